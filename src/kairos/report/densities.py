"""Figures of the strategies themselves: density p(t) and effective weight p(t)·w(t), over training."""

from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kairos.report.collect import Results
from kairos.report.plot_style import INK, MUTED, Look, figure, own_time
from kairos.report.ranking import NOT_MOVED, moved

_COLUMNS = 3


def panels(results: Results, looks: dict[str, Look], column: str, label: str, scale: str) -> Figure:
    """A column of every method's strategy table, T times it, at every milestone."""
    methods, words = results.methods, own_time(results.experiment.diffusion.process["name"])
    steps = results.experiment.milestones
    columns = min(_COLUMNS, len(methods))
    rows = -(-len(methods) // columns)
    height = 2.25 * rows - 0.55
    drawing, grid = figure(8.7, height, rows, columns, between=0.3, above=0.5)
    colors = matplotlib.colormaps["viridis"](np.linspace(0.92, 0.0, len(steps)))
    handles = {"does not change": Line2D([], [], color=INK, linewidth=1.6)}
    highest = 0.0
    for axes in grid.flat[len(methods) :]:
        axes.remove()
    for place, (axes, method) in enumerate(zip(grid.flat, methods)):
        trainings = results.of(method)
        every = [(m.strategy[column], t.final.strategy[column]) for t in trainings for m in t.milestones]
        fixed = all(np.array_equal(*pair) for pair in every)
        lines: list[Any] = [(trainings[0].final, INK)]
        if not fixed:
            lines = [pair for training in trainings for pair in zip(training.milestones, colors)]
            handles |= {f"step {step:,}": Line2D([], [], color=each, linewidth=2) for step, each in zip(steps, colors)}
        for milestone, color in lines:
            table = milestone.strategy
            values = table[column].to_numpy(float) * len(table)
            highest = max(highest, float(values.max()))
            axes.plot(table["t"], values, color=color, linewidth=1.4 if fixed else 1.2)
        axes.axhline(1, color=MUTED, linewidth=0.8, linestyle=(0, (2, 2)), zorder=0)
        axes.set_title(method, fontsize=9.5)
        axes.text(1, 1.05, _note(trainings), transform=axes.transAxes, ha="right", fontsize=8, color=MUTED)
        below, left = place + columns >= len(methods), place % columns == 0
        axes.set(xscale=words["xscale"], xlabel=words["xlabel"] if below else "")
        axes.set(yscale=scale, ylabel=label if left else "")
        axes.tick_params(labelbottom=below, labelleft=left)
        axes.margins(x=0)
    for axes in drawing.axes:
        axes.set_ylim(*((0, highest * 1.08) if scale == "linear" else (highest * 1e-4, highest * 2)))
    corner: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (-0.014, 1 + 0.75 / height)}
    drawing.legend(handles.values(), handles, ncols=len(handles), fontsize=8.5, **corner)
    return drawing


def _note(trainings: list) -> str:  # type: ignore[type-arg]
    distances = [distance for distance in map(moved, trainings) if distance is not None]
    if not distances:
        return "fixed"
    return f"moved by {max(distances):.2f}" if max(distances) >= NOT_MOVED else "has not moved"
