"""Analyses that evaluate no network: of results that runs have recorded (density, time), and of processes."""

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from kairos import increments as process_increments
from kairos.analyses.noise_levels import TableRow
from kairos.analyses.settings import ADAPTIVE, AnalysisOptions, DensityOptions, IncrementsOptions
from kairos.files import DamagedError, read_record, read_times
from kairos.stages import run_folder
from kairos.strategy_file import parse_strategy_csv
from kairos_timesteps.diffusion.adapters import as_process
from kairos_timesteps.errors import KairosError


def collect_densities(options: DensityOptions, experiment: Any, results: Path) -> list[TableRow]:
    """Collect the density of timesteps and the trained density at every snapshot, relative to the uniform density.

    The columns are ``method``, ``seed``, ``step``, ``t``, ``density`` and ``trained``. Column ``density`` is T p(t).
    Column ``trained`` is p(t) w(t) over its mean: loss weights are treated as probabilities (Kim et al. 2025, figure
    5). A row contains means over a group of consecutive timesteps. There are `options.bins` groups, or one for each
    timestep if there are fewer. The densities are read from the ``strategy.csv`` of the snapshots.

    Raises:
        FileNotFoundError: a snapshot is missing.
        DamagedError: the strategy.csv of a snapshot is damaged.
    """
    rows = []
    for method, seed, step in product(experiment.methods, experiment.seeds, experiment.milestones):
        path = run_folder(results, method, seed) / f"snapshots/{step:07d}/strategy.csv"
        try:
            strategy = parse_strategy_csv(path.read_text(encoding="utf-8"))
        except ValueError as error:
            remedy = "delete it and let `kairos train` create it again"
            raise DamagedError(f"{path} cannot be read ({error}); {remedy}") from None
        t, probability, trained = strategy["t"], strategy["p"], strategy["effective"]
        for cells in np.array_split(np.arange(len(t)), min(options.bins, len(t))):
            row = {
                "method": method,
                "seed": seed,
                "step": step,
                "t": t[cells].mean(),
                "density": probability[cells].mean() / probability.mean(),  # p sums to 1, so its mean is 1/T
                "trained": trained[cells].mean() / trained.mean(),  # column `effective` is p(t) w(t)
            }
            rows.append(row)
    return rows


def collect_relative_times(options: AnalysisOptions, experiment: Any, results: Path) -> list[TableRow]:
    """Collect distance and time of every snapshot, a row per snapshot; ``relative_time`` is 1 at the baseline's best.

    The other columns are ``method``, ``selected``, ``seed``, ``step``, ``seconds``, ``metric`` and ``distance``. The
    unit of relative time is "1D" of Kim et al. 2025, figure 1: the mean time over seeds at which the baseline's mean
    distance over seeds is lowest. Times are training times, including the computations of the sampler; the untrained
    network has time 0. Column ``selected`` is |S| of an adaptive sampler, else None. Column ``metric`` is the name of
    the reference's Fréchet distance.

    The caller ensures that the experiment has a baseline.

    Raises:
        KairosError: a run has no recorded time of a snapshot, for example because its results were pulled.
        FileNotFoundError: the reference or an evaluation is missing.
    """
    metric = read_record(results / "reference/record.json")["metric"]
    rows = []
    for (name, method), seed in product(experiment.methods.items(), experiment.seeds):
        folder = run_folder(results, name, seed)
        subset_size = method.sampler.get("selected") if method.sampler.name in ADAPTIVE else None
        timing_file = folder / "timing.jsonl"
        # without times of this run, only the untrained network has one: the first later snapshot raises the error below
        identity = read_record(folder / "training.json")["identity"]
        seconds_by_step = {0: 0.0}  # the untrained network
        seconds_by_step |= {entry["step"]: entry["seconds"] for entry in read_times(timing_file, identity)}
        for step in experiment.milestones:
            if step not in seconds_by_step:
                raise KairosError(f"{timing_file}: has no time of step {step}; results that were pulled have no times")
            evaluation = read_record(folder / f"evaluation/{step:07d}.json")
            row = {
                "method": name,
                "selected": subset_size,
                "seed": seed,
                "step": step,
                "seconds": seconds_by_step[step],
                "metric": metric,
                "distance": evaluation["metrics"][metric],
            }
            rows.append(row)
    best_time = _find_best_time(rows, experiment)
    return [row | {"relative_time": row["seconds"] / best_time} for row in rows]


def _find_best_time(rows: list[TableRow], experiment: Any) -> float:
    """Return the baseline's mean seconds over seeds at the step at which its mean distance over seeds is lowest.

    Step 0, the untrained network, is ignored. The caller ensures that the experiment has a baseline, and a snapshot
    after step 0.
    """
    distance_and_time = []  # means over seeds, by step
    for step in experiment.milestones[1:]:  # the first is step 0
        step_rows = [row for row in rows if row["method"] == experiment.baseline and row["step"] == step]
        mean_distance = np.mean([row["distance"] for row in step_rows])
        mean_time = np.mean([row["seconds"] for row in step_rows])
        distance_and_time.append((mean_distance, mean_time))
    _, best_time = min(distance_and_time)  # the lowest distance; the time decides between equal ones
    return float(best_time)


def collect_subset_sizes(options: AnalysisOptions, experiment: Any, results: Path) -> list[TableRow]:
    """Collect distance and time by subset size |S|: the rows of `collect_relative_times` that have one.

    Rows of adaptive samplers have |S| in column ``selected``. The rows of the baseline, with ``selected`` None, are
    included for comparison. Source: Kim et al. 2025, figure 7. The caller ensures that the experiment has a baseline.

    Raises:
        KairosError: a run has no recorded time of a snapshot.
        FileNotFoundError: the reference or an evaluation is missing.
    """
    rows = collect_relative_times(options, experiment, results)
    return [row for row in rows if row["selected"] is not None or row["method"] == experiment.baseline]


def compute_increments(options: IncrementsOptions, experiment: Any, results: Path) -> list[TableRow]:
    """Compute moments and areas of x_{t+1} - x_t of eight processes in 1000 steps, a row per process and time.

    The columns are ``process``, the columns of `Increments.columns`, and ``area``. Source: `kairos.increments`.
    Experiment and results are not used.
    """
    rows: list[TableRow] = []
    for name in ("linear", "cosine", "quadratic", "scaled_linear", "vp", "flow", "ve", "edm"):
        has_levels = name in ("ve", "edm", "flow")  # defined by noise levels; the others are schedules of process vp
        process = name if has_levels else "vp"
        schedule = None if has_levels else as_process(name).schedule
        moments = process_increments.increments(process, schedule, r=options.r)
        columns = {**moments.columns(), "area": moments.area()}
        for values in zip(*columns.values()):  # the values of one time
            rows.append({"process": name, **dict(zip(columns, values))})
    return rows
