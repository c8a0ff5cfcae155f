"""Several processes, micro-batches and early stops do not change the result of a training run."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from commands import Commands
from kairos.cli import main
from kairos.files import read_json
from kairos.training import checkpoint
from kairos.training.run_folder import lock_run_folder
from kairos.training.state import split_into_micro_batches
from kairos_timesteps.errors import ConfigError, KairosError
from training_case import (
    difference,
    experiment,
    hashes,
    make_latents,
    start_training,
    train,
    train_command,
    write_experiment,
)

pytestmark = pytest.mark.timeout(900)

STEPS = 50
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with latents."""
    folder = tmp_path_factory.mktemp("distributed")
    make_latents(folder)
    return folder


def line(folder: Path, method: str, out: Path, *more: object, **changes: object) -> list[str]:
    """Return the command line of a run in double precision, with `changes` of its section `training`."""
    settings = {"precision": "fp64", "milestones": [STEPS], **changes}
    case = experiment(**{f"training__{name}": value for name, value in settings.items()})
    config = folder / f"{abs(hash(str(settings)))}.yaml"
    return train_command(write_experiment(config, case), method, out, folder / "latents", *more)


def run_in_subprocess(line: list[str], status: int = 0) -> str:
    """Run a command line in a new process; returns its log."""
    done = subprocess.run(line, stderr=subprocess.PIPE, text=True, timeout=900, check=False)
    assert done.returncode == status, done.stderr
    return done.stderr


def run_here(line: list[str]) -> None:
    """Run a command line in this process."""
    assert main(line[3:]) == 0


@pytest.fixture
def two_ranks(commands: Commands, tmp_path: Path) -> Callable[[list[str]], str]:
    """Function that trains on two ranks, and returns the log of rank 0."""

    def run_ranks(line: list[str]) -> str:
        logs = [tmp_path / f"rank{rank}.log" for rank in range(2)]
        statuses = commands.run_ranks(line, logs)
        assert statuses == [0, 0], "\n".join(log.read_text() for log in logs)
        return logs[0].read_text()

    return run_ranks


@pytest.fixture(scope="module")
def alone(folder) -> Path:
    """Training runs of one process without micro-batches, a folder per method."""
    for method in ("uniform", "adaptive"):
        run_here(line(folder, method, folder / "alone" / method))
    return folder / "alone"


def assert_same(one: Path, other: Path) -> None:
    """Assert that weights, average, optimizer, metrics and strategy of two runs agree."""
    states = [checkpoint.read(out / "checkpoint.pt") for out in (one, other)]
    differences = {name: difference(*(state[name] for state in states)) for name in checkpoint.COMPONENTS}
    lines = [[json.loads(text) for text in (out / "metrics.jsonl").read_text().splitlines()] for out in (one, other)]
    assert len(lines[0]) == STEPS
    for row in lines[0] + lines[1]:  # a and b are those of the first process's images
        row["sampler"] = {name: value for name, value in row["sampler"].items() if name not in ("a", "b")}
    differences |= {name: difference(*([row[name] for row in rows] for rows in lines)) for name in lines[0][0]}
    print(differences)
    assert states[0]["model"]["blocks.0.attn.qkv.weight"].dtype == torch.float64
    assert max(differences.values()) < TOLERANCE, differences


def check_two_processes(out: Path, alone: Path, updates: int | None) -> None:
    """Check a run of two processes against the run of one, and its number of updates of the sampler."""
    assert_same(out, alone)
    last = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["sampler"].get("updates") == updates
    assert read_json(out / "training.json")["identity"] == read_json(alone / "training.json")["identity"]


@pytest.mark.long
def test_a_run_on_two_processes_of_torchrun_equals_that_on_one(folder, alone, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    out = tmp_path / "two"
    log = run_in_subprocess(line(folder, "adaptive", out, processes=2))
    assert "2 processes" in log and log.count("steps computed") == 1
    assert not [*tmp_path.glob("kairos-*"), *tmp_path.glob("torchelastic*")]  # empty logs of ranks are deleted
    check_two_processes(out, alone / "adaptive", updates=10)  # 13 measurements, S selected after the third


@pytest.mark.long
def test_a_run_on_two_processes_with_a_fixed_sampler_equals_that_on_one(folder, alone, tmp_path, two_ranks):
    two_ranks(line(folder, "uniform", tmp_path / "two", processes=2))
    check_two_processes(tmp_path / "two", alone / "uniform", updates=None)


@pytest.mark.long
@pytest.mark.parametrize("method", ["uniform", "adaptive"])
def test_a_run_with_micro_batches_equals_that_with_whole_batches(method, folder, alone):
    out = folder / "microbatches" / method
    run_here(line(folder, method, out, microbatch=3))  # of 16: the last one is smaller
    assert_same(out, alone / method)


@pytest.mark.long
def test_a_run_with_micro_batches_and_a_learned_weighting_equals_that_with_whole_batches(folder, tmp_path):
    outs = []
    for microbatch in (None, 5):
        case = experiment({"u": {"weighting": "edm2", "sampler": "loss_rms"}}, training__precision="fp64",
                          training__milestones=[STEPS], training__microbatch=microbatch)  # fmt: skip
        outs.append(tmp_path / str(microbatch))
        train(case, "u", 0, outs[-1], folder / "latents", [0, STEPS])
    assert_same(*outs)


@pytest.mark.long
def test_two_processes_equal_one_with_nearest_noise_but_not_with_assigned_noise(folder, tmp_path, two_ranks):
    """Each process assigns noise within its slice of the batch, which is another run with another identity."""
    for processes in (1, 2):
        case = experiment({"nearest": {"coupling": "nearest"}, "assignment": {"coupling": "assignment"}},
                          training__precision="fp64", training__milestones=[STEPS], training__processes=processes,
                          training__microbatch=5)  # fmt: skip
        config = write_experiment(tmp_path / f"{processes}.yaml", case)
        for method in case["methods"]:
            command = train_command(config, method, tmp_path / f"{method} {processes}", folder / "latents")
            run_here(command) if processes == 1 else two_ranks(command)
    assert_same(tmp_path / "nearest 1", tmp_path / "nearest 2")
    identities = {
        method: {read_json(tmp_path / f"{method} {processes}" / "training.json")["identity"] for processes in (1, 2)}
        for method in ("nearest", "assignment")
    }
    assert [len(identities_of_method) for identities_of_method in identities.values()] == [1, 2]
    with pytest.raises(AssertionError):
        assert_same(tmp_path / "assignment 1", tmp_path / "assignment 2")


def test_a_checkpoint_of_one_process_resumes_on_two(folder, alone, two_ranks):
    out = folder / "one_then_two"
    run_here(line(folder, "adaptive", out, "--milestones", 0, 23))
    log = two_ranks(line(folder, "adaptive", out, processes=2))
    assert "resumes from step 23" in log and "27 steps computed" in log
    assert_same(out, alone / "adaptive")


@pytest.mark.long
def test_two_processes_stop_on_a_signal_and_resume_as_two_or_as_one(folder, tmp_path, two_ranks):
    length, every = 80, 10
    two = {"processes": 2, "milestones": [length], "checkpoint_every": every}
    out, whole = tmp_path / "out", tmp_path / "whole"
    process = start_training(line(folder, "adaptive", out, **two), out)
    process.send_signal(signal.SIGTERM)  # to the launcher alone
    log = process.communicate(timeout=600)[1]
    assert process.returncode == 75 and log.count("run the same command again") == 1 and "SIGTERM" in log, log
    progress = read_json(out / ".state" / "progress.json")
    assert progress["state"] == "stopped" and 0 < progress["step"] < length and progress["of"] == length
    assert "Traceback" not in log
    shutil.copytree(out, tmp_path / "as_one")
    assert f"resumes from step {progress['step']}" in two_ranks(line(folder, "adaptive", out, **two))
    two_ranks(line(folder, "adaptive", whole, **two))
    assert hashes(out) == hashes(whole)
    run_here(line(folder, "adaptive", tmp_path / "as_one", **(two | {"processes": 1})))
    states = [checkpoint.read(one / "checkpoint.pt")["ema"] for one in (tmp_path / "as_one", whole)]
    assert difference(*states) < TOLERANCE


def list_ranks(launcher: int) -> list[int]:
    """Return the processes that a launcher has started."""
    return [int(child) for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]


@pytest.mark.long
@pytest.mark.parametrize("targets", ["all", "one rank"])
def test_a_request_to_all_processes_or_to_one_rank_stops_all_after_a_checkpoint(targets, folder, tmp_path):
    out = tmp_path / "out"
    process = start_training(line(folder, "uniform", out, processes=2, milestones=[100_000]), out)
    ranks = list_ranks(process.pid)
    for target in [process.pid, *ranks] if targets == "all" else ranks[1:]:
        os.kill(target, signal.SIGTERM)
    log = process.communicate(timeout=600)[1]
    assert process.returncode == 75 and log.count("run the same command again") == 1, log
    progress = read_json(out / ".state" / "progress.json")
    assert progress["state"] == "stopped" and progress["step"] > 0


@pytest.mark.long
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 75), (signal.SIGINT, -signal.SIGINT)])
def test_a_repeated_sigterm_waits_for_the_checkpoint_and_a_repeated_ctrl_c_does_not(number, status, folder, tmp_path):
    out = tmp_path / "out"
    process = start_training(line(folder, "uniform", out, processes=2, milestones=[100_000]), out)
    ranks = list_ranks(process.pid)
    os.kill(ranks[1], signal.SIGSTOP)  # so that rank 0 waits for it in a step
    process.send_signal(number)
    time.sleep(1)
    assert process.poll() is None
    process.send_signal(number)
    if number == signal.SIGTERM:
        time.sleep(1)
        assert process.poll() is None
        os.kill(ranks[1], signal.SIGCONT)
    log = process.communicate(timeout=60)[1]
    assert process.returncode == status and "Traceback" not in log, log
    state = read_json(out / ".state" / "progress.json")["state"]
    assert state == ("stopped" if number == signal.SIGTERM else "running")
    with lock_run_folder(out / ".state", wait=True):  # no rank trains any longer
        pass


@pytest.mark.long
def test_a_checkpoint_that_fails_after_a_request_to_stop_is_an_error(folder, tmp_path):
    out = tmp_path / "out"
    never = {"milestones": [100_000], "checkpoint_every": 100_000}
    process = start_training(line(folder, "uniform", out, processes=2, **never), out)
    (state,) = [path for path in (out / ".state").iterdir() if path.is_dir()]
    shutil.rmtree(state)
    process.send_signal(signal.SIGTERM)
    log = process.communicate(timeout=600)[1]
    assert process.returncode == 1 and f"No such file or directory: '{state}" in log, log
    assert "Traceback" not in log, log
    assert read_json(out / ".state" / "progress.json")["state"] == "failed"


FAILING_PLUGIN = """
import os, time

from kairos_timesteps.components import coupling
from kairos_timesteps.couplings import Coupling
from kairos_timesteps.errors import KairosError


@coupling("test_failing", "fails on rank 1")
class Failing(Coupling):
    def __call__(self, x0, noise, fractions, coordinates):
        if os.environ["RANK"] == "1":
            raise ERROR
        time.sleep(0.5)  # until torchrun ends this rank, before it loses the connection
        return noise
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("error", "logged", "tracebacks"),
    [
        ("KairosError('of one rank')", "process 1 of the training run: KairosError: of one rank", 0),
        ("RuntimeError('of one rank')", "RuntimeError: of one rank", 1),
    ],
)
def test_the_error_of_the_rank_that_fails_first_is_reported_alone(
    error, logged, tracebacks, folder, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)  # plugins are relative to the working directory
    (tmp_path / "failing.py").write_text(FAILING_PLUGIN.replace("ERROR", error))
    case = experiment({"uniform": {}}, training__processes=2) | {"plugins": ["failing.py"]}
    case["methods"] = {"failing": {"coupling": "test_failing"}}
    config = write_experiment(tmp_path / "case.yaml", case)
    log = run_in_subprocess(train_command(config, "failing", tmp_path / "out", folder / "latents"), status=1)
    assert logged in log and log.count("Traceback") == tracebacks, log
    assert log.count("of the training run") == 1, log
    progress = read_json(tmp_path / "out" / ".state" / "progress.json")
    assert (progress["state"], progress["message"]) == ("failed", "of one rank")


@pytest.mark.long
def test_a_killed_process_ends_all_others_and_the_launcher_reports_it(folder, tmp_path):
    out = tmp_path / "out"
    process = start_training(line(folder, "uniform", out, processes=2, milestones=[100_000]), out)
    first, second = list_ranks(process.pid)
    os.kill(second, signal.SIGKILL)
    start = time.monotonic()
    log = process.communicate(timeout=600)[1]
    assert process.returncode == 1 and time.monotonic() - start < 60
    assert "process 1 of the training run: Signal 9 (SIGKILL)" in log and "the same command resumes" in log, log
    assert "Traceback" not in log, log
    assert not Path(f"/proc/{first}").exists()


@pytest.mark.long
def test_ranks_die_with_their_launcher(folder, tmp_path):
    out = tmp_path / "out"
    process = start_training(line(folder, "uniform", out, processes=2, milestones=[100_000]), out)
    children = list_ranks(process.pid)
    process.kill()
    process.communicate()
    end = time.monotonic() + 60
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < end
        time.sleep(0.1)
    with lock_run_folder(out / ".state"):  # their end has released the lock
        pass


@pytest.mark.long
def test_an_error_of_all_ranks_is_reported_once_in_one_line(folder, tmp_path):
    wild = {"lr": 1e30, "warmup_steps": 0, "grad_clip": None}
    log = run_in_subprocess(
        line(folder, "uniform", tmp_path / "out", processes=2, optimizer=wild, precision="fp32"), status=1
    )
    assert log.count("not finite") == 1 and "Traceback" not in log and "ChildFailedError" not in log, log
    progress = read_json(tmp_path / "out" / ".state" / "progress.json")
    assert progress["state"] == "failed" and "not finite" in progress["message"] and "\n" not in progress["message"]


def test_micro_batches_do_not_depend_on_the_number_of_processes():
    for size, microbatch, processes in ((16, 3, 1), (16, 3, 2), (16, 3, 4), (16, None, 3), (7, 1, 7), (5, 2, 3)):
        parts = [split_into_micro_batches(size, microbatch, rank, processes) for rank in range(processes)]
        assert all(parts)
        joined = [one for part in parts for one in part]
        assert [number for number, _ in joined] == list(range(len(joined)))
        assert [k for _, rows in joined for k in range(size)[rows]] == list(range(size))
        if microbatch is not None:
            assert joined == split_into_micro_batches(size, microbatch, 0, 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"processes": 3, "nodes": 2}, "training.processes: got 3, allowed: a multiple of nodes = 2"),
        ({"processes": 17}, "training.processes: got 17, allowed: at most batch_size = 16"),
        ({"microbatch": 17}, "training.microbatch: got 17, allowed: at most batch_size = 16"),
        ({"microbatch": 6, "processes": 4}, "training.microbatch: got 6, allowed: at most 5, so that batch_size = 16"),
        ({"trainings_per_gpu": 2, "processes": 2}, "training.trainings_per_gpu: got 2 with 2 processes, allowed: 1"),
        ({"device": "cuda:1", "processes": 2}, "training.device: got 'cuda:1' with 2 processes, allowed: auto, cpu"),
    ],
)
def test_incompatible_settings_are_rejected(settings, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        experiment(**{f"training__{name}": value for name, value in settings.items()})


@pytest.mark.long
def test_dropout_does_not_depend_on_the_number_of_processes(folder, tmp_path, commands, two_ranks):
    commands.preload("kairos.models.unet")  # imports diffusers
    unet = {"name": "unet", "channels": 8, "multipliers": [1], "blocks": 1, "norm_groups": 4, "dropout": 0.3}
    outs = []
    for processes in (1, 2):
        case = experiment({"uniform": {}}, model=unet, training__precision="fp64", training__milestones=[STEPS],
                          training__microbatch=8, training__processes=processes)  # fmt: skip
        config = write_experiment(tmp_path / f"{processes}.yaml", case)
        outs.append(tmp_path / str(processes))
        command = train_command(config, "uniform", outs[-1], folder / "latents")
        if processes == 1:  # in a new process, since other tests have changed the settings of torch in this one
            assert commands.run(command, tmp_path / "log") == 0, (tmp_path / "log").read_text()
        else:
            two_ranks(command)
    states = [checkpoint.read(out / "checkpoint.pt") for out in outs]
    assert difference(*(state["model"] for state in states)) < TOLERANCE
    assert all(read_json(out / "training.json")["provenance"]["rerun_is_bit_exact"] for out in outs)


def test_several_processes_require_a_launcher_and_several_nodes_a_slurm_job(folder, tmp_path, monkeypatch, capsys):
    case = experiment({"uniform": {}}, training__processes=2)
    with pytest.raises(KairosError, match=r"training.processes: got 2, but 1 were started; use kairos train"):
        train(case, "uniform", 0, tmp_path / "out", folder / "latents", [0, 2])
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert main(line(folder, "uniform", tmp_path / "nodes", processes=2, nodes=2)[3:]) == 1
    assert "training.nodes: got 2 in no SLURM job" in capsys.readouterr().err
