"""The end of kairos' processes: no teardown of the interpreter, and nothing else is lost."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

START = "from kairos import process_exit\nprocess_exit.skip_teardown()\n"
NEVER_FREED = """
class Freed:
    def __del__(self):
        print("freed")

global_object = Freed()
"""


def run(code, stdout=subprocess.PIPE):
    """Run code in a process that begins as kairos does, with buffered output."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", START + code]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, env=environment, check=False)


@pytest.mark.parametrize("status", [0, 1, 3])
def test_status_and_buffered_output_arrive(status):
    ended = run(f"{NEVER_FREED}\nprint('x' * 100_000)\nprocess_exit.end_process({status})")
    assert (ended.returncode, ended.stdout, ended.stderr) == (status, "x" * 100_000 + "\n", "")


def test_objects_are_freed_without_it():
    """Objects of the other tests would be freed if the teardown took place."""
    ended = subprocess.run([sys.executable, "-c", NEVER_FREED], capture_output=True, text=True, check=True)
    assert ended.stdout == "freed\n"


def test_threads_end_and_registered_functions_run_first():
    code = """
import atexit, threading, time
atexit.register(print, "registered")
threading.Thread(target=lambda: (time.sleep(0.3), print("thread"))).start()
process_exit.end_process(0)
"""
    ended = run(code)
    assert (ended.returncode, ended.stdout) == (0, "thread\nregistered\n")


def test_an_unexpected_error_shows_its_traceback():
    ended = run("raise ValueError('unexpected')")
    assert ended.returncode == 1 and "ValueError: unexpected" in ended.stderr


def test_closed_streams_are_no_error():
    ended = run("import sys; sys.stdout.close(); sys.stderr = None; process_exit.end_process(2)")
    assert (ended.returncode, ended.stderr) == (2, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has /dev/full")
def test_output_that_cannot_be_written_is_an_error():
    with open("/dev/full", "w") as full_disk:
        ended = run("print('lost'); process_exit.end_process(0)", stdout=full_disk)
    assert ended.returncode == 1


def test_an_unhandled_error_leaves_no_temporary_file(tmp_path):
    code = f"""
import tempfile

def fail():
    file = tempfile.NamedTemporaryFile(dir={str(tmp_path)!r})
    raise ValueError(file.name)

fail()
"""
    ended = run(code)
    assert ended.returncode == 1 and str(tmp_path) in ended.stderr
    assert not list(tmp_path.iterdir())
