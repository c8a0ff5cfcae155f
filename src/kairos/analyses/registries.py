"""Analyses by name.

An entry's code gives rows, dictionaries of numbers and texts. What it `reads` says how it is called:

- ``milestone``: ``code(options, folder, latents, device)`` for each milestone that is asked for, a job each;
- ``strategies``: ``code(options, experiment, results)`` where all trainings have ended;
- ``evaluations``: the same where all are evaluated;
- ``nothing``: the same at once.
"""

from collections.abc import Mapping
from itertools import product
from typing import Any

from kairos_timesteps.errors import demand
from kairos_timesteps.options import Options, option
from kairos_timesteps.registry import NoOptions, Registry

ADAPTIVE = ("adaptive", "adaptive_official")  # samplers that have a subset S


class OfMilestones(Options):
    """Options that all analyses of networks at milestones share."""

    methods: list[str] | None = option(None, "methods that are looked at; null: all")
    milestones: list[int] | None = option(None, "steps that are looked at, of the milestones; null: all")
    images: int = option(64, "images of each level or part; gradients: for training, else held out", ge=2)
    seed: int = option(0, "of images, noise and times", ge=0)


class GradientVarianceOptions(OfMilestones):
    """Variance of gradient and loss by time (Kim et al. 2025, figures 2 and 6)."""

    bins: int = option(20, "levels: equal fractions of the process", ge=1)


class AreasOptions(OfMilestones):
    """Loss and gradient in SpeeD's areas (Wang et al. 2025, figure 1)."""

    r: float = option(5.0, "magnitude from which on a time counts as converged", gt=1)


class AgreementOptions(OfMilestones):
    """Agreement of gradients between levels of noise, and their noise scale (McCandlish et al. 2018)."""

    bins: int = option(10, "levels: equal in ln SNR", ge=2)
    least: float = option(-9.0, "ln SNR where the noisiest level ends, if the process reaches it", lt=0)
    most: float = option(9.0, "ln SNR where the cleanest level begins, likewise", gt=0)


class InterdependenceOptions(OfMilestones):
    """Effect of training on one part of the process on the loss of all parts (Kim et al. 2025, figure 4)."""

    parts: int = option(5, "equal parts of the process", ge=2, le=100)
    steps: int = option(100, "optimiser steps on each part, all from the same weights", ge=1)


class DensityOptions(Options):
    """Density of the timesteps that methods train on, over the training run (Kim et al. 2025, figure 5)."""

    bins: int = option(100, "points of a line, at most one per timestep", ge=1)


class IncrementsOptions(Options):
    """Process increments with their bounds and areas, of eight processes (Wang et al. 2025, figures 1 and 4)."""

    r: float = option(5.0, "magnitude from which on a timestep counts as converged", gt=1)


ANALYSES = Registry("analysis")


def _add(code: str, options: type, help: str, reads: str = "milestone") -> None:
    ANALYSES.add(code.split(":")[1], f"kairos.analyses.{code}", options, help, reads=reads)


_add("noise_levels:gradient_variance", GradientVarianceOptions, "Variance of gradient and loss by time")
_add("noise_levels:areas", AreasOptions, "Loss and gradient in SpeeD's areas")
_add("noise_levels:agreement", AgreementOptions, "Gradients at different levels of noise: agreement and noise")
_add("interdependence:interdependence", InterdependenceOptions, "Trained on a part of the process, measured on all")
_add("recorded_results:density", DensityOptions, "Where methods train, over training", "strategies")
_add("recorded_results:relative_time", NoOptions, "Distance against relative time", "evaluations")
_add("recorded_results:subset_size", NoOptions, "The adaptive sampler's |S| in time and distance", "evaluations")
_add("recorded_results:increments", IncrementsOptions, "Process increments, their bounds and areas", "nothing")


def places(named: Mapping[str, Any], experiment: Any) -> list[tuple[str, int, int]]:
    """Method, seed and step of every milestone that an analysis looks at; none where it looks at no network."""
    if ANALYSES.entry(named["name"]).facts["reads"] != "milestone":
        return []
    methods, steps = named["methods"] or experiment.methods, named["milestones"] or experiment.milestones
    return list(product(methods, experiment.seeds, steps))


def part_of(results: Any, name: str, method: str, seed: int, step: int) -> str:
    """The file of what an analysis has measured at a milestone, in the folder of its training."""
    return f"{results}/{method}/seed{seed}/analyses/{name}.{step:07d}.csv"


def check_analyses(experiment: Any) -> None:
    """Check that an experiment contains the methods, milestones and images that its analyses need.

    Raises:
        ConfigError: an analysis is listed twice, or needs something that the experiment does not contain.
    """
    names, samplers = [its["name"] for its in experiment.analyses], [its.sampler for its in experiment.methods.values()]
    sizes = {sampler["selected"] for sampler in samplers if sampler["name"] in ADAPTIVE}
    plain = experiment.baseline, "with a method of sampler uniform and weighting none: its time is 1"
    needs = (
        ("relative_time", *plain),
        ("subset_size", *plain),
        ("subset_size", len(sizes) > 1, "with adaptive methods of several |S|: grid: {sampler.selected: [1, 3, 10]}"),
        ("interdependence", experiment.dataset.heldout != 0, "where images are held out; dataset.heldout is 0"),
    )
    for name, there, allowed in needs:
        demand(there or name not in names, "analyses", name, allowed)
    for named in experiment.analyses:
        demand(names.count(named["name"]) == 1, "analyses", f"{named['name']} twice", "each once")
        for key, known in (("methods", list(experiment.methods)), ("milestones", list(experiment.milestones))):
            given, allowed = named.get(key), f"of {', '.join(map(str, known))}, each once; null: all"
            good = given is None or (given and len({*given} & {*known}) == len(given))
            demand(good, f"analyses.{named['name']}.{key}", given, allowed)
