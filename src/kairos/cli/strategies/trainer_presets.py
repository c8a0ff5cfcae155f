"""``kairos strategies show`` of presets: another trainer's timesteps and weights, in that trainer's time."""

import argparse
from typing import Any

import numpy as np

import kairos_timesteps
from kairos.cli.common import demand_option
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
from kairos.forward_process import select_prediction
from kairos.library_components import LibraryComponent
from kairos_timesteps.components import PROCESSES
from kairos_timesteps.errors import ConfigError
from kairos_timesteps.preset_table import CONVENTIONS, TABLE, Row

# process whose time is the time of a preset, by the unit of the preset's times
PROCESS_BY_TIME_UNIT: dict[str, dict[str, Any]] = {
    "t": {"name": "flow"},
    "sigma": {"name": "edm", "sigma_data": 0.5},
    "step": {"name": "discrete", "schedule": "scaled_linear"},
}
_ROWS = {row.name: row for row in TABLE}
_NOTED_SHARE = 1e-4  # share of draws outside of the process's time above which a note reports them
_PROCESS_ARGUMENTS = ("process", "schedule", "timesteps")  # a preset determines them


def build_views_with_presets(arguments: argparse.Namespace, context: dict[str, Any]) -> list[View]:
    """Return the view of the preset or strategy in the arguments, and the view of the one in ``--compare``, if any.

    The caller ensures that at least one of them is a preset. A strategy is shown in its initial state, on the process
    whose time is the time of the preset.

    Args:
        context: properties of a sample, such as its tokens.

    Raises:
        ConfigError: a name or an option is not allowed, two presets have different times, or ``--progress`` or an
            option of the process is set, which the preset determines.
    """
    arguments_of_views = [arguments]
    if arguments.compare is not None:
        arguments_of_views.append(compared_arguments(arguments))
    presets = []  # of each view, None for a strategy
    for view_arguments in arguments_of_views:
        presets.append(_build_preset(view_arguments) if is_preset(view_arguments.strategy) else None)
    process = _select_process([preset.name for preset in presets if preset is not None], arguments)
    process_arguments = {"process": process.name, "schedule": process.get("schedule")}

    views = []
    for view_arguments, preset in zip(arguments_of_views, presets, strict=True):
        if preset is not None:
            views.append(build_preset_view(preset, process, context))
        else:
            arguments_on_process = argparse.Namespace(**{**vars(view_arguments), **process_arguments})
            views.append(build_initial_view(arguments_on_process, context))
    return views


def _select_process(preset_names: list[str], arguments: argparse.Namespace) -> LibraryComponent:
    """Return the process whose time is the time of one or two presets.

    Raises:
        ConfigError: two presets have different times, or ``--progress`` or an option of the process is set.
    """
    units = {name: _time_unit(_ROWS[name]) for name in preset_names}
    if len(set(units.values())) > 1:
        times = " and ".join(f"{name} in {PROCESS_BY_TIME_UNIT[unit]['name']} time" for name, unit in units.items())
        raise ConfigError(f"--compare: got {times}; allowed: presets in the same time")
    preset_name, unit = next(iter(units.items()))  # a second preset has an equal unit
    for option in (*_PROCESS_ARGUMENTS, "progress"):
        value = getattr(arguments, option)
        demand_option(value is None, option, value, f"none, since {preset_name} determines it")
    return LibraryComponent.select(PROCESSES, PROCESS_BY_TIME_UNIT[unit])


def _time_unit(row: Row) -> str:
    """Return the unit of a preset's times, ``t``, ``sigma`` or ``step``, from its row in the table of presets."""
    return CONVENTIONS[row.convention].time


def _build_preset(arguments: argparse.Namespace) -> Any:
    """Return the preset in `arguments.strategy`, built with the options of the trainer in `arguments.set`.

    Arguments from `compared_arguments` have the options of ``--compare-set`` in `set`.

    Raises:
        ConfigError: the preset or an option is unknown, or the value of an option is not allowed or set twice.
    """
    options = {}
    for setting in arguments.set:
        key, equals, text = map(str.strip, setting.partition("="))
        demand_option(equals, arguments.set_option, repr(setting), "OPTION=VALUE, such as shift=3")
        demand_option(key not in options, f"{arguments.set_option} {key}", "a value twice", "once")
        options[key] = parse_scalar(text, arguments.set_option, setting)
    return kairos_timesteps.preset(arguments.strategy, **options)


def build_preset_view(preset: Any, process: LibraryComponent, context: dict[str, Any]) -> View:
    """Return the view of a preset: its density and weights in each of the T cells of the process's time.

    Column ``p`` is the increment of the preset's cumulative distribution over a cell. Draws outside of the process's
    time belong to the outer cells; a note reports them if they are more than 0.01 %. Column ``w`` is the weight at the
    time of a cell, and ``effective`` is p w. The caller ensures that the process has the preset's time.

    Args:
        context: properties of a sample, such as its tokens.

    Raises:
        ConfigError: the preset requires a property that `context` does not contain.
    """
    row = _ROWS[preset.name]
    built_process = build_process_with_warnings(process, select_prediction(process, None))
    properties, notes = select_context(preset.sampler, f"preset {preset.name}", context)

    # density
    schedule, unit = built_process.schedule, _time_unit(row)
    fractions = np.arange(schedule.timesteps + 1) / schedule.timesteps  # edges of T equal cells of [0, 1], (T + 1,)
    edges = built_process.times(fractions) if unit == "sigma" else fractions  # edges in the preset's unit
    cumulative = preset.cdf(edges, **properties)  # (T + 1,)
    # 0 and 1 in place of the outer values: the outer cells include the draws beyond them
    p = np.diff(np.concatenate([[0.0], cumulative[1:-1], [1.0]]))  # (T,)
    outside_share = cumulative[0] + 1 - cumulative[-1]
    if outside_share > _NOTED_SHARE:
        ends = f"{built_process.time_symbol} below {edges[0]:g} or above {edges[-1]:g}"
        notes.append(f"{100 * outside_share:.2g} % of the draws, {ends}, belong to the first and the last row")

    # weights
    t = schedule.times  # (T,)
    preset_times = t / len(t) if unit == "step" else t  # presets have steps as fractions of T
    w = preset.weights(preset_times).double().numpy()
    return View(
        name=preset.name,
        process=process.name,
        columns={"t": t, "p": p, "w": w, "effective": p * w},
        description=_describe_preset(preset, row),
        notes=tuple(notes),
    )


def _describe_preset(preset: Any, row: Row) -> tuple[tuple[str, str], ...]:
    """Return the lines that describe a preset, each a label and a text.

    The labels are ``options``, ``formula``, ``time``, ``sampler`` and ``weighting`` of kairos, ``in code`` for the call
    of `kairos_timesteps.attach`, and ``source``.
    """
    lines = {
        "options": describe_options(preset.options) or "none",
        "formula": preset.help,
        "time": preset.convention,
        "sampler": row.sampler,
        "weighting": row.weighting,
        "in code": preset.attach_call(),
        "source": preset.source,
    }
    return tuple(lines.items())
