"""Figures of images: every method at every milestone, the final samples beside real images, and what they were told."""

import textwrap
from itertools import product
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from kairos.data.image_grid import tile_images
from kairos.report.collect import Results, real_images
from kairos.report.plot_style import INK, MUTED, Look, figure

_BY_IMAGE = 4  # images that are shown by method and milestone
_TOLD = 8  # captions or low-resolution images that are shown


def samples(results: Results, looks: dict[str, Look]) -> Figure:
    """Grids of the first seed: a row per method, a column per milestone."""
    methods, steps = results.methods, results.experiment.milestones
    side = min(1.9, 9.0 / len(steps))
    size = (side * len(steps) + 0.05, side * len(methods))
    drawing, grid = figure(*size, len(methods), len(steps), between=0.08, above=0.08)
    for row, method in zip(grid, methods):
        pictures = {milestone.step: milestone.grid for milestone in results.of(method)[0].milestones}
        for axes, step in zip(row, steps):
            axes.axis("off")
            if step in pictures:
                _show(axes, picture(pictures[step]))
        row[0].text(-0.06, 0.5, method, transform=row[0].transAxes, ha="right", va="center", fontweight="bold")
    for axes, step in zip(grid[0], steps):
        axes.set_title("untrained" if step == 0 else f"step {step:,}", loc="center", fontsize=9.5)
    return drawing


def final_samples(results: Results, looks: dict[str, Look]) -> Figure:
    """Real images, held out where any are, and every method's last milestone (first seed), in one picture each."""
    name, images = real_images(results, results.experiment.sampling.grid)
    pictures = [(name, tile_images(images))]
    pictures += [(method, picture(results.of(method)[0].final.grid)) for method in results.methods]
    columns = min(4, len(pictures))
    rows = -(-len(pictures) // columns)
    drawing, grid = figure(9.5, 2.65 * rows - 0.25, rows, columns, between=0.15, above=0.4)
    for axes, (title, pixels) in zip(grid.flat, pictures):
        _show(axes, pixels)
        axes.set_title(title, fontsize=9.5, color=MUTED if title == name else INK)
    for axes in grid.flat[len(pictures) :]:
        axes.remove()
    return drawing


def image_by_image(results: Results, looks: dict[str, Look]) -> Figure:
    """The first images of the first seed one by one: rows of methods, columns of milestones."""
    from kairos.sampling.samples_file import open_samples

    methods, steps = results.methods, results.experiment.milestones
    grids = {(one.method, own.step): own.grid for one in reversed(results.trainings) for own in one.milestones}
    rows = {place: open_samples(grid.with_suffix(".npz")).images[:_BY_IMAGE] for place, grid in grids.items()}
    blank = np.full_like(next(iter(rows.values())), 255)
    cells = np.stack([rows.get(place, blank) for place in product(methods, steps)])  # (places, images, height, ...)
    height = 9.5 / len(blank) * len(methods) * blank.shape[1] / len(steps) / blank.shape[2]
    drawing, grid = figure(9.5, height, 1, len(blank), between=0.1)
    for number, axes in enumerate(grid[0]):
        pixels, extent = tile_images(cells[:, number], columns=len(steps)).squeeze(), (0, len(steps), len(methods), 0)
        axes.imshow(pixels, cmap="gray", vmin=0, vmax=255, interpolation="nearest", extent=extent, aspect="auto")
        axes.set_title(f"image {number + 1}", fontsize=9.5, color=MUTED)
        axes.set_xticks(np.arange(len(steps)) + 0.5, [f"{step:,}" for step in steps], fontsize=8)
        axes.set_yticks(np.arange(len(methods)) + 0.5, [] if number else methods, fontweight="bold")
        axes.tick_params(length=0, grid_alpha=0)
        axes.spines[:].set_visible(False)
    return drawing


def told_samples(results: Results, looks: dict[str, Look]) -> Figure:
    """The first captions or low-resolution images, the real images that they are of, and each method's last samples."""
    from kairos.data.dataset import open_dataset, reduce_resolution, to_uint8
    from kairos.sampling.conditions import select_condition_sources
    from kairos.sampling.samples_file import open_samples

    finals = {method: results.of(method)[0].final for method in results.methods}
    opened = {method: open_samples(final.grid.with_suffix(".npz")) for method, final in finals.items()}
    first, record = opened[results.methods[0]], finals[results.methods[0]].record
    count, dataset = min(_TOLD, len(first.images)), open_dataset(results.folder / "dataset")
    told = select_condition_sources(
        dataset, range(count), record["conditions"], first.protocol["labels"], first.protocol["seed"]
    )
    columns = {"real": dataset.images[told]} | {method: each.images[:count] for method, each in opened.items()}
    if factor := results.experiment.dataset.low_resolution:
        columns = {"told": to_uint8(reduce_resolution(dataset.load_tensor(told), factor))} | columns
    drawing, grid = figure(1.3 * len(columns), 1.4 * count, count, len(columns), between=0.1, above=0.1)
    for column, (name, images) in enumerate(columns.items()):
        grid[0, column].set_title(name, fontsize=9.5, color=INK if name in opened else MUTED)
        for axes, image in zip(grid[:, column], images):
            _show(axes, image)
    for axes, text in zip(grid[:, 0], first.conditions["text"][:count] if "text" in first.conditions else ()):
        caption = textwrap.fill(text.decode().replace("$", r"\$"), 30, max_lines=6)
        axes.text(-0.08, 0.5, caption, transform=axes.transAxes, ha="right", va="center", fontsize=9)
    return drawing


def picture(path: Path) -> np.ndarray:
    """The grid of samples at `path`, RGB."""
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def _show(axes: Axes, pixels: np.ndarray) -> None:
    axes.imshow(pixels.squeeze(), cmap="gray", vmin=0, vmax=255, interpolation="nearest")
    axes.axis("off")
