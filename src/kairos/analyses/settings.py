"""Analyses by name with their options, and the checks that an experiment allows its analyses.

The code of an analysis returns the rows of a table, dictionaries of numbers and texts. `AnalysisOptions.reads` decides
when and how the code is called:

- ``snapshot``: ``code(options, folder, latents, device)`` in a job for each analysed snapshot;
- ``strategies``: ``code(options, experiment, results)`` when all training runs have ended;
- ``evaluations``: ``code(options, experiment, results)`` when all snapshots are evaluated;
- ``nothing``: ``code(options, experiment, results)`` at any time.
"""

from itertools import product
from pathlib import Path
from typing import Any, ClassVar, Literal

from kairos.components import ComponentOptions, Components
from kairos.increments import PUBLISHED_R
from kairos.section import field
from kairos.stages import run_folder
from kairos_timesteps.errors import demand

Reads = Literal["snapshot", "strategies", "evaluations", "nothing"]
ADAPTIVE = ("adaptive", "adaptive_official", "adaptive_paper")  # samplers that have a subset S


class AnalysisOptions(ComponentOptions):
    """Base class of the options of an analysis.

    Attributes:
        reads: results that the analysis reads.
        title: title of its figure.
    """

    reads: ClassVar[Reads]
    title: ClassVar[str]


ANALYSES: Components[AnalysisOptions] = Components("analysis")


class SnapshotOptions(AnalysisOptions):
    """Base class of the options of an analysis of networks at snapshots."""

    reads: ClassVar[Reads] = "snapshot"

    methods: list[str] | None = field(None, "methods that are analysed; null: all")
    milestones: list[int] | None = field(None, "steps of the snapshots that are analysed; null: all")
    images: int = field(64, "images of each level or part; gradients: for training, else held out", ge=2)
    seed: int = field(0, "seed of images, noise and times", ge=0)


@ANALYSES.register
class GradientVarianceOptions(SnapshotOptions):
    """Variance of gradient and loss by time (Kim et al. 2025, figures 2 and 6)."""

    code: ClassVar[str] = "kairos.analyses.noise_levels:measure_gradient_variance"
    title: ClassVar[str] = "Variance of gradient and loss by time"

    name: str = "gradient_variance"
    bins: int = field(20, "levels: equal fractions of the process", ge=1)


@ANALYSES.register
class AreasOptions(SnapshotOptions):
    """Loss and gradient in SpeeD's areas (Wang et al. 2025, figure 1)."""

    code: ClassVar[str] = "kairos.analyses.noise_levels:measure_areas"
    title: ClassVar[str] = "Loss and gradient in SpeeD's areas"

    name: str = "areas"
    r: float = field(PUBLISHED_R, "magnitude from which on a time counts as converged (138.6: SpeeD's tau = 700)", gt=1)


@ANALYSES.register
class AgreementOptions(SnapshotOptions):
    """Agreement of gradients between noise levels, and their noise scale (McCandlish et al. 2018)."""

    code: ClassVar[str] = "kairos.analyses.noise_levels:measure_agreement"
    title: ClassVar[str] = "Gradients at different levels of noise: agreement and noise"

    name: str = "agreement"
    bins: int = field(10, "levels: equal in ln SNR", ge=2)
    least: float = field(-9.0, "ln SNR at which the noisiest level ends, if the process reaches it", lt=0)
    most: float = field(9.0, "ln SNR at which the cleanest level begins, if the process reaches it", gt=0)


@ANALYSES.register
class InterdependenceOptions(SnapshotOptions):
    """Effect of training on one part of the process on the loss of all parts (Kim et al. 2025, figure 4)."""

    code: ClassVar[str] = "kairos.analyses.interdependence:measure_interdependence"
    title: ClassVar[str] = "Trained on a part of the process, measured on all"

    name: str = "interdependence"
    parts: int = field(5, "equal parts of the process", ge=2, le=100)
    steps: int = field(100, "optimizer steps on each part, all from the snapshot's weights", ge=1)


@ANALYSES.register
class DensityOptions(AnalysisOptions):
    """Density of the timesteps that methods train on, over the training run (Kim et al. 2025, figure 5)."""

    code: ClassVar[str] = "kairos.analyses.recorded_results:collect_densities"
    title: ClassVar[str] = "Where methods train, over training"
    reads: ClassVar[Reads] = "strategies"

    name: str = "density"
    bins: int = field(100, "points of a line, at most one per timestep", ge=1)


@ANALYSES.register
class RelativeTimeOptions(AnalysisOptions):
    """Distance against training time relative to the baseline's."""

    code: ClassVar[str] = "kairos.analyses.recorded_results:collect_relative_times"
    title: ClassVar[str] = "Distance against relative time"
    reads: ClassVar[Reads] = "evaluations"

    name: str = "relative_time"


@ANALYSES.register
class SubsetSizeOptions(AnalysisOptions):
    """The adaptive sampler's number of selected timesteps, in time and distance."""

    code: ClassVar[str] = "kairos.analyses.recorded_results:collect_subset_sizes"
    title: ClassVar[str] = "The adaptive sampler's |S| in time and distance"
    reads: ClassVar[Reads] = "evaluations"

    name: str = "subset_size"


@ANALYSES.register
class IncrementsOptions(AnalysisOptions):
    """Process increments with their bounds and areas, of eight processes (Wang et al. 2025, figures 1 and 4)."""

    code: ClassVar[str] = "kairos.analyses.recorded_results:compute_increments"
    title: ClassVar[str] = "Process increments, their bounds and areas"
    reads: ClassVar[Reads] = "nothing"

    name: str = "increments"
    r: float = field(PUBLISHED_R, "magnitude from which on a timestep has converged (138.6: SpeeD's tau = 700)", gt=1)


def analysed_snapshots(analysis: AnalysisOptions, experiment: Any) -> list[tuple[str, int, int]]:
    """Return method, seed and step of every snapshot that an analysis reads; empty if it reads none.

    An option that is None selects all methods or steps of the experiment. All seeds of the experiment are read. The
    order is by method, then seed, then step.
    """
    if not isinstance(analysis, SnapshotOptions):
        return []
    methods = analysis.methods or experiment.methods
    steps = analysis.milestones or experiment.milestones
    return list(product(methods, experiment.seeds, steps))


def snapshot_table_path(results: Path | str, name: str, method: str, seed: int, step: int) -> str:
    """Return the path of the table that an analysis measures at one snapshot, in the folder of the training run."""
    return f"{run_folder(results, method, seed)}/analyses/{name}.{step:07d}.csv"


def check_analyses(experiment: Any) -> None:
    """Check that an experiment contains the methods, snapshots and images that its analyses need.

    * relative_time and subset_size need a baseline, see `Experiment.baseline`.
    * subset_size needs adaptive methods with several subset sizes.
    * interdependence needs held-out images, and at least one timestep of a discrete process for each part.
    * Analyses of snapshots need methods and steps that the experiment contains.

    Raises:
        ConfigError: an analysis is listed twice, or needs something that the experiment does not contain.
    """
    names = [analysis.name for analysis in experiment.analyses]
    samplers = [method.sampler for method in experiment.methods.values()]
    # different |S| of the adaptive methods
    subset_sizes = {sampler.get("selected") for sampler in samplers if sampler.name in ADAPTIVE}
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
        name = analysis.name
        demand(names.count(name) == 1, "analyses", f"{name} twice", "each once")
        if isinstance(analysis, SnapshotOptions):
            _check_selection(f"analyses.{name}.methods", analysis.methods, list(experiment.methods))
            _check_selection(f"analyses.{name}.milestones", analysis.milestones, list(experiment.milestones))
        if isinstance(analysis, InterdependenceOptions):
            timesteps = experiment.diffusion.process.get("timesteps")
            if timesteps is not None:  # a continuous process has more cells than parts
                allowed = f"at most diffusion.process.timesteps = {timesteps}"
                demand(analysis.parts <= timesteps, f"analyses.{name}.parts", analysis.parts, allowed)


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
