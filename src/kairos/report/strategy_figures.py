"""Pictures of a strategy, p(t), w(t) and p(t) w(t), and of SpeeD's process increments; no pipeline needed."""

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
from kairos.report.plot_style import DPI, INK, MUTED, STYLE, figure, own_time

_BLUE, _ORANGE, _GREEN, _RED = "#0072B2", "#D55E00", "#009E73", "#C0001A"
SHADES = {"acceleration": "#F3C9A8", "steady": "#DCD3EE", "deceleration": "#BFD9EC", "convergence": "#E3E5E8"}
_PAPER: dict[str, Any] = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.5}  # behind a text
_COMPARED: dict[str, Any] = {"color": "#CC79A7", "linestyle": (0, (4, 1.5))}  # look of a second strategy
_STAIRS = 60  # timesteps up to which each one is a step of its own


class Compared(NamedTuple):
    """A second strategy in the picture of a strategy.

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
    compared: Compared | None = None,
) -> Figure:
    """Density, weight and their product over timesteps.

    Args:
        columns: of `strategies.names.table`, each (T,).
        title: the strategy's name.
        lines: what else one has to know, written below it.
        process: name of the process whose time it is.
        compared: strategy to draw as dashed lines, described on the right.
    """
    drawing, grid = figure(9.45, 2.05, 1, 3, between=0.62)
    described = [(title, lines)] if compared is None else [(title, lines), (compared.title, compared.lines)]
    characters = 150 if compared is None else 72
    wrapped = [
        [part for line in each for part in textwrap.wrap(line, characters, subsequent_indent="    ")]
        for _, each in described
    ]
    top = 0.65 + 0.17 * max(map(len, wrapped))
    for column, ((name, _), notes) in enumerate(zip(described, wrapped)):
        left, height = 0.52 * column, 1 + (top + 0.18) / 2.05
        indent = 0.0
        if compared is not None:
            indent = 0.045
            look = _COMPARED if column else {"color": MUTED}
            middle = height - 0.08 / 2.05
            drawing.add_artist(Line2D([left, left + 0.035], [middle, middle], linewidth=1.8, **look))
        drawing.text(left + indent, height, name, va="top", fontsize=13, fontweight="bold")
        below = 1 + (top - 0.14) / 2.05
        drawing.text(left, below, "\n".join(notes), va="top", fontsize=8.5, color=MUTED, linespacing=1.35)
    others = [] if compared is None else [compared.columns]
    t, count = columns["t"], len(columns["t"])
    w = np.concatenate([each["w"] for each in (columns, *others)])
    positive = w[np.isfinite(w) & (w > 0)]
    decades = not (w < 0).any() and positive.max(initial=0) > 1e3 * positive.min(initial=np.inf)
    panels = (
        ("Drawn: T · p(t)", "p", count, _BLUE, False),
        ("Weighted: w(t)", "w", 1, _ORANGE, decades),
        ("Effective: T · p(t) · w(t)", "effective", count, INK, decades),
    )
    for axes, (label, key, scale, color, logarithmic) in zip(grid.flat, panels):
        _curve(axes, t, columns[key] * scale, color, logarithmic, [each[key] * scale for each in others])
        axes.set(title=label, **own_time(process))
        axes.margins(x=0)
    drawn, side = grid[0, 0], {"ha": "right", "fontsize": 8, "color": MUTED}
    drawn.axhline(1, color=MUTED, linewidth=0.9, linestyle=(0, (2, 2)), zorder=1)
    drawn.annotate("uniform", (1, 1), (-2, 3), ("axes fraction", "data"), "offset points", **side)
    return drawing


def _curve(
    axes: Axes, t: np.ndarray, values: np.ndarray, color: str, logarithmic: bool, compared: Sequence[np.ndarray]
) -> None:
    """Draw a filled curve from 0, or from the lower end of a log axis, and dashed curves to compare it with.

    Values that cannot be drawn are marked in red.
    """
    shown, *others = [np.where(np.isfinite(each), each, np.nan) for each in (values, *compared)]
    together = np.concatenate([shown, *others])
    positive = together[together > 0]
    if logarithmic and len(positive):
        axes.set_yscale("log")
        high = min(positive.max(), 1e280)  # matplotlib's ticks overflow beyond
        low = max(min(positive.min(), high), high * 1e-12) / 2
        axes.set_ylim(low, high * 3)
    else:
        low, least, most = 0.0, np.nanmin([0, *together]), np.nanmax([0, *together])
        room = 0.12 * ((most - least) or 1.0)
        axes.set_ylim(least - room * (least < 0), most + room)
    if len(t) <= _STAIRS:
        edges = np.arange(len(t) + 1) - 0.5
        axes.stairs(shown, edges, baseline=None, color=color, linewidth=1.6)
        axes.stairs(shown, edges, baseline=low, color=color, alpha=0.12, fill=True, linewidth=0)
        for other in others:
            axes.stairs(other, edges, baseline=None, linewidth=1.6, **_COMPARED)
    else:
        axes.plot(t, shown, color=color, linewidth=1.6)
        axes.fill_between(t, shown, low, color=color, alpha=0.12, linewidth=0)
        for other in others:
            axes.plot(t, other, linewidth=1.6, **_COMPARED)
    bad = ~np.isfinite(values) | (values < 0)
    if bad.any():
        axes.plot(t[bad], np.full(bad.sum(), 0.02), "|", color=_RED, transform=axes.get_xaxis_transform())
        note = "red: negative or not finite"
        axes.text(0.02, 0.96, note, transform=axes.transAxes, va="top", fontsize=8, color=_RED)


def draw_increments(found: Increments, title: str) -> Figure:
    """SpeeD's figures 1 and 4 for any process: moments of the increments, the areas, and how many lie in each."""
    drawing, grid = figure(9.9, 4.75, 2, 3, between=0.72, above=0.85)
    drawing.text(0, 1 + 1.18 / 4.75, f"Process increments: {title}", va="top", fontsize=13, fontweight="bold")
    area, exploding = found.area(), found.process in ("ve", "edm")
    names = [name for name in SHADES if (area == name).any()]
    pick = slice(int(exploding), None)  # on a log axis there is no 0
    t, bounds = found.t[pick], (0, (3, 2))
    curves = (
        (grid[0, 0], "Variance of $x_{t+1} - x_t$", exploding, [("as the paper has it", found.variance, _BLUE, "-"),
         ("its lower bound", found.variance_bound, INK, bounds)]),
        (grid[0, 1], "Growth of that variance by t", found.process == "edm", [("", found.change, _ORANGE, "-")]),
        (grid[1, 0], "Own variance, given x0", exploding, [("", found.own_variance, _GREEN, "-")]),
        (grid[1, 1], "Mean, in multiples of x0", not exploding, [("size of the mean", abs(found.mean), _BLUE, "-"),
         ("its upper bound", found.mean_squared_bound**0.5, INK, bounds)]),
    )  # fmt: skip
    for axes, heading, logarithmic, lines in curves:
        axes.set(xscale="log" if exploding else "linear", yscale="log" if logarithmic else "linear")
        for label, values, color, dash in lines:
            axes.plot(t, values[pick], color=color, linestyle=dash, linewidth=1.6, label=label or None)
        axes.set(xlim=(t[0], t[-1]), title=heading, xlabel="time t")
        _shade(axes, found, area)
        if not any(values.any() for _, values, _, _ in lines):
            axes.set_ylim(-1, 1)
            note = "none: the scale of x0 is constant"
            axes.text(0.5, 0.62, note, transform=axes.transAxes, ha="center", fontsize=9, bbox=_PAPER)
        elif len(lines) > 1:
            place = "lower right" if axes is grid[0, 0] else "best"
            axes.legend(fontsize=8, loc=place, frameon=True, edgecolor="none", framealpha=0.85)
    _boundaries(grid[0, 1], found)
    _shares(grid[0, 2], area, names)
    _histogram(grid[1, 2], found, area, names)
    handles: list[Any] = [Patch(facecolor=SHADES[name], label=name) for name in names]
    handles += [Line2D([], [], color=MUTED, linewidth=1, linestyle=(0, (4, 2)), label="boundary of two areas")]
    corner = (-0.011, 1 + 0.9 / 4.75)
    drawing.legend(handles=handles, loc="upper left", ncols=4, bbox_to_anchor=corner, fontsize=9, columnspacing=1.6)
    return drawing


def _shade(axes: Axes, found: Increments, area: np.ndarray) -> None:
    """The areas as background."""
    look: dict[str, Any] = {"fill": True, "alpha": 0.55, "linewidth": 0, "zorder": 0}
    for name, shade in SHADES.items():
        axes.stairs(area[:-1] == name, found.t, color=shade, transform=axes.get_xaxis_transform(), **look)
    for place in (found.deceleration, found.convergence):
        if place is not None:
            axes.axvline(place, color=MUTED, linewidth=1, linestyle=(0, (4, 2)), zorder=1)


def _boundaries(axes: Axes, found: Increments) -> None:
    """Mark the boundaries of the areas, with labels above the curve."""
    low, high = axes.get_ylim()
    axes.set_ylim((low, high * (high / low) ** 0.28) if axes.get_yscale() == "log" else (0, high * 1.28))
    at: Any = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "va": "top", "bbox": _PAPER}
    for place, height, note in ((found.deceleration, 0.97, ""), (found.convergence, 0.88, f" (r = {found.r:g})")):
        if place is None:
            continue
        left = axes.transAxes.inverted().transform(axes.transData.transform((place, high)))[0] < 0.6
        side: dict[str, Any] = {"xytext": (4, 0), "ha": "left"} if left else {"xytext": (-4, 0), "ha": "right"}
        axes.annotate(f"t = {place:.5g}{note}", (place, height), fontsize=8.5, **side, **at)


def _shares(axes: Axes, area: np.ndarray, names: list[str]) -> None:
    shares = [100 * float((area == name).mean()) for name in names]
    bars = axes.bar(names, shares, color=[SHADES[name] for name in names], edgecolor=MUTED, linewidth=0.8, width=0.62)
    axes.bar_label(bars, labels=[f"{share:.1f} %" for share in shares], padding=2, fontsize=9)
    axes.set(ylim=(0, max(shares) * 1.15), title="Timesteps in each area, %")
    axes.tick_params(axis="x", labelsize=8.5, length=0)
    axes.grid(axis="x", visible=False)


def _histogram(axes: Axes, found: Increments, area: np.ndarray, names: list[str]) -> None:
    """Draw the histogram of increments over timesteps, on a log axis for variance-exploding processes."""
    variance = found.variance
    edges = np.linspace(0, variance.max(), 21)
    if found.process in ("ve", "edm"):
        edges = np.geomspace(variance.min(), variance.max() * 1.0001, 21)
        axes.set_xscale("log")
    values = [variance[area == name] for name in names]
    weights = [np.full(len(value), 100 / len(area)) for value in values]
    shades = [SHADES[name] for name in names]
    axes.hist(values, edges.tolist(), weights=weights, stacked=True, color=shades, edgecolor=MUTED, linewidth=0.6)
    axes.set(title="Timesteps by variance, %", xlabel="variance, as the paper has it")
    axes.grid(axis="x", visible=False)


def write_png(draw: Callable[[], Figure], path: Path) -> None:
    """Draw a picture and write it, whole or not at all."""
    with matplotlib.rc_context(STYLE), atomic(path) as file:
        draw().savefig(file, format="png", dpi=DPI, bbox_inches="tight", pad_inches=0.1)
