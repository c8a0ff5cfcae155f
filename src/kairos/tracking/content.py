"""What goes into MLflow, as plain values: parameters, metric points with recorded times, tags."""

import math
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np

from kairos.report.collect import Results, Training

_POINTS = 500  # points per training curve: a database takes seconds for ten thousand; longer ones are thinned
_PARAM_LIMIT = 6000
_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)  # start of a training whose clock was not kept


@dataclass(frozen=True)
class Point:
    """One metric value; `timestamp` is in milliseconds since 1970."""

    key: str
    value: float
    step: int
    timestamp: int


def parameters(results: Results, training: Training) -> dict[str, str]:
    """What decides the training, flattened: sampler and weighting first, nothing that may change on an extension."""
    plain = results.experiment.plain()
    method = plain["methods"][training.method]
    settings = {key: plain["training"][key] for key in ("batch_size", "optimizer", "ema", "precision", "threads")}
    nested = {
        "method": training.method,
        "seed": training.seed,
        "sampler": method["sampler"],
        "weighting": method["weighting"],
        "model": plain["model"],
        "diffusion": plain["diffusion"],
        "training": settings,
        "dataset": {key: plain["dataset"][key] for key in ("source", "path", "resolution", "flips")},
        "autoencoder": {"kind": plain["autoencoder"]["kind"]},
    }
    return {key: str(value)[:_PARAM_LIMIT] for key, value in _flat(nested)}


def points(training: Training) -> list[Point]:
    """All curves of a training: what metrics.jsonl holds (thinned) and the evaluation of every milestone."""
    start = (training.started or _EPOCH).timestamp()

    def when(step: int) -> int:
        seconds = float(training.seconds(step))
        return round(1000 * (start + (seconds if math.isfinite(seconds) else step)))

    return [Point(key, value, step, when(step)) for key, value, step in _values(training) if math.isfinite(value)]


def reference_points(results: Results) -> list[Point]:
    """The reference rows, for the parent run."""
    start = min((training.started or _EPOCH for training in results.trainings), default=_EPOCH)
    at = round(1000 * start.timestamp())
    rows = results.reference["rows"]
    return [
        Point(f"reference/{name}/{key}", float(value), 0, at)
        for name, row in rows.items()
        for key, value in row.items()
        if isinstance(value, (int, float)) and math.isfinite(value)
    ]


def tags(results: Results, training: Training) -> dict[str, str]:
    """Tags by which a run is judged; those that find it again are `identifying_tags`."""
    record = training.record
    found = {
        "kairos.data": results.dataset["content_sha256"],
        "kairos.autoencoder": str(results.autoencoder["sha256"]),
        "kairos.extractor_hash": results.reference["extractor_hash"],
        "kairos.reference_hash": results.reference["reference_hash"],
        **{f"kairos.sha256.{name}": digest for name, digest in record["components"].items()},
        **{f"kairos.provenance.{key}": str(value) for key, value in record["provenance"].items() if value is not None},
    }
    commit = record["provenance"].get("git_commit") or git_commit()
    return found | ({"mlflow.source.git.commit": commit} if commit else {})


def identifying_tags(results: Results, training: Training | None) -> dict[str, str]:
    """The tags that a run is found again by; without a training those of the experiment's parent run."""
    experiment = {"kairos.experiment": results.experiment.experiment}
    if training is None:
        return {**experiment, "kairos.role": "experiment"}
    return {
        **experiment,
        "kairos.role": "training",
        "kairos.identity": training.record["identity"],
        "kairos.method": training.method,
        "kairos.seed": str(training.seed),
    }


def git_commit() -> str | None:
    """The commit of the working tree, where it is one of git's."""
    try:
        answer = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


def _values(training: Training) -> Iterator[tuple[str, float, int]]:
    table = training.metrics.select_dtypes("number")
    stride = 1 << max(0, math.ceil(math.log2(max(len(table), 1) / _POINTS)))  # an extension keeps every second point
    kept = np.arange(len(table)) % stride == stride - 1
    steps = table["step"].to_numpy(int)[kept]
    for column in table.columns:
        if column not in ("step", "images"):
            for step, value in zip(steps, table[column].to_numpy(float)[kept]):
                yield column, float(value), int(step)
    for milestone in training.milestones:
        measured = dict(milestone.evaluation["metrics"])
        measured |= {name: milestone.value(name) for name in ("val_loss", "val_vlb", "val_vlb_without_last")}
        for key, value in measured.items():
            if isinstance(value, (int, float)):
                yield key, float(value), milestone.step


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        elif value is not None:
            yield prefix + key, value
