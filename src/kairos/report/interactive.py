"""Curves of the report that can be hovered and switched on and off in a browser, without a network: Bokeh's.

They are read off the figures of matplotlib, so that both show the same numbers.
"""

import json
import re
from typing import Any

import numpy as np
from bokeh.embed import json_item
from bokeh.layouts import column
from bokeh.models import HoverTool
from bokeh.plotting import figure
from bokeh.resources import Resources
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from kairos.report.plot_style import Look

FIGURES = ("metric_vs_steps", "metric_vs_time", "validation_loss", "training_loss")
LIBRARY = Resources(mode="inline", components=["bokeh"])  # Bokeh's JavaScript, which no network is asked for
_ID = re.compile(r'"(id|root_id)": "p(\d+)"')


def item(drawing: Figure, looks: dict[str, Look]) -> str:
    """The figure's curves as JSON for ``Bokeh.embed.embed_item``; same numbers, same text."""
    panels = [_panel(axes, looks) for axes in drawing.axes]
    for panel in panels:
        panel.frame_width, panel.frame_height = 640, 260 if panels[1:] else 440
    text = json.dumps(json_item(column(panels)))  # type: ignore[arg-type]
    numbers: dict[str, int] = {}  # Bokeh counts its ids on from figure to figure
    text = _ID.sub(lambda found: f'"{found[1]}": "p{numbers.setdefault(found[2], len(numbers))}"', text)
    return text.replace("<", "\\u003c")  # it stands in a script


def _panel(axes: Axes, looks: dict[str, Look]) -> Any:
    words: dict[str, Any] = {"title": axes.get_title("left") or None, "toolbar_location": "above"}
    for side, axis in zip("xy", (axes.xaxis, axes.yaxis)):
        words[f"{side}_range"] = tuple(map(float, axis.get_view_interval()))
        words |= {f"{side}_axis_label": axis.get_label_text(), f"{side}_axis_type": axis.get_scale()}
    words["x_axis_type"] = words["x_axis_type"].replace("symlog", "linear")  # which Bokeh lacks
    panel = figure(**words, tools="pan,wheel_zoom,box_zoom,reset", active_drag=None, active_scroll=None)
    lines: dict[Any, Any] = {bars.get_label(): (bars.lines[0], bars.lines[2][0]) for bars in axes.containers}  # type: ignore[attr-defined]
    for name, (line, spread) in (lines | {line.get_label(): (line, None) for line in axes.lines}).items():
        x, y = (np.asarray(part, float) for part in line.get_data())
        if name in looks:
            ends = zip(("low", "high"), np.array([bar[:, 1] for bar in spread.get_segments()]).T) if spread else ()
            _curve(panel, name, {"x": x, "y": y, **dict(ends)}, looks[name], bool(spread))
        elif not name.startswith("_"):
            panel.hspan(y=[y[0]], line_color=to_hex(line.get_color()), line_dash="dashed", legend_label=name)
    if panel.legend:
        panel.add_layout(panel.legend[0], "right")
        panel.legend.click_policy, panel.legend.label_text_font_size, panel.legend.spacing = "hide", "12px", 0
    return panel


def _curve(panel: Any, name: str, data: dict[str, Any], look: Look, spread: bool) -> None:
    style, dash = {"color": look["color"], "legend_label": name, "source": data}, look["linestyle"]
    if spread:
        panel.varea(x="x", y1="low", y2="high", fill_alpha=0.13, **style)
        panel.scatter(x="x", y="y", size=6, **style)
    dashes = "solid" if dash == "-" else [max(1, round(3 * part)) for part in dash[1]]
    line = panel.line(x="x", y="y", line_width=2, line_dash=dashes, **style)
    said = [(name, "@y{%.4g}" + " (@low{%.4g} to @high{%.4g})" * spread), ("at", "@x{%.4g}")]
    printf: Any = dict.fromkeys(("@x", "@y", "@low", "@high"), "printf")
    panel.add_tools(HoverTool(renderers=[line], tooltips=said, formatters=printf, visible=False))
