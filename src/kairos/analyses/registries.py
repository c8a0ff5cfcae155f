"""Registry of the analyses with their options, and the checks that an experiment allows its analyses.

The code of an entry returns the rows of a table, dictionaries of numbers and texts. The fact `reads` of an entry
decides when and how the code is called:

- ``milestone``: ``code(options, folder, latents, device)`` in a job for each analysed snapshot;
- ``strategies``: ``code(options, experiment, results)`` when all training runs have ended;
- ``evaluations``: ``code(options, experiment, results)`` when all snapshots are evaluated;
- ``nothing``: ``code(options, experiment, results)`` at any time.
"""

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

from kairos_timesteps.errors import demand
from kairos_timesteps.options import Options, option
from kairos_timesteps.registry import NoOptions, Registry

ADAPTIVE = ("adaptive", "adaptive_official")  # samplers that have a subset S


class SnapshotOptions(Options):
    """Options that all analyses of networks at snapshots share."""

    methods: list[str] | None = option(None, "methods that are analysed; null: all")
    milestones: list[int] | None = option(None, "steps of the snapshots that are analysed; null: all")
    images: int = option(64, "images of each level or part; gradients: for training, else held out", ge=2)
    seed: int = option(0, "seed of images, noise and times", ge=0)


class GradientVarianceOptions(SnapshotOptions):
    """Variance of gradient and loss by time (Kim et al. 2025, figures 2 and 6)."""

    bins: int = option(20, "levels: equal fractions of the process", ge=1)


class AreasOptions(SnapshotOptions):
    """Loss and gradient in SpeeD's areas (Wang et al. 2025, figure 1)."""

    r: float = option(5.0, "magnitude from which on a time counts as converged", gt=1)


class AgreementOptions(SnapshotOptions):
    """Agreement of gradients between noise levels, and their noise scale (McCandlish et al. 2018)."""

    bins: int = option(10, "levels: equal in ln SNR", ge=2)
    least: float = option(-9.0, "ln SNR at which the noisiest level ends, if the process reaches it", lt=0)
    most: float = option(9.0, "ln SNR at which the cleanest level begins, if the process reaches it", gt=0)


class InterdependenceOptions(SnapshotOptions):
    """Effect of training on one part of the process on the loss of all parts (Kim et al. 2025, figure 4)."""

    parts: int = option(5, "equal parts of the process", ge=2, le=100)
    steps: int = option(100, "optimiser steps on each part, all from the snapshot's weights", ge=1)


class DensityOptions(Options):
    """Density of the timesteps that methods train on, over the training run (Kim et al. 2025, figure 5)."""

    bins: int = option(100, "points of a line, at most one per timestep", ge=1)


class IncrementsOptions(Options):
    """Process increments with their bounds and areas, of eight processes (Wang et al. 2025, figures 1 and 4)."""

    r: float = option(5.0, "magnitude from which on a timestep counts as converged", gt=1)


ANALYSES = Registry("analysis")


def _add(name: str, code: str, options: type, help: str, reads: str = "milestone") -> None:
    """Register an analysis; `code` is module and function in this package."""
    ANALYSES.add(name, f"kairos.analyses.{code}", options, help, reads=reads)


_add(
    "gradient_variance",
    "noise_levels:measure_gradient_variance",
    GradientVarianceOptions,
    "Variance of gradient and loss by time",
)
_add("areas", "noise_levels:measure_areas", AreasOptions, "Loss and gradient in SpeeD's areas")
_add(
    "agreement",
    "noise_levels:measure_agreement",
    AgreementOptions,
    "Gradients at different levels of noise: agreement and noise",
)
_add(
    "interdependence",
    "interdependence:measure_interdependence",
    InterdependenceOptions,
    "Trained on a part of the process, measured on all",
)
_add(
    "density",
    "recorded_results:collect_densities",
    DensityOptions,
    "Where methods train, over training",
    "strategies",
)
_add(
    "relative_time",
    "recorded_results:collect_relative_times",
    NoOptions,
    "Distance against relative time",
    "evaluations",
)
_add(
    "subset_size",
    "recorded_results:collect_subset_sizes",
    NoOptions,
    "The adaptive sampler's |S| in time and distance",
    "evaluations",
)
_add(
    "increments",
    "recorded_results:compute_increments",
    IncrementsOptions,
    "Process increments, their bounds and areas",
    "nothing",
)


def analysed_snapshots(analysis: Mapping[str, Any], experiment: Any) -> list[tuple[str, int, int]]:
    """Return method, seed and step of every snapshot that an analysis reads; empty if it reads no networks."""
    if ANALYSES.entry(analysis["name"]).facts["reads"] != "milestone":
        return []
    methods = analysis["methods"] or experiment.methods
    steps = analysis["milestones"] or experiment.milestones
    return list(product(methods, experiment.seeds, steps))


def snapshot_table_path(results: Path | str, name: str, method: str, seed: int, step: int) -> str:
    """Return the path of the table that an analysis measures at one snapshot, in the folder of the training run."""
    return f"{results}/{method}/seed{seed}/analyses/{name}.{step:07d}.csv"


def check_analyses(experiment: Any) -> None:
    """Check that an experiment contains the methods, snapshots and images that its analyses need.

    Raises:
        ConfigError: an analysis is listed twice, or needs something that the experiment does not contain.
    """
    names = [analysis["name"] for analysis in experiment.analyses]
    samplers = [method.sampler for method in experiment.methods.values()]
    subset_sizes = {sampler["selected"] for sampler in samplers if sampler["name"] in ADAPTIVE}
    has_baseline = experiment.baseline is not None
    baseline_needed = "with a method of sampler uniform and weighting none: its time is 1"
    sizes_needed = "with adaptive methods of several |S|: grid: {sampler.selected: [1, 3, 10]}"
    held_out_needed = "with held-out images; dataset.heldout is 0"
    requirements = (  # analysis, True if the experiment satisfies its requirement, and the requirement
        ("relative_time", has_baseline, baseline_needed),
        ("subset_size", has_baseline, baseline_needed),
        ("subset_size", len(subset_sizes) > 1, sizes_needed),
        ("interdependence", experiment.dataset.heldout != 0, held_out_needed),
    )
    for name, satisfied, requirement in requirements:
        if name in names:
            demand(satisfied, "analyses", name, requirement)
    for analysis in experiment.analyses:
        name = analysis["name"]
        demand(names.count(name) == 1, "analyses", f"{name} twice", "each once")
        _check_selection(f"analyses.{name}.methods", analysis.get("methods"), list(experiment.methods))
        _check_selection(f"analyses.{name}.milestones", analysis.get("milestones"), list(experiment.milestones))


def _check_selection(field: str, selection: list[Any] | None, allowed: list[Any]) -> None:
    """Check that a selection is None, or contains elements of `allowed`, at least one and each once.

    Raises:
        ConfigError: the selection is empty, or contains an element twice or one that is not allowed.
    """
    if selection is None:  # all
        return
    is_allowed = set(selection) <= set(allowed)
    has_duplicates = len(set(selection)) < len(selection)
    is_valid = bool(selection) and is_allowed and not has_duplicates
    demand(is_valid, field, selection, f"of {', '.join(map(str, allowed))}, each once; null: all")
