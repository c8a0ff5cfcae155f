"""``kairos strategies show`` of presets: another trainer's timesteps and weights, in that trainer's time."""

import argparse
from typing import Any

import numpy as np

import kairos_timesteps
from kairos.cli.common import demand
from kairos.cli.strategies.listing import describe_options
from kairos.cli.strategies.show import (
    View,
    build_initial_view,
    build_process_with_warnings,
    compared_arguments,
    is_preset,
    parse_scalar,
    select_context,
)
from kairos.forward_process import chosen_prediction
from kairos_timesteps.diffusion.registries import PROCESSES
from kairos_timesteps.errors import ConfigError
from kairos_timesteps.options import but_name, dump
from kairos_timesteps.preset_table import CONVENTIONS, TABLE, Row

PROCESS_BY_TIME_UNIT: dict[str, dict[str, Any]] = {  # that has the time of a preset, by the unit of its times
    "t": {"name": "flow"},
    "sigma": {"name": "edm", "sigma_data": 0.5},
    "step": {"name": "discrete", "schedule": "scaled_linear"},
}
_ROWS = {row.name: row for row in TABLE}
_ARGUMENTS = ("process", "schedule", "timesteps")  # of the process, which a preset determines


def build_views_with_presets(arguments: argparse.Namespace, context: dict[str, Any]) -> list[View]:
    """Return the views of a preset or strategy and of the one that it is compared with; one of them is a preset.

    A strategy is shown on the process that has the time of the preset.

    Raises:
        ConfigError: a name or an option is not allowed, or two presets have different times.
    """
    each = [arguments] if arguments.compare is None else [arguments, compared_arguments(arguments)]
    presets = {one.strategy: _preset(one) for one in each if is_preset(one.strategy)}
    units = {name: CONVENTIONS[_ROWS[name].convention].time for name in presets}
    if len({*units.values()}) > 1:
        got = " and ".join(f"{name} in {PROCESS_BY_TIME_UNIT[unit]['name']} time" for name, unit in units.items())
        raise ConfigError(f"--compare: got {got}; allowed: presets in the same time")
    for option in (*_ARGUMENTS, "progress"):
        got = getattr(arguments, option)
        demand(got is None, option, got, f"none: {next(iter(presets))} determines it")
    process = PROCESS_BY_TIME_UNIT[next(iter(units.values()))]
    changed = {"process": process["name"], "schedule": process.get("schedule")}
    return [
        build_preset_view(presets[one.strategy], process, context)
        if one.strategy in presets
        else build_initial_view(argparse.Namespace(**{**vars(one), **changed}), context)
        for one in each
    ]


def _preset(arguments: argparse.Namespace) -> Any:
    """Return the preset that the arguments name, with the trainer's options of ``--set``."""
    options = {}
    for setting in arguments.set:
        key, equals, text = map(str.strip, setting.partition("="))
        demand(equals, "set", repr(setting), "OPTION=VALUE, such as shift=3")
        demand(key not in options, f"set {key}", "given twice", "once")
        options[key] = parse_scalar(text, setting)
    return kairos_timesteps.preset(arguments.strategy, **options)


def build_preset_view(preset: Any, process: dict[str, Any], context: dict[str, Any]) -> View:
    """Return the view of a preset.

    Args:
        preset: the preset.
        process: name and options of the process that has the preset's time.
        context: properties of a sample, such as its tokens.
    """
    row = _ROWS[preset.name]
    options = dump(PROCESSES.parse(process["name"], but_name(process)))
    built = build_process_with_warnings(
        {"process": {"name": process["name"], **options}, "prediction": chosen_prediction(process["name"], None)}
    )
    properties, notes = select_context(preset.sampler, f"preset {preset.name}", context)
    cells = np.arange(built.schedule.timesteps + 1) / built.schedule.timesteps
    unit = CONVENTIONS[row.convention].time
    edges = built.times(cells) if unit == "sigma" else cells
    t = built.schedule.times
    below = preset.cdf(edges, **properties)
    p = np.diff(np.concatenate([[0.0], below[1:-1], [1.0]]))
    outside = below[0] + 1 - below[-1]
    if outside > 1e-4:
        ends = f"{built.time_symbol} below {edges[0]:g} or above {edges[-1]:g}"
        notes.append(f"{100 * outside:.2g} % of the draws, {ends}, belong to the first and the last row")
    w = preset.weights(t / len(t) if unit == "step" else t).double().numpy()
    columns = {"t": t, "p": p, "w": w, "effective": p * w}
    return View(preset.name, process["name"], columns, _description(preset, row), tuple(notes))


def _description(preset: Any, row: Row) -> tuple[tuple[str, str], ...]:
    """Return the lines that describe a preset: options, formula, time, components of kairos and source."""
    lines = {
        "options": describe_options(preset.options) or "none",
        "formula": preset.help,
        "time": preset.convention,
        "sampler": row.sampler,
        "weighting": row.weighting,
        "source": preset.source,
    }
    return tuple(lines.items())
