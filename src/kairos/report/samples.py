"""Figures of images: every method at every milestone, and the final samples beside real images."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from kairos.data.grid import grid as tile
from kairos.report.canvas import INK, MUTED, Look, figure
from kairos.report.collect import Results, real_images


def samples(results: Results, looks: dict[str, Look]) -> Figure:
    """Grids of the first seed: a row per method, a column per milestone."""
    methods, steps = results.methods, results.experiment.milestones
    side = min(1.9, 9.0 / len(steps))
    size = (side * len(steps) + 0.05, side * len(methods))
    drawing, grid = figure(*size, len(methods), len(steps), between=0.08, above=0.08)
    for row, method in zip(grid, methods):
        for axes, milestone in zip(row, results.of(method)[0].milestones):
            _show(axes, _picture(milestone.grid))
        row[0].text(-0.06, 0.5, method, transform=row[0].transAxes, ha="right", va="center", fontweight="bold")
    for axes, step in zip(grid[0], steps):
        axes.set_title("untrained" if step == 0 else f"step {step:,}", loc="center", fontsize=9.5)
    return drawing


def final_samples(results: Results, looks: dict[str, Look]) -> Figure:
    """Real images, held out where any are, and every method's last milestone (first seed), in one picture each."""
    name, images = real_images(results, results.experiment.sampling.grid)
    pictures = [(name, tile(images))]
    pictures += [(method, _picture(results.of(method)[0].final.grid)) for method in results.methods]
    columns = min(4, len(pictures))
    rows = -(-len(pictures) // columns)
    drawing, grid = figure(9.5, 2.65 * rows - 0.25, rows, columns, between=0.15, above=0.4)
    for axes, (title, picture) in zip(grid.flat, pictures):
        _show(axes, picture)
        axes.set_title(title, fontsize=9.5, color=MUTED if title == name else INK)
    for axes in grid.flat[len(pictures) :]:
        axes.remove()
    return drawing


def _picture(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def _show(axes: Axes, picture: np.ndarray) -> None:
    axes.imshow(picture.squeeze(), cmap="gray", vmin=0, vmax=255, interpolation="nearest")
    axes.axis("off")
