"""``kairos strategies show``: what a strategy trains on, computed from its name."""

import argparse
import warnings
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import yaml

from kairos.cli.common import demand
from kairos.cli.strategies.listing import describe_options
from kairos.cli.strategies.output import align_columns, text_bar, timestep_ranges, warn, write_output
from kairos.forward_process import build_process, chosen_prediction, measured
from kairos.strategy_file import strategy_csv
from kairos_timesteps.base import Learned, Sampler
from kairos_timesteps.components import SAMPLERS, WEIGHTINGS
from kairos_timesteps.diffusion.processes import Process
from kairos_timesteps.diffusion.registries import PROCESSES
from kairos_timesteps.diffusion.schedule import Array
from kairos_timesteps.errors import ConfigError
from kairos_timesteps.lookup import build_pair, parse_name, table
from kairos_timesteps.options import but_name, dump, unknown_key

StrategySettings = tuple[
    dict[str, Any], dict[str, Any], dict[str, Any]
]  # sampler and weighting with options, `diffusion`


@dataclass(frozen=True)
class View:
    """Table of a strategy or a preset, and its description.

    Attributes:
        name: ``sampler+weighting``, or the name of a preset.
        process: name of the process whose time is shown.
        columns: ``t``, ``p``, ``w``, ``effective``, each (T,).
        description: lines below the name, each a label and a text.
        notes: state, step or context that is shown, a sentence each.
    """

    name: str
    process: str
    columns: dict[str, Array]
    description: tuple[tuple[str, str], ...]
    notes: tuple[str, ...] = ()

    def head(self) -> list[tuple[str, str]]:
        """Return the header lines, each a label and a text."""
        kind = "preset" if is_preset(self.name) else "strategy"
        return [(kind, self.name), *self.description, *(("note", note) for note in self.notes)]


def build_strategy_view(
    sampler: dict[str, Any],
    weighting: dict[str, Any],
    diffusion: dict[str, Any],
    columns: dict[str, Array],
    notes: tuple[str, ...],
) -> View:
    """Return the view of a strategy.

    Args:
        sampler: name and options.
        weighting: name and options.
        diffusion: the process with its options, and the prediction.
        columns: ``t``, ``p``, ``w``, ``effective``, each (T,).
        notes: state, step or context that is shown.
    """
    process = diffusion["process"]
    name = process["name"]
    if name == "discrete":
        process = {"name": f"{process['schedule']} schedule, T = {process['timesteps']}"}
    named = (("sampler", sampler), ("weighting", weighting), ("process", process))
    lines = {kind: ": ".join(filter(None, (part["name"], describe_options(but_name(part))))) for kind, part in named}
    if diffusion["prediction"] is not None:
        lines["process"] += f", prediction {diffusion['prediction']}"
    return View(f"{sampler['name']}+{weighting['name']}", name, columns, tuple(lines.items()), notes)


def run(arguments: argparse.Namespace) -> None:
    """Show the strategy or preset that the arguments name, with another one if `compare` names it."""
    views = build_views(arguments)
    for view in views:
        for fault in find_faults(view.columns):
            warn(fault if len(views) == 1 else f"{view.name}: {fault}")
    first, *others = views
    described_views = [
        (view.columns, view.name, [f"{word}  {what}" for word, what in view.head()[1:]]) for view in views
    ]
    write_output(
        arguments,
        first.name.replace(":", "-"),
        table=lambda: _text(views),
        csv=lambda: strategy_csv(_joined_columns(views)),
        picture=lambda figures: figures.draw_strategy(
            *described_views[0], first.process, figures.ComparedStrategy(*described_views[1]) if others else None
        ),
    )


def build_views(arguments: argparse.Namespace) -> list[View]:
    """Return the view of the strategy or preset that the arguments name, and that of `compare`.

    Raises:
        ConfigError: the arguments contradict one another, or the two do not have the same time.
    """
    if arguments.checkpoint is not None:
        for option in ("progress", "compare"):
            if getattr(arguments, option) is not None:
                why = "shows the recorded state alone"
                raise ConfigError(f"--{option}: --checkpoint {why}; allowed: one of the two")
        from kairos.cli.strategies.recorded import build_recorded_view

        return [build_recorded_view(arguments)]
    names = [name for name in (arguments.strategy, arguments.compare) if name is not None]
    context = _parse_context(arguments.context)
    if any(map(is_preset, names)):
        from kairos.cli.strategies.trainer_presets import build_views_with_presets

        views = build_views_with_presets(arguments, context)
    else:
        views = [build_initial_view(arguments, context)]
        if arguments.compare is not None:
            views.append(build_initial_view(compared_arguments(arguments), context))
    unused = [
        name for name in context if not any(note.startswith(f"{name} =") for view in views for note in view.notes)
    ]
    demand(not unused, "context", ", ".join(unused), "properties that the strategy depends on, such as tokens of shift")
    return views


def is_preset(name: str | None) -> bool:
    """Return True for names of presets, ``trainer:option``."""
    return ":" in (name or "")


def compared_arguments(arguments: argparse.Namespace) -> argparse.Namespace:
    """Return the arguments with the name and the options of `compare` in the place of the first ones."""
    return argparse.Namespace(
        **{**vars(arguments), "strategy": arguments.compare, "set": arguments.compare_set, "progress": None}
    )


def _parse_context(settings: list[str]) -> dict[str, Any]:
    """Parse settings ``name=value`` of a sample's properties, such as its tokens."""
    context = {}
    for setting in settings:
        name, equals, text = map(str.strip, setting.partition("="))
        demand(equals, "context", repr(setting), "NAME=VALUE, such as tokens=4096")
        context[name] = parse_scalar(text, setting)
    return context


def select_context(sampler: Any, name: str, context: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the part of a context that a sampler depends on, and notes on it.

    Raises:
        ConfigError: the sampler requires more.
    """
    missing = sampler.required_context(sampler.options) - {*context, "progress", "step"}
    if missing:
        example = ", ".join(f"--context {each}={'4096' if each == 'tokens' else '1'}" for each in sorted(missing))
        raise ConfigError(f"{name} depends on {', '.join(sorted(missing))} of a sample; add {example}")
    properties = {key: value for key, value in context.items() if key in sampler.context_names}
    return properties, [f"{key} = {value}" for key, value in properties.items()]


def _joined_columns(views: list[View]) -> dict[str, Array]:
    """Return the columns of the first view, and those of the second with the suffix ``_compared``."""
    columns = dict(views[0].columns)
    for view in views[1:]:
        columns |= {f"{key}_compared": values for key, values in view.columns.items() if key != "t"}
    return columns


def find_faults(columns: dict[str, Array]) -> list[str]:
    """Describe faults of a table: weights that are negative or not finite, timesteps that are never drawn."""
    warnings = []
    for fault, bad in (
        ("weight is negative", columns["w"] < 0),
        ("weight is not finite", ~np.isfinite(columns["w"])),
        ("timestep is never drawn (p = 0)", columns["p"] == 0),
    ):
        if bad.any():
            first, last = columns["t"][bad][[0, -1]]
            warnings.append(f"{fault} at {bad.sum()} of {len(bad)} timesteps between t = {first:g} and {last:g}")
    return warnings


def parse_strategy(arguments: argparse.Namespace) -> StrategySettings:
    """Sampler and weighting that the arguments name, with their options, and section `diffusion`.

    Raises:
        ConfigError: no or an unknown name, an option that does not exist or is ambiguous.
    """
    if arguments.strategy is None:
        allowed = "SAMPLER, WEIGHTING or SAMPLER+WEIGHTING, see kairos strategies list"
        raise ConfigError(f"strategy: none given; allowed: {allowed}")
    sampler, weighting = parse_name(arguments.strategy)
    process = arguments.process or "discrete"
    given = parse_settings(arguments.set, {"sampler": sampler, "weighting": weighting, "process": process})
    short = {key: getattr(arguments, key) for key in ("schedule", "timesteps")}
    given["process"] |= {key: value for key, value in short.items() if value is not None}
    its = {"name": process, **dump(PROCESSES.parse(process, given["process"]))}
    its = measured(its, 0.5)  # of pixels, as weighting edm has it
    diffusion = {"process": its, "prediction": chosen_prediction(process, arguments.prediction)}
    return {"name": sampler, **given["sampler"]}, {"name": weighting, **given["weighting"]}, diffusion


def build_process_with_warnings(diffusion: dict[str, Any]) -> Process:
    """The process of a section; that it does not end in noise is a warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        process = build_process(diffusion)
    for warning in caught:
        warn(str(warning.message))
    return process


def parse_settings(settings: list[str], names: dict[str, str]) -> dict[str, dict[str, Any]]:
    """The settings ``part.option=value``, or ``option=value`` where one part alone has the option, by part.

    Raises:
        ConfigError: an option is unknown, ambiguous or given twice; the message lists what exists.
    """
    registries = {"sampler": SAMPLERS, "weighting": WEIGHTINGS, "process": PROCESSES}
    defaults = {part: dump(registries[part].entry(name).options()) for part, name in names.items()}
    existing = [f"{part}.{option}" for part in names for option in defaults[part]]
    given: dict[str, dict[str, Any]] = {part: {} for part in names}
    for setting in settings:
        key, equals, text = map(str.strip, setting.partition("="))
        demand(equals, "set", repr(setting), "OPTION=VALUE, such as sampler.k=5")
        meant = [name for name in existing if key in (name, name.partition(".")[2])]
        if len(meant) > 1:
            raise ConfigError(f"--set {key}: several parts have it; allowed: {' or '.join(meant)}")
        if not meant:
            raise unknown_key(key, existing, "--set")
        part, _, option = meant[0].partition(".")
        if option in given[part]:
            raise ConfigError(f"--set {meant[0]}: given twice, allowed: once")
        given[part][option] = parse_scalar(text, setting)
    return given


def parse_scalar(text: str, setting: str) -> Any:
    """A value written in YAML; numbers such as 1e-3, which YAML takes for text, are numbers here."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"--set {setting}: not a value; allowed: a number, true, false, null or a word") from None
    if isinstance(value, str):
        with suppress(ValueError):
            number = float(value)
            return int(number) if number.is_integer() and abs(number) < 1e15 else number
    return value


def build_initial_view(arguments: argparse.Namespace, context: dict[str, Any] | None = None) -> View:
    """Return the view of the strategy that the arguments name, as it is before any training.

    Args:
        arguments: arguments of the command.
        context: properties of a sample, such as its tokens.

    Raises:
        ConfigError: a name, an option or a value is not allowed, or the sampler requires more context.
    """
    *named, diffusion = parse_strategy(arguments)
    names = named[0]["name"], named[1]["name"]
    sampler, weighting = build_pair(
        build_process_with_warnings(diffusion), names, but_name(named[0]), but_name(named[1])
    )
    place, notes = _curriculum_context(sampler, names[0], arguments.progress)
    properties, properties_shown = select_context(sampler, f"sampler {names[0]}", context or {})
    notes += properties_shown
    if isinstance(sampler, Learned):
        notes.append("p(t) is the initial density: this sampler learns; --checkpoint shows what it has learned")
    if sampler.importance:
        notes.append("w(t) holds the importance weight 1/(T p(t)) as well")
    if isinstance(weighting, Learned):
        notes.append("w(t) is the initial one: this weighting learns; --checkpoint shows what it has learned")
    complete = [{"name": name, **dump(its)} for name, its in zip(names, (sampler.options, weighting.options))]
    with np.errstate(all="ignore"):  # `find_faults` reports what is not finite
        columns = table(sampler, weighting, **properties, **place)
    return build_strategy_view(complete[0], complete[1], diffusion, columns, tuple(notes))


def _curriculum_context(sampler: Sampler, name: str, progress: float | None) -> tuple[dict[str, Any], list[str]]:
    """Return the context at which a curriculum is shown, and notes on it.

    Raises:
        ConfigError: the sampler has no curriculum, or `progress` is not between 0 and 1.
    """
    if "step" not in sampler.context_names:
        if progress is not None:
            why = "learns from what it observes" if isinstance(sampler, Learned) else "is the same at every step"
            fault = f"got {progress:g}, but sampler {name} {why}"
            raise ConfigError(f"--progress: {fault}; allowed: curricula, such as clts")
        return {}, []
    share = 0.0 if progress is None else progress
    demand(0 <= share <= 1, "progress", f"{share:g}", "0 to 1")
    length = getattr(sampler, "length", 0) or max(getattr(sampler, "values", [0]))
    step = round(share * length)
    note = f"curriculum at step {step} of {length}"
    note += "" if progress is not None else "; --progress 0..1 shows other places"
    return {"step": step, "progress": share}, [note]


def _text(views: list[View]) -> str:
    """Return the descriptions of one or two views, and a table of ranges of time."""
    head = "\n".join("".join(f"{word:10} {what}\n" for word, what in view.head()) for view in views)
    first = views[0]
    t, ranges = first.columns["t"], timestep_ranges(len(first.columns["t"]))
    ends = [[f"{t[place]:.5g}" for place in (inside.start, inside.stop - 1)] for inside in ranges]
    width = max(len(end) for pair in ends for end in pair)
    symbol = "timesteps" if first.process == "discrete" else PROCESSES[first.process].load().time_symbol
    shares = [_shares(view, ranges) for view in views]
    largest = max(filter(np.isfinite, shares[0]), default=0.0)
    titles = [title for name in ("mass of p", "mean w", "share of p*w") for title in (name, "compared")[: len(views)]]
    rows = [[symbol, *titles, ""]]
    for row, (inside, pair) in enumerate(zip(ranges, ends)):
        name = " - ".join(end.rjust(width) for end in dict.fromkeys(pair))
        masses = [f"{100 * view.columns['p'][inside].sum():.2f} %" for view in views]
        with np.errstate(invalid="ignore", over="ignore"):
            weights = [f"{view.columns['w'][inside].mean():.4g}" for view in views]
        percents = [f"{100 * each[row]:.2f} %" for each in shares]
        rows.append([name, *masses, *weights, *percents, text_bar(shares[0][row], largest)])
    sums = "".join(
        f"sum of p = {view.columns['p'].sum():.15g}, sum of p*w = {view.columns['effective'].sum():.6g}\n"
        for view in views
    )
    return f"{head}\n{align_columns(rows)}{sums}"


def _shares(view: View, ranges: list[slice]) -> list[float]:
    """Return the share of p w in each range of timesteps."""
    effective = view.columns["effective"]
    with np.errstate(invalid="ignore", over="ignore"):
        return [float(effective[inside].sum() / effective.sum()) for inside in ranges]
