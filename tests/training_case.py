"""Small real training runs for tests, on digits whose 2x2 blocks form latents of shape 4x4x4."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from kairos import models
from kairos.config import validate
from kairos.data.latents import Latents
from kairos.files import read_json, sha256_bytes, write_record
from kairos.forward_process import build_process
from kairos.library_components import LibraryComponent
from kairos.models.settings import BACKBONES
from kairos.training import run
from kairos.training.settings import read_run_settings
from kairos.training.state import TrainingState
from kairos_timesteps.components import PROCESSES


def make_latents(folder: Path, count: int = 200) -> Path:
    """Write `folder`/dataset and `folder`/latents; returns the folder of the latents."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = (digits.images[:count] * 255 / 16).round().astype(np.uint8)[..., None]  # (n, 8, 8, 1)
    dataset, latents = folder / "dataset", folder / "latents"
    (dataset / "conditions").mkdir(parents=True)
    latents.mkdir()
    np.save(dataset / "images.npy", images)
    np.save(dataset / "conditions" / "class.npy", digits.target[:count].astype(np.int64))
    order = np.random.default_rng(0).permutation(count)
    np.save(dataset / "train.npy", np.sort(order[count // 4 :]))
    np.save(dataset / "heldout.npy", np.sort(order[: count // 4]))
    conditions = {"class": {"kind": "class", "num_classes": 10, "file": "conditions/class.npy"}}
    content = sha256_bytes(images.tobytes())
    write_record(dataset / "record.json", {"content_sha256": content, "count": count, "conditions": conditions})
    blocks = images.reshape(count, 4, 2, 4, 2).transpose(0, 2, 4, 1, 3).reshape(count, 4, 4, 4)
    np.save(latents / "mean.npy", blocks.astype(np.float32))
    np.save(latents / "logvar.npy", np.full(blocks.shape, 2.0, np.float32))
    record = {
        "kind": "moments", "shape": [4, 4, 4], "count": count, "scaling_factor": 0.01, "shift_factor": 80.0,
        "flips": False, "autoencoder_sha256": "blocks", "dataset_sha256": content, "content_sha256": content,
        "conditions": conditions, "dataset": "../dataset", "files": {"mean.npy": "", "logvar.npy": ""},
    }  # fmt: skip
    write_record(latents / "record.json", record)
    return latents


def experiment(methods: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """Return a tiny experiment as plain values.

    Args:
        methods: methods by name; None: uniform and adaptive.
        changes: values by the dotted name of their field, with __ for dots.
    """
    values: dict[str, Any] = {
        "experiment": "case",
        "model": {"name": "dit", "patch": 2, "width": 16, "depth": 1, "heads": 2},
        "diffusion": {"process": {"name": "discrete", "timesteps": 100}},
        "training": {
            "batch_size": 16, "milestones": [20, 40], "checkpoint_every": 10, "device": "cpu",
            "optimizer": {"lr": 1e-3, "warmup_steps": 5},
        },
        "methods": methods or {
            "uniform": {},
            "adaptive": {
                "sampler": {"name": "adaptive", "frequency": 4, "feature_timesteps": 20}, "weighting": "min_snr",
            },
        },
        "evaluation": {"num_samples": 40},
    }  # fmt: skip
    for name, value in changes.items():
        *path, last = name.split("__")
        section = values
        for name_of_section in path:
            section = section.setdefault(name_of_section, {})
        section[last] = value
    return validate(values).plain()


def train(values: dict[str, Any], method: str, seed: int, *arguments: Any, **keywords: Any) -> dict[str, Any]:
    """Train a method of an experiment given as plain values; see `kairos.training.run.train`."""
    return run.train(read_run_settings(values, method, seed), *arguments, **keywords)


def build_training(
    values: dict[str, Any], method: str, seed: int, latents: Latents, device: torch.device
) -> TrainingState:
    """Build the initial state of a training run of an experiment given as plain values."""
    return TrainingState(read_run_settings(values, method, seed), latents, device)


def build_model(values: dict[str, Any], *arguments: Any) -> Any:
    """Build the backbone of section `model`, given as plain values; see `kairos.models.build`."""
    return models.build(BACKBONES.select(values), *arguments)


def load_model(folder: Path, values: dict[str, Any], *arguments: Any) -> Any:
    """Load the backbone of section `model`, given as plain values; see `kairos.models.load`."""
    return models.load(folder, BACKBONES.select(values), *arguments)


def make_process(values: dict[str, Any], prediction: str | None, sigma_data: float | None = None) -> Any:
    """Build a forward process from plain values, ``{"name": ..., option: ...}``."""
    return build_process(LibraryComponent.select(PROCESSES, values), prediction, sigma_data)


def write_experiment(path: Path, plain: dict[str, Any]) -> Path:
    """Write an experiment file; returns its path."""
    path.write_text(yaml.safe_dump(plain))
    return path


def command(*arguments: Any) -> list[str]:
    """Return the command line of a kairos subcommand."""
    return [sys.executable, "-m", "kairos", *(str(argument) for argument in arguments)]


def train_command(config: Path, method: str, out: Path, latents: Path, *more: Any) -> list[str]:
    """Return the command line of a training run."""
    base = ("train", "--config", config, "--method", method, "--seed", 0, "--out", out, "--latents", latents)
    return command(*base, *more)


def start_training(line: list[str], out: Path) -> subprocess.Popen:
    """Start a training run; returns its process as soon as it begins its first step."""
    start = time.time()
    process = subprocess.Popen(line, stderr=subprocess.PIPE, text=True)
    wait_for_steps(out, start, lambda: process.poll() is None)
    return process


def wait_for_steps(out: Path, start: float, is_running: Callable[[], bool] = lambda: True) -> None:
    """Wait until a training run begins its first step.

    Args:
        out: folder of the run.
        start: time at which the run was started, as of `time.time`.
        is_running: False if the process of the run has ended, which fails the test.
    """
    file = out / ".state" / "progress.json"
    while not (file.exists() and read_json(file)["updated"] > start and read_json(file)["state"] == "running"):
        assert is_running(), f"the training run in {out} ended before its first step"
        assert time.time() < start + 120, f"the training run in {out} took no step in two minutes"
        time.sleep(0.02)


def hashes(out: Path) -> dict[str, str]:
    """Read the hashes of the components of a finished training run."""
    return read_json(out / "training.json")["components"]


def difference(one: object, other: object) -> float:
    """Return the largest relative difference between tensors of two nested states.

    The difference of two tensors is the norm of their difference over the norm of the second one. Values other than
    floating-point numbers must be equal.
    """
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        return max((difference(one[key], other[key]) for key in one), default=0.0)
    if isinstance(one, (list, tuple)):
        return max((difference(*pair) for pair in zip(one, other, strict=True)), default=0.0)
    if isinstance(one, float):
        one, other = torch.tensor(one), torch.tensor(other)
    if isinstance(one, torch.Tensor) and one.is_floating_point():
        return float((one.double() - other.double()).norm() / other.double().norm().clamp_min(1e-300))
    assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    return 0.0
