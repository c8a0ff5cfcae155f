"""Figures of images: samples over training, final samples next to real images, and samples with their conditions."""

import math
import textwrap
from itertools import chain, product
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from kairos.data.dataset import open_dataset
from kairos.data.image_grid import Picture, tile_images
from kairos.report.collect import Results, load_real_images
from kairos.report.plot_style import INK, MUTED, MethodStyle, create_figure
from kairos.sampling.samples_file import open_samples

_IMAGES_ONE_BY_ONE = 4  # images that are shown by method and snapshot
_CONDITIONED_IMAGES = 8  # captions or low-resolution images that are shown


def draw_samples_over_training(results: Results, styles: dict[str, MethodStyle]) -> Figure:
    """Draw the sample grids of the first seed, a row per method and a column per snapshot; missing ones are blank.

    In an unfinished experiment, the first seed is the first one that the method has. Methods without a style are left
    out.
    """
    methods = _select_methods(results, styles)
    steps = results.experiment.milestones
    side = min(1.9, 9.0 / len(steps))  # inches of a sample grid
    width, height = side * len(steps) + 0.05, side * len(methods)
    figure, grid = create_figure(width, height, len(methods), len(steps), column_space=0.08, row_space=0.08)
    for row, method in zip(grid, methods):
        grid_files = {snapshot.step: snapshot.grid_file for snapshot in results.runs_of(method)[0].snapshots}
        for axes, step in zip(row, steps):
            axes.axis("off")
            if step in grid_files:
                _show_image(axes, load_sample_grid(grid_files[step]))
        row[0].text(-0.06, 0.5, method, transform=row[0].transAxes, ha="right", va="center", fontweight="bold")
    for axes, step in zip(grid[0], steps):
        axes.set_title("untrained" if step == 0 else f"step {step:,}", loc="center", fontsize=9.5)
    return figure


def draw_final_samples(results: Results, styles: dict[str, MethodStyle]) -> Figure:
    """Draw a panel with a grid of real images, then a panel per method with its last sample grid, of the first seed.

    The real images are held out if possible, see `load_real_images`. Methods without a style are left out. The panels
    fill rows of four.
    """
    real_label, images = load_real_images(results.folder, results.experiment.sampling.grid)
    pictures = [(real_label, tile_images(images))]
    for method in _select_methods(results, styles):
        pictures.append((method, load_sample_grid(results.runs_of(method)[0].last_snapshot.grid_file)))
    columns = min(4, len(pictures))
    rows = math.ceil(len(pictures) / columns)
    height = 2.65 * rows - 0.25  # inches: about 2.3 per panel, and 0.4 between rows
    figure, grid = create_figure(9.5, height, rows, columns, column_space=0.15, row_space=0.4)
    for axes, (title, pixels) in zip(grid.flat, pictures):
        _show_image(axes, pixels)
        axes.set_title(title, fontsize=9.5, color=MUTED if title == real_label else INK)
    for axes in grid.flat[len(pictures) :]:
        axes.remove()
    return figure


def draw_image_by_image(results: Results, styles: dict[str, MethodStyle]) -> Figure:
    """Draw the first four samples, a panel per sample with a row per method and a column per snapshot.

    Samples are from the first seed that has the snapshot; the cell of a snapshot that no seed has is white. The caller
    ensures that the samples of all snapshots are saved. Methods without a style are left out.
    """
    methods = _select_methods(results, styles)
    steps = results.experiment.milestones
    # the images of every cell
    first_images: dict[tuple[str, int], np.ndarray] = {}  # (images, height, width, channels) by method, step
    for run in chain.from_iterable(results.runs_of(method) for method in methods):
        for snapshot in run.snapshots:
            if (run.method, snapshot.step) not in first_images:  # otherwise an earlier seed has the snapshot
                samples = open_samples(snapshot.grid_file.with_suffix(".npz"))
                first_images[run.method, snapshot.step] = samples.images[:_IMAGES_ONE_BY_ONE]
    blank = np.full_like(next(iter(first_images.values())), 255)
    cells = [first_images.get(method_and_step, blank) for method_and_step in product(methods, steps)]
    images = np.stack(cells)  # (methods x steps, images, height, width, channels)
    image_count, image_height, image_width, _ = blank.shape
    # a panel per image; sizes are in inches
    figure_width = 9.5
    panel_width = figure_width / image_count
    # the height at which pixels are square
    panel_height = panel_width * (len(methods) * image_height) / (len(steps) * image_width)
    figure, grid = create_figure(figure_width, panel_height, 1, image_count, column_space=0.1)
    for index, axes in enumerate(grid[0]):
        pixels = tile_images(images[:, index], columns=len(steps)).squeeze()  # gray ones without a channel dimension
        extent = (0, len(steps), len(methods), 0)  # left, right, bottom, top: an image has size 1
        axes.imshow(pixels, cmap="gray", vmin=0, vmax=255, interpolation="nearest", extent=extent, aspect="auto")
        axes.set_title(f"image {index + 1}", fontsize=9.5, color=MUTED)
        axes.set_xticks(np.arange(len(steps)) + 0.5, [f"{step:,}" for step in steps], fontsize=8)
        method_labels = methods if index == 0 else []  # only left of the first panel
        axes.set_yticks(np.arange(len(methods)) + 0.5, method_labels, fontweight="bold")
        axes.tick_params(length=0, grid_alpha=0)
        axes.spines[:].set_visible(False)
    return figure


def draw_conditional_samples(results: Results, styles: dict[str, MethodStyle]) -> Figure:
    """Draw the first conditions (captions or low-resolution images), their real images, and each method's last samples.

    Each row shows one condition; there are at most eight. The columns are the low-resolution image, if the experiment
    has such a condition, the real image, and each method's sample of the first seed. Captions are left of the row.
    Methods without a style are left out. The caller ensures that the samples of the last snapshots are saved, and that
    at least one method has a style.
    """
    from kairos.sampling.conditions import select_condition_sources  # imports torch, which other figures do not need

    methods = _select_methods(results, styles)
    snapshots = {}
    samples = {}
    for method in methods:
        snapshot = results.runs_of(method)[0].last_snapshot  # of the first seed
        snapshots[method] = snapshot
        samples[method] = open_samples(snapshot.grid_file.with_suffix(".npz"))
    # the real images whose conditions were used; conditions are equal for all methods
    first_method = methods[0]
    first_samples = samples[first_method]
    count = min(_CONDITIONED_IMAGES, len(first_samples.images))
    dataset = open_dataset(results.folder / "dataset")
    sources = select_condition_sources(
        dataset,
        indices=range(count),
        descriptions=snapshots[first_method].record["conditions"],
        labels=first_samples.protocol["labels"],
        seed=first_samples.protocol["seed"],
    )
    # a column of images per name
    columns = {}
    factor = results.experiment.dataset.low_resolution
    if factor:
        from kairos.data.pixels import reduce_resolution, to_uint8  # imports torch

        columns["low resolution"] = to_uint8(reduce_resolution(dataset.load_tensor(sources), factor))
    columns["real"] = dataset.images[sources]
    for method in methods:
        columns[method] = samples[method].images[:count]
    width, height = 1.3 * len(columns), 1.4 * count  # inches
    figure, grid = create_figure(width, height, count, len(columns), column_space=0.1, row_space=0.1)
    for column, (name, images) in enumerate(columns.items()):
        grid[0, column].set_title(name, fontsize=9.5, color=INK if name in samples else MUTED)
        for axes, image in zip(grid[:, column], images):
            _show_image(axes, image)
    captions = first_samples.conditions["text"][:count] if "text" in first_samples.conditions else ()  # UTF-8 bytes
    for axes, caption in zip(grid[:, 0], captions):
        text = caption.decode().replace("$", r"\$")  # "$" would begin a formula
        wrapped = textwrap.fill(text, 30, max_lines=6)
        axes.text(-0.08, 0.5, wrapped, transform=axes.transAxes, ha="right", va="center", fontsize=9)
    return figure


def _select_methods(results: Results, styles: dict[str, MethodStyle]) -> list[str]:
    """Return the methods that have a style, in the order of the configuration."""
    return [method for method in results.methods if method in styles]


def load_sample_grid(path: Path) -> Picture:
    """Load an image file, such as the picture of a sample grid, as RGB, uint8 (height, width, 3)."""
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def _show_image(axes: Axes, pixels: np.ndarray) -> None:
    """Show an image, gray (height, width, 1) or RGB with values from 0 to 255, in the axes without frame and ticks."""
    axes.imshow(pixels.squeeze(), cmap="gray", vmin=0, vmax=255, interpolation="nearest")
    axes.axis("off")
