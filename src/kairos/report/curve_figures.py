"""Figures over training: the distance by steps and by time, training losses, validation loss per timestep."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kairos.report.collect import Results
from kairos.report.plot_style import MUTED, Label, Look, figure, label_lines, method_lines, own_time, plain_log
from kairos.report.ranking import curve

_POINTS = 1500  # points of a drawn line; more are not visible


def metric_label(name: str) -> str:
    """Return the axis label of a metric."""
    if name == "val_loss":
        return "validation loss (lower is better)"
    if name == "fid":
        return "FID (lower is better)"
    return f"Fréchet distance, {name.removeprefix('frechet_')} features (lower is better)"


def training_loss(results: Results, looks: dict[str, Look]) -> Figure:
    """Smoothed training losses: as minimised, and the squared error without weights; mean over seeds."""
    drawing, grid = figure(7.8, 2.95, 1, 2, between=1.9)
    logs = {method: [training.metrics for training in results.of(method)] for method in looks}
    panels = (("loss", "Loss that is minimised"), ("mse", "Squared error, unweighted"))
    for axes, (column, title) in zip(grid[0], panels):
        curves = {}
        for method in looks:
            tables = [table.set_index("step")[column] for table in logs[method] if column in table]
            if tables:
                mean = pd.concat(tables, axis=1, join="inner").mean(axis=1)
                mean = mean.rolling(max(1, len(mean) // 40), center=True, min_periods=1).mean()
                curves[method] = mean.iloc[:: -(-len(mean) // _POINTS)]
        words = {"title": title, "xlabel": "training step", "ylabel": "loss (smoothed, log)", "yscale": "log"}
        method_lines(axes, looks, curves, words)
    return drawing


def validation_loss(results: Results, looks: dict[str, Look]) -> Figure:
    """Validation loss per timestep at the last milestone: linear, logarithmic, and relative to uniform."""
    baseline = results.baseline
    rows = 1 if baseline is None else 2
    drawing, grid = figure(7.8, 3.7 * rows - 0.95, rows, 2, above=0.95, between=0.8)
    losses = {method: _per_timestep(results, method) for method in looks}
    words = own_time(results.experiment.diffusion.process["name"]) | {"ylabel": "validation loss"}
    for axes, scale in zip(grid[0], ("linear", "log")):
        shown = words | {"title": f"Loss per timestep, {scale} axis", "yscale": scale}
        method_lines(axes, looks, losses, shown, labelled=scale == "log")
    if baseline is None:
        return drawing
    for axes in grid[1]:
        axes.remove()
    axes = drawing.add_subplot(grid[1][0].get_gridspec()[1, :])
    ratios = {method: values / losses[baseline] for method, values in losses.items()}
    words |= {"ylabel": f"loss / loss of {baseline}", "title": f"Relative to {baseline}: below 1 is better there"}
    method_lines(axes, looks, ratios, words | {"yscale": "log"})
    return drawing


def metric(results: Results, looks: dict[str, Look], time: bool) -> Figure:
    """Distance against optimiser steps, or against training time."""
    drawing, grid = figure(5.85, 4.25)
    axes = grid[0][0]
    curves = {method: curve(results.measured, method) for method in looks}
    longest = max(np.nan_to_num(c.seconds).max() for c in curves.values())
    unit, divisor = ("h", 3600) if longest > 3 * 3600 else ("min", 60) if longest > 180 else ("s", 1)
    labels, right = [], 0.0
    for method, look in looks.items():
        own = curves[method]
        x = own.seconds / divisor if time else own.steps
        there = np.isfinite(own.mean + x)  # an unfinished experiment has not all, and there may be no clock
        x, mean = x[there], own.mean[there]
        up = np.nan_to_num(own.spread[there])  # no band where it is unknown
        down = np.minimum(up, mean * 0.999)  # a log axis has no zero
        axes.fill_between(x, mean - down, mean + up, color=look["color"], alpha=0.13, linewidth=0)
        drawn = look | {"markersize": 4.5, "linewidth": 1.6, "elinewidth": 0.9, "capsize": 2, "label": method}
        axes.errorbar(x, mean, [down, up], **drawn)
        right = max(right, x[-1])
        labels.append(Label(float(mean[-1]), method, look["color"], bold=True, x=float(x[-1])))
    for name, row in results.reference["rows"].items():
        value = row.get(results.primary_metric)
        if value is not None and value > 0:
            axes.axhline(value, color=MUTED, linewidth=1, linestyle=(0, (4, 3)), zorder=1, label=name)
            labels.append(Label(float(value), "floor: real, held out" if name == "floor" else name, MUTED))
    axes.set(yscale="log", ylabel=metric_label(results.primary_metric))
    plain_log(axes)
    if time:
        axes.set_xlabel(f"training time in {unit}")
    else:
        axes.set_xlabel(f"training step ({results.experiment.training.batch_size} images each)")
        _step_axis(axes, np.array(results.experiment.milestones, float))
    if right > 0:
        axes.set_xlim(right=right * 1.01)
    label_lines(axes, labels)
    return drawing


def _step_axis(axes: Axes, steps: np.ndarray) -> None:
    """Linear for evenly spread milestones, logarithmic past the first one where they grow by orders of magnitude."""
    if steps[-1] / steps[1] > 20:
        axes.set_xscale("symlog", linthresh=steps[1], linscale=0.4)
    axes.set_xticks(steps, [f"{step:,.0f}" for step in steps])
    axes.set_xlim(left=-0.03 * steps[1] if steps[-1] / steps[1] > 20 else -0.015 * steps[-1])


def _per_timestep(results: Results, method: str) -> "pd.Series[float]":
    tables = [training.final.evaluation["validation"]["per_timestep"] for training in results.of(method)]
    return pd.concat([pd.DataFrame(table).set_index("t")["loss"] for table in tables], axis=1).mean(axis=1)
