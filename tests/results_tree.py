"""Small results/<experiment>/ trees in the formats of the pipeline, with numbers from a formula.

Tests of code that reads results (report, tracking) use them instead of training runs.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

from kairos.config import Experiment, validate
from kairos.files import sha256_file, sha256_json, write_json, write_record, write_text
from kairos.validity import Validity

METRIC = "frechet_classifier32"
MACHINE = {"host": "node1", "cpu": "CPU 1", "gpu": None, "cpus": 2, "threads": 1, "processes": 1}
T = 100
EXTRACTOR_HASH = "e" * 64
REFERENCE_HASH = "f" * 64
# method: (sampler and weighting, final distance, speed of its decrease)
METHODS: dict[str, tuple[dict[str, Any], float, float]] = {
    "uniform": ({"sampler": "uniform"}, 24.0, 1.0),
    "p2": ({"sampler": "uniform", "weighting": "p2"}, 23.6, 1.0),
    "min_snr": ({"sampler": "uniform", "weighting": "min_snr"}, 17.0, 1.5),
    "log_normal": ({"sampler": "log_normal"}, 31.0, 0.9),
    "speed": ({"sampler": "speed", "weighting": "change_aware"}, 18.6, 1.4),
    "adaptive": ({"sampler": {"name": "adaptive", "frequency": 4}}, 29.0, 0.9),
}


def experiment(
    seeds: tuple[int, ...] = (0, 1),
    methods: tuple[str, ...] = tuple(METHODS),
    edited: Mapping[str, dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Return the values of the experiment file; `edited` has other settings of some methods, by name."""
    settings = {method: METHODS[method][0] for method in methods} | dict(edited or {})
    return {
        "experiment": "tiny",
        "seeds": list(seeds),
        "autoencoder": {"kind": "train"},
        "model": "dit",
        "diffusion": {"process": {"name": "discrete", "timesteps": T}},
        "training": {"batch_size": 64, "milestones": [100, 200, 400]},
        "methods": settings,
        "sampling": {"steps": 20, "grid": 16},
        "evaluation": {"extractor": {"name": "classifier", "features": 32}, "num_samples": 400, "strata": 18},
    }


def write(
    root: Path,
    seeds: tuple[int, ...] = (0, 1),
    methods: tuple[str, ...] = tuple(METHODS),
    edited: Mapping[str, dict[str, Any]] | None = None,
) -> tuple[Path, Path]:
    """Write the experiment file and its results below `root`; returns both paths.

    Runs of `edited` methods have another identity, and distances that are 10 % larger.
    """
    values = experiment(seeds, methods, edited)
    config = root / "tiny.yaml"
    write_text(config, yaml.safe_dump(values, sort_keys=False))
    experiment_config = validate(values)
    results = root / "results" / "tiny"
    _write_shared(results)
    for method in methods:
        for seed in seeds:
            is_edited = method in (edited or {})
            _write_training(results / "methods" / method / f"seed{seed}", experiment_config, method, seed, is_edited)
    sign(experiment_config, results)
    return config, results


def sign(experiment_config: Experiment, results: Path) -> None:
    """Record that all results below a folder were computed from the experiment as it is."""
    validity = Validity(experiment_config, results)
    for stage in validity.stages:
        for result in validity.list_results(stage):
            if validity.path(result).is_file():
                run = {"seed": result.seed, "device": "cpu"} if stage == "train" else {}
                validity.add_computed_from(result, {**validity.describe(result), **run})


def distance(method: str, seed: int, step: int) -> float:
    """Return a made-up distance: it decreases exponentially from 320 to the method's final value at step 400.

    A seed shifts all methods equally, and adds 0.8 % of noise to each method.
    """
    _, final, speed = METHODS[method]
    noise = np.random.default_rng([seed, *method.encode()]).standard_normal() if step else 0.0
    share = (np.exp(-step * speed / 80) - np.exp(-400 * speed / 80)) / (1 - np.exp(-400 * speed / 80))
    return float((final + (320 - final) * share + (0.3 * (seed - 0.5) if step else 0.0)) * (1 + 0.008 * noise))


def _write_shared(results: Path) -> None:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (60, 8, 8, 1), dtype=np.uint8)
    (results / "dataset").mkdir(parents=True)
    np.save(results / "dataset" / "images.npy", images)
    np.save(results / "dataset" / "train.npy", np.arange(40))
    np.save(results / "dataset" / "heldout.npy", np.arange(40, 60))
    write_record(
        results / "dataset" / "record.json",
        {
            "source": "digits", "count": 60, "height": 8, "width": 8, "channels": 1, "classes": ["0", "1"],
            "train_count": 40, "heldout_count": 20, "content_sha256": "d" * 64, "skipped": [], "conditions": {},
            "values": [{"kind": "8-bit", "count": 60, "black": 0, "white": 255}], "warnings": [],
        },
    )  # fmt: skip
    write_record(
        results / "autoencoder" / "record.json",
        {"kind": "train", "class": "AutoencoderKL", "latent_shape": [4, 4, 4], "psnr": 24.7, "sha256": "a" * 64},
    )
    rows = {"floor": 8.6, "reconstruction": 9.1, "gaussian": 88.0, "noise": 957.0}
    write_record(
        results / "reference" / "record.json",
        {
            "extractor": "classifier32", "extractor_hash": EXTRACTOR_HASH, "metric": METRIC, "features": 32,
            "accuracy": 0.981, "extractor_check": None, "extractor_warnings": [], "warnings": [],
            "reference": "train", "reference_hash": REFERENCE_HASH, "eval_seed": 0,
            "num_samples": 400, "sets": 3,
            "rows": {
                name: {
                    "n_samples": 400, METRIC: value, f"{METRIC}_spread": value * 0.02, "kid": value / 1000,
                    "kid_spread": 0.001,
                }
                for name, value in rows.items()
            },
        },
    )  # fmt: skip
    for stage, cpu, startup in (("prepare", 3.0, 2.0), ("sample", 25.0, 12.5), ("evaluate", 20.0, 10.0)):
        for k in range(2):
            write_json(
                results / "timing" / f"{stage}-{k}.json",
                {
                    "stage": stage, "wall_seconds": cpu + 1, "cpu_seconds": cpu, "startup_wall_seconds": startup + 1,
                    "startup_cpu_seconds": startup, "peak_rss_bytes": int(6e8) + k,
                },
            )  # fmt: skip


def _write_training(folder: Path, experiment_config: Experiment, method: str, seed: int, is_edited: bool) -> None:
    learned = method == "adaptive"
    rng = np.random.default_rng([seed, 7])
    identity = f"{method}-{seed}".encode().hex().ljust(64, "0")
    if is_edited:
        identity = sha256_json([method, seed, experiment_config.methods[method].model_dump(mode="json")])
    records = []
    level = 1 + 0.15 * list(METHODS).index(method)
    for step in range(1, 401):
        loss = level * 0.2 + 0.9 * np.exp(-step / 90) + 0.03 * rng.standard_normal()
        sampler = {"a": 1 - step / 1000, "b": 1.0} if learned else {}
        records.append(
            {
                "step": step, "images": 64 * step, "loss": loss, "mse": loss * 1.1, "lr": 1e-3, "grad_norm": 0.5,
                "sampler": sampler,
            }
        )  # fmt: skip
    write_text(folder / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in records))
    per_step = 0.06 if learned else 0.05
    timing = [
        {
            "identity": identity, "step": step, "seconds": per_step * step, "steps_run": step,
            "started": "2026-01-02T03:04:05+00:00", "saved": "2026-01-02T03:04:30+00:00", "machine": MACHINE,
        }
        for step in experiment_config.milestones
    ]  # fmt: skip
    write_text(folder / "timing.jsonl", "".join(json.dumps(line) + "\n" for line in timing))
    for snapshot_number, step in enumerate(experiment_config.milestones):
        value = distance(method, seed, step) * (1.1 if is_edited else 1)
        _write_snapshot(folder, experiment_config, method, seed, step, snapshot_number, identity, value)
    write_record(
        folder / "training.json",
        {
            "identity": identity, "method": method, "seed": seed, "steps": 400, "milestones": [0, 100, 200, 400],
            "components": {name: "c" * 64 for name in ("model", "ema", "optimizer", "strategy", "metrics")},
            "provenance": {"kairos": "0.1.0", "torch": "2.9.0", "git_commit": "0123456789abcdef"},
        },
    )  # fmt: skip


def _write_snapshot(
    folder: Path,
    experiment_config: Experiment,
    method: str,
    seed: int,
    step: int,
    snapshot_number: int,
    identity: str,
    value: float,
) -> None:
    learned = method == "adaptive"
    snapshot = folder / "snapshots" / f"{step:07d}"
    t = np.arange(T)
    u = (t + 0.5) / T
    a = 1 - 0.12 * snapshot_number if learned else 1.0
    p = {
        "log_normal": np.exp(-(np.log(u / (1 - u)) ** 2) / 2) / (u * (1 - u)),
        "speed": np.where(t < 70, 5.0, 1.0),
    }.get(method, u ** (a - 1))
    p = p / p.sum()
    snr = np.exp(9 - 16 * u)
    w = {"p2": 1 / (1 + snr), "min_snr": np.minimum(snr, 5) / snr, "speed": 0.4 + 0.2 * np.sin(np.pi * u)}.get(
        method, np.ones(T)
    )
    table = (
        "".join(f"{t},{p[t]!r},{w[t]!r},{(p * w)[t]!r}\n" for t in range(T)).replace("np.float64(", "").replace(")", "")
    )
    write_text(snapshot / "strategy.csv", "t,p,w,effective\n" + table)
    moved = float(abs(p - 1 / T).sum() / 2)
    strategy = (
        {"updates": 25 * snapshot_number, "a": a, "b": 1.0, "tv_from_start": moved}
        if learned
        else {"tv_from_start": 0.0}
    )
    write_record(
        snapshot / "snapshot.json",
        {
            "step": step, "images_seen": 64 * step, "identity": identity, "method": method, "seed": seed,
            "config": experiment_config.plain(), "shape": [4, 4, 4], "conditions": {}, "autoencoder_sha256": "a" * 64,
            "dataset_sha256": "d" * 64, "strategy": strategy, "learned": learned,
            "provenance": {"kairos": "0.1.0", "torch": "2.9.0", "git_commit": "0123456789abcdef"}, "files": {},
        },
    )  # fmt: skip
    sets = [value * factor for factor in (0.97, 1.0, 1.03)]
    strata = []
    for t0 in range(0, T, 5):
        tilt = 1 + 0.1 * list(METHODS).index(method) * (t0 / T - 0.5)
        loss = float((0.9 * np.exp(-t0 / 40) + 2 / (step + 50)) * tilt)
        strata.append({"u": [t0 / T, (t0 + 5) / T], "t": t0 + 2, "loss_epsilon": loss, "vlb": 0.01 * loss})
    loss = float(np.mean([entry["loss_epsilon"] for entry in strata]))
    write_record(
        folder / "evaluation" / f"{step:07d}.json",
        {
            "step": step,
            "metrics": {
                METRIC: value, f"{METRIC}_spread": float(np.std(sets, ddof=1)), f"{METRIC}_sets": sets,
                "kid": value / 1000, "kid_spread": 0.001,
            },
            "protocol": {
                "extractor": "classifier32", "extractor_hash": EXTRACTOR_HASH, "n_samples": 400, "sets": 3,
                "scheduler": "ddim", "steps": 20, "nfe": 20, "spacing": "trailing", "clip": False, "weights": "ema",
                "reference_hash": REFERENCE_HASH, "sample_seed": 0, "eval_seed": 0,
                "identity": identity,
            },
            "validation": {
                "loss_epsilon": loss, "vlb": loss / 30, "vlb_without_last": loss / 31, "per_timestep": strata,
            },
            "warnings": ["fewer than ten times as many images as features"] if step == 0 else [],
        },
    )  # fmt: skip
    grid = np.random.default_rng([step, seed]).integers(0, 256, (42, 42), dtype=np.uint8)
    grid[:, ::10], grid[:, 1::10], grid[::10], grid[1::10] = 255, 255, 255, 255
    path = folder / "samples" / f"{step:07d}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(grid).save(path)
    write_record(path.with_suffix(".json"), {"files": {path.name: sha256_file(path)}})
