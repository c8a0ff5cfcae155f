"""Every way to interrupt a run on this machine: no job starts, training runs write checkpoints, the log reports it."""

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

pytestmark = pytest.mark.long

STEPS = 400
TIME_LIMIT = 60  # seconds within which all processes must end


def signal_snakemake(*numbers: int) -> Callable[[int], None]:
    """Return a function that sends signals to Snakemake alone, one per second."""

    def send_signals(snakemake: int) -> None:
        for number in numbers:
            os.kill(snakemake, number)
            time.sleep(1)

    return send_signals


def signal_all(number: int) -> Callable[[int], None]:
    """Return a function that sends a signal to Snakemake and all its jobs at once, as a terminal does."""
    return lambda snakemake: os.killpg(os.getpgid(snakemake), number)


WAYS = {
    "sigint": ("exec {}", signal_snakemake(signal.SIGINT)),
    "sigterm": ("exec {}", signal_snakemake(signal.SIGTERM)),
    "twice": ("exec {}", signal_snakemake(signal.SIGTERM, signal.SIGTERM)),
    "terminal": ("exec {}", signal_all(signal.SIGINT)),
    "hangup": ("exec {}", signal_all(signal.SIGHUP)),
    "background": ("trap '' INT; exec {}", signal_all(signal.SIGINT)),  # SIGINT ignored, as in a script's background
    "stopped": ("exec {}", signal_all(signal.SIGTERM)),  # as a service manager does
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    """Project copy with all inputs of its training runs, and one run that was not interrupted."""
    copy = Copy(tmp_path_factory.mktemp("interrupts"))
    text = (copy.folder / "tests/tiny.yaml").read_text()
    text = re.sub("autoencoder: .*", "autoencoder: {kind: none}", text)  # jobs that do not import diffusers
    text = text.replace("[20, 40]", f"[{STEPS}]").replace("segments: 2", "segments: 1")
    text = text.replace("checkpoint_every: 20", f"checkpoint_every: {STEPS}")
    names = ["undisturbed", *(f"{way}{number}" for way in WAYS for number in (1, 2, 3))]
    methods = "".join(f"  {name}: {{sampler: uniform}}\n" for name in names)  # one training run under each name
    (copy.folder / "params.yaml").write_text(re.sub(r"methods:\n(  .*\n)+", f"methods:\n{methods}", text))
    done = copy.snakemake("--", record_path("undisturbed"), config="params.yaml")
    assert done.returncode == 0, done.stderr
    return copy


def record_path(method: str) -> str:
    """Return the path of the record of a training run."""
    return f"results/tiny/methods/{method}/seed0/training.json"


def read_progress(copy: Copy, method: str) -> dict:
    path = copy.folder / f"results/tiny/methods/{method}/seed0/.state/progress.json"
    return read_json(path) if path.exists() else {"step": 0, "state": "never begun"}


def list_processes(session: int) -> list[psutil.Process]:
    """List the processes of a session that have not ended."""
    processes = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
    return processes


def interrupt_runs(copy: Copy, way: str) -> str:
    """Start three training runs, interrupt two while they compute, and check their state; return a stopped method."""
    template, send_signals = WAYS[way]
    methods = [f"{way}{number}" for number in (1, 2, 3)]  # with CPUs for two
    line = shlex.join(["snakemake", "--cores", "2", "--configfile", "params.yaml", "--", *map(record_path, methods)])
    path = copy.folder / f"{way}.log"
    with open(path, "w") as log:
        snakemake = subprocess.Popen(
            template.format(line), shell=True, cwd=copy.folder, env=copy.environment, stdout=log, stderr=log,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # even if these tests ignore it
        )  # fmt: skip
    try:
        while sum(read_progress(copy, method)["state"] == "running" for method in methods) < 2:
            assert snakemake.poll() is None, path.read_text()
            time.sleep(0.05)
        time.sleep(0.5)  # both take their first steps
        send_signals(snakemake.pid)
        signal_time = time.monotonic()
        while list_processes(snakemake.pid):
            assert time.monotonic() - signal_time < TIME_LIMIT, path.read_text()
            time.sleep(0.1)
        print(f"{way}: {time.monotonic() - signal_time:.1f} s")
    finally:
        for process in list_processes(snakemake.pid):
            process.kill()
    output = path.read_text()
    assert snakemake.wait() not in (0, 2)
    assert output.count("interrupted: 2 training runs wrote a checkpoint; run the same command again to resume") == 1, (
        output
    )
    assert "Traceback" not in output and "Error in rule" not in output
    progress = {method: read_progress(copy, method) for method in methods}
    assert sorted(record["state"] for record in progress.values()) == ["never begun", "stopped", "stopped"], way
    for method, record in progress.items():
        checkpoints = (copy.folder / record_path(method)).parent.glob(".state/*/checkpoints/*.ckpt")
        assert max((int(path.stem) for path in checkpoints), default=0) == record["step"] < STEPS, way
    return next(method for method in methods if progress[method]["state"] == "stopped")


def test_interrupted_runs_write_checkpoints_and_resume_exactly(copy: Copy, capsys) -> None:
    stopped = {way: interrupt_runs(copy, way) for way in WAYS}
    steps = {way: read_progress(copy, method)["step"] for way, method in stopped.items()}
    done = copy.snakemake("--", *map(record_path, stopped.values()), config="params.yaml")
    assert done.returncode == 0, done.stderr
    for way, step in steps.items():
        assert f"{stopped[way]} seed 0: resumes from step {step}" in done.stdout + done.stderr, way
    capsys.readouterr()
    hashes = {}
    for method in (*stopped.values(), "undisturbed"):
        assert main(["verify", str((copy.folder / record_path(method)).parent)]) == 0
        hashes[method] = capsys.readouterr().out
    assert set(hashes.values()) == {hashes["undisturbed"]}
