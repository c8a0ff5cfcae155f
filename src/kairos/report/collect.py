"""Read the results folder of an experiment into plain values, for the report, comparisons and the tracking import."""

import json
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from PIL import Image, UnidentifiedImageError

from kairos.array_shapes import ImageArray
from kairos.config import Experiment, validate
from kairos.data.dataset import open_dataset
from kairos.evaluation import settings
from kairos.evaluation.separation import find_instrument_faults, gaussian_value
from kairos.evaluation.settings import is_higher_better
from kairos.files import glance, read_json, read_lines, read_record, read_times
from kairos.report.formatting import format_machine, format_number, join_first_names
from kairos.snapshots import step_name
from kairos.stages import EXTRACTOR, REFERENCE, RUN_FOLDERS, STAGES, run_folder
from kairos.validity import Change, Result, Validity, format_changes
from kairos_timesteps.errors import KairosError

Record = dict[str, Any]


@dataclass(frozen=True)
class SnapshotResults:
    """Results of an evaluated snapshot of a training run.

    Attributes:
        step: optimizer steps taken.
        record: content of ``snapshot.json``; all snapshots of an experiment share its settings.
        strategy_file: density and weight by timestep.
        evaluation: content of the evaluation record.
        grid_file: picture of the first samples.
    """

    step: int
    record: Record
    strategy_file: Path
    evaluation: Record
    grid_file: Path

    @cached_property
    def strategy_table(self) -> pd.DataFrame:
        """Density and weight by timestep, with columns t, p, w and effective; read at the first access.

        Raises:
            KairosError: the file is missing or damaged.
        """
        table: pd.DataFrame = _read(self.strategy_file, "train", pd.read_csv)
        return table

    @property
    def measured_values(self) -> Record:
        """Metrics and validation losses of the evaluation by column name, as a flat dictionary.

        A metric ``x`` comes with its standard deviation ``x_spread`` and the list ``x_sets`` of its values for single
        sample sets. Validation losses have the prefix ``val_``; there are none if the evaluation has no validation.
        Losses by time are left out.
        """
        validation = self.evaluation.get("validation") or {}  # absent if none was computed
        losses = {}
        for name, value in validation.items():
            if isinstance(value, float):  # other entries are not losses: counts are integers, losses by time a list
                losses[f"val_{name}"] = value
        return {**self.evaluation["metrics"], **losses}


@dataclass(frozen=True)
class RunResults:
    """Results of the training run of one method with one seed.

    Attributes:
        method: name of the method.
        seed: seed of the run.
        snapshots: evaluated snapshots, by ascending step.
        metrics_file: metrics.jsonl; None if it is missing or belongs to another run.
        times: entries of timing.jsonl, see `TIMING_FIELDS`; empty if the file is missing or belongs to another run.
        record: content of ``training.json``. Until the run has ended, it is the last snapshot's record in this form,
            and empty without a snapshot.
    """

    method: str
    seed: int
    snapshots: tuple[SnapshotResults, ...]
    metrics_file: Path | None
    times: tuple[Record, ...]
    record: Record

    @cached_property
    def seconds_by_step(self) -> dict[int, float]:
        """Training time until a step, accumulated over resumes; empty without `times`."""
        return {entry["step"]: float(entry["seconds"]) for entry in self.times}

    @property
    def started(self) -> datetime | None:
        """Time of the first start; None without `times`."""
        return datetime.fromisoformat(self.times[0]["started"]) if self.times else None

    def machines_until(self, step: int) -> tuple[str, ...]:
        """Return the kinds of machine that the training time until a step was measured on; empty without `times`."""
        return tuple(dict.fromkeys(format_machine(entry["machine"]) for entry in self.times if entry["step"] <= step))

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """Content of metrics.jsonl, a row per line; read at the first access, and empty without a file.

        Keys of nested objects are joined by dots.

        Raises:
            KairosError: the file is missing or damaged.
        """
        if self.metrics_file is None:
            return pd.DataFrame()
        return pd.json_normalize(_read(self.metrics_file, "train", _read_json_lines))

    @property
    def last_snapshot(self) -> SnapshotResults:
        """Results of the last evaluated snapshot; without snapshots, the access raises IndexError."""
        return self.snapshots[-1]

    @property
    def learns_sampler(self) -> bool:
        """True if the sampler learns during training, by field `learned` of the last snapshot's record.

        A record without this field is treated as False.
        """
        return bool(self.last_snapshot.record.get("learned"))


# a run with its valid snapshots, and an error for each result that is missing or outdated
_RunWithErrors = tuple[RunResults, list[KairosError]]


@dataclass(frozen=True)
class MethodMeasurements:
    """Measured values of methods, which may belong to several experiments.

    Attributes:
        table: a row per evaluated snapshot, with the columns method, seed, step and the measured values.
        methods: names of the compared methods.
        seeds: compared seeds.
        metric: column that methods are compared by.
        baseline: method that differences and factors refer to, or None.
        missing: a line per run that lacks results, if the experiment is unfinished.
        instrument_faults: reasons why the metric cannot rank any methods, see `find_instrument_faults`.
        gaussian: value of the metric for a Gaussian fitted to the data; None if unknown.
    """

    table: pd.DataFrame
    methods: list[str]
    seeds: list[int]
    metric: str
    baseline: str | None
    missing: tuple[str, ...] = ()
    instrument_faults: tuple[str, ...] = ()
    gaussian: float | None = None

    @property
    def higher_is_better(self) -> bool:
        """True if higher values of the metric are better."""
        return is_higher_better(self.metric)

    @property
    def validation_columns(self) -> list[str]:
        """Columns of the table with losses on held-out images, whose names begin with ``val_``."""
        return [column for column in map(str, self.table.columns) if column.startswith("val_")]

    @cached_property
    def reasons_not_to_rank(self) -> tuple[str, ...]:
        """Reasons why the metric cannot rank these methods, as sentences; empty if it can.

        They are the faults of the instrument. Without faults, the reason may be that no method ends below a Gaussian.
        """
        if self.instrument_faults or not self.gaussian_warning:
            return self.instrument_faults
        if len(self.methods_above_gaussian) < len(self.methods):
            return ()
        return (f"The methods are not ranked: {self.gaussian_warning}",)

    @cached_property
    def methods_above_gaussian(self) -> dict[str, float]:
        """Methods that do not end below a Gaussian fitted to the data, with their values at the last common snapshot.

        Values are means over seeds. There are no such methods without a common snapshot.
        """
        if self.gaussian is None or self.higher_is_better:
            return {}
        try:
            common = self.common_measurements
        except KairosError:
            return {}
        final_values = {method: common.values_of(method, self.metric).iloc[:, -1].mean() for method in self.methods}
        return {method: float(value) for method, value in final_values.items() if value >= self.gaussian}

    @property
    def gaussian_warning(self) -> str:
        """Warning with all `methods_above_gaussian`; empty if there are none."""
        if not self.methods_above_gaussian:
            return ""
        limit = f"{format_number(self.gaussian)} of a Gaussian fitted to the data"
        names = [f"{method} ({format_number(value)})" for method, value in self.methods_above_gaussian.items()]
        return f"{self.metric} is not below the {limit}: {join_first_names(names)}. Train longer."

    def values_of(self, method: str, column: str) -> pd.DataFrame:
        """Return the values of a column for one method as a table: a row per compared seed, a column per step.

        Rows have the order of `seeds`, and steps ascend. Missing values are NaN, and all values are NaN if the table
        lacks the column. The steps are the steps in the method's rows; there are none if the table lacks the method.
        """
        no_rows = self.table[:0]
        rows = self._rows_by_method.get(method, no_rows)
        # position of every row's value in the result: its seed is the row, its step the column
        steps, step_positions = np.unique(rows["step"].to_numpy(int), return_inverse=True)
        seed_positions = pd.Index(self.seeds).get_indexer(pd.Index(rows["seed"]))  # -1: a seed that is not compared
        values = np.full((len(self.seeds), len(steps)), np.nan)
        if column in rows:
            is_compared = seed_positions >= 0
            column_values = rows[column].to_numpy(float, na_value=np.nan)
            values[seed_positions[is_compared], step_positions[is_compared]] = column_values[is_compared]
        return pd.DataFrame(values, pd.Index(self.seeds, name="seed"), pd.Index(steps, name="step"))

    @cached_property
    def methods_by_machine(self) -> dict[str, list[str]]:
        """Methods whose training times were measured on each kind of machine; a run on two has them joined by ``;``."""
        timed_rows = self.table[self.table["machine"].notna() & self.table["method"].isin(self.methods)]
        methods = timed_rows.groupby("machine", sort=False)["method"].unique()
        return {str(machine): list(names) for machine, names in methods.items()}

    @property
    def has_one_clock(self) -> bool:
        """True if all known training times were measured on machines of one kind, so that they can be compared."""
        machines = list(self.methods_by_machine)
        return len(machines) <= 1 and all("; " not in machine for machine in machines)

    @cached_property
    def _rows_by_method(self) -> dict[str, pd.DataFrame]:
        """Rows of the table by method; a method without rows has no entry."""
        return {str(method): rows for method, rows in self.table.groupby("method", sort=False)}

    @cached_property
    def common_measurements(self) -> "MethodMeasurements":
        """Measurements up to the last snapshot that all methods have, of the seeds that all methods have there.

        A method has a snapshot if it is evaluated for any seed. Earlier snapshots are kept even if a method lacks them.
        If no seed is evaluated for all methods at the last common snapshot, all seeds and the lines in `missing` are
        kept. Otherwise `missing` is empty.

        Raises:
            KairosError: no snapshot after step 0 is evaluated for all methods.
        """
        trained_rows = self.table[self.table["step"] > 0]
        seed_sets_by_step_and_method = trained_rows.groupby(["step", "method"])["seed"].agg(set)
        # a row per step, ascending, and a column per method; a cell is the set of evaluated seeds, NaN without any
        seed_sets = seed_sets_by_step_and_method.unstack().reindex(columns=self.methods)
        seed_sets_at_common_steps = seed_sets.dropna()  # without steps that a method lacks
        if seed_sets_at_common_steps.empty:
            raise KairosError(f"{', '.join(self.methods)}: no snapshot after step 0 is evaluated for all of them")
        last_common_step = seed_sets_at_common_steps.index[-1]
        seed_sets_of_methods = seed_sets_at_common_steps.loc[last_common_step]  # one set per method
        common_seeds = set.intersection(*seed_sets_of_methods)
        table = self.table[self.table["step"] <= last_common_step]
        if not common_seeds:
            return replace(self, table=table)
        seeds = [seed for seed in self.seeds if seed in common_seeds]
        return replace(self, table=table[table["seed"].isin(common_seeds)], seeds=seeds, missing=())


@dataclass(frozen=True)
class Results:
    """All results of an experiment.

    Attributes:
        experiment: the experiment; if it is unfinished, only with the methods and seeds that have evaluations.
        configured_seeds: all seeds of the experiment, with and without evaluations.
        folder: the results folder.
        runs: training runs, in the order of the configuration.
        reference: content of reference/record.json, with the reference rows.
        dataset: record of the data set.
        autoencoder: record of the autoencoder.
        jobs: time records of the jobs.
        missing: a line per run that lacks results, such as ``uniform seed 1: evaluated up to step 200; <reason>``.
        outdated: a line per change of settings that makes results outdated; these results are left out.
        notes: lines about results that are included although their code or rounding differs.
    """

    experiment: Experiment
    configured_seeds: tuple[int, ...]
    folder: Path
    runs: tuple[RunResults, ...]
    reference: Record
    dataset: Record
    autoencoder: Record
    jobs: tuple[Record, ...]
    missing: tuple[str, ...] = ()
    outdated: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def distance_metric(self) -> str:
        """Name of the Fréchet distance: ``frechet_<extractor>``, or ``fid`` with Inception features."""
        return str(self.reference["metric"])

    @property
    def primary_metric(self) -> str:
        """Column that methods are ranked by: the Fréchet distance or `validation_metric`."""
        is_loss = self.experiment.evaluation.primary_metric == "validation"
        return self.validation_metric if is_loss else self.distance_metric

    @property
    def validation_metric(self) -> str:
        """Column of the validation loss: ``val_loss_<prediction>``, such as ``val_loss_velocity``."""
        return f"val_loss_{self.experiment.diffusion.prediction_name}"

    @property
    def methods(self) -> list[str]:
        """Names of the methods, in the order of the configuration."""
        return list(self.experiment.methods)

    @property
    def baseline(self) -> str | None:
        """Method that differences and factors refer to, or None, see `Experiment.baseline`."""
        return self.experiment.baseline

    @property
    def has_validation_losses(self) -> bool:
        """True if all `common_snapshots` have a validation loss per timestep; they raise KairosError without any."""
        loss_name = self.validation_metric.removeprefix("val_")
        snapshots = chain.from_iterable(self.common_snapshots.values())
        # metrics that compute a single loss have no rows by timestep
        rows = ((snapshot.evaluation.get("validation") or {}).get("per_timestep") or [{}] for snapshot in snapshots)
        return all(loss_name in rows_of_snapshot[0] for rows_of_snapshot in rows)

    @cached_property
    def common_snapshots(self) -> dict[str, list[SnapshotResults]]:
        """Snapshots at the last step and of the seeds of `MethodMeasurements.common_measurements`, by method.

        If no seed is evaluated there for all methods, each method has the snapshots of its seeds that are.

        Raises:
            KairosError: no snapshot after step 0 is evaluated for all methods.
        """
        common = self.measurements.common_measurements
        last_step = common.table["step"].max()
        snapshots: dict[str, list[SnapshotResults]] = {method: [] for method in self.methods}
        for run, snapshot in self.run_snapshots:
            if snapshot.step == last_step and run.seed in common.seeds:
                snapshots[run.method].append(snapshot)
        return snapshots

    @cached_property
    def table(self) -> pd.DataFrame:
        """Table with a row per evaluated snapshot, in the order of `run_snapshots`; all columns have dtype object.

        Columns are experiment, method, seed, step, images_seen, train_seconds, machine, the measured values (see
        `SnapshotResults.measured_values`) and the fields of the evaluation's protocol. `train_seconds` is 0 at step 0,
        and None if timing.jsonl lacks the step. `machine` is None without a time after step 0. Other values that a
        snapshot lacks are NaN.
        """
        rows = []
        for run, snapshot in self.run_snapshots:
            row = {
                "experiment": self.experiment.experiment,
                "method": run.method,
                "seed": run.seed,
                "step": snapshot.step,
                "images_seen": snapshot.record["images_seen"],
                "train_seconds": run.seconds_by_step.get(snapshot.step) if snapshot.step else 0.0,
                "warnings": "; ".join(snapshot.evaluation.get("warnings") or []),
                "machine": "; ".join(run.machines_until(snapshot.step)) or None,
            }
            rows.append(row | snapshot.measured_values | snapshot.evaluation["protocol"])
        return pd.DataFrame(rows, dtype=object)

    @cached_property
    def measurements(self) -> MethodMeasurements:
        """Measurements of all methods and seeds, to compare the methods by the primary metric."""
        return self.measurements_of(self.primary_metric)

    def measurements_of(self, metric: str) -> MethodMeasurements:
        """Return the measurements of all methods and seeds, to compare the methods by a metric."""
        compares_features = metric == self.distance_metric or settings.compares_features(metric)
        return MethodMeasurements(
            table=self.table,
            methods=self.methods,
            seeds=self.experiment.seeds,
            metric=metric,
            baseline=self.baseline,
            missing=self.missing,
            instrument_faults=tuple(find_instrument_faults(self.reference)) if compares_features else (),
            gaussian=gaussian_value(self.reference, metric),
        )

    @property
    def run_snapshots(self) -> list[tuple[RunResults, SnapshotResults]]:
        """All pairs of a training run and one of its snapshots, run by run, with ascending steps."""
        return [(run, snapshot) for run in self.runs for snapshot in run.snapshots]

    def runs_of(self, method: str) -> list[RunResults]:
        """Return the training runs of a method in the order of the seeds; an unfinished experiment may lack runs.

        Raises:
            KeyError: the experiment lacks the method.
        """
        return self._runs_by_method[method]

    @cached_property
    def _runs_by_method(self) -> dict[str, list[RunResults]]:
        """Training runs of each method, in the order of the seeds."""
        runs: dict[str, list[RunResults]] = {method: [] for method in self.methods}
        for run in self.runs:
            runs[run.method].append(run)
        return runs


def collect(experiment: Experiment, folder: Path | str, unfinished: bool = False) -> Results:
    """Read the results of every method and seed of an experiment.

    Args:
        experiment: the experiment.
        folder: its results folder.
        unfinished: True leaves out results that are missing, damaged or outdated instead of raising an error. A
            snapshot is included if all its files exist and belong to one run. Runs without a snapshot after step 0, and
            methods and seeds without runs, are left out.

    Raises:
        KairosError: the folder or a record is missing or damaged, that of a job's time included.
            A result is missing, damaged or outdated; if `unfinished`, it raises only if no run is evaluated
            past step 0.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise KairosError(
            f"--results: {folder} is not a folder; `make run EXPERIMENT=...` creates results/<experiment>"
        )
    # files that all runs share
    reference = _read(folder / "reference" / "record.json", "reference")
    dataset = _read(folder / "dataset" / "record.json", "prepare")
    autoencoder = _read(folder / "autoencoder" / "record.json", "autoencoder")
    # runs, each with the errors of its results
    validity = Validity(experiment, folder)
    runs_with_errors = [
        _read_run(validity, method, seed, reference, unfinished)
        for method, seed in product(experiment.methods, experiment.seeds)
    ]
    for _, errors in runs_with_errors:
        if errors and not unfinished:
            raise errors[0]
    # included runs, and a description of what is left out
    runs = [run for run, _ in runs_with_errors if _last_step(run) > 0]
    missing = [_describe_missing(run, errors) for run, errors in runs_with_errors if errors]
    outdated = _describe_outdated(runs_with_errors)
    if not runs:
        reason = f"; left out, computed with other settings: {'; '.join(outdated)}" if outdated else ""
        raise KairosError(
            f"{folder}: no training run is evaluated past step 0 yet; `kairos status` shows progress{reason}"
        )
    experiment_of_runs = _restrict_to_runs(experiment, runs)
    return Results(
        experiment=experiment_of_runs,
        configured_seeds=tuple(experiment.seeds),
        folder=folder,
        runs=tuple(runs),
        reference=reference,
        dataset=dataset,
        autoencoder=autoencoder,
        jobs=_read_job_records(folder, experiment_of_runs, runs),
        missing=tuple(missing),
        outdated=outdated,
        notes=_describe_other_code(runs, validity),
    )


def select_methods(results: Results, methods: Collection[str]) -> Results:
    """Return the results of some methods of an experiment; the caller ensures that each of them has runs."""
    runs = tuple(run for run in results.runs if run.method in methods)
    return replace(results, experiment=_restrict_to_runs(results.experiment, list(runs)), runs=runs)


def load_recorded_experiment(folder: Path) -> Experiment:
    """Load the experiment from the newest records in a results folder, by modification time.

    Sections ``sampling`` and ``evaluation`` are those of the newest samples and of the reference, if they exist.

    Raises:
        KairosError: the folder contains no snapshot, or the record is damaged or not a valid experiment.
    """
    newest_record = _find_newest(folder, "snapshots/*/snapshot.json")
    if newest_record is None:
        raise KairosError(f"{folder}: contains no snapshot yet; `kairos status` shows the progress of training runs")
    config = read_record(newest_record)["config"]
    samples_record = _find_newest(folder, "samples/*.json")
    for path in (samples_record, folder / EXTRACTOR.record_path, folder / REFERENCE.record_path):
        computed_from = glance(path).get("computed_from", {}) if path else {}
        for section in computed_from.get("fields", {}).keys() & {"sampling", "evaluation"}:
            if not computed_from["paths"]:  # without the paths of outside files, which fields lack
                config[section] = {**config[section], **computed_from["fields"][section]}
    return validate(config, str(folder))


def _find_newest(folder: Path, pattern: str) -> Path | None:
    return max(folder.glob(f"{RUN_FOLDERS}/{pattern}"), key=os.path.getmtime, default=None)


def load_real_images(folder: Path, count: int) -> tuple[str, ImageArray]:
    """Return a label and the first `count` held-out images of an experiment, or training images if none are held out.

    The label is ``real, held out`` or ``real, trained on``. The images are uint8 (n, height, width, channels); n is
    below `count` if there are fewer. `folder` is the results folder of the experiment.

    Raises:
        KairosError: the data set is missing or damaged.
    """
    dataset = open_dataset(folder / "dataset")
    if len(dataset.heldout):
        return "real, held out", dataset.images[dataset.heldout[:count]]
    return "real, trained on", dataset.images[dataset.train[:count]]


class OutdatedError(KairosError):
    """A snapshot or its evaluation was computed with settings or inputs that the experiment no longer has.

    Attributes:
        changes: these, each with its recorded and its present value, as one line of text.
    """

    def __init__(self, changes: Sequence[Change]):
        self.changes = format_changes(changes)
        super().__init__(f"computed with other settings ({self.changes}); run the experiment again")


def _last_step(run: RunResults) -> int:
    """Return the last evaluated step of a run, 0 if it has none."""
    return max((snapshot.step for snapshot in run.snapshots), default=0)


def _describe_missing(run: RunResults, errors: list[KairosError]) -> str:
    """Describe in one line how far a run is evaluated, and at most two reasons why results are missing.

    A reason is an error's message without its remedy. Damaged and outdated files come before missing ones.
    """
    last_step = _last_step(run)
    progress = f"evaluated up to step {last_step:,}" if last_step else "not evaluated yet"
    problems = [str(error).partition(";")[0] for error in errors]  # the remedy follows the semicolon
    problems.sort(key=lambda problem: "is missing" in problem)  # False sorts before True
    distinct_problems = list(dict.fromkeys(problems))
    return "; ".join([f"{run.method} seed {run.seed}: {progress}", *distinct_problems[:2]])


def _describe_outdated(runs_with_errors: list[_RunWithErrors]) -> tuple[str, ...]:
    """Return a line for each set of changed settings that makes results outdated, with the affected runs in brackets.

    The settings are `OutdatedError.changes`, as text; other errors are ignored. A line with more than
    12 runs lists the first five.
    """
    runs_by_changes = defaultdict[str, list[str]](list)
    for run, errors in runs_with_errors:
        outdated_errors = [error for error in errors if isinstance(error, OutdatedError)]
        # once per run: most snapshots of a run have the same changes
        for changes in dict.fromkeys(error.changes for error in outdated_errors):
            runs_by_changes[changes].append(f"{run.method} seed {run.seed}")
    return tuple(f"{changes} ({join_first_names(names)})" for changes, names in runs_by_changes.items())


def _restrict_to_runs(experiment: Experiment, runs: list[RunResults]) -> Experiment:
    """Return a copy of the experiment with only those methods and seeds that occur in the runs."""
    run_methods = {run.method for run in runs}
    run_seeds = {run.seed for run in runs}
    methods = {name: method for name, method in experiment.methods.items() if name in run_methods}
    seeds = [seed for seed in experiment.seeds if seed in run_seeds]
    return experiment.model_copy(update={"methods": methods, "seeds": seeds})


def _read_run(validity: Validity, method: str, seed: int, reference: Record, unfinished: bool) -> _RunWithErrors:
    """Read the results of a run, and collect an error for each result that is missing, damaged or outdated.

    The results contain the valid snapshots. If `unfinished`, only snapshots of the run that wrote the one with the
    highest step are kept. Until this run has ended, the results' record is the record of its last snapshot, in the form
    of training.json; it is empty without snapshots. If not `unfinished`, the snapshots are not checked to be of one
    run. A missing timing.jsonl is not an error, and damaged lines of it are left out.

    training.json and metrics.jsonl are used only if training.json has the identity of the snapshots, and an entry of
    timing.jsonl only if it has this identity. The files are written at the end of a run, and may be of an earlier run.
    If not `unfinished`, a training.json of another run is an error.
    """
    folder = run_folder(validity.results, method, seed)
    errors: list[KairosError] = []
    snapshots = _read_snapshots(validity, method, seed, reference, errors, unfinished)
    # an unfinished experiment: only the run of the last snapshot, whose record serves until training.json exists
    record: Record = {}
    if unfinished and snapshots:
        last_snapshot = snapshots[-1]
        snapshots = _select_run(snapshots, last_snapshot.record["identity"], errors)
        record = last_snapshot.record | {"steps": last_snapshot.step, "components": {}}  # has the form of training.json
    # files that a run writes at its end; an unfinished experiment may have those of an earlier run than the snapshots
    metrics_file: Path | None = None
    times: list[Record] = []
    with _collect_error(errors):  # after an error, the values that are not read yet stay as they are
        training_record = _read(folder / "training.json", "train")
        is_of_run = training_record["identity"] == (snapshots[-1].record["identity"] if snapshots else None)
        if not is_of_run and not unfinished:
            raise KairosError(f"{folder}/training.json: belongs to another training run; run `kairos train` again")
        if is_of_run:
            record = training_record
            times = read_times(folder / "timing.jsonl", record["identity"])
        metrics_path = _read(folder / "metrics.jsonl", "train", Path)
        if is_of_run:
            if unfinished:  # raises an error now if the file is damaged; an error in a figure would end the report
                _read(metrics_path, "train", _read_json_lines)
            metrics_file = metrics_path
    run = RunResults(
        method=method,
        seed=seed,
        snapshots=tuple(snapshots),
        metrics_file=metrics_file,
        times=tuple(times),
        record=record,
    )
    return run, errors


def _read_snapshots(
    validity: Validity,
    method: str,
    seed: int,
    reference: Record,
    errors: list[KairosError],
    unfinished: bool,
) -> list[SnapshotResults]:
    """Return the valid snapshots of a run; append an error to `errors` for each milestone without a valid one.

    A snapshot is invalid if it is outdated, or if one of its files is missing, damaged or rejected by `_read_snapshot`.
    If `unfinished`, a damaged strategy table or sample grid also makes it invalid. Otherwise the two are not read here;
    a damaged one raises an error when a figure needs it.
    """
    folder = run_folder(validity.results, method, seed)
    snapshots = []
    for step in validity.experiment.milestones:
        with _collect_error(errors):
            for stage in ("train", "evaluate"):
                # none if the record is missing or damaged
                changes = validity.find_changes(Result(stage, method, seed, step_name(step)))
                if changes:
                    raise OutdatedError(changes)
            snapshot = _read_snapshot(validity, folder, step, reference)
            if unfinished:
                # raise an error now if a file is damaged; an error in a figure would end the report
                _ = snapshot.strategy_table
                _read(snapshot.grid_file, "sample", _verify_image)
            snapshots.append(snapshot)
    return snapshots


def _select_run(snapshots: list[SnapshotResults], identity: str, errors: list[KairosError]) -> list[SnapshotResults]:
    """Return the snapshots whose record has this identity; append an error to `errors` for each other snapshot."""
    selected = []
    for snapshot in snapshots:
        if snapshot.record["identity"] == identity:
            selected.append(snapshot)
        else:
            errors.append(KairosError(f"step {snapshot.step:,} belongs to another training run"))
    return selected


def _describe_other_code(runs: list[RunResults], validity: Validity) -> tuple[str, ...]:
    """Return a list with a sentence about the runs that other code than the present one computed; else it is empty."""
    names = []
    for run in runs:
        evaluations = [Result("evaluate", run.method, run.seed, step_name(snapshot.step)) for snapshot in run.snapshots]
        if any(map(validity.has_other_code, evaluations)):
            names.append(f"{run.method} seed {run.seed}")
    return (f"Computed with other code: {join_first_names(names)}.",) if names else ()


@contextmanager
def _collect_error(errors: list[KairosError]) -> Iterator[None]:
    """Append a KairosError that the block raises to `errors`, and suppress it; other errors are raised."""
    try:
        yield
    except KairosError as error:
        errors.append(error)


def _read_snapshot(validity: Validity, run_folder: Path, step: int, reference: Record) -> SnapshotResults:
    """Read record and evaluation of a snapshot as `SnapshotResults`; strategy table and sample grid must exist.

    Raises:
        KairosError: a file is missing or damaged, or the evaluation lacks the metric of `reference`.
    """
    name = step_name(step)
    snapshot_folder = run_folder / "snapshots" / name
    evaluation_file = run_folder / "evaluation" / f"{name}.json"
    record = _read(snapshot_folder / "snapshot.json", "train", validity.snapshot_records.read)
    strategy_file = _read(snapshot_folder / "strategy.csv", "train", Path)
    evaluation = _read(evaluation_file, "evaluate")
    grid_file = _read(run_folder / "samples" / f"{name}.png", "sample", Path)
    if reference["metric"] not in evaluation["metrics"]:
        raise KairosError(f"{evaluation_file}: has no {reference['metric']}; run `kairos evaluate` again")
    return SnapshotResults(step, record, strategy_file, evaluation, grid_file)


def _read_job_records(folder: Path, experiment: Experiment, runs: list[RunResults]) -> tuple[Record, ...]:
    """Read the time records of the jobs that the report depends on.

    These are the jobs of the stages that all methods share, and the jobs of the experiment's methods and seeds. Jobs of
    the report and of the tracking import are left out, and so are numbers of shards or segments that the experiment no
    longer has. A job of training counts only if it has the identity of the run in `runs`.

    The order is: shared stages, runs, shards of stage encode, each sorted by path.

    Raises:
        KairosError: a record is damaged.
    """
    # examples of file names:
    #   timing/prepare.json                             stage that all methods share
    #   timing/.shards/encode.2of4.json                 shard of such a stage
    #   timing/train/uniform_seed1/3.json               segment 3 of a run
    #   timing/.shards/sample/uniform_seed1/3.2of4.json shard of that segment
    run_names = {f"{method}_seed{seed}" for method in experiment.methods for seed in experiment.seeds}
    shards_folder = "timing/.shards"
    shared_paths = sorted(folder.glob("timing/*.json"))
    encode_paths = sorted(folder.glob(f"{shards_folder}/encode.*of{experiment.autoencoder.shards}.json"))
    run_paths = [
        *folder.glob("timing/*/*/*.json"),
        *folder.glob(f"{shards_folder}/*/*/*of{experiment.sampling.shards}.json"),
    ]
    expected_run_paths = []
    for path in sorted(run_paths):
        segment = int(path.name.partition(".")[0])  # 3 in 3.json and in 3.2of4.json
        if path.parent.name in run_names and segment <= len(experiment.segments):
            expected_run_paths.append(path)
    paths = [*shared_paths, *expected_run_paths, *encode_paths]
    # STAGE is a placeholder in the error message: a damaged record does not show its stage
    records = [_read(path, f"STAGE --timing {path}", read_json) for path in paths]
    identities = {(run.method, run.seed): run.record["identity"] for run in runs}
    summaries = {row.name for row in STAGES if row.is_summary}
    jobs = []
    for record in records:
        expected_identity = identities.get((record.get("method"), record.get("seed")))
        is_of_another_run = "identity" in record and record["identity"] != expected_identity
        if record["stage"] not in summaries and not is_of_another_run:
            jobs.append(record)
    return tuple(jobs)


def _read(path: Path, command: str, reader: Callable[[Path], Any] = read_record) -> Any:
    """Return what `reader` returns for a file of the results; the reader `Path` only checks that the file exists.

    `command` is the kairos command, without the word kairos, that creates the file; errors report it.

    Raises:
        KairosError: the file is missing, or the reader rejects its content with a ValueError or KairosError.
    """
    if not path.exists():
        remedy = f"`kairos {command}` creates it (`make run EXPERIMENT=...` runs all that is missing)"
        raise KairosError(f"{path} is missing; {remedy}")
    try:
        return reader(path)
    except ValueError as error:
        remedy = f"delete it and let `kairos {command}` create it again"
        raise KairosError(f"{path} cannot be read ({error}); {remedy}") from None


def _read_json_lines(path: Path) -> list[Record]:
    """Read a file that contains one JSON object per line, except a last line without a newline, which is incomplete.

    Raises:
        ValueError: a line is not JSON.
    """
    return [json.loads(line) for line in read_lines(path)]


def _verify_image(path: Path) -> None:
    """Check the structure and the checksums of a PNG file, without decoding its pixels.

    Raises:
        ValueError: the file is not an image, or is damaged.
    """
    try:
        with Image.open(path) as image:
            image.verify()
    except UnidentifiedImageError:  # its message repeats the path
        raise ValueError("cannot identify image file") from None
    except (OSError, SyntaxError, EOFError, IndexError, Image.DecompressionBombError) as error:
        raise ValueError(str(error)) from None
