"""Pages of the site about strategies: description, formula, options, and a picture of p, w and p w of each one."""

import argparse
import inspect
import io
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox
from reference import described, fields, schema

import kairos_timesteps
from kairos.cli import strategies as command
from kairos.cli.strategies.listing import COMBINATIONS
from kairos.cli.strategies.show import build_initial_view, find_faults
from kairos.report.plot_style import STYLE, Label, create_figure, label_lines
from kairos.report.strategy_figures import draw_strategy
from kairos_timesteps import options
from kairos_timesteps.base import FixedDensity
from kairos_timesteps.components import COUPLINGS, SAMPLERS, WEIGHTINGS
from kairos_timesteps.diffusion.schedule import make_schedule
from kairos_timesteps.registry import Registry

_BOX = Bbox([[-0.6, -0.5], [9.55, 2.4]])  # inches around the axes; measuring the labels would need a second drawing
Part = tuple[str, dict[str, bytes]]  # Markdown, and pictures by their path relative to the page
_PROCESSES = {  # of strategies that are not for timesteps alone; densities of u are equal on all processes
    **dict.fromkeys(("edm_log_normal", "edm", "edm2"), ("edm", "discrete")),
    **dict.fromkeys(("log_snr", "cosine_interpolated", "sigmoid"), ("discrete", "edm")),
    **dict.fromkeys(("mode", "cosmap", "u_shape", "shift", "parabola", "slope"), ("flow",)),
    **dict.fromkeys(("linear", "power", "bell", "cosmap_weight"), ("flow", "discrete")),
    **dict.fromkeys((name for name in COMBINATIONS if name.startswith("edm")), ("edm",)),
}
_EXAMPLES = {  # options of strategies whose defaults, or whose initial densities, are uniform
    "clts": ["--progress=1"],
    "range": ["density=log_normal", "low=0.2", "high=0.8"],
    "shift": ["density=log_normal", "alpha=3"],
    "mixture": ["parts=[{name: log_normal, m: 1, share: 3}, {name: uniform, share: 1}]"],
    "by_group": ["parts=[{name: log_normal, group: photos}]"],
    "schedule": ["parts=[{name: log_normal, start: 0}, {name: uniform, start: 1000}]"],
    "table": ["values=[1, 3, 2, 0.5, 1]"],
    "listed": ["times=[0.1, 0.3, 0.5, 0.9]"],
    "table_weight": ["values=[1, 3, 2, 0.5, 1]"],
}
_SECTIONS = re.compile(r"\n+(Args|Raises|Attributes|Returns):\n.*", re.DOTALL)


def shown(name: str, process: str) -> tuple[bytes, str]:
    """Draw a strategy on a process; returns the SVG file and its caption."""
    parser = argparse.ArgumentParser()
    command.add_arguments("strategies", parser)
    arguments: list[str] = []
    for option in _EXAMPLES.get(name, ()):
        arguments += [option] if option[0] == "-" else ["--set", option]
    words = [name, *(["--process", process] if process != "discrete" else []), *arguments]
    view = build_initial_view(parser.parse_args(["show", *words]))
    with matplotlib.rc_context(STYLE):
        picture = _svg(draw_strategy(view.columns, "", (), view.process), _BOX)
    shell_words = " ".join(f'"{word}"' if re.search(r"[\s\[{]", word) else word for word in words)
    notes = "; ".join([*view.notes, *find_faults(view.columns)])
    return picture, f"`kairos strategies show {shell_words}`" + (f": {notes}." if notes else "")


def pictured(name: str) -> Part:
    """Draw a strategy on all processes that it is designed for; returns Markdown and the pictures."""
    lines, pictures = [], {}
    for process in _PROCESSES.get(name, ("discrete",)):
        path = f"pictures/{name.replace('+', '-')}-{process}.svg"
        pictures[path], below = shown(name, process)
        lines.append(f"![p, w and p w of {name}, process {process}]({path}){{ loading=lazy }}\n\n{below}")
    return "\n\n".join(lines), pictures


def doc(code: Any) -> str:
    """Return a docstring without its sections Args, Raises, Attributes and Returns."""
    text = _SECTIONS.sub("", inspect.getdoc(code) or "")
    return re.sub(r"``(.+?)``", r"`\1`", text)


def component(registry: Registry, name: str, properties: Mapping[str, Any], draw: bool = True) -> Part:
    """Describe one sampler, weighting or coupling; returns Markdown and the pictures."""
    code = registry[name].component
    common = _COMMON if registry is SAMPLERS else {}
    specific = {key: its for key, its in properties.items() if its != common.get(key)}
    table = fields(specific) if specific else "No options of its own."
    picture, pictures = pictured(name) if draw else ("", {})
    return "\n\n".join(filter(None, [f"## {name}", doc(code), picture, table])), pictures


def page(registry: Registry) -> Part:
    """Describe all components of a registry; returns Markdown and the pictures."""
    descriptions = described(schema()["$defs"]["MethodConfig"]["properties"][registry.kind])
    parts, pictures = [], {}
    for name in registry:
        properties = descriptions[name]["properties"]
        text, component_pictures = component(registry, name, properties, draw=registry is not COUPLINGS)
        parts.append(text)
        pictures |= component_pictures
    if registry is SAMPLERS:
        parts.insert(0, "## Options of all samplers\n\n`points`: for fixed densities.\n\n" + fields(_COMMON))
    parts += [f"## {name}\n\nNot available: {why}." for name, why in registry.unavailable.items()]
    return "\n\n".join(parts), pictures


def combinations() -> Part:
    """Describe the pairs of sampler and weighting in `COMBINATIONS`, which papers and their code use together."""
    parts, pictures = [], {}
    for name, source in COMBINATIONS.items():
        text, combination_pictures = pictured(name)
        sampler, weighting = name.split("+")
        parts.append(
            f"## {name}\n\n{source}: sampler [{sampler}](samplers.md#{sampler}), "
            f"weighting [{weighting}](weightings.md#{weighting}).\n\n{text}"
        )
        pictures |= combination_pictures
    return "\n\n".join(parts), pictures


def levels() -> Part:
    """Draw ln SNR over the fraction u of the process, for processes and noise schedules."""
    curves = {
        "discrete, linear": make_schedule("linear"),
        "discrete, cosine": make_schedule("cosine"),
        "edm": kairos_timesteps.Edm().schedule,
        "flow": kairos_timesteps.Flow().schedule,
        "flow, shift 3": kairos_timesteps.Flow(shift=3.0).schedule,
    }
    with matplotlib.rc_context(STYLE):
        drawing, grid = create_figure(6.6, 2.9)
        axes, labels = grid[0, 0], []
        for (name, schedule), color in zip(curves.items(), ("#0072B2", "#56B4E9", "#D55E00", "#009E73", "#7A4FA3")):
            level = np.log(schedule.snr)
            axes.plot((np.arange(len(level)) + 0.5) / len(level), level, color=color)
            labels.append(Label(float(level[-1]), name, color))
        axes.set(xlim=(0, 1), ylim=(-12, 12), xlabel="fraction u of the process (0: almost clean)", title="ln SNR")
        label_lines(axes, [replace(label, y=max(label.y, -12.0)) for label in labels])
        return "![ln SNR along processes](pictures/levels.svg)", {"pictures/levels.svg": _svg(drawing, "tight")}


def _svg(drawing: Figure, box: Any) -> bytes:
    """Return a picture as an SVG file without a date, with coordinates cut to a tenth of a point for a smaller file."""
    file = io.BytesIO()
    drawing.savefig(file, format="svg", metadata={"Date": None}, bbox_inches=box)
    return re.sub(rb' d="[^"]+"', lambda path: re.sub(rb"(\.\d)\d+", rb"\1", path[0]), file.getvalue())


_uniform = described(schema()["$defs"]["MethodConfig"]["properties"]["sampler"])["uniform"]["properties"]
_COMMON = {key: its for key, its in _uniform.items() if key in options.default_values(FixedDensity)}
PARTS = {
    "levels": levels,
    "example": lambda: pictured("speed+change_aware"),
    "samplers": lambda: page(SAMPLERS),
    "weightings": lambda: page(WEIGHTINGS),
    "couplings": lambda: page(COUPLINGS),
    "combinations": combinations,
}
