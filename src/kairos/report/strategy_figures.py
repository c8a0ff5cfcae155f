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
_TEXT_BOX: dict[str, Any] = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.5}  # behind a text
_COMPARED_STYLE: dict[str, Any] = {"color": "#CC79A7", "linestyle": (0, (4, 1.5))}  # style of a second strategy
_BOUNDARY: dict[str, Any] = {"color": MUTED, "linewidth": 1, "linestyle": (0, (4, 2))}
SUPPRESSION: dict[str, Any] = {"color": INK, "linewidth": 1.3, "linestyle": (0, (1, 1.5))}  # boundary of sampler speed
_STAIRS = 60  # timesteps up to which each one is drawn as a step
_STRATEGY_HEIGHT = 2.05  # inches of the panels of a strategy
_INCREMENTS_HEIGHT = 4.75  # inches of the panels of process increments
EXPLODING_PROCESSES = ("ve", "edm")  # processes whose variance grows over orders of magnitude
_BOUND_DASH = (0, (3, 2))


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


class _StrategyPanel(NamedTuple):
    """A panel of the figure of a strategy.

    Attributes:
        title: title of the panel.
        column: column of the strategy that is drawn.
        factor: factor that the column is multiplied by.
        color: colour of the curve.
        logarithmic: True for a logarithmic y axis.
    """

    title: str
    column: str
    factor: float
    color: str
    logarithmic: bool


class _Line(NamedTuple):
    """A line in a panel of process increments.

    Attributes:
        label: label in the legend; empty without one.
        values: values at the times of the increments, (T,).
        color: colour of the line.
        dash: dash of the line, in matplotlib's terms.
    """

    label: str
    values: np.ndarray
    color: str
    dash: Any = "-"


def draw_strategy(
    columns: dict[str, np.ndarray],
    title: str,
    lines: Sequence[str],
    process: str,
    compared: ComparedStrategy | None = None,
) -> Figure:
    """Draw density, weight and their product over timesteps, in three panels, with name and description above.

    Weight and product have a log axis if the weights, of both strategies together, span more than three decades.
    Density and product are multiplied by the number of timesteps T, so that a uniform density is 1. The caller sets the
    common style, see `write_png`.

    Args:
        columns: ``t``, ``p``, ``w`` and ``effective`` of the strategy, each (T,), see `kairos_timesteps.lookup.table`.
        title: name of the strategy.
        lines: description, written below the name.
        process: name of the process whose time is the x axis.
        compared: strategy to draw as dashed lines, described on the right. The caller ensures that it has the times of
            the first strategy.
    """
    figure, grid = create_figure(9.45, _STRATEGY_HEIGHT, 1, 3, column_space=0.62)
    _write_descriptions(figure, title, lines, compared)
    other_strategies = [] if compared is None else [compared.columns]
    timestep_count = len(columns["t"])
    all_weights = np.concatenate([strategy["w"] for strategy in (columns, *other_strategies)])
    weights_span_decades = _span_decades(all_weights)
    panels = (
        _StrategyPanel("Drawn: T · p(t)", "p", timestep_count, _BLUE, logarithmic=False),
        _StrategyPanel("Weighted: w(t)", "w", 1, _ORANGE, logarithmic=weights_span_decades),
        _StrategyPanel(
            "Effective: T · p(t) · w(t)", "effective", timestep_count, INK, logarithmic=weights_span_decades
        ),
    )
    for axes, panel in zip(grid.flat, panels):
        _draw_filled_curve(
            axes,
            t=columns["t"],
            values=columns[panel.column] * panel.factor,
            color=panel.color,
            logarithmic=panel.logarithmic,
            compared_values=[strategy[panel.column] * panel.factor for strategy in other_strategies],
        )
        axes.set(title=panel.title, **time_axis_settings(process))
        axes.margins(x=0)
    # a line at the uniform density
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
    """Write name and description of a strategy above the panels, and of the compared one on the right.

    With a compared strategy, a short line before each name shows the style of its curves. Long lines of the
    descriptions are wrapped.
    """
    if compared is None:
        names, descriptions = [title], [_wrap_lines(lines, width=150)]
    else:
        names = [title, compared.title]
        descriptions = [_wrap_lines(lines, width=72), _wrap_lines(compared.lines, width=72)]
    line_count = max(len(description) for description in descriptions)
    text_height = 0.17 * line_count  # inches; the panels' titles are below the text
    name_top = _fraction_above_panels(0.83 + text_height)
    line_height = _fraction_above_panels(0.75 + text_height)  # the middle of the name's letters
    description_top = _fraction_above_panels(0.51 + text_height)
    for column, (name, description) in enumerate(zip(names, descriptions)):
        left = 0.52 * column  # fraction of the figure's width
        indent = 0.0
        if compared is not None:
            indent = 0.045
            style = {"color": MUTED} if column == 0 else _COMPARED_STYLE
            figure.add_artist(Line2D([left, left + 0.035], [line_height, line_height], linewidth=1.8, **style))
        figure.text(left + indent, name_top, name, va="top", fontsize=13, fontweight="bold")
        text = "\n".join(description)
        figure.text(left, description_top, text, va="top", fontsize=8.5, color=MUTED, linespacing=1.35)


def _wrap_lines(lines: Sequence[str], width: int) -> list[str]:
    """Wrap each line to `width` characters; continuation lines are indented, and empty lines are dropped."""
    wrapped: list[str] = []
    for line in lines:
        wrapped += textwrap.wrap(line, width, subsequent_indent="    ")
    return wrapped


def _fraction_above_panels(inches: float) -> float:
    """Convert inches above the panels of a strategy's figure to a figure coordinate; the panels' upper edge is 1."""
    return 1 + inches / _STRATEGY_HEIGHT


def _span_decades(weights: np.ndarray) -> bool:
    """Return True if no weight is negative and the positive, finite weights span a factor of more than 1000."""
    if (weights < 0).any():
        return False
    positive = weights[np.isfinite(weights) & (weights > 0)]
    return len(positive) > 0 and bool(positive.max() > 1e3 * positive.min())


def _draw_filled_curve(
    axes: Axes,
    t: np.ndarray,
    values: np.ndarray,
    color: str,
    logarithmic: bool,
    compared_values: Sequence[np.ndarray],
) -> None:
    """Draw a filled curve from 0, or from the lower end of a log axis, and dashed curves to compare it with.

    The limits of the y axis are set for all curves; values that are not finite leave gaps. A note and red marks above
    the x axis show where `values` are negative or not finite.

    Args:
        t: times of the values, (T,). If there are at most `_STAIRS`, each is drawn as a step, and the caller ensures
            that they are 0 ... T - 1.
        logarithmic: make the y axis logarithmic if any value is positive.
        compared_values: values of the dashed curves, each (T,).
    """
    curve = np.where(np.isfinite(values), values, np.nan)  # matplotlib leaves a gap at NaN
    compared_curves = [np.where(np.isfinite(compared), compared, np.nan) for compared in compared_values]
    bottom = _set_value_limits(axes, np.concatenate([curve, *compared_curves]), logarithmic)
    if len(t) <= _STAIRS:
        edges = np.arange(len(t) + 1) - 0.5  # a step is centred at its timestep
        axes.stairs(curve, edges, baseline=None, color=color, linewidth=1.6)
        axes.stairs(curve, edges, baseline=bottom, color=color, alpha=0.12, fill=True, linewidth=0)
        for compared_curve in compared_curves:
            axes.stairs(compared_curve, edges, baseline=None, linewidth=1.6, **_COMPARED_STYLE)
    else:
        axes.plot(t, curve, color=color, linewidth=1.6)
        axes.fill_between(t, curve, bottom, color=color, alpha=0.12, linewidth=0)
        for compared_curve in compared_curves:
            axes.plot(t, compared_curve, linewidth=1.6, **_COMPARED_STYLE)
    is_invalid = ~np.isfinite(values) | (values < 0)
    if is_invalid.any():
        heights = np.full(is_invalid.sum(), 0.02)  # fractions of the axes' height: just above the x axis
        axes.plot(t[is_invalid], heights, "|", color=_RED, transform=axes.get_xaxis_transform())
        note = "red: negative or not finite"
        axes.text(0.02, 0.96, note, transform=axes.transAxes, va="top", fontsize=8, color=_RED)


def _set_value_limits(axes: Axes, values: np.ndarray, logarithmic: bool) -> float:
    """Set scale and limits of the y axis with room around the values, and return the y at which filled areas begin.

    It is the lower end of a log axis, else 0, which a linear axis always contains. The axis is linear if no value is
    positive. A log axis shows at most twelve decades below the highest value. Values may be NaN.
    """
    positive = values[values > 0]
    if logarithmic and len(positive):
        axes.set_yscale("log")
        highest = min(positive.max(), 1e280)  # matplotlib's ticks overflow beyond
        lowest = np.clip(positive.min(), 1e-12 * highest, highest)  # at most twelve decades are visible
        axes.set_ylim(lowest / 2, highest * 3)
        return float(lowest / 2)
    lowest = np.nanmin([0, *values])
    highest = np.nanmax([0, *values])
    room = 0.12 * (highest - lowest) if highest > lowest else 0.12
    bottom = lowest - room if lowest < 0 else 0.0
    axes.set_ylim(bottom, highest + room)
    return 0.0


def draw_increments(increments: Increments, title: str) -> Figure:
    """Draw SpeeD's figures 1 and 4 for any process, in six panels with a heading and a legend of the areas.

    Four panels show moments of the increments over time, one the share of timesteps in each area, and one the histogram
    of the variance. The caller sets the common style, see `write_png`.

    Args:
        increments: increments of the process.
        title: name of the process, for the heading.
    """
    figure, grid = create_figure(9.9, _INCREMENTS_HEIGHT, 2, 3, column_space=0.72, row_space=0.85)
    heading = f"Process increments: {title}"
    figure.text(0, 1 + 1.18 / _INCREMENTS_HEIGHT, heading, va="top", fontsize=13, fontweight="bold")
    areas = increments.area()
    names = [name for name in SHADES if (areas == name).any()]  # areas that the process has
    is_exploding = increments.process in EXPLODING_PROCESSES
    # moments of the increments
    _draw_increment_panel(
        grid[0, 0],
        increments,
        title="Variance of $x_{t+1} - x_t$",
        logarithmic=is_exploding,
        lines=[
            _Line("by the paper's formula", increments.variance, _BLUE),
            _Line("its lower bound", increments.variance_bound, INK, _BOUND_DASH),
        ],
        legend_position="lower right",
    )
    _draw_increment_panel(
        grid[0, 1],
        increments,
        title="Growth of that variance by t",
        logarithmic=increments.process == "edm",  # only there it grows over orders of magnitude
        lines=[_Line("", increments.change, _ORANGE)],
    )
    _draw_increment_panel(
        grid[1, 0],
        increments,
        title="Variance given x0",
        logarithmic=is_exploding,
        lines=[_Line("", increments.own_variance, _GREEN)],
    )
    _draw_increment_panel(
        grid[1, 1],
        increments,
        title="Mean, in multiples of x0",
        logarithmic=not is_exploding,  # the mean of a variance-exploding process is 0
        lines=[
            _Line("size of the mean", abs(increments.mean), _BLUE),
            _Line("its upper bound", increments.mean_squared_bound**0.5, INK, _BOUND_DASH),
        ],
    )
    # the areas
    _mark_boundaries(grid[0, 1], increments)
    _draw_area_shares(grid[0, 2], areas, names)
    _draw_variance_histogram(grid[1, 2], increments, areas, names)
    handles: list[Any] = [Patch(facecolor=SHADES[name], label=name) for name in names]
    handles += [Line2D([], [], **_BOUNDARY, label="boundary of two areas")]
    if increments.suppression is not None:
        handles += [
            Line2D([], [], **SUPPRESSION, label=f"sampler speed suppresses from t = {increments.suppression:g}")
        ]
    corner = (-0.011, 1 + 0.9 / _INCREMENTS_HEIGHT)  # below the heading; its text begins at the panels' left edge
    figure.legend(handles=handles, loc="upper left", ncols=4, bbox_to_anchor=corner, fontsize=9, columnspacing=1.6)
    return figure


def _draw_increment_panel(
    axes: Axes,
    increments: Increments,
    title: str,
    logarithmic: bool,
    lines: Sequence[_Line],
    legend_position: str = "best",
) -> None:
    """Draw moments of the increments over time, with the areas as background, and a legend if there are several lines.

    For a variance-exploding process, the x axis is logarithmic and the first time, t = 0, is left out. If all values
    are 0, a note that the scale of x0 is constant replaces the legend.
    """
    is_exploding = increments.process in EXPLODING_PROCESSES
    visible = slice(1, None) if is_exploding else slice(None)  # a log axis has no t = 0
    t = increments.t[visible]
    axes.set(xscale="log" if is_exploding else "linear", yscale="log" if logarithmic else "linear")
    for line in lines:
        values = line.values[visible]
        legend_label = line.label or None  # None: the legend leaves the line out
        axes.plot(t, values, color=line.color, linestyle=line.dash, linewidth=1.6, label=legend_label)
    axes.set(xlim=(t[0], t[-1]), title=title, xlabel="time t")
    _shade_areas(axes, increments)
    if not any(line.values.any() for line in lines):
        axes.set_ylim(-1, 1)
        note = "none: the scale of x0 is constant"
        axes.text(0.5, 0.62, note, transform=axes.transAxes, ha="center", fontsize=9, bbox=_TEXT_BOX)
    elif len(lines) > 1:
        axes.legend(fontsize=8, loc=legend_position, frameon=True, edgecolor="none", framealpha=0.85)


def _shade_areas(axes: Axes, increments: Increments) -> None:
    """Draw the areas as background over the full height, with lines at the boundaries that are not None.

    Boundaries of areas are dashed. The boundary of sampler ``speed`` is dotted.
    """
    areas = increments.area()
    style: dict[str, Any] = {"fill": True, "alpha": 0.55, "linewidth": 0, "zorder": 0}
    full_height = axes.get_xaxis_transform()  # y = 1 is the upper edge of the axes
    for name, shade in SHADES.items():
        is_in_area = areas[:-1] == name  # a stair is between two times
        axes.stairs(is_in_area, increments.t, color=shade, transform=full_height, **style)
    for boundary in (increments.deceleration, increments.convergence):
        if boundary is not None:
            axes.axvline(boundary, **_BOUNDARY, zorder=1)
    if increments.suppression is not None:
        axes.axvline(increments.suppression, **SUPPRESSION, zorder=1)


def _mark_boundaries(axes: Axes, increments: Increments) -> None:
    """Label the boundaries of the areas with their times, above the curve; the y axis is extended for the labels.

    A linear axis then begins at 0. The second label also contains r, the magnitude at that boundary. A boundary that is
    None has no label. The caller draws the curve before.
    """
    # the labels need 28 % of the height of the curve, which a log axis measures in decades
    low, high = axes.get_ylim()
    if axes.get_yscale() == "log":
        axes.set_ylim(low, high * (high / low) ** 0.28)
    else:
        axes.set_ylim(0, high * 1.28)
    # time of each boundary, height of its label as a fraction of the axes, and an addition to the label
    boundaries = ((increments.deceleration, 0.97, ""), (increments.convergence, 0.88, f" (r = {increments.r:g})"))
    for time, height, note in boundaries:
        if time is None:
            continue
        pixels = axes.transData.transform((time, high))  # any height does: it does not change x
        x_in_axes, _ = axes.transAxes.inverted().transform(pixels)
        has_room_on_right = x_in_axes < 0.6
        axes.annotate(
            f"t = {time:.5g}{note}",
            xy=(time, height),
            xytext=(4, 0) if has_room_on_right else (-4, 0),
            ha="left" if has_room_on_right else "right",
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            va="top",
            bbox=_TEXT_BOX,
            fontsize=8.5,
        )


def _draw_area_shares(axes: Axes, areas: np.ndarray, names: list[str]) -> None:
    """Draw a bar for the percentage of timesteps in each named area; `areas` has the area of every timestep."""
    shares = [100 * float((areas == name).mean()) for name in names]
    bars = axes.bar(names, shares, color=[SHADES[name] for name in names], edgecolor=MUTED, linewidth=0.8, width=0.62)
    axes.bar_label(bars, labels=[f"{share:.1f} %" for share in shares], padding=2, fontsize=9)
    axes.set(ylim=(0, max(shares) * 1.15), title="Timesteps in each area, %")
    axes.tick_params(axis="x", labelsize=8.5, length=0)
    axes.grid(axis="x", visible=False)


def _draw_variance_histogram(axes: Axes, increments: Increments, areas: np.ndarray, names: list[str]) -> None:
    """Draw the histogram of timesteps by variance in 20 bars, on a log axis for variance-exploding processes.

    Each bar is a percentage of all timesteps, stacked from the named areas of SpeeD in their colours.
    """
    variance = increments.variance
    edges: np.ndarray  # of 20 bars
    if increments.process in EXPLODING_PROCESSES:
        edges = np.geomspace(variance.min(), variance.max() * 1.0001, 21)  # rounding must not exclude the maximum
        axes.set_xscale("log")
    else:
        edges = np.linspace(0, variance.max(), 21)
    variances_by_area = [variance[areas == name] for name in names]
    # the weight of a timestep is its percentage of all timesteps
    weights = [np.full(len(variances), 100 / len(areas)) for variances in variances_by_area]
    shades = [SHADES[name] for name in names]
    style: dict[str, Any] = {"color": shades, "edgecolor": MUTED, "linewidth": 0.6}
    axes.hist(variances_by_area, edges.tolist(), weights=weights, stacked=True, **style)
    axes.set(title="Timesteps by variance, %", xlabel="variance by the paper's formula")
    axes.grid(axis="x", visible=False)


def write_png(draw: Callable[[], Figure], path: Path) -> None:
    """Call `draw` in the common style of all figures, and write its figure to a PNG file, atomically."""
    with matplotlib.rc_context(STYLE), atomic(path) as file:
        draw().savefig(file, format="png", dpi=DPI, bbox_inches="tight", pad_inches=0.1)
