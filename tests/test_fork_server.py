"""A job that is forked from a process with loaded imports equals a job that starts without the fork server."""

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

from kairos import devices
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
no_server = sys.platform != "linux" or devices.has_nvidia_driver()
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(no_server, reason="no server here: a GPU, or not Linux"),
]


class Run:
    """Controller with its fork server, and clients as Snakemake starts them."""

    def __init__(self, folder: Path, source: Path = SOURCE, **training: object):
        self.folder = folder
        self.latents = make_latents(folder / "data")
        self.config = write_experiment(folder / "x.yaml", experiment(**training))
        variables = dict.fromkeys(fork_server._THREAD_VARIABLES, "1") | dict.fromkeys(
            fork_server._FOLDER_VARIABLES, tempfile.gettempdir()
        )
        self.plain_environment = {**os.environ, **variables, "PYTHONPATH": f"{source}{os.pathsep}{LIBRARY}"}
        command = [sys.executable, "-P", "-c", CONTROLLER, str(self.config)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.controller = subprocess.Popen(command, cwd=folder, env=self.plain_environment, **pipes)
        path, server = self.controller.stdout.readline().split()
        self.server, self.environment = (
            psutil.Process(int(server)),
            {**self.plain_environment, "KAIROS_PRELOADED": path},
        )

    def command(self, out: str, *more: object) -> list[str]:
        return train_command(self.config, "adaptive", self.folder / out, self.latents, *more)

    def start(
        self, command: list[str], environment: dict[str, str] | None = None, **options: object
    ) -> subprocess.Popen:
        settings = {"cwd": self.folder, "env": environment or self.environment, "text": True}
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **settings, **options)

    def read_progress(self, out: str) -> dict:
        return glance(self.folder / out / ".state" / "progress.json")

    def start_computing(self, out: str, *more: object) -> tuple[subprocess.Popen, psutil.Process]:
        """Start a client and wait for the first checkpoint of its job; return the client and the computing process."""
        client = self.start(self.command(out, "--milestones", 0, 1_000_000, *more))
        training = self.folder / out
        wait_for(lambda: client.poll() is not None or any(training.glob(".state/*/checkpoints/*.ckpt")))
        assert client.poll() is None, client.communicate()[1]
        return client, psutil.Process(self.read_progress(out)["pid"])

    def stop(self) -> None:
        self.controller.kill()
        self.controller.communicate()
        wait_for(lambda: has_ended(self.server))


def wait_for(condition: Callable[[], object]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def has_ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    run = Run(tmp_path_factory.mktemp("preload"))
    yield run
    run.stop()


def is_forked(run: Run, client: subprocess.Popen, out: str) -> bool:
    return run.read_progress(out)["pid"] != client.pid


def test_two_concurrent_runs_on_the_server_equal_a_run_without_it(run):
    clients = {out: run.start(run.command(out, "--timing", f"{out}.json")) for out in ("one", "other")}
    for out, client in clients.items():
        assert client.wait() == 0, client.communicate()[1]
        assert is_forked(run, client, out)
    alone = run.start(run.command("alone", "--timing", "alone.json"), run.plain_environment)
    assert alone.wait() == 0
    assert not is_forked(run, alone, "alone")
    for out in clients:
        assert hashes(run.folder / out) == hashes(run.folder / "alone")
        for name in ("training.json", "metrics.jsonl", "checkpoint.pt"):
            assert (run.folder / out / name).read_bytes() == (run.folder / "alone" / name).read_bytes()
        forked_timing, plain_timing = read_json(run.folder / f"{out}.json"), read_json(run.folder / "alone.json")
        assert forked_timing.keys() == plain_timing.keys() and forked_timing["machine"] == plain_timing["machine"]
        assert 0 < forked_timing["startup_cpu_seconds"] < plain_timing["startup_cpu_seconds"] / 3
        assert forked_timing["startup_wall_seconds"] > 0.02  # includes the start of the client
        assert forked_timing["peak_rss_bytes"] > 2**27  # includes the loaded imports


@pytest.mark.parametrize("more", [["--seed", "-1"], ["--nonsense"], ["--latents", "nowhere"]])
def test_a_failing_command_prints_and_returns_the_same_with_and_without_a_server(run, more, tmp_path):
    no_server_environment = {**run.plain_environment, "KAIROS_PRELOADED": str(tmp_path / "nobody")}
    processes = [
        run.start(run.command("wrong", *more), environment) for environment in (run.environment, no_server_environment)
    ]
    forked_result, plain_result = ((*process.communicate(), process.returncode) for process in processes)
    assert forked_result == plain_result and forked_result[2] in (1, 2) and forked_result[1]


def test_sigterm_stops_the_run_after_its_step_with_the_status_that_means_resume(run):
    client, job = run.start_computing("terminated")
    assert is_forked(run, client, "terminated")
    client.terminate()
    errors = client.communicate()[1]
    assert client.returncode == 75 and "SIGTERM: stopped after step" in errors
    assert run.read_progress("terminated")["state"] == "stopped" and has_ended(job)


def test_a_killed_client_ends_its_job(run):
    client, job = run.start_computing("killed")
    client.kill()
    wait_for(lambda: has_ended(job))
    assert run.read_progress("killed")["state"] == "running"  # it had no time to update its progress


def test_a_killed_job_ends_its_client_and_not_the_server(run):
    client, job = run.start_computing("crashed")
    job.kill()
    assert client.wait() == 128 + signal.SIGKILL
    after = run.start(run.command("after"))
    assert after.wait() == 0 and is_forked(run, after, "after")


def test_a_suspended_client_suspends_its_job(run):
    client, job = run.start_computing("stopped")
    client.send_signal(signal.SIGTSTP)
    wait_for(lambda: job.status() == psutil.STATUS_STOPPED)
    client.send_signal(signal.SIGCONT)
    wait_for(lambda: job.status() != psutil.STATUS_STOPPED)
    client.send_signal(signal.SIGINT)
    assert client.wait() == 75
    assert run.read_progress("stopped")["message"].startswith("SIGINT: stopped after step")


def test_signals_that_a_shell_ignores_are_ignored_by_the_job(run):
    command = run.command("ignoring", "--milestones", 0, 1_000_000)
    client = run.start(["bash", "-c", "trap '' HUP; exec \"$@\"", "bash", *command])
    wait_for(lambda: run.read_progress("ignoring").get("state") == "running")
    job = psutil.Process(run.read_progress("ignoring")["pid"])
    masks = [
        Path(f"/proc/{process}/status").read_text().split("SigIgn:")[1].split()[0] for process in (client.pid, job.pid)
    ]
    assert masks[0] == masks[1] and int(masks[0], 16) & 1 << signal.SIGHUP - 1
    for number in (signal.SIGHUP, signal.SIGUSR1):
        client.send_signal(number)
    assert client.wait() == 75
    assert run.read_progress("ignoring")["message"].startswith("SIGUSR1")


def hand_over(run: Run, out: str, environment: dict[str, str], shell: str = 'exec "$@"') -> str:
    """Return the exit status of a run if the server accepts it, otherwise "None"; the client imports nothing."""
    command = [sys.executable, "-c", HAND_OVER, *run.command(out, "--milestones", 0)[3:]]
    client = run.start(["bash", "-c", shell, "bash", *command], environment)
    written, errors = client.communicate()
    assert client.returncode == 0, errors
    return written.strip()


@pytest.mark.parametrize("change", ["nothing", "environment", "folder", "stdin"])
def test_the_server_accepts_only_commands_with_its_environment_and_folder_and_a_standard_input(run, change):
    environment = run.environment | ({"OMP_NUM_THREADS": "2"} if change == "environment" else {})
    shells = {"folder": 'cd /; exec "$@"', "stdin": 'exec "$@" <&-'}
    status = hand_over(run, f"other {change}", environment, shells.get(change, 'exec "$@"'))
    assert status == ("0" if change == "nothing" else "None")


def test_the_server_does_not_run_changed_code_and_a_killed_controller_leaves_nothing(tmp_path):
    source = shutil.copytree(SOURCE, tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    run = Run(tmp_path, source)
    client, job = run.start_computing("before")
    assert is_forked(run, client, "before")
    os.utime(source / "kairos" / "files.py")
    assert hand_over(run, "changed", run.environment) == "None"
    socket = Path(run.environment["KAIROS_PRELOADED"])
    guardian = job.parent()
    assert socket.exists() and guardian.parent() == run.server
    run.stop()  # SIGKILL
    for process in (job, guardian):
        wait_for(lambda process=process: has_ended(process))
    assert client.wait() == 128 + signal.SIGKILL and run.read_progress("before")["state"] == "stopped"
    assert not socket.parent.exists()


def test_the_server_uses_portable_kernels_for_a_portable_experiment(tmp_path):
    if "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("no AVX2 here")
    run = Run(tmp_path, training__deterministic="portable")
    try:
        for out, environment in (("forked", run.environment), ("alone", run.plain_environment)):
            client = run.start(run.command(out), environment)
            assert client.wait() == 0, client.communicate()[1]
            assert is_forked(run, client, out) == (out == "forked")
        assert hashes(run.folder / "forked") == hashes(run.folder / "alone")
    finally:
        run.stop()


@pytest.mark.parametrize(("stage", "imports_diffusers"), [("train", False), ("sample", True)])
def test_the_server_imports_only_the_modules_of_the_stages_that_the_run_starts(stage, imports_diffusers, tmp_path):
    code = f"""
import sys
from kairos.workflow import fork_server
fork_server._import_modules({str(SOURCE.parent / "tests/tiny.yaml")!r}, [{stage!r}])
print("diffusers" in sys.modules, "kairos.training.loop" in sys.modules)
"""
    environment = {**os.environ, "PYTHONPATH": f"{SOURCE}{os.pathsep}{LIBRARY}"}
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended.stdout.split() == [str(imports_diffusers), "True"], ended.stderr
