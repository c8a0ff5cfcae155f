"""A job that is forked from a process that has imported everything is the job that would have started by itself."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from kairos.files import glance, read_json
from kairos.workflow import fork_server
from training_case import experiment, hashes, make_latents, train_command, write_experiment

SOURCE = Path(fork_server.__file__).parents[2]
LIBRARY = SOURCE.parent / "library/src"
CONTROLLER = """
import os, sys
from pathlib import Path
from kairos.workflow import fork_server
fork_server.start_server(Path(sys.argv[1]), 1, ["train", "train"])
print(os.environ["KAIROS_PRELOADED"], fork_server._servers[0].pid, flush=True)
sys.stdin.read()
"""
HAND_OVER = "import sys; from kairos.workflow import fork_server; print(fork_server.run_on_server(sys.argv[1:]))"
no_server = sys.platform != "linux" or Path("/dev/nvidiactl").exists()
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(no_server, reason="no server here: a GPU, or not Linux"),
]


class Run:
    """A controller with its server, and clients as Snakemake starts them."""

    def __init__(self, folder: Path, source: Path = SOURCE, **training: object):
        self.folder = folder
        self.latents = make_latents(folder / "data")
        self.config = write_experiment(folder / "x.yaml", experiment(**training))
        variables = dict.fromkeys(fork_server._THREAD_VARIABLES, "1") | dict.fromkeys(
            fork_server._FOLDER_VARIABLES, tempfile.gettempdir()
        )
        self.alone = {**os.environ, **variables, "PYTHONPATH": f"{source}{os.pathsep}{LIBRARY}"}
        line = [sys.executable, "-P", "-c", CONTROLLER, str(self.config)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.controller = subprocess.Popen(line, cwd=folder, env=self.alone, **pipes)
        path, server = self.controller.stdout.readline().split()
        self.server, self.environment = psutil.Process(int(server)), {**self.alone, "KAIROS_PRELOADED": path}

    def line(self, out: str, *more: object) -> list[str]:
        return train_command(self.config, "adaptive", self.folder / out, self.latents, *more)

    def start(self, line: list[str], environment: dict[str, str] | None = None, **how: object) -> subprocess.Popen:
        kept = {"cwd": self.folder, "env": environment or self.environment, "text": True}
        return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **kept, **how)

    def word(self, out: str) -> dict:
        return glance(self.folder / out / ".state" / "progress.json")

    def computing(self, out: str, *more: object) -> tuple[subprocess.Popen, psutil.Process]:
        """A client whose job has done a step, and the process that computes."""
        client = self.start(self.line(out, "--milestones", 0, 1_000_000, *more))
        training = self.folder / out
        wait_for(lambda: client.poll() is not None or any(training.glob(".state/*/checkpoints/*.ckpt")))
        assert client.poll() is None, client.communicate()[1]
        return client, psutil.Process(self.word(out)["pid"])

    def end(self) -> None:
        self.controller.kill()
        self.controller.communicate()
        wait_for(lambda: gone(self.server))


def wait_for(condition: Callable[[], object]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    run = Run(tmp_path_factory.mktemp("preload"))
    yield run
    run.end()


def forked(run: Run, client: subprocess.Popen, out: str) -> bool:
    return run.word(out)["pid"] != client.pid


def test_two_trainings_at_once_have_the_bits_of_one_that_starts_by_itself(run):
    clients = {out: run.start(run.line(out, "--timing", f"{out}.json")) for out in ("one", "other")}
    for out, client in clients.items():
        assert client.wait() == 0, client.communicate()[1]
        assert forked(run, client, out)
    alone = run.start(run.line("alone", "--timing", "alone.json"), run.alone)
    assert alone.wait() == 0
    assert not forked(run, alone, "alone")
    for out in clients:
        assert hashes(run.folder / out) == hashes(run.folder / "alone")
        for name in ("training.json", "metrics.jsonl", "checkpoint.pt"):
            assert (run.folder / out / name).read_bytes() == (run.folder / "alone" / name).read_bytes()
        own, other = read_json(run.folder / f"{out}.json"), read_json(run.folder / "alone.json")
        assert own.keys() == other.keys() and own["machine"] == other["machine"]
        assert 0 < own["startup_cpu_seconds"] < other["startup_cpu_seconds"] / 3
        assert own["startup_wall_seconds"] > 0.02  # the client's start counts
        assert own["peak_rss_bytes"] > 2**27  # what it has imported counts


@pytest.mark.parametrize("more", [["--seed", "-1"], ["--nonsense"], ["--latents", "nowhere"]])
def test_a_command_that_fails_prints_and_returns_what_it_does_without_a_server(run, more, tmp_path):
    without = {**run.alone, "KAIROS_PRELOADED": str(tmp_path / "nobody")}
    ended = [run.start(run.line("wrong", *more), environment) for environment in (run.environment, without)]
    forked, alone = ((*process.communicate(), process.returncode) for process in ended)
    assert forked == alone and forked[2] in (1, 2) and forked[1]


def test_sigterm_lets_the_training_write_its_state_and_the_same_command_go_on(run):
    client, job = run.computing("told")
    assert forked(run, client, "told")
    client.terminate()
    said = client.communicate()[1]
    assert client.returncode == 75 and "SIGTERM: stopped after step" in said
    assert run.word("told")["state"] == "stopped" and gone(job)


def test_a_client_that_is_killed_takes_its_job_along(run):
    client, job = run.computing("killed")
    client.kill()
    wait_for(lambda: gone(job))
    assert run.word("killed")["state"] == "running"  # it had no time for a last word


def test_a_job_that_is_killed_ends_its_client_alike_and_nothing_else(run):
    client, job = run.computing("crashed")
    job.kill()
    assert client.wait() == 128 + signal.SIGKILL
    after = run.start(run.line("after"))
    assert after.wait() == 0 and forked(run, after, "after")


def test_a_stopped_client_stops_its_job(run):
    client, job = run.computing("stopped")
    client.send_signal(signal.SIGTSTP)
    wait_for(lambda: job.status() == psutil.STATUS_STOPPED)
    client.send_signal(signal.SIGCONT)
    wait_for(lambda: job.status() != psutil.STATUS_STOPPED)
    client.send_signal(signal.SIGINT)
    assert client.wait() == 75
    assert run.word("stopped")["message"].startswith("SIGINT: stopped after step")


def test_what_a_shell_has_its_command_ignore_is_ignored(run):
    line = run.line("ignoring", "--milestones", 0, 1_000_000)
    client = run.start(["bash", "-c", "trap '' HUP; exec \"$@\"", "bash", *line])
    wait_for(lambda: run.word("ignoring").get("state") == "running")
    job = psutil.Process(run.word("ignoring")["pid"])
    masks = [
        Path(f"/proc/{process}/status").read_text().split("SigIgn:")[1].split()[0] for process in (client.pid, job.pid)
    ]
    assert masks[0] == masks[1] and int(masks[0], 16) & 1 << signal.SIGHUP - 1
    for number in (signal.SIGHUP, signal.SIGUSR1):
        client.send_signal(number)
    assert client.wait() == 75
    assert run.word("ignoring")["message"].startswith("SIGUSR1")


def handed_over(run: Run, out: str, environment: dict[str, str], shell: str = 'exec "$@"') -> str:
    """Return the exit status of a training if the server takes it, None otherwise; nothing is imported then."""
    command = [sys.executable, "-c", HAND_OVER, *run.line(out, "--milestones", 0)[3:]]
    client = run.start(["bash", "-c", shell, "bash", *command], environment)
    written, errors = client.communicate()
    assert client.returncode == 0, errors
    return written.strip()


@pytest.mark.parametrize("change", ["nothing", "environment", "folder", "stdin"])
def test_the_server_takes_commands_of_its_environment_and_folder_with_a_standard_input(run, change):
    environment = run.environment | ({"OMP_NUM_THREADS": "2"} if change == "environment" else {})
    shells = {"folder": 'cd /; exec "$@"', "stdin": 'exec "$@" <&-'}
    status = handed_over(run, f"other {change}", environment, shells.get(change, 'exec "$@"'))
    assert status == ("0" if change == "nothing" else "None")


def test_changed_code_is_not_taken_from_the_server_and_a_killed_controller_leaves_nothing_behind(tmp_path):
    source = shutil.copytree(SOURCE, tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    run = Run(tmp_path, source)
    client, job = run.computing("before")
    assert forked(run, client, "before")
    os.utime(source / "kairos" / "files.py")
    assert handed_over(run, "changed", run.environment) == "None"
    socket = Path(run.environment["KAIROS_PRELOADED"])
    guardian = job.parent()
    assert socket.exists() and guardian.parent() == run.server
    run.end()  # SIGKILL
    for process in (job, guardian):
        wait_for(lambda process=process: gone(process))
    assert client.wait() == 128 + signal.SIGKILL and run.word("before")["state"] == "stopped"
    assert not socket.parent.exists()


def test_portable_kernels_come_with_the_server(tmp_path):
    if "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("no AVX2 here")
    run = Run(tmp_path, training__deterministic="portable")
    try:
        for out, environment in (("forked", run.environment), ("alone", run.alone)):
            client = run.start(run.line(out), environment)
            assert client.wait() == 0, client.communicate()[1]
            assert forked(run, client, out) == (out == "forked")
        assert hashes(run.folder / "forked") == hashes(run.folder / "alone")
    finally:
        run.end()
