"""Common look of all figures: one colour, dash and marker per method, and labels next to lines without overlap.

Only matplotlib's object interface is used, and SVG files carry no date and no random ids: same numbers, same bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_params_from_file, rcParams
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.rcsetup import cycler
from matplotlib.ticker import LogLocator, MaxNLocator
from matplotlib.transforms import Bbox
from scipy.optimize import isotonic_regression

from kairos_timesteps.diffusion.registries import PROCESSES

DPI = 160  # of PNG files
INK, MUTED = "#1f2328", "#667079"
# Okabe and Ito's palette, distinct in every common colour blindness; the baseline is black, its yellow is too light
_COLORS = cycler(color=["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#B27C00", "#7A4FA3"])
_MARKERS = cycler(marker=["s", "D", "^", "v", "P", "X", "p"])
_DASHES = cycler(linestyle=["-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5))])
Look = dict[str, Any]  # how a method is drawn: color, marker and linestyle, as matplotlib calls them

_LEADER = {"arrowstyle": "-", "lw": 0.7, "alpha": 0.6, "shrinkA": 1, "shrinkB": 0, "relpos": (0, 0.5)}

STYLE: Any = rc_params_from_file(Path(__file__).with_suffix(".mplstyle"), use_default_template=False)


@dataclass(frozen=True)
class Label:
    """A text beside the right edge of the axes, for a line that ends at height `y` (data), before the edge at `x`."""

    y: float
    text: str
    color: str
    bold: bool = False
    x: float | None = None


def looks(methods: Sequence[str], baseline: str | None) -> dict[str, Look]:
    """A look per method, by its place in the configuration; the baseline is black."""
    others = [method for method in methods if method != baseline]
    black = {} if baseline is None else {baseline: {"color": "#000000", "marker": "o", "linestyle": "-"}}
    return dict(zip(others, (_DASHES * (_COLORS + _MARKERS))())) | black


def figure(
    width: float, height: float, rows: int = 1, columns: int = 1, *, between: float = 0.5, above: float = 0.6
) -> tuple[Figure, Any]:
    """A figure whose grid of axes (rows, columns) has a size in inches, with spaces `between` columns, `above` rows.

    What stands around the axes is outside of the figure; `tight_box` includes it when the figure is saved.
    """
    wide, high = width - between * (columns - 1), height - above * (rows - 1)
    space = {"wspace": between * columns / wide, "hspace": above * rows / high}  # in sizes of the axes
    result = Figure(figsize=(width, height))
    return result, result.subplots(rows, columns, squeeze=False, gridspec_kw=space)


def tight_box(drawing: Figure) -> Bbox:
    """Return the box in inches that holds everything drawn, with the style's padding, for ``savefig(bbox_inches=)``."""
    drawing.draw_without_rendering()  # texts and ticks get their positions
    return drawing.get_tightbbox().padded(rcParams["savefig.pad_inches"])


def label_lines(axes: Axes, labels: Sequence[Label], size: float = 9) -> None:
    """Write labels right of the axes at the heights of their lines, moved apart where they would overlap."""
    if not labels:
        return
    drawing = axes.get_figure(root=True)
    gap = size * 1.3 / 72 * drawing.dpi / axes.get_window_extent().height  # type: ignore[union-attr]  # of the axes
    ordered = sorted(labels, key=lambda label: label.y)
    true = [float(axes.transAxes.inverted().transform(axes.transData.transform((1, label.y)))[1]) for label in ordered]
    for label, height, place in zip(ordered, true, spread_out(true, gap)):
        if label.x is not None:
            right = axes.get_xlim()[1]
            axes.plot([label.x, right], [label.y, label.y], color=label.color, lw=0.7, ls=(0, (1, 2)), alpha=0.7)
        dark = tuple(0.78 * part for part in to_rgb(label.color))  # of light lines letters are not readable
        look: dict[str, Any] = {"color": dark, "fontsize": size, "fontweight": "bold" if label.bold else "normal"}
        at: Any = dict.fromkeys(("xycoords", "textcoords"), "axes fraction")
        at |= {"xy": (1.0, height), "xytext": (1.045, place)}
        leader = _LEADER | {"color": label.color}
        axes.annotate(label.text, **at, **look, va="center", annotation_clip=False, arrowprops=leader)


def spread_out(heights: Sequence[float], gap: float) -> list[float]:
    """Places in the order of `heights`, at least `gap` apart: of all such places those with the least squared moves."""
    gaps = gap * np.arange(len(heights))
    return (isotonic_regression(np.array(heights) - gaps).x + gaps).tolist()


def plain_log(axes: Axes) -> None:
    """A log axis upwards with numbers instead of powers of ten, and enough of them where it is short."""
    low, high = axes.get_ylim()
    decades = np.log10(high / low)
    ticks = LogLocator(subs=(1.0, 2.0, 5.0) if decades < 3 else (1.0,))
    axes.yaxis.set_major_locator(MaxNLocator(6) if decades < 0.6 else ticks)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")


def method_lines(
    axes: Axes, looks: dict[str, Look], lines: dict[str, Any], settings: dict[str, Any], labelled: bool = True
) -> None:
    """A line per method, each a pandas Series over its index; its name at its end; axes as `settings` say."""
    for method, line in lines.items():
        axes.plot(line.index, line, **looks[method] | {"marker": "", "label": method}, linewidth=1.4)
    axes.set(**settings)
    axes.margins(x=0)
    if axes.get_yscale() == "log":
        plain_log(axes)
    if labelled:
        ends = {method: float(line.iloc[-1]) for method, line in lines.items()}
        label_lines(axes, [Label(end, method, looks[method]["color"]) for method, end in ends.items()])


def own_time(process: str) -> dict[str, Any]:
    """Return label and scale of an axis that shows the time of a process."""
    own = PROCESSES.entry(process).load().time_symbol
    if own != "t":
        return {"xlabel": f"{own} (small: almost clean)", "xscale": "log"}
    return {"xlabel": f"{'timestep' if process == 'discrete' else 'time'} t (0: almost clean)", "xscale": "linear"}
