"""A full disk ends a training run with a clear error and keeps its last checkpoint, from which it resumes."""

import os
import subprocess

import pytest

from kairos.files import read_json
from training_case import experiment, make_latents, train_command, write_experiment

pytestmark = pytest.mark.long


@pytest.fixture
def small_disk(tmp_path):
    """A tmpfs of one MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_run_resumes_exactly_after_a_full_disk(commands, small_disk, tmp_path):
    latents = make_latents(tmp_path / "data")
    config = write_experiment(tmp_path / "x.yaml", experiment())
    uninterrupted = tmp_path / "alone"
    log = tmp_path / "log"
    assert commands.run(train_command(config, "adaptive", uninterrupted, latents), log) == 0, log.read_text()
    out = small_disk / "run"
    line = train_command(config, "adaptive", out, latents)
    status, logged = commands.run(line, log), log.read_text()
    assert status == 1
    (message,) = [text for text in logged.splitlines() if "No space left on device" in text]
    assert str(out) in message, "the message names the file"
    assert "Traceback" not in logged and not (out / "training.json").exists()
    checkpoints = sorted(path.name for path in out.glob(".state/*/checkpoints/*.ckpt"))
    assert checkpoints, "a checkpoint was written before the disk was full"
    subprocess.run(["mount", "-o", "remount,size=64m", small_disk], check=True)
    assert commands.run(line, log) == 0, log.read_text()
    assert f"resumes from step {int(checkpoints[-1].split('.')[0])}" in log.read_text()
    assert read_json(out / "training.json") == read_json(uninterrupted / "training.json")
    used = sum(f.stat().st_size for f in out.rglob(".tmp-*"))
    assert used == 0 and os.path.getsize(out / "metrics.jsonl") == os.path.getsize(uninterrupted / "metrics.jsonl")
