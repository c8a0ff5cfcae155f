"""An experiment's results folder as plain values: everything that the report and the tracking import read."""

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kairos.config import Experiment, validate
from kairos.data.dataset import open_dataset
from kairos.files import read_json, read_lines
from kairos.milestones import step_name
from kairos.report.outdated import ExpectedSettings, listed
from kairos_timesteps.errors import KairosError

Record = dict[str, Any]


@dataclass(frozen=True)
class Milestone:
    """Evaluated milestone of a training run.

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
        """Measured values by column: metrics with standard deviations and sets, validation losses as ``val_...``."""
        validation = self.evaluation.get("validation") or {}
        losses = {f"val_{name}": value for name, value in validation.items() if isinstance(value, float)}
        return {**self.evaluation["metrics"], **losses}


@dataclass(frozen=True)
class Training:
    """Training run of one method with one seed.

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
        """True if the sampler learns during training."""
        return bool(self.final.record.get("learned"))


_Found = tuple[Training, list[KairosError]]  # a training with its milestones that count, and why others do not


@dataclass(frozen=True)
class Measured:
    """Methods, of one experiment or of several, and what was measured of each.

    Attributes:
        table: a row per evaluated milestone: method, seed, step and what was measured.
        methods, seeds: that are compared.
        metric: the distance, a column.
        baseline: the method that differences and factors refer to, where there is one.
        missing: what an unfinished experiment lacks, a line per training.
    """

    table: pd.DataFrame
    methods: list[str]
    seeds: list[int]
    metric: str
    baseline: str | None
    missing: tuple[str, ...] = ()

    def values(self, method: str, name: str) -> pd.DataFrame:
        """A column of a method's rows of the table, (seeds, the method's milestones); NaN where there is nothing."""
        own = self.table[self.table["method"] == method]
        rows = own.assign(value=own.get(name, np.nan)).pivot(index="seed", columns="step", values="value")
        return rows.reindex(self.seeds).astype(float)

    @cached_property
    def common(self) -> "Measured":
        """Truncate the measurements to the last milestone that all methods have, and to the seeds that all have there.

        All seeds are kept if the methods share none at that milestone.

        Raises:
            KairosError: no milestone after step 0 is evaluated for all methods.
        """
        having = self.table[self.table["step"] > 0].groupby(["step", "method"])["seed"].agg(set).unstack()
        steps = having.reindex(columns=self.methods).dropna()
        if steps.empty:
            raise KairosError(f"{', '.join(self.methods)}: no milestone past step 0 is evaluated of all of them")
        table, seeds = self.table[self.table["step"] <= steps.index[-1]], set.intersection(*steps.iloc[-1])
        if not seeds:
            return replace(self, table=table)
        own = [seed for seed in self.seeds if seed in seeds]
        return replace(self, table=table[table["seed"].isin(seeds)], seeds=own, missing=())


@dataclass(frozen=True)
class Results:
    """All results of an experiment: trainings in the order of the configuration, and what they are compared with.

    Of an unfinished one `experiment` has only methods and seeds that there are evaluations of, and `missing` a line per
    training that lacks something. `outdated` lists the results that are left out because they were computed with other
    settings, `notes` the trainings whose code or rounding differs; these count.
    """

    experiment: Experiment
    folder: Path
    trainings: tuple[Training, ...]
    reference: Record
    dataset: Record
    autoencoder: Record
    jobs: tuple[Record, ...]
    missing: tuple[str, ...] = ()
    outdated: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def metric(self) -> str:
        """Name of the Fréchet distance: ``frechet_<extractor>``, or ``fid`` with Inception features."""
        return str(self.reference["metric"])

    @property
    def primary_metric(self) -> str:
        """Column that methods are ranked by: the Fréchet distance, or ``val_loss``."""
        return "val_loss" if self.experiment.evaluation.primary_metric == "validation" else self.metric

    @property
    def methods(self) -> list[str]:
        """Methods in the order of the configuration."""
        return list(self.experiment.methods)

    @property
    def baseline(self) -> str | None:
        """The method that differences and factors refer to, see `Experiment.baseline`."""
        return self.experiment.baseline

    @property
    def validated(self) -> bool:
        """True if every training run has a validation loss by time."""
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

    @cached_property
    def measured(self) -> Measured:
        """Measurements of the methods, for their comparison."""
        return Measured(
            self.table, self.methods, self.experiment.seeds, self.primary_metric, self.baseline, self.missing
        )

    @property
    def evaluated(self) -> list[tuple[Training, Milestone]]:
        """All pairs of a training run and one of its milestones."""
        return [(training, milestone) for training in self.trainings for milestone in training.milestones]

    def of(self, method: str) -> list[Training]:
        """The trainings of a method, one per seed."""
        return [training for training in self.trainings if training.method == method]


def collect(experiment: Experiment, folder: Path | str, unfinished: bool = False) -> Results:
    """Read the results of every method and seed of the experiment.

    Milestones that were computed with settings other than the experiment's do not count.

    Args:
        experiment, folder: what is to be there, and where.
        unfinished: take what is there; a milestone counts whose every file is, of one training and one reference.

    Raises:
        KairosError: something is missing, damaged or of other settings (named, with the command that makes it), or an
            evaluation used another extractor or other reference statistics than the reference rows; `unfinished`: so
            of all.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise KairosError(f"--results: {folder} is no folder; `make run EXPERIMENT=...` makes results/<experiment>")
    reference = _read(folder / "reference" / "reference.json", "reference")
    dataset = _read(folder / "dataset" / "manifest.json", "prepare")
    autoencoder = _read(folder / "autoencoder" / "manifest.json", "autoencoder")
    expected = ExpectedSettings(experiment, folder)
    found = [
        _training(expected, method, seed, reference, unfinished)
        for method, seed in product(experiment.methods, experiment.seeds)
    ]
    found = _without_other_protocols(found, expected)
    trainings, missing, outdated = list[Training](), list[str](), defaultdict[str, list[str]](list)
    for training, lacks in found:
        if lacks and not unfinished:
            raise lacks[0]
        name = f"{training.method} seed {training.seed}"
        last = max((own.step for own in training.milestones), default=0)
        far = f"evaluated up to step {last:,}" if last else "not evaluated yet"
        trainings += [training] if last else []
        for changes in dict.fromkeys(fault.changes for fault in lacks if isinstance(fault, OutdatedError)):
            outdated[changes].append(name)
        if lacks:
            reasons = sorted((str(one).split(";")[0] for one in lacks), key=lambda line: "is missing" in line)
            missing.append("; ".join([f"{name}: {far}", *list(dict.fromkeys(reasons))[:2]]))
    left_out = tuple(f"{changes} ({', '.join(names)})" for changes, names in outdated.items())
    if not trainings:
        why = f"; left out, computed with other settings: {'; '.join(left_out)}" if left_out else ""
        progress = "`kairos status` says how far they are"
        raise KairosError(f"{folder}: no training is evaluated past step 0 yet; {progress}{why}")
    methods = {name: own for name, own in experiment.methods.items() if name in {one.method for one in trainings}}
    seeds = [seed for seed in experiment.seeds if seed in {one.seed for one in trainings}]
    experiment = experiment.model_copy(update={"methods": methods, "seeds": seeds})
    jobs, notes = _jobs(folder, experiment), _notes(trainings, expected)
    return Results(
        experiment, folder, tuple(trainings), reference, dataset, autoencoder, jobs, tuple(missing), left_out, notes
    )


def recorded(folder: Path) -> Experiment:
    """The experiment as the newest milestone in a folder of results records it.

    Raises:
        KairosError: there is none.
    """
    newest = max(folder.glob("*/seed*/milestones/*/milestone.json"), key=os.path.getmtime, default=None)
    if newest is None:
        raise KairosError(f"{folder}: no milestone there yet; `kairos status` says how far trainings are")
    return validate(read_json(newest)["config"], str(folder))


def real_images(results: Results, count: int) -> tuple[str, np.ndarray]:
    """Return a label, and at most `count` held-out images, or training images if none are held out.

    The images are uint8 (n, height, width, channels).
    """
    dataset = open_dataset(results.folder / "dataset")
    if len(dataset.heldout):
        return "real, held out", dataset.images[dataset.heldout[:count]]
    return "real, trained on", dataset.images[dataset.train[:count]]


class OutdatedError(KairosError):
    """A milestone or its evaluation was computed with settings that the experiment no longer has.

    Attributes:
        changes: the settings with the value in the record and the present value.
    """

    def __init__(self, changes: str):
        super().__init__(f"computed with other settings ({changes}); run the experiment again")
        self.changes = changes


def _training(expected: ExpectedSettings, method: str, seed: int, reference: Record, unfinished: bool) -> _Found:
    """A training with its milestones that count, and an error for each part that is missing or does not count."""
    folder = expected.results / method / f"seed{seed}"
    timing, milestones, lacks = folder / "timing.jsonl", list[Milestone](), list[KairosError]()
    metrics, record = pd.DataFrame(), Record()
    for step in expected.experiment.milestones:
        with _noting(lacks):
            path = folder / "milestones" / step_name(step) / "milestone.json"
            if changes := expected.changes(method, seed, path):
                raise OutdatedError(listed(changes))
            milestones.append(_milestone(folder, step, reference))
    if unfinished and milestones:
        record = milestones[-1].record | {"components": {}}
        identity = record["identity"]
        others = [own.step for own in milestones if own.record["identity"] != identity]
        lacks += [KairosError(f"step {step:,} is of another training") for step in others]
        milestones = [own for own in milestones if own.step not in others]
    with _noting(lacks):
        ended = _read(folder / "training.json", "train")
        logged = pd.json_normalize(_read(folder / "metrics.jsonl", "train", _lines))
        if not unfinished or ended["identity"] == record.get("identity"):  # and not of an earlier training
            record, metrics = ended, logged
    clocked = _read(timing, "train", _lines) if timing.exists() else []
    clock = {line["step"]: float(line["seconds"]) for line in clocked}
    started = datetime.fromisoformat(clocked[0]["started"]) if clocked else None
    return Training(method, seed, tuple(milestones), metrics, clock, started, record), lacks


def _without_other_protocols(found: list[_Found], expected: ExpectedSettings) -> list[_Found]:
    """Remove evaluations whose sampling or evaluation settings differ from the experiment's.

    If every evaluation differs, all stay: they do not mix, and the milestones' record of the experiment may be older.
    """
    evaluated = [milestone for training, _ in found for milestone in training.milestones]
    changes = {id(one): listed(expected.evaluation_changes(one.evaluation)) for one in evaluated}
    if all(changes.values()):
        return found
    kept = []
    for training, lacks in found:
        milestones = tuple(one for one in training.milestones if not changes[id(one)])
        errors = [OutdatedError(changes[id(one)]) for one in training.milestones if changes[id(one)]]
        kept.append((replace(training, milestones=milestones), [*lacks, *errors]))
    return kept


def _notes(trainings: list[Training], expected: ExpectedSettings) -> tuple[str, ...]:
    """Lines that name what differs in runs that count: sampling, evaluation, code, or settings that change rounding."""
    notes = defaultdict[str, list[str]](list)
    for training in trainings:
        record, identities = training.final.record, expected.identities(training.method, training.seed)
        if changes := listed(expected.evaluation_changes(training.final.evaluation)):
            notes[changes].append(f"{training.method} seed {training.seed}")
        if identities and record["identity"] not in identities:
            changes = listed(expected.rounding_changes(training.method, record))
            notes[changes or "other code, or another kind of device"].append(f"{training.method} seed {training.seed}")
    return tuple(f"Computed with {reason}: {', '.join(names)}." for reason, names in notes.items())


@contextmanager
def _noting(lacks: list[KairosError]) -> Iterator[None]:
    try:
        yield
    except KairosError as error:
        lacks.append(error)


def _milestone(folder: Path, step: int, reference: Record) -> Milestone:
    name = step_name(step)
    place, path = folder / "milestones" / name, folder / "evaluation" / f"{name}.json"
    record = _read(place / "milestone.json", "train")
    strategy = _read(place / "strategy.csv", "train", pd.read_csv)
    evaluation = _read(path, "evaluate")
    grid = _read(folder / "samples" / f"{name}.png", "sample", Path)
    protocol, again = evaluation["protocol"], "run `kairos evaluate` again"
    if protocol["identity"] != record["identity"]:
        other, remedy = protocol["identity"][:12], "run `kairos sample` and `kairos evaluate` again"
        raise KairosError(f"{path}: is of another training ({other}); {remedy}")
    for key in ("extractor_hash", "reference_hash"):
        if protocol[key] != reference[key]:
            fault = f"{path}: its {key} {protocol[key][:12]} is not that of reference/reference.json"
            raise KairosError(f"{fault} ({reference[key][:12]}), so the two cannot be compared; {again}")
    if reference["metric"] not in evaluation["metrics"]:
        raise KairosError(f"{path}: has no {reference['metric']}; {again}")
    return Milestone(step, record, strategy, evaluation, grid)


def _jobs(folder: Path, experiment: Experiment) -> tuple[Record, ...]:
    """Time records of the jobs that the report depends on: of this experiment's methods and seeds, none of its own."""
    trainings = {f"{method}_seed{seed}" for method in experiment.methods for seed in experiment.seeds}
    parts, drawn, segments = "timing/.parts", experiment.sampling.shards, len(experiment.segments)
    paths = sorted([*folder.glob("timing/*/*/*.json"), *folder.glob(f"{parts}/*/*/*of{drawn}.json")])
    paths = [path for path in paths if path.parent.name in trainings and int(path.stem.split(".")[0]) <= segments]
    paths += sorted(folder.glob(f"{parts}/encode.*of{experiment.autoencoder.shards}.json"))
    records = [_read(path, "--timing") for path in [*sorted(folder.glob("timing/*.json")), *paths]]
    return tuple(record for record in records if record["stage"] not in ("report", "track"))


def _read(path: Path, command: str, reader: Callable[[Path], Any] = read_json) -> Any:
    own = f"`kairos {command}`"
    if not path.exists():
        raise KairosError(f"{path} is missing; {own} makes it (`make run EXPERIMENT=...` runs all that is missing)")
    try:
        return reader(path)
    except ValueError as error:
        raise KairosError(f"{path} cannot be read ({error}); delete it and let {own} make it again") from None


def _lines(path: Path) -> list[Record]:
    return [json.loads(line) for line in read_lines(path)]
