"""All figures of a report by name, and the code that draws them into files; their captions are in the page."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from kairos.report import curve_figures, plot_style, sample_figures
from kairos.report.collect import Results
from kairos.report.shown_methods import select_shown_methods

DrawFunction = Callable[[Results, dict[str, plot_style.MethodStyle]], Figure]

FIGURES: dict[str, DrawFunction] = {
    "metric_vs_steps": partial(curve_figures.draw_distance, over_time=False),
    "metric_vs_time": partial(curve_figures.draw_distance, over_time=True),
    "metric_vs_option": curve_figures.draw_distance_by_option,
    "validation_loss": curve_figures.draw_validation_loss,
    "density": partial(curve_figures.draw_strategies, column="p", label="T · p(t)  (uniform: 1)", scale="linear"),
    "effective_weight": partial(
        curve_figures.draw_strategies, column="effective", label="T · p(t) · w(t)", scale="log"
    ),
    "training_loss": curve_figures.draw_training_loss,
    "final_samples": sample_figures.draw_final_samples,
    "samples": sample_figures.draw_samples_over_training,
    "image_by_image_samples": sample_figures.draw_image_by_image,
    "conditional_samples": sample_figures.draw_conditional_samples,
}


def available_figures(results: Results) -> dict[str, DrawFunction]:
    """Return the functions that draw the figures whose results exist, by name, in the order of `FIGURES`.

    Five figures need results that not every experiment has:

    * ``validation_loss``: validation losses of all common snapshots.
    * ``conditional_samples``: text or low resolution as a condition. The figure also reads the saved samples of the
      last snapshots, whose existence is not checked here.
    * ``training_loss``: a metrics.jsonl of any run that is not empty.
    * ``image_by_image_samples``: saved samples of all snapshots.
    * ``metric_vs_option``: a sweep.

    Raises:
        KairosError: a metrics.jsonl is damaged, or no snapshot after step 0 is evaluated for all methods.
    """
    conditions = set(results.experiment.conditions)
    grid_files = [snapshot.grid_file for _, snapshot in results.run_snapshots]
    is_available = {
        "validation_loss": results.has_validation_losses,
        "conditional_samples": bool({"text", "low_resolution"} & conditions),
        "training_loss": any(len(run.metrics) for run in results.runs),
        "image_by_image_samples": all(file.with_suffix(".npz").exists() for file in grid_files),
        "metric_vs_option": bool(curve_figures.group_swept_methods(results.methods)),
    }
    return {name: draw for name, draw in FIGURES.items() if is_available.get(name, True)}


def draw_figures(results: Results, folder: Path) -> None:
    """Draw every available figure in the common style, and write NAME.png and NAME.svg into the existing `folder`.

    Files of these names are replaced.

    Raises:
        KairosError: a file that a figure shows is missing or damaged, or no snapshot after step 0 is evaluated for all
            methods.
    """
    styles = plot_style.assign_styles(select_shown_methods(results), results.baseline)
    for name, draw in available_figures(results).items():
        with matplotlib.rc_context(plot_style.STYLE):
            figure = draw(results, styles)
            box = plot_style.tight_bounding_box(figure)  # once: savefig would draw the figure again for each file
            figure.savefig(folder / f"{name}.png", dpi=plot_style.DPI, bbox_inches=box)
            # no date: equal results give equal bytes
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None}, bbox_inches=box)
