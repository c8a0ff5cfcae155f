"""Figures of the analyses, each drawn from its table alone, and both written; lines are means over seeds."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import SymLogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from kairos.analyses import tables
from kairos.report.plot_style import INK, MUTED, Label, figure, label_lines, looks, own_time, plain_log
from kairos.report.strategy_figures import SHADES, write_png

_BLUE, _SHADE = "#0072B2", "#DDE1E5"
_AREAS = {"acceleration": "#D55E00", "steady": "#7A4FA3", "deceleration": _BLUE, "convergence": MUTED}
_DASHED: dict[str, Any] = {"linewidth": 1.1, "linestyle": (0, (4, 2))}
_NAMES: dict[Any, str] = {
    "training": "training loss",
    "vlb": "VLB loss",
    "variance": "variance of the gradient",
    "loss_mean": "loss",
    "squared_mean": "‖mean gradient‖²",
    "noise_scale": "noise scale in samples",
}


def write(named: dict[str, Any], experiment: Any, results: Path) -> None:
    """Write table and figure of an analysis into the folder ``analyses``, each whole or not at all.

    Args:
        named: the analysis with its options.
        experiment: what it is of.
        results: its folder.

    Raises:
        KairosError: something that it is made of is missing.
    """
    name, rows = named["name"], tables.table(named, experiment, results)
    tables.write(rows, results / "analyses" / f"{name}.csv")
    write_png(lambda: globals()[f"_{name}"](rows, experiment), results / "analyses" / f"{name}.png")


def _gradient_variance(table: pd.DataFrame, experiment: Any) -> Figure:
    """Variance of the gradient and loss over time, a line a milestone; behind them the last one's density."""
    methods, colors = list(table.groupby("method", sort=False)), _colors(table)
    drawing, grid = figure(14.2, 3.0 * len(methods) - 0.8, len(methods), 4, between=1.25, above=0.8)
    for row, (method, own) in zip(grid, methods):
        for axes, (loss, value) in zip(row, product(("training", "vlb"), ("variance", "loss_mean"))):
            last = own[own["step"] == own["step"].max()].groupby("t")["density"].mean()
            behind = axes.twinx()
            behind.fill_between(last.index, last, color=_SHADE, linewidth=0)
            behind.set(ylim=(0, 1.3 * max(1.6, last.max())))
            behind.grid(visible=False)
            axes.set_zorder(2)
            axes.patch.set_visible(False)
            _lines(axes, own[own["loss"] == loss], "t", value, "step", colors)
            axes.set(title=f"{method}, {_NAMES[loss]}", **own_time(experiment.diffusion.process["name"]))
    _legend(drawing, colors, Patch(facecolor=_SHADE, label="T · p(t) at the last milestone (right axis)"))
    return drawing


def _areas(table: pd.DataFrame, experiment: Any) -> Figure:
    """Loss and variance of the gradient in SpeeD's areas over training; shares of the process and of the draws."""
    groups = list(table.groupby(["method", "loss"], sort=False))
    drawing, grid = figure(7.4, 2.5 * len(groups) - 0.7, len(groups), 2, between=0.9, above=0.7)
    for row, ((method, loss), own) in zip(grid, groups):
        last = own[own["step"] == own["step"].max()].groupby("area", sort=False).mean(numeric_only=True)
        share, labels = 100 * (last["u_high"] - last["u_low"]), []
        for axes, value in zip(row, ("loss_mean", "variance")):
            _lines(axes, own, "step", value, "area", _AREAS)
            axes.set(xlabel="training step")
        for area, own_share in share.items():
            text = f"{area}: {own_share:.0f} % of the process, {own_share * last['density'][area]:.0f} % of the draws"
            labels.append(Label(last["variance"][area], text, _AREAS[str(area)]))
        label_lines(row[1], labels)
        row[0].set_title(f"{method}, {_NAMES[loss]}")
    return drawing


def _agreement(table: pd.DataFrame, experiment: Any) -> Figure:
    """Cosines between levels of ln SNR at up to four milestones; below, size and noise of the gradient by level."""
    table, adam = table[table["loss"] == "training"], table[table["loss"] == "preconditioned"]
    methods, colors = list(table["method"].unique()), _colors(table)
    drawing, grid = figure(11.5, 5.2 * len(methods), 2 * len(methods), 4, between=0.9, above=0.75)
    for (above, below), method in zip(grid.reshape(-1, 2, 4), methods):
        own, metric = table[table["method"] == method], adam[adam["method"] == method]
        for axes, step in zip(above, list(colors)[-4:]):
            mean = own[own["step"] == step].groupby("level").mean(numeric_only=True)
            cosines = mean[[f"cosine_{k}" for k in mean.index]]
            names = [f"{value:.0f}" for value in mean["log_snr"]]
            image = _matrix(axes, cosines, names, names, vmin=-1, vmax=1)
            axes.set(title=f"{method}, step {step:,}", xlabel="ln SNR", ylabel="ln SNR" if axes is above[0] else "")
        drawing.colorbar(image, cax=axes.inset_axes((1.05, 0, 0.05, 1)), label="cosine")
        values = ("squared_mean", "variance", "noise_scale", "noise_scale")
        for axes, value, rows in zip(below, values, (own, own, own, metric)):
            _lines(axes, rows[rows[value] > 0], "log_snr", value, "step", colors)
            axes.set(xlabel="ln SNR (left: almost clean)")
            axes.xaxis.set_inverted(True)
        below[3].set_ylabel(f"{_NAMES['noise_scale']}, Adam's metric")
        for axes in (*above[len(colors) :], *below[4 if len(metric) else 3 :]):
            axes.remove()
    _legend(drawing, colors)
    return drawing


def _interdependence(table: pd.DataFrame, experiment: Any) -> Figure:
    """A matrix a milestone: the loss' change in % on every part, a row for each part that was trained on."""
    drawing, panels = _panels(table, ["method", "step"], 3, 3.6, 3.6, 0.95)
    for axes, (method, step), own in panels:
        mean = own.groupby(["trained", "part"], sort=False)[["before", "change"]].mean()
        change = 100 * (mean["change"] / mean["before"]).unstack("part")
        names = [f"{100 * low:.0f}–{100 * high:.0f} %" for low, high in sorted({*zip(own["u_low"], own["u_high"])})]
        _matrix(axes, change, names, [*names, "all"], norm=SymLogNorm(1, vmin=-1000, vmax=1000))
        for (row, column), value in np.ndenumerate(change.to_numpy()):
            color = "white" if value > 100 or value < -20 else INK
            text = f"{value:+.{int(abs(value) < 10)}f}"
            axes.text(column, row, text, ha="center", va="center", fontsize=8.5, color=color)
        axes.set(xlabel="measured on (0: clean)", ylabel="trained on")
        axes.set_title(f"{method}, step {step:,}: change of loss, %")
    return drawing


def _density(table: pd.DataFrame, experiment: Any) -> Figure:
    """Plot the trained density p(t) w(t) over its mean, a line per milestone, in a panel per method.

    The dashed line is p(t) over its mean, at the last milestone.
    """
    colors, process = _colors(table), experiment.diffusion.process["name"]
    drawing, panels = _panels(table, ["method"], 4, 2.3, 2.3, 0.9)
    for axes, (method,), own in panels:
        last = own[own["step"] == own["step"].max()].groupby("t").mean(numeric_only=True)
        _lines(axes, own, "t", "trained", "step", colors)
        axes.plot(last.index, last["density"], color=INK, **_DASHED)
        axes.set(title=method, ylim=(0.02, 1.5 * max(2, table["trained"].max())), ylabel="relative to uniform")
        axes.set(**own_time(process) | {"yscale": "log"})
        plain_log(axes)
    _legend(drawing, colors, Line2D([], [], color=INK, **_DASHED, label="p(t) alone, without weights"))
    return drawing


def _relative_time(table: pd.DataFrame, experiment: Any) -> Figure:
    """Distance over time, 1 where the baseline is at its best."""
    drawing, grid = figure(5.6, 4.0)
    _against_time(grid[0, 0], table, experiment)
    return drawing


def _subset_size(table: pd.DataFrame, experiment: Any) -> Figure:
    """Plot distance against relative time by |S|, and time per step and last distance against |S|.

    Dashed lines in the panels against |S|: the baseline.
    """
    drawing, grid = figure(12.6, 3.2, 1, 3, between=2.1)
    _against_time(grid[0, 0], table, experiment)
    last = table[table["step"] == table["step"].max()]
    last = last.assign(rate=1000 * last["seconds"] / last["step"])
    for axes, (value, label) in zip(grid[0, 1:], (("rate", "time of a step in ms"), ("distance", "last distance"))):
        mean = last.groupby("selected")[value].agg(["mean", "std"]).fillna(0)
        axes.errorbar(mean.index, mean["mean"], mean["std"], color=_BLUE, marker="o", capsize=2)
        axes.axhline(last[last["selected"].isna()][value].mean(), color=INK, **_DASHED)
        axes.set(xscale="log", xlabel=f"|S| (dashed: {experiment.baseline})", ylabel=label)
        axes.set_xticks(mean.index, [f"{size:.0f}" for size in mean.index])
        axes.set_xticks([], minor=True)
    return drawing


def _increments(table: pd.DataFrame, experiment: Any) -> Figure:
    """Variance and mean of the increments with their bounds, on SpeeD's areas, whose shares are written above."""
    kinds = {"variance": (_BLUE, "variance"), "mean": ("#B27C00", "‖mean‖ / ‖x0‖")}
    drawing, panels = _panels(table, ["process"], 4, 2.2, 2.4, 0.8)
    for axes, (name,), own in panels:
        shares = 100 * own["area"].value_counts(normalize=True, sort=False)
        own = own.iloc[1:].assign(mean=own["mean"].abs(), mean_bound=own["mean_squared_bound"] ** 0.5)
        for value, (color, _) in kinds.items():
            axes.plot(own["t"], own[value].where(own[value] > 0), color=color, linewidth=1.5)
            bound = own[f"{value}_bound"]
            axes.plot(own["t"], bound.where(bound > 0), color=INK, **_DASHED)
        for area, shade in SHADES.items():
            inside = (own["area"] == area).to_numpy()[:-1]
            look: dict[str, Any] = {"fill": True, "alpha": 0.6, "linewidth": 0, "zorder": 0}
            axes.stairs(inside, own["t"].to_numpy(), color=shade, transform=axes.get_xaxis_transform(), **look)
        scale = "log" if name in ("ve", "edm") else "linear"
        axes.set(xscale=scale, yscale="log", xlabel="time t", xlim=(own["t"].iloc[0], own["t"].iloc[-1]))
        axes.set_title(f"{name}: {' / '.join(f'{share:.0f}' for share in shares)} %", fontsize=9.5)
    handles = [Line2D([], [], color=color, label=label) for color, label in kinds.values()]
    handles += [Line2D([], [], color=INK, **_DASHED, label="bounds")]
    _legend(drawing, {}, *handles, *(Patch(facecolor=SHADES[area], label=area) for area in _AREAS))
    return drawing


def _panels(
    table: pd.DataFrame, by: list[str], columns: int, width: float, height: float, above: float
) -> tuple[Figure, Iterator[tuple[Axes, Any, pd.DataFrame]]]:
    """A figure with axes for every group of a table, and what they are of."""
    groups = list(table.groupby(by, sort=False))
    columns = min(columns, len(groups))
    rows = -(-len(groups) // columns)
    size = (width + 0.75) * columns, (height + above) * rows - above
    drawing, grid = figure(*size, rows, columns, between=0.75, above=above)
    for axes in grid.flat[len(groups) :]:
        axes.remove()
    return drawing, ((axes, key, own) for axes, (key, own) in zip(grid.flat, groups))


def _colors(table: pd.DataFrame) -> dict[int, Any]:
    """A colour per milestone, from light to dark."""
    steps = np.sort(table["step"].unique()).tolist()
    return dict(zip(steps, matplotlib.colormaps["viridis"](np.linspace(0.9, 0.0, len(steps)))))


def _lines(axes: Axes, table: pd.DataFrame, x: str, y: str, by: str, colors: dict[Any, Any]) -> None:
    """A line per group on a log axis, with points where they are few."""
    for key, own in table.groupby(by, sort=False):
        mean = own.groupby(x)[y].mean()
        axes.plot(mean.index, mean, color=colors[key], linewidth=1.3, marker="o" * (len(mean) < 40), markersize=2.5)
    axes.set(yscale="log", ylabel=_NAMES.get(y, y))
    plain_log(axes)


def _matrix(axes: Axes, values: pd.DataFrame, columns: list[str], rows: list[str], **scale: Any) -> Any:
    """Numbers as colours, orange above 0 and purple below; grey where there is none."""
    image = axes.imshow(values, cmap="PuOr_r", interpolation="nearest", **scale)
    axes.set_facecolor(_SHADE)
    axes.set_xticks(range(len(columns)), columns, fontsize=7.5)
    axes.set_yticks(range(len(values)), rows[: len(values)], fontsize=7.5)
    axes.grid(visible=False)
    return image


def _against_time(axes: Axes, table: pd.DataFrame, experiment: Any) -> None:
    """A line per method, named at its end; the band is the spread over seeds."""
    labels: list[Label] = []
    for method, look in looks(list(table["method"].unique()), experiment.baseline).items():
        groups = table[(table["method"] == method) & (table["step"] > 0)].groupby("step")
        x, y, off = groups["relative_time"].mean(), groups["distance"].mean(), groups["distance"].std().fillna(0)
        axes.fill_between(x, (y - off).clip(lower=1e-3 * y), y + off, color=look["color"], alpha=0.13, linewidth=0)
        axes.plot(x, y, **look | {"markersize": 4.5})
        labels.append(Label(float(y.iloc[-1]), method, look["color"], x=float(x.iloc[-1])))
    axes.set(yscale="log", xlabel=f"time (1: {experiment.baseline} at its best)", ylabel=table["metric"].iloc[0])
    axes.set_xlim(0, 1.03 * table["relative_time"].max())
    plain_log(axes)
    label_lines(axes, labels)


def _legend(drawing: Figure, colors: dict[int, Any], *more: Any) -> None:
    """The milestones' colours, and more, above the figure."""
    handles = [Line2D([], [], color=color, linewidth=2, label=f"step {step:,}") for step, color in colors.items()]
    at = (-0.014, 1 + 0.72 / drawing.get_figheight())
    drawing.legend(handles=[*handles, *more], loc="upper left", ncols=8, bbox_to_anchor=at)
