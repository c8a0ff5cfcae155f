"""``kairos strategies show``: density p(t), weights w(t) and p(t) w(t) of a strategy or a preset."""

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
from kairos.forward_process import build_process, select_prediction, with_sigma_data
from kairos.strategy_file import strategy_csv
from kairos_timesteps.base import Learned, Sampler
from kairos_timesteps.components import SAMPLERS, WEIGHTINGS
from kairos_timesteps.diffusion.processes import Process
from kairos_timesteps.diffusion.registries import PROCESSES
from kairos_timesteps.diffusion.schedule import Array
from kairos_timesteps.errors import ConfigError
from kairos_timesteps.lookup import build_pair, parse_name, table
from kairos_timesteps.options import but_name, dump, unknown_key

# name and options of a sampler, name and options of a weighting, section `diffusion`
StrategySettings = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]


@dataclass(frozen=True)
class View:
    """Table of a strategy or a preset, and its description.

    Attributes:
        name: ``sampler+weighting``, or the name of a preset.
        process: name of the process whose time is shown.
        columns: ``t``, ``p``, ``w``, ``effective``, each (T,).
        description: lines below the name, each a label and a text.
        notes: sentences about the state, step or context of the table.
    """

    name: str
    process: str
    columns: dict[str, Array]
    description: tuple[tuple[str, str], ...]
    notes: tuple[str, ...] = ()

    def header(self) -> list[tuple[str, str]]:
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
        sampler: name and options of the sampler.
        weighting: name and options of the weighting.
        diffusion: the process with its options, and the prediction target.
        columns: ``t``, ``p``, ``w``, ``effective``, each (T,).
        notes: sentences about the state, step or context of the table.
    """
    process = diffusion["process"]
    name = process["name"]
    if name == "discrete":
        process = {"name": f"{process['schedule']} schedule, T = {process['timesteps']}"}
    lines = {}
    for label, component in (("sampler", sampler), ("weighting", weighting), ("process", process)):
        options = describe_options(but_name(component))
        lines[label] = f"{component['name']}: {options}" if options else component["name"]
    if diffusion["prediction"] is not None:
        lines["process"] += f", prediction {diffusion['prediction']}"
    return View(f"{sampler['name']}+{weighting['name']}", name, columns, tuple(lines.items()), notes)


def run(arguments: argparse.Namespace) -> None:
    """Show a strategy or preset, or two of them with ``--compare``."""
    views = build_views(arguments)
    for view in views:
        for problem in find_faults(view.columns):
            warn(problem if len(views) == 1 else f"{view.name}: {problem}")
    first = views[0]

    def draw(figures: Any) -> Any:
        figure_views = []
        for view in views:
            lines = [f"{label}  {text}" for label, text in view.header()[1:]]
            figure_views.append((view.columns, view.name, lines))
        compared = figures.ComparedStrategy(*figure_views[1]) if len(views) > 1 else None
        return figures.draw_strategy(*figure_views[0], first.process, compared)

    write_output(
        arguments,
        first.name.replace(":", "-"),
        table=lambda: _render_table(views),
        csv=lambda: strategy_csv(_join_columns(views)),
        picture=draw,
    )


def build_views(arguments: argparse.Namespace) -> list[View]:
    """Return the view of the strategy or preset that the arguments name, and the view of the one in ``--compare``.

    Raises:
        ConfigError: the arguments contradict one another, or the two do not have the same time.
    """
    if arguments.checkpoint is not None:
        for option in ("progress", "compare"):
            if getattr(arguments, option) is not None:
                raise ConfigError(f"--{option}: not allowed with --checkpoint, which shows the recorded state")
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
    notes = [note for view in views for note in view.notes]
    unused = [name for name in context if not any(note.startswith(f"{name} =") for note in notes)]
    demand(not unused, "context", ", ".join(unused), "properties that the strategy depends on, such as tokens of shift")
    return views


def is_preset(name: str | None) -> bool:
    """Return True for names of presets, ``trainer:option``."""
    return ":" in (name or "")


def compared_arguments(arguments: argparse.Namespace) -> argparse.Namespace:
    """Return arguments that show the strategy or preset in ``--compare``."""
    compared = {"strategy": arguments.compare, "set": arguments.compare_set, "progress": None}
    return argparse.Namespace(**{**vars(arguments), **compared})


def _parse_context(settings: list[str]) -> dict[str, Any]:
    """Parse settings ``name=value`` of a sample's properties, such as its tokens."""
    context = {}
    for setting in settings:
        name, equals, text = map(str.strip, setting.partition("="))
        demand(equals, "context", repr(setting), "NAME=VALUE, such as tokens=4096")
        context[name] = parse_scalar(text, setting)
    return context


def select_context(sampler: Any, name: str, context: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the properties of a sample that a sampler depends on, and a note on each.

    Args:
        sampler: the sampler.
        name: name of the sampler for the error message.
        context: properties of a sample, such as its tokens.

    Raises:
        ConfigError: the sampler requires a property that `context` does not contain.
    """
    missing = sampler.required_context(sampler.options) - {*context, "progress", "step"}
    if missing:
        examples = (f"--context {key}={'4096' if key == 'tokens' else '1'}" for key in sorted(missing))
        raise ConfigError(f"{name} depends on {', '.join(sorted(missing))} of a sample; add {', '.join(examples)}")
    properties = {key: value for key, value in context.items() if key in sampler.context_names}
    return properties, [f"{key} = {value}" for key, value in properties.items()]


def _join_columns(views: list[View]) -> dict[str, Array]:
    """Return the columns of the first view, and those of the second with the suffix ``_compared``."""
    columns = dict(views[0].columns)
    for view in views[1:]:
        columns |= {f"{key}_compared": values for key, values in view.columns.items() if key != "t"}
    return columns


def find_faults(columns: dict[str, Array]) -> list[str]:
    """Describe faults of a table: weights that are negative or not finite, timesteps that are never drawn."""
    faults = []
    for problem, affected in (
        ("weight is negative", columns["w"] < 0),
        ("weight is not finite", ~np.isfinite(columns["w"])),
        ("timestep is never drawn (p = 0)", columns["p"] == 0),
    ):
        if affected.any():
            first, last = columns["t"][affected][[0, -1]]
            timesteps = f"{affected.sum()} of {len(affected)} timesteps"
            faults.append(f"{problem} at {timesteps} between t = {first:g} and {last:g}")
    return faults


def parse_strategy(arguments: argparse.Namespace) -> StrategySettings:
    """Return sampler, weighting and section `diffusion`, with their options, from the arguments of the command.

    Raises:
        ConfigError: the name is missing or unknown, or an option is unknown or ambiguous.
    """
    if arguments.strategy is None:
        allowed = "SAMPLER, WEIGHTING or SAMPLER+WEIGHTING, see kairos strategies list"
        raise ConfigError(f"strategy: missing; allowed: {allowed}")
    sampler, weighting = parse_name(arguments.strategy)
    process = arguments.process or "discrete"
    options = parse_settings(arguments.set, {"sampler": sampler, "weighting": weighting, "process": process})
    for option in ("schedule", "timesteps"):  # options of the process that are arguments of the command
        value = getattr(arguments, option)
        if value is not None:
            options["process"][option] = value
    complete_process = {"name": process, **dump(PROCESSES.parse(process, options["process"]))}
    complete_process = with_sigma_data(
        complete_process, 0.5
    )  # standard deviation of pixels, the default of weighting edm
    diffusion = {"process": complete_process, "prediction": select_prediction(process, arguments.prediction)}
    return {"name": sampler, **options["sampler"]}, {"name": weighting, **options["weighting"]}, diffusion


def build_process_with_warnings(diffusion: dict[str, Any]) -> Process:
    """Build the process of a section `diffusion`, and print its warnings, such as a process that ends before noise."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        process = build_process(diffusion)
    for warning in caught:
        warn(str(warning.message))
    return process


def parse_settings(settings: list[str], names: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Parse settings ``part.option=value``; return the values of options by part and option.

    The part may be omitted if only one of sampler, weighting and process has the option.

    Args:
        settings: values of ``--set``.
        names: names of sampler, weighting and process.

    Raises:
        ConfigError: an option is unknown, ambiguous or set twice; the message lists the options that exist.
    """
    registries = {"sampler": SAMPLERS, "weighting": WEIGHTINGS, "process": PROCESSES}
    defaults = {part: dump(registries[part].entry(name).options()) for part, name in names.items()}
    existing = [f"{part}.{option}" for part in names for option in defaults[part]]
    values: dict[str, dict[str, Any]] = {part: {} for part in names}
    for setting in settings:
        key, equals, text = map(str.strip, setting.partition("="))
        demand(equals, "set", repr(setting), "OPTION=VALUE, such as sampler.k=5")
        matches = [name for name in existing if key in (name, name.partition(".")[2])]
        if len(matches) > 1:
            raise ConfigError(f"--set {key}: the option is ambiguous; allowed: {' or '.join(matches)}")
        if not matches:
            raise unknown_key(key, existing, "--set")
        part, _, option = matches[0].partition(".")
        if option in values[part]:
            raise ConfigError(f"--set {matches[0]}: set twice, allowed: once")
        values[part][option] = parse_scalar(text, setting)
    return values


def parse_scalar(text: str, setting: str) -> Any:
    """Parse a value in YAML; also numbers such as 1e-3, which YAML reads as text.

    Args:
        text: the value.
        setting: the whole setting for the error message.

    Raises:
        ConfigError: the text is not YAML.
    """
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
    """Return the view of a strategy in its initial state.

    Args:
        arguments: arguments of the command.
        context: properties of a sample, such as its tokens.

    Raises:
        ConfigError: a name, an option or a value is not allowed, or the sampler requires more context.
    """
    sampler_settings, weighting_settings, diffusion = parse_strategy(arguments)
    sampler_name, weighting_name = sampler_settings["name"], weighting_settings["name"]
    process, names = build_process_with_warnings(diffusion), (sampler_name, weighting_name)
    sampler, weighting = build_pair(process, names, but_name(sampler_settings), but_name(weighting_settings))
    curriculum, notes = _curriculum_context(sampler, sampler_name, arguments.progress)
    properties, context_notes = select_context(sampler, f"sampler {sampler_name}", context or {})
    notes += context_notes
    if isinstance(sampler, Learned):
        notes.append("p(t) is the initial density: this sampler learns; --checkpoint shows a learned density")
    if sampler.importance:
        notes.append("w(t) includes the importance weight 1/(T p(t))")
    if isinstance(weighting, Learned):
        notes.append("w(t) are the initial weights: this weighting learns; --checkpoint shows learned weights")
    with np.errstate(all="ignore"):  # `find_faults` reports what is not finite
        columns = table(sampler, weighting, **properties, **curriculum)
    sampler_settings = {"name": sampler_name, **dump(sampler.options)}  # defaults included
    weighting_settings = {"name": weighting_name, **dump(weighting.options)}
    return build_strategy_view(sampler_settings, weighting_settings, diffusion, columns, tuple(notes))


def _curriculum_context(sampler: Sampler, name: str, progress: float | None) -> tuple[dict[str, Any], list[str]]:
    """Return step and progress at which a curriculum is shown, with a note; empty for samplers without a curriculum.

    Args:
        sampler: the sampler.
        name: name of the sampler.
        progress: fraction of the curriculum that has passed; None: 0.

    Raises:
        ConfigError: the sampler has no curriculum, or `progress` is not between 0 and 1.
    """
    if "step" not in sampler.context_names:
        if progress is not None:
            reason = "learns from its observations" if isinstance(sampler, Learned) else "does not depend on the step"
            problem = f"got {progress:g}, but sampler {name} {reason}"
            raise ConfigError(f"--progress: {problem}; allowed: curricula, such as clts")
        return {}, []
    shown_progress = 0.0 if progress is None else progress
    demand(0 <= shown_progress <= 1, "progress", f"{shown_progress:g}", "0 to 1")
    length = getattr(sampler, "length", 0) or max(getattr(sampler, "values", [0]))
    step = round(shown_progress * length)
    note = f"curriculum at step {step} of {length}"
    if progress is None:
        note += "; --progress 0..1 shows other steps"
    return {"step": step, "progress": shown_progress}, [note]


def _render_table(views: list[View]) -> str:
    """Return the descriptions of one or two views, and a table with a row per range of times."""
    description = "\n".join("".join(f"{label:10} {text}\n" for label, text in view.header()) for view in views)
    first = views[0]
    t = first.columns["t"]
    ranges = timestep_ranges(len(t))
    is_discrete = first.process == "discrete"
    time_header = "timesteps" if is_discrete else PROCESSES[first.process].load().time_symbol
    header = [time_header]
    for column in ("mass of p", "mean w", "share of p*w"):
        header += [column, "compared"][: len(views)]
    rows = [[*header, ""]]
    range_ends = [[f"{t[index]:.5g}" for index in (timesteps.start, timesteps.stop - 1)] for timesteps in ranges]
    width = max(len(end) for ends in range_ends for end in ends)
    shares = [_effective_shares(view, ranges) for view in views]
    largest_share = max(filter(np.isfinite, shares[0]), default=0.0)
    for number, (timesteps, ends) in enumerate(zip(ranges, range_ends)):
        times = " - ".join(end.rjust(width) for end in dict.fromkeys(ends))  # one time if both ends are equal
        masses = [f"{100 * view.columns['p'][timesteps].sum():.2f} %" for view in views]
        with np.errstate(invalid="ignore", over="ignore"):
            weights = [f"{view.columns['w'][timesteps].mean():.4g}" for view in views]
        percentages = [f"{100 * view_shares[number]:.2f} %" for view_shares in shares]
        rows.append([times, *masses, *weights, *percentages, text_bar(shares[0][number], largest_share)])
    sums = ""
    for view in views:
        p_sum, effective_sum = view.columns["p"].sum(), view.columns["effective"].sum()
        sums += f"sum of p = {p_sum:.15g}, sum of p*w = {effective_sum:.6g}\n"
    return f"{description}\n{align_columns(rows)}{sums}"


def _effective_shares(view: View, ranges: list[slice]) -> list[float]:
    """Return the share of the sum of p w in each range of timesteps."""
    effective = view.columns["effective"]
    with np.errstate(invalid="ignore", over="ignore"):
        return [float(effective[timesteps].sum() / effective.sum()) for timesteps in ranges]
