"""All figures of a report by name; their captions are in the page."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from kairos.report import canvas, curves, densities, interactive, samples, sweeps
from kairos.report.collect import Results

FIGURES: dict[str, Callable[[Results, dict[str, canvas.Look]], Figure]] = {
    "metric_vs_steps": partial(curves.metric, time=False),
    "metric_vs_time": partial(curves.metric, time=True),
    "metric_vs_option": sweeps.metric,
    "validation_loss": curves.validation_loss,
    "density": partial(densities.panels, column="p", label="T · p(t)  (uniform: 1)", scale="linear"),
    "effective_weight": partial(densities.panels, column="effective", label="T · p(t) · w(t)", scale="log"),
    "training_loss": curves.training_loss,
    "final_samples": samples.final_samples,
    "samples": samples.samples,
    "image_by_image_samples": samples.image_by_image,
    "told_samples": samples.told_samples,
}


def figures_of(results: Results) -> dict[str, Callable[[Results, dict[str, canvas.Look]], Figure]]:
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
    looks = canvas.looks(results.methods, results.baseline)
    for name, draw in figures_of(results).items():
        with matplotlib.rc_context(canvas.STYLE):
            drawing = draw(results, looks)
            box = canvas.tight_box(drawing)  # savefig would draw the figure once more for each file to find it
            drawing.savefig(folder / f"{name}.png", dpi=canvas.DPI, bbox_inches=box)
            drawing.savefig(folder / f"{name}.svg", metadata={"Date": None}, bbox_inches=box)
        if name in interactive.FIGURES:
            live[name] = interactive.item(drawing, looks)
    return live
