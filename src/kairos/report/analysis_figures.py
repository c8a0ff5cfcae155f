"""Figures of the analyses, each drawn from the table of its analysis alone; lines are means over seeds."""

import math
from collections.abc import Callable, Iterator, Sequence
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
from kairos.analyses.settings import AnalysisOptions
from kairos.config import Experiment
from kairos.config.sweeps import parse_sweep_name
from kairos.forward_process import build_process
from kairos.report.plot_style import (
    INK,
    MUTED,
    Label,
    assign_styles,
    create_figure,
    grid_height,
    label_lines,
    style_log_axis,
    time_axis_settings,
)
from kairos.report.strategy_figures import EXPLODING_PROCESSES, SHADES, SUPPRESSION, write_png
from kairos_timesteps.diffusion.schedule import SCHEDULES, start_of_convergence

_BLUE, _SHADE = "#0072B2", "#DDE1E5"
# colours of lines by SpeeD's area; `SHADES` has lighter ones for backgrounds
_AREA_COLORS = {"acceleration": "#D55E00", "steady": "#7A4FA3", "deceleration": _BLUE, "convergence": MUTED}
_DASHED: dict[str, Any] = {"linewidth": 1.1, "linestyle": (0, (4, 2))}
_AGREEMENT_STEPS = 4  # snapshots that the figure of agreement shows
# colour and label by column of the table
_INCREMENT_MOMENTS = {"variance": (_BLUE, "variance"), "mean": ("#B27C00", "‖mean‖ / ‖x0‖")}
_TITLES: dict[Any, str] = {  # title by name of a loss or of a column
    "training": "training loss",
    "vlb": "VLB loss",
    "variance": "variance of the gradient",
    "loss_mean": "loss",
    "squared_mean": "‖mean gradient‖²",
    "noise_scale": "noise scale in samples",
}


def write_analysis(analysis: AnalysisOptions, experiment: Experiment, results: Path) -> None:
    """Compute the table of an analysis, and write it and its figure as ``analyses/NAME.csv`` and ``.png``, atomically.

    `results` is the results folder. The table is written first, and stays if the figure fails.

    Raises:
        KairosError: the table of a snapshot, or the training time of a run, is missing.
        FileNotFoundError: another result that the analysis reads, such as an evaluation, is missing.
    """
    name = analysis.name
    table = tables.build_table(analysis, experiment, results)
    tables.write_table(table, results / "analyses" / f"{name}.csv")
    write_png(lambda: _DRAW_FUNCTIONS[name](table, experiment), results / "analyses" / f"{name}.png")


def _draw_gradient_variance(table: pd.DataFrame, experiment: Experiment) -> Figure:
    """Draw variance of the gradient and loss over time, a row of four panels per method and a line per snapshot.

    The first two panels of a row show gradient variance and value of the training loss, the others those of the VLB
    loss. The background is the density of the drawn timesteps at the method's last snapshot. Lines and density are
    means over the seeds.
    """
    methods_with_rows = list(table.groupby("method", sort=False))
    colors = _snapshot_colors(table)
    time_settings = time_axis_settings(experiment.diffusion.process.name)
    panel_contents = list(product(("training", "vlb"), ("variance", "loss_mean")))  # loss and column of each panel
    row_count = len(methods_with_rows)
    height = grid_height(row_count, panel_height=2.2, row_space=0.8)
    figure, grid = create_figure(14.2, height, row_count, len(panel_contents), column_space=1.25, row_space=0.8)
    for panels, (method, rows) in zip(grid, methods_with_rows):
        density = _last_snapshot_rows(rows).groupby("t")["density"].mean()
        for axes, (loss, column) in zip(panels, panel_contents):
            _shade_density(axes, density)
            _draw_group_lines(axes, rows[rows["loss"] == loss], x="t", y=column, by="step", colors=colors)
            axes.set(title=f"{method}, {_TITLES[loss]}", **time_settings)
    _draw_snapshot_legend(figure, colors, Patch(facecolor=_SHADE, label="T · p(t) at the last snapshot (right axis)"))
    return figure


def _shade_density(axes: Axes, density: "pd.Series[float]") -> None:
    """Shade the area below a density, a series by time, as background, on a second y axis at the right.

    The background of the given axes becomes transparent.
    """
    background = axes.twinx()
    background.fill_between(density.index, density, color=_SHADE, linewidth=0)
    background.set(ylim=(0, 1.3 * max(1.6, density.max())))  # a uniform density, 1, fills at most the lower half
    background.grid(visible=False)
    # twinx draws the second axes above the first: bring the first to the front, without its opaque background
    axes.set_zorder(2)
    axes.patch.set_visible(False)


def _draw_areas(table: pd.DataFrame, experiment: Experiment) -> Figure:
    """Draw loss and variance of the gradient in SpeeD's areas over training, with the share of draws in each area.

    A row of panels shows one loss of one method: the loss at the left, the variance at the right. The areas' shares of
    the process and of the draws are from the last snapshot, and are written next to the lines.
    """
    groups = list(table.groupby(["method", "loss"], sort=False))
    height = grid_height(len(groups), panel_height=1.8, row_space=0.7)
    figure, grid = create_figure(7.4, height, len(groups), 2, column_space=0.9, row_space=0.7)
    for panels, ((method, loss), rows) in zip(grid, groups):
        for axes, column in zip(panels, ("loss_mean", "variance")):
            _draw_group_lines(axes, rows, x="step", y=column, by="area", colors=_AREA_COLORS)
            axes.set(xlabel="training step")
        last_means = _last_snapshot_rows(rows).groupby("area", sort=False).mean(numeric_only=True)
        labels = []
        for area, values in last_means.iterrows():
            process_share = 100 * (values["u_high"] - values["u_low"])  # ends of the area as fractions of the process
            # The density is the mean of T p(t) over the area's cells. Its product with their share of all T cells is
            # the sum of p(t) over these cells.
            draw_share = process_share * values["density"]
            text = f"{area}: {process_share:.0f} % of the process, {draw_share:.0f} % of the draws"
            labels.append(Label(values["variance"], text, _AREA_COLORS[str(area)]))
        label_lines(panels[1], labels)
        panels[0].set_title(f"{method}, {_TITLES[loss]}")
        panels[1].set_title(f"sampler speed suppresses from {_suppression_share(str(method), experiment):.0f} % on")
    return figure


def _suppression_share(method: str, experiment: Experiment) -> float:
    """Return the percentage of the process before the convergence area of sampler ``speed``.

    The options are those of the method if its sampler is ``speed``, else the defaults.
    """
    process = build_process(experiment.diffusion.process, experiment.diffusion.prediction, sigma_data=1.0)
    sampler = experiment.methods[method].sampler
    has_options = sampler.name == "speed"
    tau, r = (sampler.get("tau"), sampler.get("r")) if has_options else (None, None)
    return 100 * start_of_convergence(tau, r, process.schedule) / process.schedule.timesteps


def _draw_agreement(table: pd.DataFrame, experiment: Experiment) -> Figure:
    """Draw how gradients at different levels of ln SNR agree; each method has two rows of panels.

    The upper row has a matrix of cosines for each of the last snapshots, at most four. The lower row shows squared
    mean, variance and noise scale of the gradient by level, a line per snapshot. Estimates that are not positive are
    left out. With rows of loss ``preconditioned``, a fourth panel shows the noise scale in Adam's metric.
    """
    plain = table[table["loss"] == "training"]
    preconditioned = table[table["loss"] == "preconditioned"]
    methods = list(plain["method"].unique())
    colors = _snapshot_colors(plain)
    last_steps = list(colors)[-_AGREEMENT_STEPS:]
    row_count, column_count = 2 * len(methods), _AGREEMENT_STEPS
    width, height = 11.5, 5.2 * len(methods)
    figure, grid = create_figure(width, height, row_count, column_count, column_space=0.9, row_space=0.75)
    rows_by_method = grid.reshape(len(methods), 2, column_count)  # each method has an upper and a lower row of axes
    for (upper, lower), method in zip(rows_by_method, methods):
        rows = plain[plain["method"] == method]
        _draw_cosines(figure, upper, rows, last_steps, method)
        # rows and column of each panel in the lower row
        panel_contents = [(rows, "squared_mean"), (rows, "variance"), (rows, "noise_scale")]
        preconditioned_rows = preconditioned[preconditioned["method"] == method]
        if len(preconditioned_rows):
            panel_contents.append((preconditioned_rows, "noise_scale"))
        for axes, (panel_rows, column) in zip(lower, panel_contents):
            positive = panel_rows[panel_rows[column] > 0]  # a log axis has no zero
            _draw_group_lines(axes, positive, x="log_snr", y=column, by="step", colors=colors)
            axes.set(xlabel="ln SNR (left: almost clean)")
            axes.xaxis.set_inverted(True)
        # the panel in Adam's metric; it is removed below if it is unused
        lower[3].set_ylabel(f"{_TITLES['noise_scale']}, Adam's metric")
        unused_panels = [*upper[len(last_steps) :], *lower[len(panel_contents) :]]
        for axes in unused_panels:
            axes.remove()
    _draw_snapshot_legend(figure, colors)
    return figure


def _draw_cosines(
    figure: Figure, panels: Sequence[Axes], rows: pd.DataFrame, steps: Sequence[int], method: str
) -> None:
    """Draw the matrix of cosines between the gradients of two levels, a panel per step, with a colour bar.

    Cosines are means over the seeds. `rows` are the rows of one method, whose name is only used for the titles. `steps`
    has at least one step, and `panels` at least one axes per step. Further panels stay empty; the caller removes them.
    """
    for axes, step in zip(panels, steps):
        mean = rows[rows["step"] == step].groupby("level").mean(numeric_only=True)  # over seeds; a row per level
        cosines = mean[[f"cosine_{level}" for level in mean.index]]
        names = [f"{value:.0f}" for value in mean["log_snr"]]
        image = _draw_matrix(axes, cosines, columns=names, rows=names, vmin=-1, vmax=1)
        axes.set(title=f"{method}, step {step:,}", xlabel="ln SNR", ylabel="ln SNR" if axes is panels[0] else "")
    right_of_last_panel = panels[len(steps) - 1].inset_axes((1.05, 0, 0.05, 1))
    figure.colorbar(image, cax=right_of_last_panel, label="cosine")  # one bar, since all panels have one scale


def _draw_interdependence(table: pd.DataFrame, experiment: Experiment) -> Figure:
    """Draw a matrix per method and snapshot: how training on an interval of the process changes the loss on each.

    Rows are trained intervals, and the last row is the whole process. Columns are the intervals of the measured loss.
    The numbers are the loss after minus before, as in Kim et al. 2025, figure 4, means over the seeds. The colours are
    the change relative to the loss before.
    """
    figure, panels = _create_panels(table, ["method", "step"], columns=3, width=3.6, height=3.6, row_space=0.95)
    for axes, (method, step), rows in panels:
        mean = rows.groupby(["trained", "part"], sort=False)[["before", "change"]].mean()
        # rows: trained, columns: part, both in the order of the table, whose last trained part is the whole process
        percentages = 100 * (mean["change"] / mean["before"]).unstack("part")
        intervals = sorted({*zip(rows["u_low"], rows["u_high"])})  # fractions of the process
        names = [f"{100 * low:.0f}–{100 * high:.0f} %" for low, high in intervals]
        norm = SymLogNorm(1, vmin=-1000, vmax=1000)  # linear from -1 % to 1 %
        _draw_matrix(axes, percentages, columns=names, rows=[*names, "all"], norm=norm)
        differences = mean["change"].unstack("part").to_numpy()
        for (row, column), value in np.ndenumerate(percentages.to_numpy()):
            is_dark = value > 100 or value < -20  # the colour of the cell: purple darkens earlier than orange
            text = f"{differences[row, column]:+.1g}"
            color = "white" if is_dark else INK
            axes.text(column, row, text, ha="center", va="center", fontsize=8.5, color=color)
        axes.set(xlabel="measured on (0: clean)", ylabel="trained on")
        axes.set_title(f"{method}, step {step:,}: loss after minus before")
    return figure


def _draw_density(table: pd.DataFrame, experiment: Experiment) -> Figure:
    """Draw the trained density p(t) w(t) over its mean, a line per snapshot and a panel per method.

    The dashed line is p(t) over its mean, at the last snapshot. The y axis is logarithmic and equal in all panels;
    values below 0.02 are outside of it.
    """
    colors = _snapshot_colors(table)
    process = experiment.diffusion.process.name
    figure, panels = _create_panels(table, ["method"], columns=4, width=2.3, height=2.3, row_space=0.9)
    highest = max(2, table["trained"].max())  # a uniform density is 1
    for axes, (method,), rows in panels:
        last_density = _last_snapshot_rows(rows).groupby("t")["density"].mean()
        _draw_group_lines(axes, rows, x="t", y="trained", by="step", colors=colors)
        axes.plot(last_density.index, last_density, color=INK, **_DASHED)
        axes.set(title=method, ylim=(0.02, 1.5 * highest), ylabel="relative to uniform")
        axes.set(**time_axis_settings(process) | {"yscale": "log"})
        style_log_axis(axes)  # again: the ticks depend on the limits
    _draw_snapshot_legend(figure, colors, Line2D([], [], color=INK, **_DASHED, label="p(t) alone, without weights"))
    return figure


def _draw_relative_time(table: pd.DataFrame, experiment: Experiment) -> Figure:
    """Draw each method's distance over training time, in units of the time at which the baseline is at its best."""
    figure, grid = create_figure(5.6, 4.0)
    _draw_distance_over_time(grid[0, 0], table, experiment)
    return figure


def _draw_subset_size(table: pd.DataFrame, experiment: Experiment) -> Figure:
    """Draw three panels: distance against relative time, and time per step and last distance against the size |S|.

    The first panel has a line per method. In the other panels, a line connects the methods whose names differ in |S|
    alone, and dashed lines show the baseline, whose rows have no |S| (NaN in column ``selected``). Bars are one
    standard deviation over seeds.
    """
    figure, grid = create_figure(12.6, 3.2, 1, 3, column_space=2.1)
    _draw_distance_over_time(grid[0, 0], table, experiment)
    last_rows = _last_snapshot_rows(table)
    last_rows = last_rows.assign(step_milliseconds=1000 * last_rows["seconds"] / last_rows["step"])
    baseline_rows = last_rows[last_rows["selected"].isna()]
    sized_rows = last_rows.dropna(subset="selected")
    rows_by_line = dict(list(sized_rows.groupby(sized_rows["method"].map(_name_without_size), sort=False)))
    styles = assign_styles(list(rows_by_line), experiment.baseline)
    sizes = np.unique(sized_rows["selected"])
    panel_contents = (("step_milliseconds", "time of a step in ms"), ("distance", "last distance"))
    for axes, (column, label) in zip(grid[0, 1:], panel_contents):
        labels = []
        for name, rows in rows_by_line.items():
            by_size = rows.groupby("selected")[column]
            means, stds = by_size.mean(), by_size.std().fillna(0)  # over seeds; one seed has no standard deviation
            axes.errorbar(means.index, means, stds, **styles[name], label=name, capsize=2)
            labels.append(Label(float(means.iloc[-1]), name, styles[name]["color"], x=float(means.index[-1])))
        axes.axhline(baseline_rows[column].mean(), color=INK, **_DASHED)
        axes.set(xscale="log", xlabel=f"|S| (dashed: {experiment.baseline})", ylabel=label)
        axes.set_xticks(sizes, [f"{size:.0f}" for size in sizes])
        axes.set_xticks([], minor=True)
        label_lines(axes, labels)
    return figure


def _name_without_size(method: str) -> str:
    """Return the name of a method without its size |S| in a sweep: ``adaptive-lr=1`` for ``adaptive-selected=3-lr=1``.

    Names of methods outside of a sweep over `selected` are returned unchanged.
    """
    for option, value in parse_sweep_name(method):
        if option == "selected":
            return method.replace(f"-{option}={value}", "", 1)
    return method


_SUPPRESSION_TIME = 700  # of 1000: tau of sampler speed, which the paper sets directly


def _draw_increments(table: pd.DataFrame, experiment: Experiment) -> Figure:
    """Draw variance and mean of the increments with their bounds, a panel per process; the first time is left out.

    The background shows SpeeD's areas. The title contains the percentage of times in each area, in the order of the
    process and with t = 0.
    """
    figure, panels = _create_panels(table, ["process"], columns=4, width=2.2, height=2.4, row_space=0.8)
    for axes, (name,), rows in panels:
        area_shares = 100 * rows["area"].value_counts(normalize=True, sort=False)
        rows = rows.iloc[1:]  # without t = 0, which a log axis cannot show
        _draw_increment_moments(axes, rows)
        full_height = axes.get_xaxis_transform()  # y = 1 is the upper edge of the axes
        style: dict[str, Any] = {"fill": True, "alpha": 0.6, "linewidth": 0, "zorder": 0}
        for area, shade in SHADES.items():
            is_in_area = (rows["area"] == area).to_numpy()[:-1]  # a stair is between two times
            axes.stairs(is_in_area, rows["t"].to_numpy(), color=shade, transform=full_height, **style)
        if name in SCHEDULES:  # other processes have no timesteps
            axes.axvline(_SUPPRESSION_TIME, **SUPPRESSION, zorder=1)
        scale = "log" if name in EXPLODING_PROCESSES else "linear"
        axes.set(xscale=scale, yscale="log", xlabel="time t", xlim=(rows["t"].iloc[0], rows["t"].iloc[-1]))
        shares_text = " / ".join(f"{share:.0f}" for share in area_shares)
        axes.set_title(f"{name}: {shares_text} %", fontsize=9.5)
    handles: list[Any] = [Line2D([], [], color=color, label=label) for color, label in _INCREMENT_MOMENTS.values()]
    handles += [Line2D([], [], color=INK, **_DASHED, label="bounds")]
    handles += [Line2D([], [], **SUPPRESSION, label=f"sampler speed suppresses from t = {_SUPPRESSION_TIME}")]
    handles += [Patch(facecolor=SHADES[area], label=area) for area in _AREA_COLORS]
    _draw_snapshot_legend(figure, {}, *handles)
    return figure


def _draw_increment_moments(axes: Axes, rows: pd.DataFrame) -> None:
    """Draw the variance and the absolute mean of a process' increments over time, with their bounds as dashed lines.

    Values that are not positive are left out: the caller makes the y axis logarithmic. The caller also adds title,
    labels and legend. `rows` are the rows of one process, by ascending time.
    """
    # columns of the mean in the form of the variance's; the table has the bound of the squared mean
    rows = rows.assign(mean=rows["mean"].abs(), mean_bound=rows["mean_squared_bound"] ** 0.5)
    for column, (color, _) in _INCREMENT_MOMENTS.items():
        moment, bound = rows[column], rows[f"{column}_bound"]
        axes.plot(rows["t"], moment.where(moment > 0), color=color, linewidth=1.5)
        axes.plot(rows["t"], bound.where(bound > 0), color=INK, **_DASHED)


# each draws a figure from the table of its analysis and the experiment
_DRAW_FUNCTIONS: dict[str, Callable[[pd.DataFrame, Experiment], Figure]] = {
    "gradient_variance": _draw_gradient_variance,
    "areas": _draw_areas,
    "agreement": _draw_agreement,
    "interdependence": _draw_interdependence,
    "density": _draw_density,
    "relative_time": _draw_relative_time,
    "subset_size": _draw_subset_size,
    "increments": _draw_increments,
}


def _create_panels(
    table: pd.DataFrame, by: list[str], columns: int, width: float, height: float, row_space: float
) -> tuple[Figure, Iterator[tuple[Axes, Any, pd.DataFrame]]]:
    """Create a figure with a grid that has a panel for every group of a table; other cells of the grid are removed.

    `columns` is the largest number of columns of the grid. `width` and `height` of a panel, and `row_space`, are in
    inches. A panel is up to 0.75 inches wider than `width`.

    Returns:
        The figure; and an iterator over axes, key and rows of each group, in the order of the table. A key is a tuple
            with a value per column of `by`.
    """
    groups = list(table.groupby(by, sort=False))
    columns = min(columns, len(groups))
    rows = math.ceil(len(groups) / columns)
    column_space = 0.75  # inches
    # one space more than there are between the columns: it widens the panels
    figure_width = (width + column_space) * columns
    figure_height = grid_height(rows, height, row_space)
    figure, grid = create_figure(
        figure_width, figure_height, rows, columns, column_space=column_space, row_space=row_space
    )
    for axes in grid.flat[len(groups) :]:
        axes.remove()
    panels = ((axes, key, group_rows) for axes, (key, group_rows) in zip(grid.flat, groups))
    return figure, panels


def _last_snapshot_rows(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the last snapshot in a table: those with the highest step of all rows."""
    rows: pd.DataFrame = table[table["step"] == table["step"].max()]
    return rows


def _snapshot_colors(table: pd.DataFrame) -> dict[int, Any]:
    """Return a colour (RGBA) by step for the steps in a table; steps ascend, from light to dark."""
    steps = np.sort(table["step"].unique()).tolist()
    colors = matplotlib.colormaps["viridis"](np.linspace(0.9, 0.0, len(steps)))
    return dict(zip(steps, colors))


def _draw_group_lines(axes: Axes, table: pd.DataFrame, x: str, y: str, by: str, colors: dict[Any, Any]) -> None:
    """Draw column `y` against column `x`, a line per group of column `by`; make the y axis logarithmic and label it.

    Rows of a group with equal `x`, such as rows of several seeds, are averaged. `colors` has a colour for each group.
    The label is the column's title in `_TITLES`, or else its name.
    """
    for key, rows in table.groupby(by, sort=False):
        mean = rows.groupby(x)[y].mean()
        marker = "o" if len(mean) < 40 else ""  # many markers would hide the line
        axes.plot(mean.index, mean, color=colors[key], linewidth=1.3, marker=marker, markersize=2.5)
    axes.set(yscale="log", ylabel=_TITLES.get(y, y))
    style_log_axis(axes)


def _draw_matrix(axes: Axes, values: pd.DataFrame, columns: list[str], rows: list[str], **scale: Any) -> Any:
    """Draw a matrix as an image with labelled rows and columns, and return matplotlib's image, for a colour bar.

    Orange is above 0, purple below, grey unknown. `columns` and `rows` are the labels; `rows` may have more labels than
    the matrix has rows. The arguments `scale` of `imshow` map values to colours.
    """
    image = axes.imshow(values, cmap="PuOr_r", interpolation="nearest", **scale)
    axes.set_facecolor(_SHADE)
    axes.set_xticks(range(len(columns)), columns, fontsize=7.5)
    axes.set_yticks(range(len(values)), rows[: len(values)], fontsize=7.5)
    axes.grid(visible=False)
    return image


def _draw_distance_over_time(axes: Axes, table: pd.DataFrame, experiment: Experiment) -> None:
    """Draw the distance of each method against relative time, with a band of one standard deviation over seeds.

    The snapshot before training (step 0) is left out. A line is labelled with its method. With one seed there is no
    band. The function makes the y axis logarithmic, labels both axes, and sets the limits of the x axis. The caller
    ensures that the table contains the baseline.
    """
    labels: list[Label] = []
    for method, style in assign_styles(list(table["method"].unique()), experiment.baseline).items():
        groups = table[(table["method"] == method) & (table["step"] > 0)].groupby("step")
        x, y = groups["relative_time"].mean(), groups["distance"].mean()
        std = groups["distance"].std().fillna(0)
        lower = (y - std).clip(lower=1e-3 * y)  # a log axis has no zero
        axes.fill_between(x, lower, y + std, color=style["color"], alpha=0.13, linewidth=0)
        axes.plot(x, y, **style | {"markersize": 4.5})
        labels.append(Label(float(y.iloc[-1]), method, style["color"], x=float(x.iloc[-1])))
    axes.set(yscale="log", xlabel=f"time (1: {experiment.baseline} at its best)", ylabel=table["metric"].iloc[0])
    axes.set_xlim(0, 1.03 * table["relative_time"].max())
    style_log_axis(axes)
    label_lines(axes, labels)


def _draw_snapshot_legend(figure: Figure, colors: dict[int, Any], *more_handles: Any) -> None:
    """Draw a legend above the panels, with a line in the colour of each snapshot and further matplotlib handles."""
    handles = [Line2D([], [], color=color, linewidth=2, label=f"step {step:,}") for step, color in colors.items()]
    left = -0.014  # the legend's padding would move its text right of the panels' edge
    top = 1 + 0.72 / figure.get_figheight()  # 0.72 inches above the panels, over their titles
    figure.legend(handles=[*handles, *more_handles], loc="upper left", ncols=8, bbox_to_anchor=(left, top))
