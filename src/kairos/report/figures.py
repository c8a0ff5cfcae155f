"""All figures of a report by name, each with its caption."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from kairos.report import canvas, curves, densities, samples
from kairos.report.collect import Results


@dataclass(frozen=True)
class Plot:
    """A figure: what draws it, its heading and what one has to know to read it."""

    draw: Callable[[Results, dict[str, canvas.Look]], Figure]
    title: str
    caption: str


FIGURES = {
    "metric_vs_steps": Plot(
        partial(curves.metric, time=False),
        "Distance against training steps",
        "Mean over seeds; bars and bands are the larger of the spread over sets of samples and over seeds. Dashed "
        "lines are the reference rows, computed with as many images and the same statistics.",
    ),
    "metric_vs_time": Plot(
        partial(curves.metric, time=True),
        "Distance against training time",
        "The same distances over the seconds spent in training steps, the sampler's own work included, checkpoints "
        "and evaluation not. Times are this machine's and vary with its load.",
    ),
    "validation_loss": Plot(
        curves.validation_loss,
        "Per timestep, at the last milestone",
        "Squared error on the same held-out images, noise and timesteps for every method, mean "
        "over seeds. It shows where on the timestep axis a strategy gains and what it gives up for that.",
    ),
    "density": Plot(
        partial(densities.panels, column="p", label="T · p(t)  (uniform: 1)", scale="linear"),
        "Where the timesteps are drawn: p(t)",
        "Density of the drawn timesteps as a multiple of uniform's (dotted). A sampler that learns has a line per "
        "milestone and seed; one that does not has a single dark line.",
    ),
    "effective_weight": Plot(
        partial(densities.panels, column="effective", label="T · p(t) · w(t)", scale="log"),
        "What the optimiser sees: p(t)·w(t)",
        "Density times loss weight on a log axis: two strategies with the same curve minimise the same loss, with "
        "different noise.",
    ),
    "training_loss": Plot(
        curves.training_loss,
        "Over training steps",
        "Each method draws its own timesteps and weights them in its own way, so levels do not compare between "
        "methods: use these curves to see whether a training is stable, and the validation loss to compare.",
    ),
    "final_samples": Plot(
        samples.final_samples,
        "Samples of the last milestone beside real images",
        "First seed. All methods start from the same noise, image by image; nothing is selected.",
    ),
    "samples": Plot(
        samples.samples,
        "Samples over training",
        "First seed; the same starting noise in every grid.",
    ),
}


def draw_all(results: Results, folder: Path) -> None:
    """Draw every figure into `folder` as PNG and SVG."""
    looks = canvas.looks(results.methods, results.baseline)
    for name, plot in FIGURES.items():
        with matplotlib.rc_context(canvas.STYLE):
            drawing = plot.draw(results, looks)
        canvas.save(drawing, folder / name)
