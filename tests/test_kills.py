"""Twenty SIGKILLs of a training run in two segments (adaptive, Min-SNR) change nothing in its result."""

import json
import os
import random
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from commands import Commands
from kairos.files import read_json
from training_case import experiment, make_latents, train_command, write_experiment

pytestmark = pytest.mark.long

STEPS = (200, 400)
# (point, passage) in the order of the run; each entry is one process that is killed
BEFORE_FIRST_CHECKPOINT = [("step", 1), ("step", 7), ("step", 20)]
INSIDE_CHECKPOINT_WRITE = [
    ("half_written", 1), ("not_synced", 1), ("not_renamed", 2),
    ("half_written", 2), ("not_renamed", 2), ("not_synced", 2),
]  # fmt: skip
BETWEEN_STEP_AND_SAMPLER = [
    ("after_optimizer", 1),
    ("after_optimizer", 5),
    ("after_optimizer", 3),
    ("after_optimizer", 8),
]


def make_case() -> dict:
    return experiment(training__milestones=list(STEPS), training__segments=2, training__checkpoint_every=25)


def kill_at(commands: Commands, line: list[str], log: Path, point: str, passage: int) -> None:
    """Run the command until SIGKILL ends it at the point."""
    process = commands.start(line, log, point, passage)
    assert commands.wait(process) == -signal.SIGKILL, (point, passage, log.read_text())


def kill_after(commands: Commands, line: list[str], log: Path, lock: Path, seconds: float) -> bool:
    """Kill the command some seconds after it has locked the run; return False if it had finished."""
    process = commands.start(line, log)
    while not lock.read_text().startswith(f"pid {process} "):
        time.sleep(0.01)
    time.sleep(seconds)
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
    status = commands.wait(process)
    assert status in (0, -signal.SIGKILL), log.read_text()
    return status != 0


def test_twenty_kills_change_nothing(tmp_path, commands):
    latents = make_latents(tmp_path / "data")
    config = write_experiment(tmp_path / "x.yaml", make_case())
    alone, out = tmp_path / "alone", tmp_path / "killed"
    log, lock = tmp_path / "log", out / ".state" / "lock"
    segments = (("--milestones", 0, STEPS[0]), ("--milestones", STEPS[1]))
    for segment in segments:
        assert commands.run(train_command(config, "adaptive", alone, latents, *segment), log) == 0, log.read_text()
    first, second = (train_command(config, "adaptive", out, latents, *segment) for segment in segments)
    kills, moments = 0, random.Random(0)
    for point, passage in BEFORE_FIRST_CHECKPOINT + INSIDE_CHECKPOINT_WRITE[:3] + BETWEEN_STEP_AND_SAMPLER[:2]:
        kill_at(commands, first, log, point, passage)
        kills += 1
    for _ in range(3):
        kills += kill_after(commands, first, log, lock, moments.uniform(0.0, 0.6))
    assert commands.run(first, log) == 0
    assert re.search("resumes from step|0 steps to do", log.read_text())  # by now at least one checkpoint is complete
    for point, passage in INSIDE_CHECKPOINT_WRITE[3:] + BETWEEN_STEP_AND_SAMPLER[2:]:
        kill_at(commands, second, log, point, passage)
        kills += 1
    for attempt in range(20):
        if kills >= 20:
            break
        kills += kill_after(commands, second, log, lock, moments.uniform(0.0, 0.5) / (1 + attempt / 4))
    assert kills >= 20
    assert commands.run(second, log) == 0, log.read_text()

    assert read_json(out / "training.json") == read_json(alone / "training.json")
    for name in ("checkpoint.pt", "metrics.jsonl", *(f"snapshots/{step:07d}/snapshot.json" for step in (0, *STEPS))):
        assert (out / name).read_bytes() == (alone / name).read_bytes(), name
    timing = [json.loads(line) for line in (out / "timing.jsonl").read_text().splitlines()]
    assert [line["step"] for line in timing] == list(range(25, STEPS[1] + 1, 25))
    assert not list(out.glob(".state/*/checkpoints/.tmp-*.ckpt"))
