"""Content of MLflow runs as plain values: parameters, metric points with recorded times, tags.

A training run that reports while it runs and the later import both use this module, so both write the same content.
"""

import math
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kairos.training.identity import trajectory_settings

if TYPE_CHECKING:
    from kairos.config import Experiment
    from kairos.report.collect import Results, RunResults

_POINTS = 500  # points per training curve: a database takes seconds for ten thousand; longer ones are thinned
_PARAM_LIMIT = 6000
COMMIT = "mlflow.source.git.commit"  # a tag that stays what the first import made it
_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)  # start of a training whose clock was not kept


class Point(NamedTuple):
    """Metric value in the form of mlflow.entities.Metric; `timestamp` is in milliseconds since 1970."""

    key: str
    value: float
    timestamp: int
    step: int


@dataclass(frozen=True)
class Entry:
    """Content of an MLflow run; all of its `identifying` tags together find the run again and never change."""

    name: str
    identifying: dict[str, str]
    params: dict[str, str]
    points: Sequence[Point]
    tags: dict[str, str]


def experiment_name(experiment: "Experiment") -> str:
    """Name of the MLflow experiment that an experiment's runs belong to."""
    return experiment.tracking.experiment or f"kairos/{experiment.experiment}"


def parent_entry(results: "Results") -> Entry:
    """The run of an experiment as a whole, with the reference rows."""
    name = results.experiment.experiment
    start = min((training.started or _EPOCH for training in results.runs), default=_EPOCH)
    rows = {f"reference/{name}/{key}": row[key] for name, row in results.reference["rows"].items() for key in row}
    return Entry(
        name=name,
        identifying={"kairos.experiment": name, "kairos.role": "experiment"},
        params={"methods": ", ".join(results.methods), "model": results.experiment.model["name"]},
        points=list(points_of(rows, 0, moments(start, {}))),
        tags={"kairos.data": results.dataset["content_sha256"], **source(results.runs[0].record["provenance"])},
    )


def training_entry(
    experiment: "Experiment", method: str, seed: int, identity: str, points: Sequence[Point], tags: dict[str, str]
) -> Entry:
    """The run of one training."""
    identifying = {"kairos.experiment": experiment.experiment, "kairos.role": "training", "kairos.method": method}
    identifying |= {"kairos.seed": str(seed), "kairos.identity": identity}
    return Entry(f"{method} seed {seed}", identifying, parameters(experiment, method, seed), points, tags)


def parameters(experiment: "Experiment", method: str, seed: int) -> dict[str, str]:
    """Return the settings that decide a training run, flattened: sampler and weighting first.

    Settings that an extension of the run may change are left out.
    """
    plain = experiment.plain()
    nested = {
        "method": method,
        "seed": seed,
        **plain["methods"][method],
        "model": plain["model"],
        "diffusion": plain["diffusion"],
        "training": trajectory_settings(plain, method),
        "dataset": {key: plain["dataset"][key] for key in ("source", "path", "resolution", "flips")},
        "autoencoder": {"kind": plain["autoencoder"]["kind"]},
    }
    return {key: str(value)[:_PARAM_LIMIT] for key, value in flat(nested)}


def stride(lines: int) -> int:
    """Return the stride, a power of 2, that keeps at most `_POINTS` points of a curve of `lines` lines.

    An extension of the run keeps every second point of the shorter curve, or every fourth and so on, or all.
    """
    return 1 << max(0, math.ceil(math.log2(max(lines, 1) / _POINTS)))


def moments(started: datetime, clock: Mapping[int, float]) -> Callable[[int], int]:
    """Return a function from a step to the recorded time of its end, in milliseconds since 1970.

    Args:
        started: when the training was first started.
        clock: training seconds by step, from timing.jsonl; time goes evenly between them. Empty: a second a step.
    """
    steps = [0, *sorted(clock)]
    seconds = [0.0, *(clock[step] for step in steps[1:])]
    start = started.timestamp()
    return lambda step: round(1000 * (start + (float(np.interp(step, steps, seconds)) if clock else step)))


def points(training: "RunResults") -> list[Point]:
    """All curves of a training: what metrics.jsonl holds (thinned) and the evaluation of every milestone."""
    when = moments(training.started or _EPOCH, training.seconds_by_step)
    every = stride(len(training.metrics))
    lines = training.metrics.iloc[every - 1 :: every].to_dict("records")
    found = [point for line in lines for point in points_of(line, line["step"], when)]
    found += [point for one in training.snapshots for point in points_of(one.measured_values, one.step, when)]
    last = training.last_snapshot.step
    if training.seconds_by_step.get(last):
        found += points_of({"seconds_per_step": training.seconds_by_step[last] / last}, last, when)
    return found


def points_of(record: Mapping[Any, Any], step: int, when: Callable[[int], int]) -> Iterator[Point]:
    """The finite numbers of a record, but its own step."""
    for key, value in flat(record):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if key not in ("step", "images") and number and math.isfinite(value):
            yield Point(key, float(value), when(step), step)


def tags(results: "Results", training: "RunResults") -> dict[str, str]:
    """Tags by which a training's run is judged."""
    record = training.record
    found = {
        "kairos.data": results.dataset["content_sha256"],
        "kairos.autoencoder": str(results.autoencoder["sha256"]),
        "kairos.extractor_hash": results.reference["extractor_hash"],
        "kairos.reference_hash": results.reference["reference_hash"],
        **{f"kairos.sha256.{name}": digest for name, digest in record["components"].items()},
        **{f"kairos.provenance.{key}": str(value) for key, value in record["provenance"].items() if value is not None},
    }
    return found | source(record["provenance"])


def source(provenance: Mapping[str, Any]) -> dict[str, str]:
    """Return the tags by which MLflow shows the source of a run."""
    commit = provenance.get("git_commit") or git_commit()
    return {"mlflow.source.name": "kairos", "mlflow.source.type": "LOCAL"} | ({COMMIT: commit} if commit else {})


def git_commit() -> str | None:
    """The commit of the working tree, where it is one of git's."""
    try:
        answer = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


def flat(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested dictionaries under dotted names, those that are None left out."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        elif value is not None:
            yield prefix + key, value
