"""Analyses of what trainings have left (densities, distances, times), and of processes alone."""

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from kairos import increments as of_process
from kairos.analyses.noise_levels import Row
from kairos.analyses.registries import ADAPTIVE, DensityOptions, IncrementsOptions
from kairos.files import read_json
from kairos.strategy_file import parse_strategy_csv
from kairos.training.run_folder import read_timing
from kairos_timesteps.diffusion.adapters import as_process
from kairos_timesteps.errors import KairosError
from kairos_timesteps.registry import NoOptions


def density(options: DensityOptions, experiment: Any, results: Path) -> list[Row]:
    """Return the density of timesteps and the trained density of every milestone, relative to the uniform density.

    ``density`` is T p(t). ``trained`` is p(t) w(t) over its mean: loss weights count as probabilities (Kim et al. 2025,
    figure 5).

    Args:
        options: options of the analysis.
        experiment: the experiment, whose methods, seeds and milestones are analysed.
        results: folder of the experiment's results.
    """
    rows = []
    for method, seed, step in product(experiment.methods, experiment.seeds, experiment.milestones):
        path = results / f"{method}/seed{seed}/milestones/{step:07d}/strategy.csv"
        columns = parse_strategy_csv(path.read_text(encoding="utf-8"))
        for inside in np.array_split(np.arange(len(columns["t"])), min(options.bins, len(columns["t"]))):
            row = {"method": method, "seed": seed, "step": step, "t": columns["t"][inside].mean()}
            relative = {"density": columns["p"], "trained": columns["effective"]}.items()
            rows.append(row | {name: values[inside].mean() / values.mean() for name, values in relative})
    return rows


def relative_time(options: NoOptions, experiment: Any, results: Path) -> list[Row]:
    """Distance and time of every milestone; ``relative_time`` 1 is when the baseline is at its best.

    That is "1D" of Kim et al. 2025, figure 1: the mean time over seeds at which the baseline's mean distance over seeds
    is lowest. Times are those of training steps, the sampler's own work included. Of adaptive samplers ``selected`` is
    |S|. Arguments as of `density`.

    Raises:
        KairosError: there is no clock of a training, such as of results that were pulled.
    """
    metric, rows = read_json(results / "reference/reference.json")["metric"], []
    for (method, its), seed in product(experiment.methods.items(), experiment.seeds):
        folder = results / method / f"seed{seed}"
        selected = its.sampler.get("selected") if its.sampler["name"] in ADAPTIVE else None
        path = folder / "timing.jsonl"
        clock = {0: 0.0} | {line["step"]: line["seconds"] for line in (read_timing(path) if path.is_file() else ())}
        for step in experiment.milestones:
            if step not in clock:
                raise KairosError(f"{path}: has no time of step {step}; results that were pulled have no clock")
            distance = read_json(folder / f"evaluation/{step:07d}.json")["metrics"][metric]
            row = {"method": method, "selected": selected, "seed": seed, "step": step, "seconds": clock[step]}
            rows.append(row | {"metric": metric, "distance": distance})
    own = [row for row in rows if row["method"] == experiment.baseline]
    steps = [[row for row in own if row["step"] == step] for step in experiment.milestones[1:]]
    best = min([np.mean([row[name] for row in its]) for name in ("distance", "seconds")] for its in steps)
    return [row | {"relative_time": row["seconds"] / best[1]} for row in rows]


def subset_size(options: NoOptions, experiment: Any, results: Path) -> list[Row]:
    """Return the rows of `relative_time` for adaptive samplers and the baseline (Kim et al. 2025, figure 7)."""
    rows = relative_time(options, experiment, results)
    return [row for row in rows if row["selected"] is not None or row["method"] == experiment.baseline]


def increments(options: IncrementsOptions, experiment: Any, results: Path) -> list[Row]:
    """Moments of x_{t+1} - x_t of eight processes in 1000 steps; see `kairos.increments`."""
    rows: list[Row] = []
    for name in ("linear", "cosine", "quadratic", "scaled_linear", "vp", "flow", "ve", "edm"):
        kind = name if name in of_process.PROCESSES[1:] else "vp"
        found = of_process.increments(kind, as_process("linear" if kind == "ve" else name).schedule, r=options.r)
        columns = {**found.columns(), "area": found.area()}
        rows += [{"process": name, **dict(zip(columns, values))} for values in zip(*columns.values())]
    return rows
