"""Figures of a strategy, p(t), w(t) and p(t) w(t), and of SpeeD's process increments; they need no results."""

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from kairos.files import atomic
from kairos.increments import Increments
from kairos.report.plot_style import DPI, INK, MUTED, STYLE, create_figure, time_axis_settings

_BLUE, _ORANGE, _GREEN, _RED = "#0072B2", "#D55E00", "#009E73", "#C0001A"
SHADES = {"acceleration": "#F3C9A8", "steady": "#DCD3EE", "deceleration": "#BFD9EC", "convergence": "#E3E5E8"}
_PAPER: dict[str, Any] = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.5}  # behind a text
_COMPARED: dict[str, Any] = {"color": "#CC79A7", "linestyle": (0, (4, 1.5))}  # look of a second strategy
_BOUNDARY: dict[str, Any] = {"color": MUTED, "linewidth": 1, "linestyle": (0, (4, 2))}
_STAIRS = 60  # timesteps up to which each one is drawn as a step
_STRATEGY_HEIGHT = 2.05  # inches of the panels of a strategy
_INCREMENTS_HEIGHT = 4.75  # inches of the panels of process increments
_EXPLODING = ("ve", "edm")  # processes whose variance grows over orders of magnitude


class ComparedStrategy(NamedTuple):
    """A second strategy in the figure of a strategy.

    Attributes:
        columns: ``t``, ``p``, ``w`` and ``effective``, each (T,), at the times of the first strategy.
        title: name of the strategy.
        lines: description.
    """

    columns: dict[str, np.ndarray]
    title: str
    lines: Sequence[str]


def draw_strategy(
    columns: dict[str, np.ndarray],
    title: str,
    lines: Sequence[str],
    process: str,
    compared: ComparedStrategy | None = None,
) -> Figure:
    """Draw density, weight and their product over timesteps.

    Args:
        columns: ``t``, ``p``, ``w`` and ``effective`` of the strategy, each (T,), see `strategies.names.table`.
        title: name of the strategy.
        lines: description, written below the name.
        process: name of the process whose time is the x axis.
        compared: strategy to draw as dashed lines, described on the right.
    """
    figure, grid = create_figure(9.45, _STRATEGY_HEIGHT, 1, 3, column_space=0.62)
    _write_descriptions(figure, title, lines, compared)
    other_strategies = [] if compared is None else [compared.columns]
    t, timesteps = columns["t"], len(columns["t"])
    weights_span_decades = _span_decades(np.concatenate([table["w"] for table in (columns, *other_strategies)]))
    panels = (
        ("Drawn: T · p(t)", "p", timesteps, _BLUE, False),
        ("Weighted: w(t)", "w", 1, _ORANGE, weights_span_decades),
        ("Effective: T · p(t) · w(t)", "effective", timesteps, INK, weights_span_decades),
    )
    for axes, (label, column, scale, color, logarithmic) in zip(grid.flat, panels):
        other_values = [table[column] * scale for table in other_strategies]
        _draw_filled_curve(axes, t, columns[column] * scale, color, logarithmic, other_values)
        axes.set(title=label, **time_axis_settings(process))
        axes.margins(x=0)
    density_axes = grid[0, 0]
    density_axes.axhline(1, color=MUTED, linewidth=0.9, linestyle=(0, (2, 2)), zorder=1)
    density_axes.annotate(
        "uniform",
        xy=(1, 1),
        xytext=(-2, 3),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        ha="right",
        fontsize=8,
        color=MUTED,
    )
    return figure


def _write_descriptions(figure: Figure, title: str, lines: Sequence[str], compared: ComparedStrategy | None) -> None:
    """Write name and description of a strategy above the panels, and those of the compared one on the right."""
    descriptions = [(title, lines)]
    if compared is not None:
        descriptions.append((compared.title, compared.lines))
    characters = 150 if compared is None else 72
    wrapped = []
    for _, description in descriptions:
        parts = [textwrap.wrap(line, characters, subsequent_indent="    ") for line in description]
        wrapped.append([part for line_parts in parts for part in line_parts])
    top = 0.65 + 0.17 * max(map(len, wrapped))  # inches above the panels
    for column, ((name, _), notes) in enumerate(zip(descriptions, wrapped)):
        left = 0.52 * column
        height = 1 + (top + 0.18) / _STRATEGY_HEIGHT
        indent = 0.0
        if compared is not None:
            indent = 0.045
            look = _COMPARED if column else {"color": MUTED}
            middle = height - 0.08 / _STRATEGY_HEIGHT
            figure.add_artist(Line2D([left, left + 0.035], [middle, middle], linewidth=1.8, **look))
        figure.text(left + indent, height, name, va="top", fontsize=13, fontweight="bold")
        below = 1 + (top - 0.14) / _STRATEGY_HEIGHT
        figure.text(left, below, "\n".join(notes), va="top", fontsize=8.5, color=MUTED, linespacing=1.35)


def _span_decades(weights: np.ndarray) -> bool:
    """Return True if weights are not negative and differ by a factor of more than 1000."""
    positive = weights[np.isfinite(weights) & (weights > 0)]
    return bool(not (weights < 0).any() and positive.max(initial=0) > 1e3 * positive.min(initial=np.inf))


def _draw_filled_curve(
    axes: Axes,
    t: np.ndarray,
    values: np.ndarray,
    color: str,
    logarithmic: bool,
    compared_values: Sequence[np.ndarray],
) -> None:
    """Draw a filled curve from 0, or from the lower end of a log axis, and dashed curves to compare it with.

    Values that cannot be drawn are marked in red.
    """
    curve, *compared_curves = [np.where(np.isfinite(array), array, np.nan) for array in (values, *compared_values)]
    bottom = _set_value_limits(axes, np.concatenate([curve, *compared_curves]), logarithmic)
    if len(t) <= _STAIRS:
        edges = np.arange(len(t) + 1) - 0.5
        axes.stairs(curve, edges, baseline=None, color=color, linewidth=1.6)
        axes.stairs(curve, edges, baseline=bottom, color=color, alpha=0.12, fill=True, linewidth=0)
        for compared_curve in compared_curves:
            axes.stairs(compared_curve, edges, baseline=None, linewidth=1.6, **_COMPARED)
    else:
        axes.plot(t, curve, color=color, linewidth=1.6)
        axes.fill_between(t, curve, bottom, color=color, alpha=0.12, linewidth=0)
        for compared_curve in compared_curves:
            axes.plot(t, compared_curve, linewidth=1.6, **_COMPARED)
    is_invalid = ~np.isfinite(values) | (values < 0)
    if is_invalid.any():
        heights = np.full(is_invalid.sum(), 0.02)
        axes.plot(t[is_invalid], heights, "|", color=_RED, transform=axes.get_xaxis_transform())
        note = "red: negative or not finite"
        axes.text(0.02, 0.96, note, transform=axes.transAxes, va="top", fontsize=8, color=_RED)


def _set_value_limits(axes: Axes, values: np.ndarray, logarithmic: bool) -> float:
    """Set the limits of the y axis with room around the values, and return the height that areas are filled from."""
    positive = values[values > 0]
    if logarithmic and len(positive):
        axes.set_yscale("log")
        highest = min(positive.max(), 1e280)  # matplotlib's ticks overflow beyond
        bottom = max(min(positive.min(), highest), highest * 1e-12) / 2
        axes.set_ylim(bottom, highest * 3)
        return float(bottom)
    lowest, highest = np.nanmin([0, *values]), np.nanmax([0, *values])
    room = 0.12 * ((highest - lowest) or 1.0)
    axes.set_ylim(lowest - room * (lowest < 0), highest + room)
    return 0.0


def draw_increments(increments: Increments, title: str) -> Figure:
    """Draw SpeeD's figures 1 and 4 for any process: moments of the increments, the areas, and the shares of each area.

    Args:
        increments: increments of the process.
        title: name of the process, for the heading.
    """
    figure, grid = create_figure(9.9, _INCREMENTS_HEIGHT, 2, 3, column_space=0.72, row_space=0.85)
    heading = f"Process increments: {title}"
    figure.text(0, 1 + 1.18 / _INCREMENTS_HEIGHT, heading, va="top", fontsize=13, fontweight="bold")
    areas = increments.area()
    names = [name for name in SHADES if (areas == name).any()]
    exploding = increments.process in _EXPLODING
    variance_lines = [
        ("as the paper has it", increments.variance, _BLUE, "-"),
        ("its lower bound", increments.variance_bound, INK, (0, (3, 2))),
    ]
    mean_lines = [
        ("size of the mean", abs(increments.mean), _BLUE, "-"),
        ("its upper bound", increments.mean_squared_bound**0.5, INK, (0, (3, 2))),
    ]
    panels: tuple[tuple[Axes, str, bool, list[Any]], ...] = (
        (grid[0, 0], "Variance of $x_{t+1} - x_t$", exploding, variance_lines),
        (
            grid[0, 1],
            "Growth of that variance by t",
            increments.process == "edm",
            [("", increments.change, _ORANGE, "-")],
        ),
        (grid[1, 0], "Own variance, given x0", exploding, [("", increments.own_variance, _GREEN, "-")]),
        (grid[1, 1], "Mean, in multiples of x0", not exploding, mean_lines),
    )
    for axes, panel_title, logarithmic, lines in panels:
        legend_position = "lower right" if axes is grid[0, 0] else "best"
        _draw_increment_panel(axes, increments, panel_title, logarithmic, lines, legend_position)
    _mark_boundaries(grid[0, 1], increments)
    _draw_area_shares(grid[0, 2], areas, names)
    _draw_variance_histogram(grid[1, 2], increments, areas, names)
    handles: list[Any] = [Patch(facecolor=SHADES[name], label=name) for name in names]
    handles += [Line2D([], [], **_BOUNDARY, label="boundary of two areas")]
    corner = (-0.011, 1 + 0.9 / _INCREMENTS_HEIGHT)
    figure.legend(handles=handles, loc="upper left", ncols=4, bbox_to_anchor=corner, fontsize=9, columnspacing=1.6)
    return figure


def _draw_increment_panel(
    axes: Axes,
    increments: Increments,
    title: str,
    logarithmic: bool,
    lines: Sequence[tuple[str, np.ndarray, str, Any]],
    legend_position: str,
) -> None:
    """Draw moments of the increments over time, with the areas as background.

    Args:
        axes: axes to draw into.
        increments: increments of the process.
        title: title of the panel.
        logarithmic: True for a logarithmic y axis.
        lines: label, values (T,), colour and dash of each line.
        legend_position: position of the legend, for several lines.
    """
    exploding = increments.process in _EXPLODING
    visible = slice(int(exploding), None)  # a log axis has no 0
    t = increments.t[visible]
    axes.set(xscale="log" if exploding else "linear", yscale="log" if logarithmic else "linear")
    for label, values, color, dash in lines:
        axes.plot(t, values[visible], color=color, linestyle=dash, linewidth=1.6, label=label or None)
    axes.set(xlim=(t[0], t[-1]), title=title, xlabel="time t")
    _shade_areas(axes, increments)
    if not any(values.any() for _, values, _, _ in lines):
        axes.set_ylim(-1, 1)
        note = "none: the scale of x0 is constant"
        axes.text(0.5, 0.62, note, transform=axes.transAxes, ha="center", fontsize=9, bbox=_PAPER)
    elif len(lines) > 1:
        axes.legend(fontsize=8, loc=legend_position, frameon=True, edgecolor="none", framealpha=0.85)


def _shade_areas(axes: Axes, increments: Increments) -> None:
    """Draw the areas as background, with lines at their boundaries."""
    areas = increments.area()
    look: dict[str, Any] = {"fill": True, "alpha": 0.55, "linewidth": 0, "zorder": 0}
    for name, shade in SHADES.items():
        axes.stairs(areas[:-1] == name, increments.t, color=shade, transform=axes.get_xaxis_transform(), **look)
    for boundary in (increments.deceleration, increments.convergence):
        if boundary is not None:
            axes.axvline(boundary, **_BOUNDARY, zorder=1)


def _mark_boundaries(axes: Axes, increments: Increments) -> None:
    """Label the boundaries of the areas with their times, above the curve."""
    low, high = axes.get_ylim()
    axes.set_ylim((low, high * (high / low) ** 0.28) if axes.get_yscale() == "log" else (0, high * 1.28))
    boundaries = ((increments.deceleration, 0.97, ""), (increments.convergence, 0.88, f" (r = {increments.r:g})"))
    for time, height, note in boundaries:
        if time is None:
            continue
        is_left = axes.transAxes.inverted().transform(axes.transData.transform((time, high)))[0] < 0.6
        axes.annotate(
            f"t = {time:.5g}{note}",
            xy=(time, height),
            xytext=(4, 0) if is_left else (-4, 0),
            ha="left" if is_left else "right",
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            va="top",
            bbox=_PAPER,
            fontsize=8.5,
        )


def _draw_area_shares(axes: Axes, areas: np.ndarray, names: list[str]) -> None:
    """Draw a bar for the share of timesteps in each area."""
    shares = [100 * float((areas == name).mean()) for name in names]
    bars = axes.bar(names, shares, color=[SHADES[name] for name in names], edgecolor=MUTED, linewidth=0.8, width=0.62)
    axes.bar_label(bars, labels=[f"{share:.1f} %" for share in shares], padding=2, fontsize=9)
    axes.set(ylim=(0, max(shares) * 1.15), title="Timesteps in each area, %")
    axes.tick_params(axis="x", labelsize=8.5, length=0)
    axes.grid(axis="x", visible=False)


def _draw_variance_histogram(axes: Axes, increments: Increments, areas: np.ndarray, names: list[str]) -> None:
    """Draw the histogram of timesteps by variance, on a log axis for variance-exploding processes."""
    variance = increments.variance
    edges = np.linspace(0, variance.max(), 21)
    if increments.process in _EXPLODING:
        edges = np.geomspace(variance.min(), variance.max() * 1.0001, 21)
        axes.set_xscale("log")
    values = [variance[areas == name] for name in names]
    weights = [np.full(len(area_values), 100 / len(areas)) for area_values in values]
    shades = [SHADES[name] for name in names]
    axes.hist(values, edges.tolist(), weights=weights, stacked=True, color=shades, edgecolor=MUTED, linewidth=0.6)
    axes.set(title="Timesteps by variance, %", xlabel="variance, as the paper has it")
    axes.grid(axis="x", visible=False)


def write_png(draw: Callable[[], Figure], path: Path) -> None:
    """Draw a figure in the common style and write it to a PNG file, atomically."""
    with matplotlib.rc_context(STYLE), atomic(path) as file:
        draw().savefig(file, format="png", dpi=DPI, bbox_inches="tight", pad_inches=0.1)
