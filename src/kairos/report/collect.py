"""An experiment's results folder as plain values: everything that the report and the tracking import read."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kairos.config import Experiment
from kairos.data.dataset import open_dataset
from kairos.errors import KairosError
from kairos.files import read_json, read_lines

Record = dict[str, Any]


@dataclass(frozen=True)
class Milestone:
    """One evaluated milestone of a training.

    Attributes:
        step: optimiser steps taken.
        record: its ``milestone.json``.
        strategy: columns t, p, w, effective; a row per timestep.
        evaluation: its evaluation record.
        grid: picture of the first samples.
    """

    step: int
    record: Record
    strategy: pd.DataFrame
    evaluation: Record
    grid: Path

    @property
    def columns(self) -> Record:
        """What was measured, by column: metrics with their spreads and sets, and validation losses as ``val_...``."""
        validation = self.evaluation.get("validation") or {}
        losses = {f"val_{name}": value for name, value in validation.items() if isinstance(value, float)}
        return {**self.evaluation["metrics"], **losses}


@dataclass(frozen=True)
class Training:
    """One method with one seed.

    Attributes:
        method, seed, milestones: of the training.
        metrics: a row per line of metrics.jsonl.
        clock: training seconds by step, accumulated over resumes, where a clock was kept.
        started: when the training was first started, where a clock was kept.
        record: its ``training.json``.
    """

    method: str
    seed: int
    milestones: tuple[Milestone, ...]
    metrics: pd.DataFrame
    clock: dict[int, float]
    started: datetime | None
    record: Record

    @property
    def final(self) -> Milestone:
        """The last milestone."""
        return self.milestones[-1]

    @property
    def learned(self) -> bool:
        """Whether the sampler learns while it trains."""
        return bool(self.final.record.get("learned"))


@dataclass(frozen=True)
class Results:
    """All results of an experiment: trainings in the order of the configuration, and what they are compared with."""

    experiment: Experiment
    folder: Path
    trainings: tuple[Training, ...]
    reference: Record
    dataset: Record
    autoencoder: Record
    jobs: tuple[Record, ...]

    @property
    def metric(self) -> str:
        """Name of the Fréchet distance: ``frechet_<extractor>``, or ``fid`` with Inception features."""
        return str(self.reference["metric"])

    @property
    def methods(self) -> list[str]:
        """Methods in the order of the configuration."""
        return list(self.experiment.methods)

    @property
    def baseline(self) -> str | None:
        """The method that samples uniformly and weights nothing (EDM: by its own lambda), which factors refer to."""
        plain = ("none", self.experiment.diffusion.process["name"])
        for name, method in self.experiment.methods.items():
            usual = method.sampler["name"], method.coupling["name"]
            if usual == ("uniform", "independent") and method.weighting["name"] in plain:
                return name
        return None

    @property
    def validated(self) -> bool:
        """Whether there is a validation loss by time."""
        return all("per_timestep" in (one.final.evaluation.get("validation") or {}) for one in self.trainings)

    @cached_property
    def table(self) -> pd.DataFrame:
        """A row per evaluated milestone, of objects: which one it is, what was measured, and the protocol of that."""
        rows = []
        for training, milestone in self.evaluated:
            where = {"experiment": self.experiment.experiment, "method": training.method, "seed": training.seed}
            seconds = training.clock.get(milestone.step) if milestone.step else 0.0
            when = {"step": milestone.step, "images_seen": milestone.record["images_seen"], "train_seconds": seconds}
            rows.append(where | when | milestone.columns | milestone.evaluation["protocol"])
        return pd.DataFrame(rows, dtype=object)

    def values(self, method: str, name: str) -> np.ndarray:
        """A column of a method's rows of the table (seeds, milestones), NaN where it was not measured."""
        own = self.table[self.table["method"] == method]
        return own.get(name, own["step"] * np.nan).to_numpy(float).reshape(len(self.experiment.seeds), -1)

    @property
    def evaluated(self) -> list[tuple[Training, Milestone]]:
        """Every milestone with its training."""
        return [(training, milestone) for training in self.trainings for milestone in training.milestones]

    def of(self, method: str) -> list[Training]:
        """The trainings of a method, one per seed."""
        return [training for training in self.trainings if training.method == method]


def collect(experiment: Experiment, folder: Path | str) -> Results:
    """Read the results of every method and seed of the experiment.

    Raises:
        KairosError: something is missing or damaged (named, with the command that makes it), or an evaluation used
            another extractor or other reference statistics than the reference rows.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise KairosError(f"--results: {folder} is no folder; `make run EXPERIMENT=...` makes results/<experiment>")
    trainings = tuple(
        _training(folder / method / f"seed{seed}", experiment, method, seed)
        for method in experiment.methods
        for seed in experiment.seeds
    )
    reference = _read(folder / "reference" / "reference.json", "reference")
    dataset = _read(folder / "dataset" / "manifest.json", "prepare")
    autoencoder = _read(folder / "autoencoder" / "manifest.json", "autoencoder")
    results = Results(experiment, folder, trainings, reference, dataset, autoencoder, _jobs(folder, experiment))
    _check_comparable(results)
    return results


def real_images(results: Results, count: int) -> tuple[str, np.ndarray]:
    """At most `count` held-out images, or training images where none are held out, and what to call them.

    The images are uint8 (n, height, width, channels).
    """
    dataset = open_dataset(results.folder / "dataset")
    if len(dataset.heldout):
        return "real, held out", dataset.images[dataset.heldout[:count]]
    return "real, trained on", dataset.images[dataset.train[:count]]


def _training(folder: Path, experiment: Experiment, method: str, seed: int) -> Training:
    timing = folder / "timing.jsonl"
    clocked = _read(timing, "train", _lines) if timing.exists() else []
    return Training(
        method=method,
        seed=seed,
        milestones=tuple(_milestone(folder, step) for step in experiment.milestones),
        metrics=pd.json_normalize(_read(folder / "metrics.jsonl", "train", _lines)),
        clock={line["step"]: float(line["seconds"]) for line in clocked},
        started=datetime.fromisoformat(clocked[0]["started"]) if clocked else None,
        record=_read(folder / "training.json", "train"),
    )


def _milestone(folder: Path, step: int) -> Milestone:
    name = f"{step:07d}"
    place = folder / "milestones" / name
    return Milestone(
        step=step,
        record=_read(place / "milestone.json", "train"),
        strategy=_read(place / "strategy.csv", "train", pd.read_csv),
        evaluation=_read(folder / "evaluation" / f"{name}.json", "evaluate"),
        grid=_read(folder / "samples" / f"{name}.png", "sample", Path),
    )


def _jobs(folder: Path, experiment: Experiment) -> tuple[Record, ...]:
    """Time records of the jobs that the report depends on: of this experiment's methods and seeds, none of its own."""
    trainings = {f"{method}_seed{seed}" for method in experiment.methods for seed in experiment.seeds}
    parts, drawn = "timing/.parts", experiment.sampling.shards
    paths = [
        path
        for path in sorted([*folder.glob("timing/*/*/*.json"), *folder.glob(f"{parts}/*/*/*of{drawn}.json")])
        if path.parent.name in trainings and int(path.stem.split(".")[0]) <= len(experiment.segments)
    ]
    paths += sorted(folder.glob(f"{parts}/encode.*of{experiment.autoencoder.shards}.json"))
    records = [_read(path, "--timing") for path in [*sorted(folder.glob("timing/*.json")), *paths]]
    return tuple(record for record in records if record["stage"] not in ("report", "track"))


def _check_comparable(results: Results) -> None:
    reference = results.reference
    for training, milestone in results.evaluated:
        protocol, name = milestone.evaluation["protocol"], f"{milestone.step:07d}.json"
        path = results.folder / training.method / f"seed{training.seed}/evaluation/{name}"
        if protocol["identity"] != milestone.record["identity"]:
            other, remedy = protocol["identity"][:12], "run `kairos sample` and `kairos evaluate` again"
            raise KairosError(f"{path}: is of another training ({other}); {remedy}")
        for key in ("extractor_hash", "reference_hash"):
            if protocol[key] != reference[key]:
                raise KairosError(
                    f"{path}: its {key} {protocol[key][:12]} is not that of reference/reference.json "
                    f"({reference[key][:12]}), so the two cannot be compared; run `kairos evaluate` again"
                )
        if results.metric not in milestone.evaluation["metrics"]:
            raise KairosError(f"{path}: has no {results.metric}; run `kairos evaluate` again")


def _read(path: Path, command: str, reader: Callable[[Path], Any] = read_json) -> Any:
    if not path.exists():
        raise KairosError(
            f"{path} is missing; `kairos {command}` makes it (`make run EXPERIMENT=...` runs all that is missing)"
        )
    try:
        return reader(path)
    except ValueError as error:
        raise KairosError(
            f"{path} cannot be read ({error}); delete it and let `kairos {command}` make it again"
        ) from None


def _lines(path: Path) -> list[Record]:
    return [json.loads(line) for line in read_lines(path)]
