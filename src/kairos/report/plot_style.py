"""Common style of all figures: colour, dash and marker per method, and labels next to lines without overlap.

Figures use only matplotlib's object interface. SVG files contain no date and no random ids: equal numbers give equal
bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float
from matplotlib import rc_params_from_file, rcParams
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.rcsetup import cycler
from matplotlib.ticker import LogLocator, MaxNLocator
from matplotlib.transforms import Bbox
from scipy.optimize import isotonic_regression

from kairos_timesteps.components import PROCESSES

DPI = 160  # resolution of PNG files
# colours of texts and lines, of secondary texts and lines, and of the band of methods without a style
INK, MUTED, BAND = "#1f2328", "#667079", "#c3c9ce"
WARNING = "#8a5300"
# Okabe and Ito's palette, distinct in every common colour blindness; its yellow is too light, and the baseline is black
_COLORS = cycler(color=["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#B27C00", "#7A4FA3"])
_MARKERS = cycler(marker=["s", "D", "^", "v", "P", "X", "p"])
_DASHES = cycler(linestyle=["-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5))])
MethodStyle = dict[str, Any]  # how a method is drawn: color, marker and linestyle, in matplotlib's terms

# the thin line from the right edge of the axes to a label, as `arrowprops` of matplotlib's `annotate`
_LEADER = {"arrowstyle": "-", "lw": 0.7, "alpha": 0.6, "shrinkA": 1, "shrinkB": 0, "relpos": (0, 0.5)}

PerPoint = Float[np.ndarray, "points"]
MethodValues = Float[np.ndarray, "methods points"]

STYLE: Any = rc_params_from_file(Path(__file__).with_suffix(".mplstyle"), use_default_template=False)


@dataclass(frozen=True)
class Label:
    """Text at the right of the axes that labels a line.

    Attributes:
        y: height at which the line ends, in data coordinates.
        text: the label.
        color: colour of the line.
        bold: True for bold text.
        x: x coordinate of the line's end, in data coordinates; None if the line ends at the right edge of the axes.
    """

    y: float
    text: str
    color: str
    bold: bool = False
    x: float | None = None


def assign_styles(methods: Sequence[str], baseline: str | None) -> dict[str, MethodStyle]:
    """Return a style for each method, by its position among the methods without the baseline.

    These styles repeat after 28 methods. The baseline is black and the last entry, even if it is not among the methods.
    """
    others = [method for method in methods if method != baseline]
    # cyclers: + pairs the entries, * combines all. A colour has one marker, and the dash changes after all colours
    style_cycler = _DASHES * (_COLORS + _MARKERS)
    endless_styles = style_cycler()  # a call repeats the cycle without end
    styles: dict[str, MethodStyle] = dict(zip(others, endless_styles))
    if baseline is not None:
        styles[baseline] = {"color": "#000000", "marker": "o", "linestyle": "-"}
    return styles


def create_figure(
    width: float,
    height: float,
    rows: int = 1,
    columns: int = 1,
    *,
    column_space: float = 0.5,
    row_space: float = 0.6,
) -> tuple[Figure, Any]:
    """Create a figure with a grid of axes, and return the figure and the axes, an array (rows, columns).

    Labels around the grid are outside of the figure's size; `tight_bounding_box` includes them when saving.

    Args:
        width, height: size of the grid in inches.
        rows, columns: shape of the grid.
        column_space, row_space: space between neighbouring axes in inches.
    """
    axes_width = width - column_space * (columns - 1)
    axes_height = height - row_space * (rows - 1)
    # The widths of all columns add up to `axes_width`, so that one axes is axes_width / columns wide. matplotlib takes
    # spaces as fractions of this width, and of the height in the same way.
    spaces = {"wspace": column_space * columns / axes_width, "hspace": row_space * rows / axes_height}
    figure = Figure(figsize=(width, height))
    return figure, figure.subplots(rows, columns, squeeze=False, gridspec_kw=spaces)


def grid_height(rows: int, panel_height: float, row_space: float) -> float:
    """Return the height of a grid in inches, from the height of a panel and the space between rows."""
    return rows * panel_height + (rows - 1) * row_space


def tight_bounding_box(figure: Figure) -> Bbox:
    """Return the box in inches around everything in a figure, with padding, for ``savefig(bbox_inches=)``.

    The padding is ``savefig.pad_inches`` of the present rcParams: the caller sets the style. The figure is drawn once
    for this.
    """
    figure.draw_without_rendering()  # texts and ticks get their positions
    return figure.get_tightbbox().padded(rcParams["savefig.pad_inches"])


def label_lines(axes: Axes, labels: Sequence[Label], size: float = 9) -> None:
    """Write labels right of the axes at the heights of their lines; labels that would overlap are moved apart.

    Scales and limits of the axes must be final. If a label has `x`, a dotted line leads from the end of its line to the
    right edge. A thin line leads from the right edge to each label.

    Args:
        axes: axes that contain the lines.
        labels: one label per line, in any order.
        size: font size in points.
    """
    if not labels:
        return
    figure = axes.get_figure(root=True)
    assert figure is not None
    # matplotlib has no function that moves labels apart
    text_pixels = size * 1.3 / 72 * figure.dpi  # 72 points an inch; 1.3: line spacing
    gap = text_pixels / axes.get_window_extent().height  # as a fraction of the axes' height
    ascending = sorted(labels, key=lambda label: label.y)
    line_heights = [_height_in_axes(axes, label.y) for label in ascending]
    text_heights = space_out_heights(line_heights, gap)
    for label, line_height, text_height in zip(ascending, line_heights, text_heights):
        if label.x is not None:  # a dotted line from the end of the line to the right edge
            right = axes.get_xlim()[1]
            axes.plot([label.x, right], [label.y, label.y], color=label.color, lw=0.7, ls=(0, (1, 2)), alpha=0.7)
        text_color = tuple(0.78 * channel for channel in to_rgb(label.color))  # darker: light letters are not readable
        axes.annotate(
            label.text,
            xy=(1.0, line_height),
            xytext=(1.045, text_height),
            xycoords="axes fraction",
            textcoords="axes fraction",
            color=text_color,
            fontsize=size,
            fontweight="bold" if label.bold else "normal",
            va="center",
            annotation_clip=False,
            arrowprops=_LEADER | {"color": label.color},
        )


def _height_in_axes(axes: Axes, y: float) -> float:
    """Convert a y coordinate of the data to a fraction of the axes' height, by its present scale and limits."""
    pixels = axes.transData.transform((1, y))  # any x > 0 does: the height is equal, and a log axis has no 0
    _, height = axes.transAxes.inverted().transform(pixels)
    return float(height)


def space_out_heights(heights: Sequence[float], gap: float) -> list[float]:
    """Return ascending heights moved apart to at least `gap` from each other, with the least sum of squared moves."""
    # Heights h_i are at least `gap` apart if and only if h_i - i * gap ascends. The closest ascending sequence, in
    # squared distance, is the isotonic regression.
    offsets = gap * np.arange(len(heights))
    ascending = isotonic_regression(np.array(heights) - offsets).x
    spaced: list[float] = (ascending + offsets).tolist()
    return spaced


def style_log_axis(axes: Axes) -> None:
    """Label a logarithmic y axis with numbers instead of powers of ten, with enough ticks for a short axis.

    Ticks are evenly spaced if the limits span less than 0.6 decades, at 1, 2 and 5 below three decades, else at powers
    of ten. Minor ticks have no labels. The caller has made the axis logarithmic, and has plotted or set its limits.
    """
    low, high = axes.get_ylim()
    decades = np.log10(high / low)
    if decades < 0.6:
        axes.yaxis.set_major_locator(MaxNLocator(6))  # evenly spaced, up to 6 intervals
    elif decades < 3:
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))  # three ticks in each decade
    else:
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0,)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")


def draw_method_lines(
    axes: Axes, styles: dict[str, MethodStyle], lines: dict[str, Any], settings: dict[str, Any], labelled: bool = True
) -> None:
    """Draw one line per method with the method's name at its end, and a grey band for the methods without a style.

    Methods with a style but without a line are left out. Lines have no markers. The function also sets the axes, and
    removes the margins of the x axis.

    Args:
        axes: axes that receive the lines.
        styles: style of each method that has a line.
        lines: pandas Series of each method, not empty; its index is the x axis.
        settings: arguments of ``axes.set``, such as title and scales. The y axis is linear without a ``yscale``.
        labelled: False draws no names, neither of lines nor of the band.
    """
    labels = []
    for method, style in styles.items():
        if method in lines:
            line = lines[method]
            axes.plot(line.index, line, **style | {"marker": "", "label": method}, linewidth=1.4)
            labels.append(Label(float(line.iloc[-1]), method, style["color"]))
    other_lines = [line for method, line in lines.items() if method not in styles]
    if other_lines:
        table = pd.concat(other_lines, axis=1)
        labels.append(draw_band(axes, x=table.index.to_numpy(float), values=table.to_numpy(float).T))
    # the axes, before the labels, whose heights depend on the limits
    axes.set(**settings)
    axes.margins(x=0)
    if axes.get_yscale() == "log":
        style_log_axis(axes)
    if labelled:
        label_lines(axes, labels)


def draw_band(axes: Axes, x: PerPoint, values: MethodValues) -> Label:
    """Draw the range of many methods as a grey band with the median as a line, and return the label of the band.

    Points without a known value are left out. The caller ensures that at least one point has a value, and writes the
    label with `label_lines`. `values` are (methods, points), and NaN if unknown.
    """
    is_known = np.isfinite(values).any(axis=0) & np.isfinite(x)
    x, known_values = x[is_known], values[:, is_known]
    low, high = np.nanmin(known_values, axis=0), np.nanmax(known_values, axis=0)
    median = np.nanmedian(known_values, axis=0)
    axes.fill_between(x, low, high, color=BAND, alpha=0.55, linewidth=0, zorder=0.5)
    axes.plot(x, median, color=MUTED, linewidth=1, linestyle=(0, (1, 1.5)), zorder=0.6)
    return Label(float(median[-1]), f"{len(values)} others: range, median", MUTED, x=float(x[-1]))


def time_axis_settings(process: str) -> dict[str, Any]:
    """Return ``xlabel`` and ``xscale`` of an x axis that shows the time of a process, as arguments of ``axes.set``.

    The scale is ``log`` for processes whose time is a noise level, else ``linear``.
    """
    symbol = PROCESSES.entry(process).component.time_symbol
    if symbol != "t":  # a noise level, such as sigma
        return {"xlabel": f"{symbol} (small: almost clean)", "xscale": "log"}
    quantity = "timestep" if process == "discrete" else "time"
    return {"xlabel": f"{quantity} t (0: almost clean)", "xscale": "linear"}
