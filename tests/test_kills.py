"""Twenty SIGKILLs of one training of adaptive with Min-SNR in two segments change nothing in its result."""

import json
import os
import random
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
from kill_at import Mother
from training_case import experiment, make_latents, train_command, write_experiment

from kairos.files import read_json

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

STEPS = (200, 400)
# (point, passage) in the order of the training; every entry is one process that dies
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


def case() -> dict:
    return experiment(training__milestones=list(STEPS), training__segments=2, training__checkpoint_every=25)


def killed(mother: Mother, line: list[str], log: Path, point: str, passage: int) -> None:
    """Run the line until it dies at the point; it must have died by SIGKILL."""
    mother.start(line[3:], log, point, passage)
    assert mother.wait() == -signal.SIGKILL, (point, passage, log.read_text())


def killed_after(mother: Mother, line: list[str], log: Path, lock: Path, seconds: float) -> bool:
    """SIGKILL the line some time after it has taken the training's lock; False if it had finished."""
    process = mother.start(line[3:], log)
    while not lock.read_text().startswith(f"pid {process} "):
        time.sleep(0.01)
    time.sleep(seconds)
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
    status = mother.wait()
    assert status in (0, -signal.SIGKILL), log.read_text()
    return status != 0


def run(line: list[str]) -> str:
    return subprocess.run(line, capture_output=True, text=True, check=True).stderr


def test_twenty_kills_change_nothing(tmp_path):
    latents = make_latents(tmp_path / "data")
    config = write_experiment(tmp_path / "x.yaml", case())
    alone, out = tmp_path / "alone", tmp_path / "killed"
    segments = (("--milestones", 0, STEPS[0]), ("--milestones", STEPS[1]))
    for segment in segments:
        run(train_command(config, "adaptive", alone, latents, *segment))
    first, second = (train_command(config, "adaptive", out, latents, *segment) for segment in segments)
    log, lock = tmp_path / "log", out / ".state" / "lock"
    kills, moments = 0, random.Random(0)
    with Mother() as mother:
        for point, passage in BEFORE_FIRST_CHECKPOINT + INSIDE_CHECKPOINT_WRITE[:3] + BETWEEN_STEP_AND_SAMPLER[:2]:
            killed(mother, first, log, point, passage)
            kills += 1
        for _ in range(3):
            kills += killed_after(mother, first, log, lock, moments.uniform(0.0, 0.6))
        said = run(first)
        assert "goes on from step" in said or "0 steps to do" in said  # one checkpoint at least is whole by now
        for point, passage in INSIDE_CHECKPOINT_WRITE[3:] + BETWEEN_STEP_AND_SAMPLER[2:]:
            killed(mother, second, log, point, passage)
            kills += 1
        for attempt in range(20):
            if kills >= 20:
                break
            kills += killed_after(mother, second, log, lock, moments.uniform(0.0, 0.5) / (1 + attempt / 4))
    assert kills >= 20
    run(second)

    assert read_json(out / "training.json") == read_json(alone / "training.json")
    for name in ("checkpoint.pt", "metrics.jsonl", *(f"milestones/{step:07d}/milestone.json" for step in (0, *STEPS))):
        assert (out / name).read_bytes() == (alone / name).read_bytes(), name
    timing = [json.loads(line) for line in (out / "timing.jsonl").read_text().splitlines()]
    assert [line["step"] for line in timing] == list(range(25, STEPS[1] + 1, 25))
    assert not list(out.glob(".state/*/checkpoints/.tmp-*.ckpt"))
