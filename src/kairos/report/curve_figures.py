"""Figures of curves: distance and losses over training, distance by option of a sweep, and strategies over time."""

import math
import textwrap
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kairos.config.sweeps import parse_sweep_name
from kairos.report.collect import Results, RunResults, SnapshotResults
from kairos.report.plot_style import (
    BAND,
    INK,
    MUTED,
    WARNING,
    Label,
    MethodStyle,
    create_figure,
    draw_band,
    draw_method_lines,
    grid_height,
    label_lines,
    style_log_axis,
    time_axis_settings,
)
from kairos.report.ranking import NOT_MOVED, Curve, build_curve, distance_from_start
from kairos.report.shown_methods import MOST_SHOWN

_POINTS = 1500  # points of a line; more are not visible
_LABELLED_LINES = 5  # named lines in a panel with more than MOST_SHOWN lines
# style of a line that no method determines
_SWEEP_STYLE: MethodStyle = {"color": MUTED, "marker": "o", "linestyle": "-"}
_STRATEGY_COLUMNS = 3  # columns of the grid that has a panel per strategy
_FLATTENING = 10  # a panel this many times higher than the median panel would flatten the others


def metric_label(name: str) -> str:
    """Return the axis label of a metric; its name is ``val_loss_<prediction>``, ``fid``, or ``frechet_<extractor>``."""
    if name.startswith("val_loss_"):
        return f"validation loss, squared error of {name.removeprefix('val_loss_')} (lower is better)"
    if name == "fid":
        return "FID (lower is better)"
    return f"Fréchet distance, {name.removeprefix('frechet_')} features (lower is better)"


def draw_training_loss(results: Results, styles: dict[str, MethodStyle]) -> Figure:
    """Draw smoothed training losses, mean over seeds, in two panels: minimised loss, and squared error without weights.

    A method has no line in a panel if its training log is missing or lacks the loss. Methods without a style are left
    out, without a band, because levels of training losses cannot be compared between methods.
    """
    figure, grid = create_figure(7.8, 2.95, 1, 2, column_space=1.9)
    prediction = results.experiment.diffusion.prediction_name
    panels = (("loss", "Loss that is minimised"), ("mse", f"Squared error of {prediction}, unweighted"))
    for axes, (column, title) in zip(grid[0], panels):
        lines = {}
        for method in styles:
            logs = [run.metrics for run in results.runs_of(method)]
            losses = [log.set_index("step")[column] for log in logs if column in log]  # one per seed
            if losses:
                lines[method] = _smooth_mean(losses)
        settings = {"title": title, "xlabel": "training step", "ylabel": "loss (smoothed, log)", "yscale": "log"}
        draw_method_lines(axes, styles, lines, settings)
    return figure


def _smooth_mean(losses: "list[pd.Series[float]]") -> "pd.Series[float]":
    """Return the mean over seeds at the logged steps that all seeds have, smoothed and thinned to at most 1500 points.

    Each point is the moving average over a fortieth of the points. The input has a series by step for each seed.
    """
    mean = pd.concat(losses, axis=1, join="inner").mean(axis=1)
    window = max(1, len(mean) // 40)
    smoothed = mean.rolling(window, center=True, min_periods=1).mean()
    stride = max(1, math.ceil(len(mean) / _POINTS))
    return smoothed.iloc[::stride]


def draw_validation_loss(results: Results, styles: dict[str, MethodStyle]) -> Figure:
    """Draw the validation loss per timestep at the last common snapshot, mean over seeds, in two or three panels.

    The panels are the loss on a linear and on a logarithmic axis, and below them its ratio to the baseline's loss.
    Without a baseline the third panel is left out. Methods without a style are a grey band. The caller ensures that the
    losses exist, see `Results.has_validation_losses`.
    """
    baseline = results.baseline
    rows = 1 if baseline is None else 2
    height = grid_height(rows, panel_height=2.75, row_space=0.95)
    figure, grid = create_figure(7.8, height, rows, 2, row_space=0.95, column_space=0.8)
    losses = {method: _loss_per_timestep(results, method) for method in results.methods}
    prediction = results.experiment.diffusion.prediction_name
    settings = time_axis_settings(results.experiment.diffusion.process.name)
    settings |= {"ylabel": f"squared error of {prediction}"}
    for axes, scale in zip(grid[0], ("linear", "log")):
        title = f"Loss per timestep, {scale} axis"
        labelled = scale == "log"  # the labels of the right panel serve both panels
        draw_method_lines(axes, styles, losses, settings | {"title": title, "yscale": scale}, labelled=labelled)
    if baseline is None:
        return figure
    # one panel as wide as the second row
    whole_row = grid[1][0].get_gridspec()[1, :]
    for axes in grid[1]:
        axes.remove()
    axes = figure.add_subplot(whole_row)
    ratios = {method: values / losses[baseline] for method, values in losses.items()}
    settings |= {"ylabel": f"error / error of {baseline}", "title": f"Relative to {baseline}: below 1 is better there"}
    draw_method_lines(axes, styles, ratios, settings | {"yscale": "log"})
    return figure


def _loss_per_timestep(results: Results, method: str) -> "pd.Series[float]":
    """Return a method's validation loss at the last common snapshot, mean over seeds, indexed by the time t."""
    losses_by_seed = []
    for snapshot in results.common_snapshots[method]:
        table = pd.DataFrame(snapshot.evaluation["validation"]["per_timestep"])
        losses_by_seed.append(table.set_index("t")[results.validation_metric.removeprefix("val_")])
    return pd.concat(losses_by_seed, axis=1).mean(axis=1)


def draw_distance(results: Results, styles: dict[str, MethodStyle], over_time: bool) -> Figure:
    """Draw the primary metric of every method against optimizer steps, or against training time if `over_time`.

    Values are means over seeds, with a bar and a band of one standard deviation. Methods without a style are a grey
    band. Reference rows are dashed lines. The y axis is logarithmic. Points without a known value or time are left out.
    A method without a known point has neither a curve nor a label.
    """
    figure, grid = create_figure(5.85, 4.25)
    axes = grid[0][0]
    curves = {method: build_curve(results.measurements, method) for method in results.methods}
    # a time is NaN without a clock, and is treated as 0; the time unit is not used if `over_time` is False
    longest_seconds = max(np.nan_to_num(curve.seconds).max() for curve in curves.values())
    unit, unit_seconds = _choose_time_unit(longest_seconds)
    labels = []
    right_end = 0.0  # right end of the shown curves
    for method, style in styles.items():
        curve = curves[method]
        x = curve.seconds / unit_seconds if over_time else curve.steps
        is_known = np.isfinite(curve.mean) & np.isfinite(x)
        if is_known.any():
            labels.append(_draw_distance_curve(axes, curve, x, is_known, method, style))
            right_end = max(right_end, x[is_known][-1])
    other_curves = [curve for method, curve in curves.items() if method not in styles]
    if other_curves:
        labels += _draw_other_curves(axes, other_curves, unit_seconds if over_time else None)
    labels += _draw_reference_rows(axes, results)
    # the axes, before the labels, whose heights depend on the limits
    axes.set(yscale="log", ylabel=metric_label(results.primary_metric))
    style_log_axis(axes)
    draw_warning_title(axes, results)
    if over_time:
        machine = "".join(f"\non {name}" for name in results.measurements.methods_by_machine)  # one, or no known time
        axes.set_xlabel(f"training time in {unit}{machine if results.measurements.has_one_clock else ''}")
    else:
        axes.set_xlabel(f"training step ({results.experiment.training.batch_size} images each)")
        _style_step_axis(axes, np.array(results.experiment.milestones, float))
    if right_end > 0:  # 0: no time after step 0 is known
        axes.set_xlim(right=right_end * 1.01)
    label_lines(axes, labels)
    return figure


def draw_warning_title(axes: Axes, results: Results) -> None:
    """Write why the primary metric cannot rank the methods above a panel; nothing if it can."""
    reasons = " ".join(results.measurements.reasons_not_to_rank)
    if reasons:
        axes.set_title(textwrap.fill(reasons, 95), fontsize=8, color=WARNING, loc="left")


def _choose_time_unit(longest: float) -> tuple[str, int]:
    """Return the unit for times up to `longest` seconds, and the unit's length in seconds.

    The unit is ``h`` for more than 3 hours, ``min`` for more than 3 minutes, else ``s``.
    """
    if longest > 3 * 3600:
        return "h", 3600
    if longest > 3 * 60:
        return "min", 60
    return "s", 1


def _draw_distance_curve(
    axes: Axes, curve: Curve, x: np.ndarray, is_known: np.ndarray, method: str, style: MethodStyle
) -> Label:
    """Draw a distance curve with bars and a band of one standard deviation, and return the label of its end.

    Points that are not `is_known` are left out: values of an unfinished experiment may be missing, and times without a
    clock. The caller ensures that a point is known, makes the y axis logarithmic, and writes the label.
    """
    x, mean = x[is_known], curve.mean[is_known]
    std_above = np.nan_to_num(curve.std[is_known])  # no band where it is unknown
    std_below = np.minimum(std_above, mean * 0.999)  # a log axis has no zero
    axes.fill_between(x, mean - std_below, mean + std_above, color=style["color"], alpha=0.13, linewidth=0)
    widths = {"markersize": 4.5, "linewidth": 1.6, "elinewidth": 0.9, "capsize": 2}
    axes.errorbar(x, mean, [std_below, std_above], label=method, **style | widths)
    return Label(float(mean[-1]), method, style["color"], bold=True, x=float(x[-1]))


def _draw_other_curves(axes: Axes, curves: list[Curve], unit_seconds: int | None) -> list[Label]:
    """Draw the range and the median of the curves of methods without a style, and return the label of the range.

    Without a known point, nothing is drawn and the list is empty. A step is included if any curve has it. The x axis is
    the step if `unit_seconds` is None. Otherwise it is the training time up to the step, mean over methods, in units of
    `unit_seconds`. The caller writes the label.
    """
    means = pd.concat([pd.Series(curve.mean, curve.steps) for curve in curves], axis=1).sort_index()  # a row per step
    x = means.index.to_numpy(float)
    if unit_seconds is not None:
        seconds = pd.concat([pd.Series(curve.seconds, curve.steps) for curve in curves], axis=1).sort_index()
        x = seconds.mean(axis=1).to_numpy(float) / unit_seconds
    is_known = means.notna().any(axis=1) & np.isfinite(x)
    return [draw_band(axes, x, means.to_numpy(float).T)] if is_known.any() else []


def _draw_reference_rows(axes: Axes, results: Results) -> list[Label]:
    """Draw a dashed line for each reference row with a positive value of the primary metric, and return the labels.

    The caller makes the y axis logarithmic, which excludes other values, and writes the labels.
    """
    labels = []
    for name, row in results.reference["rows"].items():
        value = row.get(results.primary_metric)
        if value is not None and value > 0:
            axes.axhline(value, color=MUTED, linewidth=1, linestyle=(0, (4, 3)), zorder=1, label=name)
            text = "floor: real, held out" if name == "floor" else name  # floor: held-out real images
            labels.append(Label(float(value), text, MUTED))
    return labels


def _style_step_axis(axes: Axes, steps: np.ndarray) -> None:
    """Put ticks at the snapshots' steps, and leave room for the marker at step 0.

    The x axis becomes logarithmic if the steps after 0 differ by a factor of more than 20. It is then linear from 0 to
    the first trained snapshot. `steps` ascend from 0, and are at least two.
    """
    first_trained, last = steps[1], steps[-1]
    left = -0.015 * last  # room for the marker at step 0
    if last / first_trained > 20:
        axes.set_xscale("symlog", linthresh=first_trained, linscale=0.4)
        left = -0.03 * first_trained
    axes.set_xticks(steps, [f"{step:,.0f}" for step in steps])
    axes.set_xlim(left=left)


def group_swept_methods(methods: Sequence[str]) -> dict[str, dict[str, dict[str, str]]]:
    """Group the methods of a sweep, whose names contain options of a `grid` and their values.

    Returns:
        ``{option: {name without the option: {value: method}}}``. For example, methods ``a-k=1`` and ``a-k=2`` give
        ``{"k": {"a": {"1": "a-k=1", "2": "a-k=2"}}}``. A method with several options is listed under each of them.
        Methods outside of sweeps are left out.
    """
    groups: dict[str, dict[str, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))  # levels are added on access
    for method in methods:
        for option, value in parse_sweep_name(method):
            name_without_option = method.replace(f"-{option}={value}", "", 1)
            groups[option][name_without_option][value] = method
    return groups


def draw_distance_by_option(results: Results, styles: dict[str, MethodStyle]) -> Figure:
    """Draw the primary metric at each method's last snapshot against each option of a sweep, a panel per option.

    A line connects the methods that differ in this option alone. Points are means over seeds. If a panel has more than
    12 lines, the five best are labelled and the others are grey. A baseline outside of the sweep is a dashed line.

    The x axis is numeric if all values of the option are numbers, and logarithmic if they span a factor of more than
    20. Otherwise the values are evenly spaced, in the order of the methods. The y axis is logarithmic.
    """
    lines_by_option = group_swept_methods(results.methods)
    height = grid_height(len(lines_by_option), panel_height=2.6, row_space=0.8)
    figure, grid = create_figure(4.6, height, len(lines_by_option), row_space=0.8)
    draw_warning_title(grid[0][0], results)
    for axes, (option, lines) in zip(grid[:, 0], lines_by_option.items()):
        positions = _option_positions(lines)
        labels = _draw_sweep_lines(axes, results, styles, lines, positions)
        baseline = results.baseline
        if baseline is not None and not parse_sweep_name(baseline):  # a baseline outside of the sweep
            final_value = float(build_curve(results.measurements, baseline).mean[-1])
            labels.append(Label(final_value, baseline, MUTED))
            axes.axhline(final_value, color=MUTED, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        lowest, highest = min(positions.values()), max(positions.values())
        spans_decades = lowest > 0 and highest > 20 * lowest  # not for evenly spaced values: their positions begin at 0
        axes.set(xscale="log" if spans_decades else "linear", yscale="log", xlabel=option)
        axes.set_ylabel(results.primary_metric)
        axes.set_xticks(list(positions.values()), list(positions))
        axes.set_xticks([], minor=True)
        style_log_axis(axes)
        label_lines(axes, labels)
    return figure


def _draw_sweep_lines(
    axes: Axes,
    results: Results,
    styles: dict[str, MethodStyle],
    lines: dict[str, dict[str, str]],
    positions: dict[str, Any],
) -> list[Label]:
    """Draw the lines of a panel of a swept option, and return their labels.

    A point is a method's mean at its last snapshot, and its bar is the standard deviation there, see `Curve`. A line
    has the style of its first method that has one. Lines that are not labelled are thin, grey and without bars, and
    have one label in common. The caller makes the y axis logarithmic, and writes the labels.

    Args:
        lines: for each line, named without the option, its methods by value of the option.
        positions: position on the x axis of each value of the option.
    """
    labels = []
    labelled_names = _select_sweep_lines(results, lines)
    end_of_last_grey_line: tuple[Any, float] | None = None
    for name, method_by_value in lines.items():
        values = sorted(method_by_value, key=lambda value: positions[value])
        methods = [method_by_value[value] for value in values]
        curves = [build_curve(results.measurements, method) for method in methods]
        x = [positions[value] for value in values]
        y = [float(curve.mean[-1]) for curve in curves]
        if name not in labelled_names:
            axes.plot(x, y, color=BAND, linewidth=1, zorder=0.6)
            end_of_last_grey_line = x[-1], y[-1]
            continue
        std = np.nan_to_num([curve.std[-1] for curve in curves])  # no bar where it is unknown
        styles_of_line = [styles[method] for method in methods if method in styles]
        style = styles_of_line[0] if styles_of_line else _SWEEP_STYLE
        axes.errorbar(x, y, std, **style, markersize=4.5, capsize=2)
        labels.append(Label(y[-1], name, style["color"], bold=True, x=x[-1]))
    if end_of_last_grey_line is not None:
        label_x, label_y = end_of_last_grey_line
        grey_line_count = len(lines) - len(labelled_names)
        labels.append(Label(label_y, f"{grey_line_count} other lines", MUTED, x=label_x))
    return labels


def _select_sweep_lines(results: Results, lines: dict[str, dict[str, str]]) -> set[str]:
    """Return the names of the lines to label: all of at most 12 lines, otherwise the five with the lowest final values.

    The value of a line is the lowest of its methods, mean over seeds at the last snapshot.
    """
    if len(lines) <= MOST_SHOWN:
        return set(lines)

    def lowest_value(name: str) -> float:
        """Return the lowest final value of the methods on a line."""
        return min(float(build_curve(results.measurements, method).mean[-1]) for method in lines[name].values())

    return set(sorted(lines, key=lowest_value)[:_LABELLED_LINES])


def _option_positions(lines: dict[str, dict[str, str]]) -> dict[str, Any]:
    """Return the position on the x axis of each value of an option: the number itself if all values are numbers.

    Otherwise a position is the value's index in the order of the methods. `lines` contains methods by value, by line.
    """
    values_of_lines: list[str] = []
    for method_by_value in lines.values():
        values_of_lines += method_by_value.keys()
    values = list(dict.fromkeys(values_of_lines))  # each value once
    numbers = pd.to_numeric(pd.Series(values), errors="coerce")  # NaN: not a number
    if numbers.isna().any():
        return {value: index for index, value in enumerate(values)}
    return dict(zip(values, numbers.astype(float)))


def draw_strategies(results: Results, styles: dict[str, MethodStyle], column: str, label: str, scale: str) -> Figure:
    """Draw a column of the strategy tables, multiplied by T, over time, with a panel per method with a style.

    A strategy that changes has a line per seed and snapshot, any other strategy a single one. All panels have equal
    limits of the y axis, and a dashed line at 1. A line may leave a linear axis, see `_set_common_linear_limit`. A note
    above each panel reports how far a learned sampler has moved.

    Args:
        results: results of the experiment.
        styles: style of each method that has a panel.
        column: ``p`` for the density, ``effective`` for density times weight.
        label: label of the y axis.
        scale: scale of the y axis, ``linear`` or ``log``.
    """
    methods = [method for method in results.methods if method in styles]
    steps = results.experiment.milestones
    time_settings = time_axis_settings(results.experiment.diffusion.process.name)
    # the grid, without panels for which there is no method
    columns = min(_STRATEGY_COLUMNS, len(methods))
    rows = math.ceil(len(methods) / columns)
    height = 2.25 * rows - 0.55  # inches: about 1.75 per panel, and 0.5 between rows
    figure, grid = create_figure(8.7, height, rows, columns, column_space=0.3, row_space=0.5)
    for axes in grid.flat[len(methods) :]:
        axes.remove()
    # a panel per method
    color_by_step = dict(zip(steps, matplotlib.colormaps["viridis"](np.linspace(0.92, 0.0, len(steps)))))
    highest_values = []  # one per method
    for panel, (axes, method) in enumerate(zip(grid.flat, methods)):
        runs = results.runs_of(method)
        highest_values.append(_draw_strategy_lines(axes, runs, column, color_by_step))
        axes.axhline(1, color=MUTED, linewidth=0.8, linestyle=(0, (2, 2)), zorder=0)
        axes.set_title(method, fontsize=9.5)
        axes.text(1, 1.05, _movement_note(runs), transform=axes.transAxes, ha="right", fontsize=8, color=MUTED)
        is_lowest = panel + columns >= len(methods)  # no panel below
        is_leftmost = panel % columns == 0
        axes.set(xscale=time_settings["xscale"], xlabel=time_settings["xlabel"] if is_lowest else "")
        axes.set(yscale=scale, ylabel=label if is_leftmost else "")
        axes.tick_params(labelbottom=is_lowest, labelleft=is_leftmost)
        axes.margins(x=0)
    # the common y axis; removed panels are not in figure.axes
    if scale == "linear":
        _set_common_linear_limit(figure.axes, highest_values)
    else:
        highest = max(highest_values)
        lowest = min(highest * 1e-4, min(highest_values) / 30)  # so that every method's line is inside the axis
        for axes in figure.axes:
            axes.set_ylim(lowest, highest * 2)
    # the legend, with snapshots if any strategy changes
    handles = {"does not change": Line2D([], [], color=INK, linewidth=1.6)}
    if any(not _is_fixed(results.runs_of(method), column) for method in methods):
        for step, color in color_by_step.items():
            handles[f"step {step:,}"] = Line2D([], [], color=color, linewidth=2)
    corner = (-0.014, 1 + 0.75 / height)  # 0.75 inches above the panels, over their titles
    figure.legend(handles.values(), handles, ncols=len(handles), fontsize=8.5, loc="upper left", bbox_to_anchor=corner)
    return figure


def _set_common_linear_limit(panels: Sequence[Axes], highest_values: Sequence[float]) -> None:
    """Set a common y axis of the panels from 0 to 8 % above the highest value, or lower if that would flatten panels.

    If the highest value exceeds ten times the median of the panels' highest values, the highest value is replaced by
    five times the median. A panel whose lines leave the axis contains its highest value as a text.
    """
    limit = max(highest_values)
    median = float(np.median(highest_values))
    if limit > _FLATTENING * median:
        limit = _FLATTENING * median / 2  # half: the threshold itself would still flatten most panels
    for axes, highest in zip(panels, highest_values, strict=True):
        axes.set_ylim(0, limit * 1.08)
        if highest > limit:
            axes.text(0.03, 0.9, f"up to {highest:,.3g}", transform=axes.transAxes, fontsize=8, color=MUTED)


def _draw_strategy_lines(
    axes: Axes, runs: list[RunResults], column: str, color_by_step: dict[int, np.ndarray]
) -> float:
    """Draw a column of the strategy tables of a method, multiplied by T, and return the highest drawn value or 0.

    A strategy that changes has a line per seed and snapshot, in the colour of its step. Any other strategy has a single
    dark line, from the first seed.
    """
    if _is_fixed(runs, column):
        linewidth = 1.4
        lines: list[tuple[SnapshotResults, Any]] = [(runs[0].last_snapshot, INK)]
    else:
        linewidth = 1.2
        lines = [(snapshot, color_by_step[snapshot.step]) for run in runs for snapshot in run.snapshots]
    highest = 0.0
    for snapshot, color in lines:
        table = snapshot.strategy_table
        values = table[column].to_numpy(float) * len(table)  # a row per timestep: T rows
        highest = max(highest, float(values.max()))
        axes.plot(table["t"], values, color=color, linewidth=linewidth)
    return highest


def _is_fixed(runs: list[RunResults], column: str) -> bool:
    """Return True if a column of the strategy table is equal at all snapshots of a run, for every run.

    The runs are not compared with each other.
    """
    for run in runs:
        final_values = run.last_snapshot.strategy_table[column]
        if any(not np.array_equal(snapshot.strategy_table[column], final_values) for snapshot in run.snapshots):
            return False
    return True


def _movement_note(runs: list[RunResults]) -> str:
    """Describe how far the learned sampler of a method has moved from its start, such as ``moved by 0.12``.

    The distance is the largest over seeds, see `distance_from_start`; unknown ones are ignored. Below `NOT_MOVED`, or
    if all are unknown, the text is ``has not moved``. It is ``fixed`` if the sampler does not learn.
    """
    distances_or_none = [distance_from_start(run) for run in runs]
    distances = [distance for distance in distances_or_none if distance is not None]
    if not distances:  # None for every run: the sampler does not learn
        return "fixed"
    largest = np.fmax.reduce(distances)  # fmax ignores NaN; the result is NaN only if all distances are
    if largest >= NOT_MOVED:
        return f"moved by {largest:.2f}"
    return "has not moved"  # also for NaN: no record has the distance
