"""All figures of a report by name; their captions are in the page."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from kairos.report import curve_figures, densities, interactive, plot_style, sample_figures, sweeps
from kairos.report.collect import Results

FIGURES: dict[str, Callable[[Results, dict[str, plot_style.Look]], Figure]] = {
    "metric_vs_steps": partial(curve_figures.metric, time=False),
    "metric_vs_time": partial(curve_figures.metric, time=True),
    "metric_vs_option": sweeps.metric,
    "validation_loss": curve_figures.validation_loss,
    "density": partial(densities.panels, column="p", label="T · p(t)  (uniform: 1)", scale="linear"),
    "effective_weight": partial(densities.panels, column="effective", label="T · p(t) · w(t)", scale="log"),
    "training_loss": curve_figures.training_loss,
    "final_samples": sample_figures.final_samples,
    "samples": sample_figures.samples,
    "image_by_image_samples": sample_figures.image_by_image,
    "told_samples": sample_figures.told_samples,
}


def figures_of(results: Results) -> dict[str, Callable[[Results, dict[str, plot_style.Look]], Figure]]:
    """The figures that there are results for."""
    told = {"text", "low_resolution"} & set(results.experiment.model.get("conditions") or ())
    there = {"validation_loss": results.validated, "told_samples": bool(told)}
    there["training_loss"] = any(len(training.metrics) for training in results.trainings)
    there["image_by_image_samples"] = all(one.grid.with_suffix(".npz").exists() for _, one in results.evaluated)
    there["metric_vs_option"] = bool(sweeps.swept(results.methods))
    return {name: draw for name, draw in FIGURES.items() if there.get(name, True)}


def draw_all(results: Results, folder: Path) -> dict[str, str]:
    """Draw every figure into `folder` as PNG and SVG; returns those for a browser, see `interactive`, by name."""
    live = {}
    looks = plot_style.looks(results.methods, results.baseline)
    for name, draw in figures_of(results).items():
        with matplotlib.rc_context(plot_style.STYLE):
            drawing = draw(results, looks)
            box = plot_style.tight_box(drawing)  # savefig would draw the figure once more for each file to find it
            drawing.savefig(folder / f"{name}.png", dpi=plot_style.DPI, bbox_inches=box)
            drawing.savefig(folder / f"{name}.svg", metadata={"Date": None}, bbox_inches=box)
        if name in interactive.FIGURES:
            live[name] = interactive.item(drawing, looks)
    return live
