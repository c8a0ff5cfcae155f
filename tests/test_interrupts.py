"""However a run on this machine is told to end: nothing further starts, its trainings write their state, it says so."""

import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress

import psutil
import pytest

from kairos.cli import main
from kairos.files import read_json
from workflow_copy import Copy

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

STEPS = 400
TOLD = 60  # seconds in which all must have ended


def alone(*numbers: int) -> Callable[[int], None]:
    """Signals to Snakemake alone, one a second."""

    def tell(snakemake: int) -> None:
        for number in numbers:
            os.kill(snakemake, number)
            time.sleep(1)

    return tell


def group(number: int) -> Callable[[int], None]:
    """A signal to Snakemake and all its jobs at once, as a terminal sends it."""
    return lambda snakemake: os.killpg(os.getpgid(snakemake), number)


WAYS = {
    "sigint": ("exec {}", alone(signal.SIGINT)),
    "sigterm": ("exec {}", alone(signal.SIGTERM)),
    "twice": ("exec {}", alone(signal.SIGTERM, signal.SIGTERM)),
    "terminal": ("exec {}", group(signal.SIGINT)),
    "hangup": ("exec {}", group(signal.SIGHUP)),
    "background": ("trap '' INT; exec {}", group(signal.SIGINT)),  # SIGINT ignored, as in a script's background
    "stopped": ("exec {}", group(signal.SIGTERM)),  # as a service manager does
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    """A copy with everything that its trainings need, and one training that was not disturbed."""
    copy = Copy(tmp_path_factory.mktemp("interrupts"))
    text = (copy.folder / "tests/tiny.yaml").read_text()
    text = text.replace("[20, 40]", f"[{STEPS}]").replace("segments: 2", "segments: 1")
    text = text.replace("checkpoint_every: 20", f"checkpoint_every: {STEPS}")
    names = ["undisturbed", *(f"{way}{number}" for way in WAYS for number in (1, 2, 3))]
    methods = "".join(f"  {name}: {{sampler: uniform}}\n" for name in names)  # the same training under each
    (copy.folder / "params.yaml").write_text(re.sub(r"methods:\n(  .*\n)+", f"methods:\n{methods}", text))
    done = copy.snakemake("--", record("undisturbed"), config="params.yaml")
    assert done.returncode == 0, done.stderr
    return copy


def record(method: str) -> str:
    return f"results/tiny/{method}/seed0/training.json"


def word(copy: Copy, method: str) -> dict:
    path = copy.folder / f"results/tiny/{method}/seed0/.state/progress.json"
    return read_json(path) if path.exists() else {"step": 0, "state": "never begun"}


def running(session: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def interrupted(copy: Copy, way: str) -> str:
    """Start three trainings, end the run while two of them compute, and check what it leaves; returns a stopped one."""
    template, tell = WAYS[way]
    methods = [f"{way}{number}" for number in (1, 2, 3)]  # on processors for two
    line = shlex.join(["snakemake", "--cores", "2", "--configfile", "params.yaml", "--", *map(record, methods)])
    path = copy.folder / f"{way}.log"
    with open(path, "w") as log:
        snakemake = subprocess.Popen(
            template.format(line), shell=True, cwd=copy.folder, env=copy.environment, stdout=log, stderr=log,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # whatever these tests run under
        )  # fmt: skip
    try:
        while sum(word(copy, method)["state"] == "running" for method in methods) < 2:
            assert snakemake.poll() is None, path.read_text()
            time.sleep(0.05)
        time.sleep(0.5)  # both take their first steps
        tell(snakemake.pid)
        told = time.monotonic()
        while running(snakemake.pid):
            assert time.monotonic() - told < TOLD, path.read_text()
            time.sleep(0.1)
        print(f"{way}: {time.monotonic() - told:.1f} s")
    finally:
        for process in running(snakemake.pid):
            process.kill()
    said = path.read_text()
    assert snakemake.wait() not in (0, 2)
    assert said.count("interrupted: 2 training runs wrote a checkpoint; run the same command again to resume") == 1, said
    assert "Traceback" not in said and "Error in rule" not in said
    words = {method: word(copy, method) for method in methods}
    assert sorted(each["state"] for each in words.values()) == ["never begun", "stopped", "stopped"], way
    for method, each in words.items():
        checkpoints = (copy.folder / record(method)).parent.glob(".state/*/checkpoints/*.ckpt")
        assert max((int(path.stem) for path in checkpoints), default=0) == each["step"] < STEPS, way
    return next(method for method in methods if words[method]["state"] == "stopped")


def test_interrupted_runs_write_the_state_of_their_trainings_and_resume_exactly(copy: Copy, capsys) -> None:
    stopped = {way: interrupted(copy, way) for way in WAYS}
    steps = {way: word(copy, method)["step"] for way, method in stopped.items()}
    done = copy.snakemake("--", *map(record, stopped.values()), config="params.yaml")
    assert done.returncode == 0, done.stderr
    for way, step in steps.items():
        assert f"{stopped[way]} seed 0: resumes from step {step}" in done.stdout + done.stderr, way
    capsys.readouterr()
    hashes = {}
    for method in (*stopped.values(), "undisturbed"):
        assert main(["verify", str((copy.folder / record(method)).parent)]) == 0
        hashes[method] = capsys.readouterr().out
    assert set(hashes.values()) == {hashes["undisturbed"]}
