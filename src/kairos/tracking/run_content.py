"""Content of MLflow runs as plain values: parameters, metric points with recorded times, tags.

Live reports of a training run and the later import both use this module, so they write equal content.
"""

import math
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kairos.files import sha256_json
from kairos.stage_keys import select_fields
from kairos.stages import TRAIN

if TYPE_CHECKING:
    from kairos.config import Experiment
    from kairos.report.collect import Results, RunResults

_CURVE_POINTS = 500  # largest number of points of a curve: a database takes seconds for ten thousand
_PARAM_LIMIT = 6000  # characters of a parameter
_TAG_LIMIT = 4900  # characters of a tag: older servers accept 5,000
IDENTITY = "kairos.identity"  # tag with the hash of everything that decides a training run's trajectory
IDENTIFYING_TAGS = tuple(f"kairos.{name}" for name in ("experiment", "role", "method", "seed", "identity"))
CURRENT = "kairos.current"  # tag: "true" for a result of the present experiment or a run under way, else "false"
TRAINING = "training"  # tag `kairos.role` of training runs
COMMIT = "mlflow.source.git.commit"  # a tag that later imports do not change
_UNKNOWN_START = datetime(2000, 1, 1, tzinfo=UTC)  # start of a training run without recorded times


class Point(NamedTuple):
    """Metric value in the form of mlflow.entities.Metric; `timestamp` is in milliseconds since 1970."""

    key: str
    value: float
    timestamp: int
    step: int


@dataclass(frozen=True)
class RunContent:
    """Content of an MLflow run.

    Attributes:
        name: name of the run.
        identifying_tags: tags that never change and together find the run.
        params: parameters.
        points: metric values with step and time.
        tags: further tags.
    """

    name: str
    identifying_tags: dict[str, str]
    params: dict[str, str]
    points: Sequence[Point]
    tags: dict[str, str]

    @cached_property
    def digest(self) -> str:
        """SHA-256 hash of name, tags, parameters and points, computed at the first access."""
        return sha256_json([self.name, self.identifying_tags, self.params, list(self.points), self.tags])


def mlflow_experiment_name(experiment: "Experiment") -> str:
    """Return the name of the MLflow experiment for a kairos experiment: `tracking.experiment` or ``kairos/<name>``."""
    return experiment.tracking.experiment or f"kairos/{experiment.experiment}"


def build_experiment_run(results: "Results") -> RunContent:
    """Build the content of an experiment's parent run: reference rows, names of methods and backbone, and tags.

    The reference rows are distances of images without a trained network, such as held-out images. Their metric keys are
    ``reference/<row>/<metric>``, at step 0 and the earliest start of a training run. A run without a recorded start is
    treated as started on 2000-01-01. The tags contain the commit of the first training run. The caller ensures that the
    results contain a run.
    """
    name = results.experiment.experiment
    reference_values: dict[str, Any] = {}
    for row_name, row in results.reference["rows"].items():
        reference_values |= {f"reference/{row_name}/{key}": value for key, value in row.items()}
    start = min(run.started or _UNKNOWN_START for run in results.runs)
    time_of_step = build_step_clock(start, seconds_by_step={})
    provenance = results.runs[0].record["provenance"]
    return RunContent(
        name=name,
        identifying_tags={"kairos.experiment": name, "kairos.role": "experiment"},
        params={"methods": ", ".join(results.methods)[:_PARAM_LIMIT], "model": results.experiment.model.name},
        points=list(convert_record(reference_values, step=0, time_of_step=time_of_step)),
        tags={CURRENT: "true", "kairos.data": results.dataset["content_sha256"], **build_source_tags(provenance)},
    )


def build_training_run(
    experiment: "Experiment",
    method: str,
    seed: int,
    identity: str,
    points: Sequence[Point],
    tags: dict[str, str],
) -> RunContent:
    """Build the content of a training run's MLflow run, which is named ``<method> seed <seed>``.

    `identity` is the hash of everything that decides the run's trajectory.
    """
    identifying_tags = identify_training_run(experiment, method, seed, identity)
    params = flatten_parameters(experiment, method, seed)
    return RunContent(
        name=f"{method} seed {seed}", identifying_tags=identifying_tags, params=params, points=points, tags=tags
    )


def identify_training_run(experiment: "Experiment", method: str, seed: int, identity: str) -> dict[str, str]:
    """Return the tags that find the MLflow run of a training run.

    `identity` is the hash of everything that decides the run's trajectory.
    """
    return {
        "kairos.experiment": experiment.experiment,
        "kairos.role": TRAINING,
        "kairos.method": method,
        "kairos.seed": str(seed),
        IDENTITY: identity,
    }


def flatten_parameters(experiment: "Experiment", method: str, seed: int) -> dict[str, str]:
    """Return the settings that decide a training run, by dotted names; method, seed and strategy come first.

    Values are texts, cut to 6000 characters. Settings that an extension of the run may change, and settings that are
    None, are left out. Only four settings of the data set and the kind of autoencoder are included. Different runs may
    therefore have equal parameters.
    """
    nested = {
        "method": method,
        "seed": seed,
        **experiment.methods[method].model_dump(mode="json"),
        "model": experiment.model.plain(),
        "diffusion": experiment.diffusion.model_dump(mode="json"),
        "training": select_fields(TRAIN, experiment.run_settings(method, seed).sections)["training"],
        "dataset": experiment.dataset.model_dump(mode="json", include={"source", "path", "resolution", "flips"}),
        "autoencoder": {"kind": experiment.autoencoder.kind},
    }
    return {key: str(value)[:_PARAM_LIMIT] for key, value in flatten(nested)}  # `flatten` leaves out None


def choose_stride(line_count: int) -> int:
    """Return the smallest stride, a power of 2, that keeps at most 500 points of a curve of `line_count` lines.

    If the run is extended, its curve therefore keeps every point of the shorter curve, or every second, fourth and so
    on.
    """
    stride = 1
    while stride * _CURVE_POINTS < line_count:
        stride *= 2
    return stride


def build_step_clock(started: datetime, seconds_by_step: Mapping[int, float]) -> Callable[[int], int]:
    """Return a function that maps a step to the time of its end, in milliseconds since 1970.

    Times between recorded steps are interpolated. Steps after the last recorded step have the time of that step.

    Args:
        started: first start of the training run.
        seconds_by_step: training seconds up to a step, by step, from timing.jsonl. If it is empty, a step takes a
            second.
    """
    recorded_steps = sorted(seconds_by_step)
    steps = [0, *recorded_steps]
    seconds = [0.0, *(seconds_by_step[step] for step in recorded_steps)]
    start = started.timestamp()

    def time_of_step(step: int) -> int:
        elapsed = float(np.interp(step, steps, seconds)) if seconds_by_step else step
        return round(1000 * (start + elapsed))

    return time_of_step


def collect_points(run: "RunResults") -> list[Point]:
    """Return all curves of a training run as points: metrics.jsonl, thinned, then the evaluations of all snapshots.

    Of each stride of metrics.jsonl only the last line is kept, see `choose_stride`; an incomplete last stride is left
    out. If the training time of the last snapshot is known and not 0, a point ``seconds_per_step`` is the mean over all
    steps. Evaluations follow the metrics, so steps are not in order. A run without a recorded start is treated as
    started on 2000-01-01.

    Raises:
        KairosError: metrics.jsonl is damaged.
    """
    time_of_step = build_step_clock(run.started or _UNKNOWN_START, run.seconds_by_step)
    points: list[Point] = []

    # metrics of training
    stride = choose_stride(len(run.metrics))
    last_of_each_stride = run.metrics.iloc[stride - 1 :: stride]
    for record in last_of_each_stride.to_dict("records"):
        points += convert_record(record, record["step"], time_of_step)

    # evaluations
    for snapshot in run.snapshots:
        points += convert_record(snapshot.measured_values, snapshot.step, time_of_step)
    last_step = run.last_snapshot.step
    if run.seconds_by_step.get(last_step):
        seconds_per_step = run.seconds_by_step[last_step] / last_step
        points += convert_record({"seconds_per_step": seconds_per_step}, last_step, time_of_step)
    return points


def convert_record(record: Mapping[Any, Any], step: int, time_of_step: Callable[[int], int]) -> Iterator[Point]:
    """Yield the finite numbers of a nested dictionary as points at a step; keys ``step`` and ``images`` are left out.

    Keys of nested dictionaries are joined by dots. Booleans are not treated as numbers.
    """
    for key, value in flatten(record):
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        is_counter = key in ("step", "images")
        if is_number and not is_counter and math.isfinite(value):
            yield Point(key, float(value), timestamp=time_of_step(step), step=step)


def build_tags(results: "Results", run: "RunResults") -> dict[str, str]:
    """Return the tags of a training run that do not identify it; entries of its provenance that are None are left out.

    The tags are hashes of the data set, autoencoder, extractor and reference, hashes of the components that the run
    wrote, its provenance, its warnings, and the tags of `build_source_tags`. Tag ``kairos.machine`` is the kind of
    machine that the run's times were measured on; it is left out without times.
    """
    from kairos.report.findings import list_run_warnings

    record = run.record
    machines = run.machines_until(run.last_snapshot.step)
    return {
        "kairos.data": results.dataset["content_sha256"],
        "kairos.autoencoder": str(results.autoencoder["sha256"]),
        "kairos.extractor_hash": results.reference["extractor_hash"],
        "kairos.reference_hash": results.reference["reference_hash"],
        # not left out without warnings, so that it replaces the tag of an earlier import
        "kairos.warnings": "\n".join(list_run_warnings(results, run))[:_TAG_LIMIT] or "none",
        **{f"kairos.sha256.{name}": digest for name, digest in record["components"].items()},
        **{f"kairos.provenance.{key}": str(value) for key, value in record["provenance"].items() if value is not None},
        **({"kairos.machine": "; ".join(machines)} if machines else {}),
        **build_source_tags(record["provenance"]),
    }


def build_source_tags(provenance: Mapping[str, Any]) -> dict[str, str]:
    """Return the tags by which MLflow shows the source code of a run.

    The commit is read from the provenance, else from the working folder; without either the tag is left out.
    """
    tags = {"mlflow.source.name": "kairos", "mlflow.source.type": "LOCAL"}
    commit = provenance.get("git_commit") or find_git_commit()
    if commit:
        tags[COMMIT] = commit
    return tags


def find_git_commit() -> str | None:
    """Return the git commit of the working folder; None if it cannot be read, see `_find_git_commit`."""
    return _find_git_commit(Path.cwd())


@cache
def _find_git_commit(folder: Path) -> str | None:
    """Return the commit of a folder, as read at the first call of this process.

    The result is None if the folder is not in a git repository, or if git is missing, fails or takes more than 10 s.
    """
    command = ["git", "rev-parse", "HEAD"]
    try:
        process = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return process.stdout.strip()


def flatten(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted names and values of nested dictionaries: ``{"a": {"b": 1}}`` yields ``("a.b", 1)``.

    Values that are None are left out, and an empty dictionary yields nothing. A list is a value. All names begin with
    `prefix`.
    """
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        elif value is not None:
            yield prefix + key, value
