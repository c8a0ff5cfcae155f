"""Several processes by torchrun, microbatches, and leaving early: nothing of it changes the result."""

import json
import os
import re
import shutil
import signal
import socket
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
from kairos.training.run import train
from kairos.training.run_folder import lock_run_folder
from kairos.training.state import split_into_micro_batches
from kairos_timesteps.errors import ConfigError, KairosError
from training_case import difference, experiment, hashes, make_latents, start_training, train_command, write_experiment

pytestmark = pytest.mark.timeout(900)

STEPS = 50
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("distributed")
    make_latents(folder)
    return folder


def line(folder: Path, method: str, out: Path, *more: object, **changes: object) -> list[str]:
    """The command line of a training in double precision, with `changes` of its section `training`."""
    settings = {"precision": "fp64", "milestones": [STEPS], **changes}
    case = experiment(**{f"training__{name}": value for name, value in settings.items()})
    config = folder / f"{abs(hash(str(settings)))}.yaml"
    return train_command(write_experiment(config, case), method, out, folder / "latents", *more)


def run(line: list[str], status: int = 0) -> str:
    """Run it in processes of its own; returns what it said."""
    done = subprocess.run(line, stderr=subprocess.PIPE, text=True, timeout=900, check=False)
    assert done.returncode == status, done.stderr
    return done.stderr


def here(line: list[str]) -> None:
    """Run it in this process."""
    assert main(line[3:]) == 0


@pytest.fixture
def two_ranks(commands: Commands, tmp_path: Path) -> Callable[[list[str]], str]:
    """Run the two ranks of a training without torchrun, whose imports take seconds; returns what rank 0 wrote."""

    def run(line: list[str]) -> str:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        logs = [tmp_path / f"rank{rank}.log" for rank in range(2)]
        group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ranks = [
            commands.start(line, log, RANK=str(rank), LOCAL_RANK=str(rank), **group) for rank, log in enumerate(logs)
        ]
        statuses = [commands.wait(rank) for rank in ranks]
        assert statuses == [0, 0], "\n".join(log.read_text() for log in logs)
        return logs[0].read_text()

    return run


@pytest.fixture(scope="module")
def alone(folder) -> Path:
    """One process, whole batches: a folder per method."""
    for method in ("uniform", "adaptive"):
        here(line(folder, method, folder / "alone" / method))
    return folder / "alone"


def same(one: Path, other: Path) -> None:
    """Two trainings agree: weights, average, optimiser, metrics, strategy."""
    states = [checkpoint.read(out / "checkpoint.pt") for out in (one, other)]
    found = {name: difference(*(state[name] for state in states)) for name in checkpoint.COMPONENTS}
    lines = [[json.loads(text) for text in (out / "metrics.jsonl").read_text().splitlines()] for out in (one, other)]
    assert len(lines[0]) == STEPS
    found |= {name: difference(*([row[name] for row in rows] for rows in lines)) for name in lines[0][0]}
    print(found)
    assert states[0]["model"]["blocks.0.attn.qkv.weight"].dtype == torch.float64
    assert max(found.values()) < TOLERANCE, found


def check_two(out: Path, alone: Path, updates: int | None) -> None:
    same(out, alone)
    last = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["sampler"].get("updates") == updates
    assert read_json(out / "training.json")["identity"] == read_json(alone / "training.json")["identity"]


@pytest.mark.long
def test_two_processes_of_torchrun_equal_one(folder, alone, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    out = tmp_path / "two"
    said = run(line(folder, "adaptive", out, processes=2))
    assert "2 processes" in said and said.count("steps computed") == 1
    assert not [*tmp_path.glob("kairos-*"), *tmp_path.glob("torchelastic*")]  # logs of ranks, which are empty
    check_two(out, alone / "adaptive", updates=10)  # 13 measurements, S selected after the third


def test_two_processes_equal_one_with_a_fixed_sampler(folder, alone, tmp_path, two_ranks):
    two_ranks(line(folder, "uniform", tmp_path / "two", processes=2))
    check_two(tmp_path / "two", alone / "uniform", updates=None)


@pytest.mark.parametrize("method", ["uniform", "adaptive"])
def test_microbatches_equal_the_whole_batch(method, folder, alone):
    out = folder / "microbatches" / method
    here(line(folder, method, out, microbatch=3))  # of 16: the last one is smaller
    same(out, alone / method)


def test_a_learned_weighting_takes_microbatches_too(folder, tmp_path):
    outs = []
    for microbatch in (None, 5):
        case = experiment({"u": {"weighting": "edm2", "sampler": "loss_rms"}}, training__precision="fp64",
                          training__milestones=[STEPS], training__microbatch=microbatch)  # fmt: skip
        outs.append(tmp_path / str(microbatch))
        train(case, "u", 0, outs[-1], folder / "latents", [0, STEPS])
    same(*outs)


@pytest.mark.long
def test_coupled_noise_on_two_processes(folder, tmp_path, two_ranks):
    """The nearest of several is that of one process; an assignment is of each process' own part: another training."""
    for processes in (1, 2):
        case = experiment({"nearest": {"coupling": "nearest"}, "assignment": {"coupling": "assignment"}},
                          training__precision="fp64", training__milestones=[STEPS], training__processes=processes,
                          training__microbatch=5)  # fmt: skip
        config = write_experiment(tmp_path / f"{processes}.yaml", case)
        for method in case["methods"]:
            command = train_command(config, method, tmp_path / f"{method} {processes}", folder / "latents")
            here(command) if processes == 1 else two_ranks(command)
    same(tmp_path / "nearest 1", tmp_path / "nearest 2")
    identities = {
        method: {read_json(tmp_path / f"{method} {processes}" / "training.json")["identity"] for processes in (1, 2)}
        for method in ("nearest", "assignment")
    }
    assert [len(each) for each in identities.values()] == [1, 2]
    with pytest.raises(AssertionError):
        same(tmp_path / "assignment 1", tmp_path / "assignment 2")


def test_a_checkpoint_of_one_process_resumes_on_two(folder, alone, two_ranks):
    out = folder / "one_then_two"
    here(line(folder, "adaptive", out, "--milestones", 0, 23))
    said = two_ranks(line(folder, "adaptive", out, processes=2))
    assert "resumes from step 23" in said and "27 steps computed" in said
    same(out, alone / "adaptive")


@pytest.mark.long
def test_two_processes_leave_when_asked_and_resume_as_two_or_as_one(folder, tmp_path, two_ranks):
    length, every = 150, 10
    two = {"processes": 2, "milestones": [length], "checkpoint_every": every}
    out, whole = tmp_path / "out", tmp_path / "whole"
    process = start_training(line(folder, "adaptive", out, **two), out)
    process.send_signal(signal.SIGTERM)  # to the launcher alone
    said = process.communicate(timeout=600)[1]
    assert process.returncode == 75 and said.count("run the same command again") == 1 and "SIGUSR1" in said, said
    word = read_json(out / ".state" / "progress.json")
    assert word["state"] == "stopped" and 0 < word["step"] < length and word["of"] == length
    assert "Traceback" not in said
    shutil.copytree(out, tmp_path / "as_one")
    assert f"resumes from step {word['step']}" in two_ranks(line(folder, "adaptive", out, **two))
    two_ranks(line(folder, "adaptive", whole, **two))
    assert hashes(out) == hashes(whole)
    here(line(folder, "adaptive", tmp_path / "as_one", **(two | {"processes": 1})))
    states = [checkpoint.read(one / "checkpoint.pt")["ema"] for one in (tmp_path / "as_one", whole)]
    assert difference(*states) < TOLERANCE


def ranks(launcher: int) -> list[int]:
    """The processes that a launcher has started."""
    return [int(child) for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]


@pytest.mark.long
def test_a_killed_process_ends_all_and_the_launcher_says_so(folder, tmp_path):
    out = tmp_path / "out"
    process = start_training(line(folder, "uniform", out, processes=2, milestones=[100_000]), out)
    first, second = ranks(process.pid)
    os.kill(second, signal.SIGKILL)
    begun = time.monotonic()
    said = process.communicate(timeout=600)[1]
    assert process.returncode == 1 and time.monotonic() - begun < 60
    assert "process 1 of the training run was killed by SIGKILL" in said and "Traceback" not in said, said
    assert not Path(f"/proc/{first}").exists()


@pytest.mark.long
def test_ranks_die_with_their_launcher(folder, tmp_path):
    out = tmp_path / "out"
    process = start_training(line(folder, "uniform", out, processes=2, milestones=[100_000]), out)
    children = ranks(process.pid)
    process.kill()
    process.communicate()
    end = time.monotonic() + 60
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < end
        time.sleep(0.1)
    with lock_run_folder(out / ".state"):  # the lock has fallen with them
        pass


@pytest.mark.long
def test_an_error_in_the_ranks_is_said_once_in_one_line(folder, tmp_path):
    wild = {"lr": 1e30, "warmup_steps": 0, "grad_clip": None}
    said = run(line(folder, "uniform", tmp_path / "out", processes=2, optimizer=wild, precision="fp32"), status=1)
    assert said.count("not finite") == 1 and "Traceback" not in said and "ChildFailedError" not in said, said
    word = read_json(tmp_path / "out" / ".state" / "progress.json")
    assert word["state"] == "failed" and "not finite" in word["message"] and "\n" not in word["message"]


def test_micro_batches_cut_the_global_batch_alike_for_any_number_of_processes():
    for size, microbatch, processes in ((16, 3, 1), (16, 3, 2), (16, 3, 4), (16, None, 3), (7, 1, 7), (5, 2, 3)):
        parts = [split_into_micro_batches(size, microbatch, rank, processes) for rank in range(processes)]
        assert all(parts)
        joined = [one for part in parts for one in part]
        assert [number for number, _ in joined] == list(range(len(joined)))
        assert [k for _, place in joined for k in range(size)[place]] == list(range(size))
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
def test_settings_that_do_not_go_together(settings, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        experiment(**{f"training__{name}": value for name, value in settings.items()})


@pytest.mark.long
def test_dropout_depends_on_the_microbatch_alone(folder, tmp_path, two_ranks):
    unet = {"name": "unet", "channels": 8, "multipliers": [1], "blocks": 1, "norm_groups": 4, "dropout": 0.3}
    outs = []
    for processes in (1, 2):
        case = experiment({"uniform": {}}, model=unet, training__precision="fp64", training__milestones=[STEPS],
                          training__microbatch=8, training__processes=processes)  # fmt: skip
        config = write_experiment(tmp_path / f"{processes}.yaml", case)
        outs.append(tmp_path / str(processes))
        command = train_command(config, "uniform", outs[-1], folder / "latents")
        if processes == 1:  # in a process of its own: other tests leave their settings of torch in this one
            subprocess.run(command, check=True)
        else:
            two_ranks(command)
    states = [checkpoint.read(out / "checkpoint.pt") for out in outs]
    assert difference(*(state["model"] for state in states)) < TOLERANCE
    assert all(read_json(out / "training.json")["provenance"]["exact"] for out in outs)


def test_more_processes_need_a_launcher_and_more_nodes_a_job(folder, tmp_path, monkeypatch, capsys):
    case = experiment({"uniform": {}}, training__processes=2)
    with pytest.raises(KairosError, match=r"training.processes: got 2, but 1 were started; use kairos train"):
        train(case, "uniform", 0, tmp_path / "out", folder / "latents", [0, 2])
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert main(line(folder, "uniform", tmp_path / "nodes", processes=2, nodes=2)[3:]) == 1
    assert "training.nodes: got 2 in no SLURM job" in capsys.readouterr().err
