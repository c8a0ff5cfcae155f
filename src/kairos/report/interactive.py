"""Interactive curves of the report: Bokeh figures with hover and lines that can be hidden, usable without a network.

They are converted from the matplotlib figures, so both show the same numbers.
"""

import json
import re
from typing import Any

import numpy as np
from bokeh.embed import json_item
from bokeh.layouts import column
from bokeh.models import HoverTool
from bokeh.plotting import figure as bokeh_figure
from bokeh.resources import Resources
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from kairos.report.plot_style import Look

FIGURES = ("metric_vs_steps", "metric_vs_time", "validation_loss", "training_loss")
LIBRARY = Resources(mode="inline", components=["bokeh"])  # Bokeh's JavaScript, which becomes part of the page
_ID = re.compile(r'"(id|root_id)": "p(\d+)"')


def convert_figure(figure: Figure, looks: dict[str, Look]) -> str:
    """Convert the curves of a matplotlib figure to JSON for ``Bokeh.embed.embed_item``; equal numbers give equal text.

    Args:
        figure: figure whose lines are labelled with the names of methods.
        looks: look of each method; lines of other names become dashed horizontal lines.
    """
    panels = [_convert_axes(axes, looks) for axes in figure.axes]
    for panel in panels:
        panel.frame_width, panel.frame_height = 640, 260 if len(panels) > 1 else 440
    text = _renumber_ids(json.dumps(json_item(column(panels))))  # type: ignore[arg-type]
    return text.replace("<", "\\u003c")  # the JSON becomes part of a script element


def _renumber_ids(text: str) -> str:
    """Renumber the ids in Bokeh's JSON from 0, since Bokeh continues its numbers from figure to figure."""
    numbers: dict[str, int] = {}

    def renumber(match: re.Match[str]) -> str:
        number = numbers.setdefault(match[2], len(numbers))
        return f'"{match[1]}": "p{number}"'

    return _ID.sub(renumber, text)


def _convert_axes(axes: Axes, looks: dict[str, Look]) -> Any:
    """Convert matplotlib axes to a Bokeh figure with the same axes, curves, horizontal lines and legend."""
    settings: dict[str, Any] = {"title": axes.get_title("left") or None, "toolbar_location": "above"}
    for side, axis in zip("xy", (axes.xaxis, axes.yaxis)):
        settings[f"{side}_range"] = tuple(map(float, axis.get_view_interval()))
        settings[f"{side}_axis_label"] = axis.get_label_text()
        settings[f"{side}_axis_type"] = axis.get_scale()
    settings["x_axis_type"] = settings["x_axis_type"].replace("symlog", "linear")  # Bokeh has no symlog axis
    tools = "pan,wheel_zoom,box_zoom,reset"
    panel = bokeh_figure(**settings, tools=tools, active_drag=None, active_scroll=None)
    for name, (line, bars) in _collect_lines(axes).items():
        x, y = (np.asarray(values, float) for values in line.get_data())
        if name in looks:
            data = {"x": x, "y": y}
            if bars is not None:
                data["low"], data["high"] = np.array([bar[:, 1] for bar in bars.get_segments()]).T
            _add_curve(panel, name, data, looks[name])
        elif not name.startswith("_"):
            panel.hspan(y=[y[0]], line_color=to_hex(line.get_color()), line_dash="dashed", legend_label=name)
    if panel.legend:
        panel.add_layout(panel.legend[0], "right")
        panel.legend.click_policy = "hide"
        panel.legend.label_text_font_size = "12px"
        panel.legend.spacing = 0
    return panel


def _collect_lines(axes: Axes) -> dict[Any, Any]:
    """Return the lines of the axes by label, each with the collection of its error bars or None."""
    lines: dict[Any, Any] = {}
    for container in axes.containers:
        lines[container.get_label()] = (container.lines[0], container.lines[2][0])  # type: ignore[attr-defined]
    for line in axes.lines:
        lines[line.get_label()] = (line, None)
    return lines


def _add_curve(panel: Any, name: str, data: dict[str, Any], look: Look) -> None:
    """Add a curve with hover to a Bokeh figure, and a band and markers if `data` contains ``low`` and ``high``."""
    style, dash = {"color": look["color"], "legend_label": name, "source": data}, look["linestyle"]
    has_band = "low" in data
    if has_band:
        panel.varea(x="x", y1="low", y2="high", fill_alpha=0.13, **style)
        panel.scatter(x="x", y="y", size=6, **style)
    dashes = "solid" if dash == "-" else [max(1, round(3 * length)) for length in dash[1]]
    line = panel.line(x="x", y="y", line_width=2, line_dash=dashes, **style)
    interval = " (@low{%.4g} to @high{%.4g})" if has_band else ""
    tooltips = [(name, "@y{%.4g}" + interval), ("at", "@x{%.4g}")]
    formatters: Any = dict.fromkeys(("@x", "@y", "@low", "@high"), "printf")
    panel.add_tools(HoverTool(renderers=[line], tooltips=tooltips, formatters=formatters, visible=False))
