"""``kairos strategies show``: density p(t), weights w(t) and p(t) w(t) of a strategy or a preset."""

import argparse
import warnings
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import yaml

from kairos.cli.common import demand_option
from kairos.cli.strategies.listing import describe_options
from kairos.cli.strategies.output import align_columns, text_bar, timestep_ranges, warn, write_output
from kairos.forward_process import build_process, select_prediction, with_sigma_data
from kairos.library_components import LibraryComponent
from kairos.strategy_file import strategy_csv
from kairos_timesteps.base import Learned, Sampler
from kairos_timesteps.components import PROCESSES, SAMPLERS, WEIGHTINGS
from kairos_timesteps.diffusion.processes import Process
from kairos_timesteps.diffusion.schedule import Array
from kairos_timesteps.errors import ConfigError
from kairos_timesteps.lookup import build_pair, parse_name, table
from kairos_timesteps.options import default_values, options_without_name, unknown_key

_SIGMA_DATA = 0.5  # standard deviation of pixels, the default of weighting edm; a training run measures its data
_MOST_EXACT = 1e15  # integers below are exact in float64


class ForwardProcess(NamedTuple):
    """Settings of a forward process.

    Attributes:
        process: name and options of the process.
        prediction: prediction target of the network; None: the process has only one.
    """

    process: LibraryComponent
    prediction: str | None


# name and options of a sampler, name and options of a weighting, forward process
StrategySettings = tuple[dict[str, Any], dict[str, Any], ForwardProcess]


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
        """Return the header lines, each a label and a text: the name first, then `description`, then `notes`."""
        kind = "preset" if is_preset(self.name) else "strategy"
        return [(kind, self.name), *self.description, *(("note", note) for note in self.notes)]


def build_strategy_view(
    sampler: dict[str, Any],
    weighting: dict[str, Any],
    diffusion: ForwardProcess,
    columns: dict[str, Array],
    notes: tuple[str, ...],
) -> View:
    """Return the view of a strategy, with lines on its sampler, weighting and process as description.

    The name is ``sampler+weighting``. The line on a discrete process has only its schedule and number of timesteps.

    Args:
        sampler: name and options.
        weighting: name and options.
        diffusion: the process with its options, and the prediction target.
        columns: ``t``, ``p``, ``w``, ``effective``, each (T,).
        notes: sentences about the state, step or context of the table.
    """
    process = diffusion.process
    if process.name == "discrete":
        process_text = f"{process.get('schedule')} schedule, T = {process.get('timesteps')}"
    else:
        process_text = _describe_component(process.plain())
    if diffusion.prediction is not None:
        process_text += f", prediction {diffusion.prediction}"
    description = (
        ("sampler", _describe_component(sampler)),
        ("weighting", _describe_component(weighting)),
        ("process", process_text),
    )
    return View(
        name=f"{sampler['name']}+{weighting['name']}",
        process=process.name,
        columns=columns,
        description=description,
        notes=notes,
    )


def _describe_component(component: dict[str, Any]) -> str:
    """Return a component as text, such as ``speed: k=5, tau=null``; without options, the name alone."""
    options = describe_options(options_without_name(component))
    return f"{component['name']}: {options}" if options else str(component["name"])


def run(arguments: argparse.Namespace) -> None:
    """Show a strategy or preset, or two of them with ``--compare``, as table, CSV or figure.

    The output goes to the terminal or to ``--out``; a figure without ``--out`` is written into the working directory,
    under the name of the first strategy. Only the folder or the checkpoint in ``--checkpoint`` is read. A warning is
    logged for each fault of a strategy, such as a negative weight, and for each warning of its process.

    Raises:
        ConfigError: see `build_views`.
        KairosError: the checkpoint is missing, damaged or does not contain the strategy.
    """
    views = build_views(arguments)
    for view in views:
        for fault in find_faults(view.columns):
            warn(fault if len(views) == 1 else f"{view.name}: {fault}")
    write_output(
        arguments,
        views[0].name.replace(":", "-"),  # names of presets contain a colon, which some file systems do not allow
        table=lambda: _render_table(views),
        csv=lambda: strategy_csv(_join_columns(views)),
        picture=lambda figures: _draw(views, figures),
    )


def _draw(views: list[View], figures: Any) -> Any:
    """Return the matplotlib figure of one or two views.

    Args:
        views: the view of a strategy, and the view to compare with, if any.
        figures: module `report.strategy_figures`, which imports matplotlib.
    """
    first, *others = views
    compared = None
    if others:
        other = others[0]
        compared = figures.ComparedStrategy(other.columns, title=other.name, lines=_figure_lines(other))
    return figures.draw_strategy(
        first.columns, title=first.name, lines=_figure_lines(first), process=first.process, compared=compared
    )


def _figure_lines(view: View) -> list[str]:
    """Return the header lines of a view as text, without the first, the name, which is the title of a figure."""
    return [f"{label}  {text}" for label, text in view.header()[1:]]


def build_views(arguments: argparse.Namespace) -> list[View]:
    """Return the view of the strategy or preset that the arguments name, and the view of the one in ``--compare``.

    With ``--checkpoint``, the list contains only the view of the recorded strategy. Otherwise the strategies are shown
    in their initial state.

    Raises:
        ConfigError: a name, an option or a value is not allowed, or the arguments contradict one another. It is also
            raised for presets with different times, and for a property in ``--context`` that no shown strategy uses.
        KairosError: see `build_recorded_view`.
    """
    if arguments.checkpoint is not None:
        for option in ("progress", "compare", "compare-set", "context"):
            if getattr(arguments, option.replace("-", "_")) not in (None, []):
                raise ConfigError(f"--{option}: not allowed with --checkpoint, which shows the recorded state")
        from kairos.cli.strategies.recorded import build_recorded_view

        return [build_recorded_view(arguments)]
    if arguments.compare_set:
        demand_option(
            arguments.compare is not None, "compare-set", arguments.compare_set[0], "nothing without --compare"
        )
    context = _parse_context(arguments.context)
    if is_preset(arguments.strategy) or is_preset(arguments.compare):
        from kairos.cli.strategies.trainer_presets import build_views_with_presets

        views = build_views_with_presets(arguments, context)
    else:
        views = [build_initial_view(arguments, context)]
        if arguments.compare is not None:
            views.append(build_initial_view(compared_arguments(arguments), context))
    notes = [note for view in views for note in view.notes]
    unused = []
    for name in context:
        # only the notes show which properties a view has used: `select_context` adds "tokens = 4096" for each of them
        is_used = any(note.startswith(f"{name} =") for note in notes)
        if not is_used:
            unused.append(name)
    demand_option(
        not unused, "context", ", ".join(unused), "properties that the strategy depends on, such as tokens of shift"
    )
    return views


def is_preset(name: str | None) -> bool:
    """Return True for names of presets, ``trainer:option``; False for other names and None."""
    return name is not None and ":" in name


def compared_arguments(arguments: argparse.Namespace) -> argparse.Namespace:
    """Return a copy of the arguments with the strategy or preset in ``--compare``, and with the options for it.

    The options are those of ``--compare-set``. The process and the other arguments are kept, except ``--progress``,
    which applies to the first strategy alone and becomes None.
    """
    compared = {
        "strategy": arguments.compare,
        "set": arguments.compare_set,
        "set_option": "compare-set",
        "progress": None,
    }
    return argparse.Namespace(**{**vars(arguments), **compared})


def _parse_context(settings: list[str]) -> dict[str, Any]:
    """Return the properties of a sample, such as its tokens, from settings ``name=value``, by name.

    The last of several settings with one name is used.

    Raises:
        ConfigError: a setting has no ``=``, or its value is not YAML.
    """
    context = {}
    for setting in settings:
        name, equals, text = map(str.strip, setting.partition("="))
        demand_option(equals, "context", repr(setting), "NAME=VALUE, such as tokens=4096")
        context[name] = parse_scalar(text, "context", setting)
    return context


def select_context(sampler: Any, name: str, context: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the properties in `context` that a sampler depends on, and a note such as ``tokens = 4096`` on each.

    Other properties are left out. The sampler may belong to a preset.

    Args:
        name: name of the sampler for the error message.

    Raises:
        ConfigError: the sampler requires a property that `context` does not contain.
    """
    provided = {*context, "progress", "step"}  # progress and step follow from option --progress
    missing = sorted(sampler.requires_context - provided)
    if missing:
        examples = ["--context tokens=4096" if key == "tokens" else f"--context {key}=1" for key in missing]
        raise ConfigError(f"{name} depends on {', '.join(missing)} of a sample; add {', '.join(examples)}")
    properties = {key: value for key, value in context.items() if key in sampler.context_names}
    return properties, [f"{key} = {value}" for key, value in properties.items()]


def _join_columns(views: list[View]) -> dict[str, Array]:
    """Return the columns of the first view, and of the second, if any, with the suffix ``_compared``.

    Column ``t`` occurs once: both views have equal times.
    """
    first, *others = views
    columns = dict(first.columns)
    for other in others:
        columns |= {f"{key}_compared": values for key, values in other.columns.items() if key != "t"}
    return columns


def find_faults(columns: dict[str, Array]) -> list[str]:
    """Return a sentence for each kind of fault of a table; an empty list without faults.

    The kinds are weights that are negative, weights that are not finite, and timesteps that are never drawn. A sentence
    has the number of timesteps, and the first and the last of their times.
    """
    faults = []
    affected_timesteps = {  # boolean mask, (T,), by fault
        "weight is negative": columns["w"] < 0,
        "weight is not finite": ~np.isfinite(columns["w"]),
        "timestep is never drawn (p = 0)": columns["p"] == 0,
    }
    for fault, mask in affected_timesteps.items():
        times = columns["t"][mask]
        if len(times):
            count = f"{len(times)} of {len(mask)} timesteps"
            faults.append(f"{fault} at {count} between t = {times[0]:g} and {times[-1]:g}")
    return faults


def parse_strategy(arguments: argparse.Namespace) -> StrategySettings:
    """Return sampler, weighting and forward process, with their options, from the arguments of the command.

    Sampler and weighting contain only the options of ``--set``, without defaults and unchecked. The process is
    ``discrete`` by default, and its option `sigma_data`, if it has one, is 0.5 by default. The first prediction target
    of the process is the default. ``--schedule`` and ``--timesteps`` override these options of the process in
    ``--set``.

    Raises:
        ConfigError: the strategy is missing, a name or an option is unknown or ambiguous, or the process does not allow
            an option or the prediction target.
    """
    if arguments.strategy is None:
        allowed = "SAMPLER, WEIGHTING or SAMPLER+WEIGHTING, see kairos strategies list"
        raise ConfigError(f"strategy: missing; allowed: {allowed}")
    sampler, weighting = parse_name(arguments.strategy)
    process = arguments.process or "discrete"
    names = {"sampler": sampler, "weighting": weighting, "process": process}
    options = parse_settings(arguments.set, names, arguments.set_option)
    for option in ("schedule", "timesteps"):  # options of the process that are arguments of the command
        value = getattr(arguments, option)
        if value is not None:
            options["process"][option] = value
    component = LibraryComponent.select(PROCESSES, {"name": process, **options["process"]})
    component = with_sigma_data(component, _SIGMA_DATA)
    diffusion = ForwardProcess(component, select_prediction(component, arguments.prediction))
    return {"name": sampler, **options["sampler"]}, {"name": weighting, **options["weighting"]}, diffusion


def build_process_with_warnings(component: LibraryComponent, prediction: str | None) -> Process:
    """Build a forward process, and print its warnings to standard error, such as a process that ends before noise.

    Raises:
        ConfigError: the process needs `sigma_data`, and its option has no value.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        process = build_process(component, prediction)
    for warning in caught:
        warn(str(warning.message))
    return process


def parse_settings(settings: list[str], names: dict[str, str], set_option: str) -> dict[str, dict[str, Any]]:
    """Return the values of options by kind of component and option, from settings such as ``sampler.k=5``.

    Every kind in `names` is in the result, with an empty dictionary if no option of its component is set. Values are
    parsed but not checked. The kind may be omitted, as in ``k=5``, if only one of the components has the option.

    Args:
        names: names of the components, by kind: ``sampler``, ``weighting`` and ``process``.
        set_option: ``set`` or ``compare-set``, for error messages.

    Raises:
        ConfigError: a setting has no ``=``, its value is not YAML, or an option is unknown, ambiguous or set twice. For
            an unknown option, the message lists the options that exist.
    """
    registries = {"sampler": SAMPLERS, "weighting": WEIGHTINGS, "process": PROCESSES}
    defaults = {kind: default_values(registries[kind].entry(name).component) for kind, name in names.items()}
    full_names = [f"{kind}.{option}" for kind in names for option in defaults[kind]]  # such as sampler.k
    values: dict[str, dict[str, Any]] = {kind: {} for kind in names}
    for setting in settings:
        key, equals, text = map(str.strip, setting.partition("="))
        demand_option(equals, set_option, repr(setting), "OPTION=VALUE, such as sampler.k=5")
        matches = []
        for full_name in full_names:
            _, _, option = full_name.partition(".")
            if key in (full_name, option):
                matches.append(full_name)
        if len(matches) > 1:
            raise ConfigError(f"--{set_option} {key}: the option is ambiguous; allowed: {' or '.join(matches)}")
        if not matches:
            raise unknown_key(key, full_names, f"--{set_option}")
        kind, _, option = matches[0].partition(".")
        if option in values[kind]:
            raise ConfigError(f"--{set_option} {matches[0]}: set twice, allowed: once")
        values[kind][option] = parse_scalar(text, set_option, setting)
    return values


def parse_scalar(text: str, option: str, setting: str) -> Any:
    """Return the value of a text in YAML, or a number if YAML reads it as text but Python as number: 1e-3, 1e3 or inf.

    Such numbers with an integer value below `_MOST_EXACT` are integers: 1e3 is 1000. A list or a mapping in YAML is
    returned, too.

    Args:
        option: command-line option without dashes that contains the setting, for the error message.
        setting: the whole setting for the error message.

    Raises:
        ConfigError: the text is not YAML.
    """
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        allowed = "allowed: a number, true, false, null or a word"
        raise ConfigError(f"--{option} {setting}: not a value; {allowed}") from None
    if isinstance(value, str):
        with suppress(ValueError):
            number = float(value)
            is_exact_integer = number.is_integer() and abs(number) < _MOST_EXACT
            return int(number) if is_exact_integer else number
    return value


def build_initial_view(arguments: argparse.Namespace, context: dict[str, Any] | None = None) -> View:
    """Return the view of a strategy in its initial state; a curriculum is shown at ``--progress``.

    Args:
        context: properties of a sample, such as its tokens; None: none.

    Raises:
        ConfigError: a name, an option or a value is not allowed, or the sampler requires more context.
    """
    sampler_settings, weighting_settings, diffusion = parse_strategy(arguments)
    sampler_name, weighting_name = sampler_settings["name"], weighting_settings["name"]
    sampler, weighting = build_pair(
        build_process_with_warnings(diffusion.process, diffusion.prediction),
        names=(sampler_name, weighting_name),
        sampler=options_without_name(sampler_settings),
        weighting=options_without_name(weighting_settings),
    )
    curriculum, curriculum_notes = _curriculum_context(sampler, sampler_name, arguments.progress)
    provided = {} if context is None else context
    properties, context_notes = select_context(sampler, f"sampler {sampler_name}", provided)
    notes = [*curriculum_notes, *context_notes, *_state_notes(sampler, weighting)]
    with np.errstate(all="ignore"):  # `find_faults` reports what is not finite
        columns = table(sampler, weighting, **properties, **curriculum)
    sampler_settings = {"name": sampler_name, **sampler.option_values()}  # defaults included
    weighting_settings = {"name": weighting_name, **weighting.option_values()}
    return build_strategy_view(sampler_settings, weighting_settings, diffusion, columns, tuple(notes))


def _state_notes(sampler: Sampler, weighting: Any) -> list[str]:
    """Return notes on what the table of a new strategy shows: initial density and weights, importance weights."""
    notes = []
    if isinstance(sampler, Learned):
        notes.append("p(t) is the initial density: this sampler learns; --checkpoint shows a learned density")
    if sampler.importance:
        notes.append("w(t) includes the importance weight 1/(T p(t))")
    if isinstance(weighting, Learned):
        notes.append("w(t) are the initial weights: this weighting learns; --checkpoint shows learned weights")
    return notes


def _curriculum_context(sampler: Sampler, name: str, progress: float | None) -> tuple[dict[str, Any], list[str]]:
    """Return ``{"step": ..., "progress": ...}`` at which a curriculum is shown, and a list with a note on it.

    Both are empty for samplers without a curriculum. The step is `progress` times the curriculum's length, or 0 if the
    length is unknown.

    Args:
        progress: fraction of the curriculum that has passed; None: 0, and the note mentions ``--progress``.

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
    demand_option(0 <= shown_progress <= 1, "progress", f"{shown_progress:g}", "0 to 1")
    length = _curriculum_length(sampler)
    step = round(shown_progress * length)
    note = f"curriculum at step {step} of {length}" if length else f"curriculum at progress {shown_progress:g}"
    if progress is None:
        note += "; --progress 0..1 shows other steps"
    return {"step": step, "progress": shown_progress}, [note]


def _curriculum_length(sampler: Any) -> int:
    """Return the number of steps over which the density of a sampler changes; 0 if no option states it in steps.

    The number of a sampler with components, such as a mixture, is the largest number of its components.
    """
    if hasattr(sampler, "length"):  # clts
        return int(sampler.length)
    if getattr(sampler, "of", None) == "steps":  # schedule: `values` are the steps at which its components begin
        last_start: float = max(sampler.values)
        return round(last_start)
    component_lengths = [_curriculum_length(component) for component in getattr(sampler, "components", ())]
    return max(component_lengths, default=0)


def _render_table(views: list[View]) -> str:
    """Return, as one text, the descriptions of one or two views, a table, and the sums of p and p w of each view.

    The table has a row per range of times, see `_range_rows`.
    """
    descriptions = ["".join(f"{label:10} {text}\n" for label, text in view.header()) for view in views]
    sums = ""
    for view in views:
        p_sum, effective_sum = view.columns["p"].sum(), view.columns["effective"].sum()
        sums += f"sum of p = {p_sum:.15g}, sum of p*w = {effective_sum:.6g}\n"
    rows = [_table_header(views), *_range_rows(views)]
    return "\n".join(descriptions) + f"\n{align_columns(rows)}{sums}"


def _table_header(views: list[View]) -> list[str]:
    """Return the header of the table of one or two views; the column of bars, the last, has none.

    The times are those of the first view. Column ``compared`` belongs to the second view.
    """
    process = views[0].process
    header = ["timesteps" if process == "discrete" else PROCESSES[process].component.time_symbol]
    for quantity in ("mass of p", "mean w", "share of p*w"):
        header.append(quantity)
        if len(views) > 1:
            header.append("compared")
    return [*header, ""]


def _range_rows(views: list[View]) -> list[list[str]]:
    """Return a row of cells per range of times: times, mass of p, mean of w, share of p w, and a bar.

    Each quantity has a cell per view. The bar is the share of p w of the first view. The ranges are those of the first
    view; both views have equal times.
    """
    first = views[0]
    ranges = timestep_ranges(len(first.columns["t"]))
    shares = [_effective_shares(view, ranges) for view in views]
    finite_shares = [share for share in shares[0] if np.isfinite(share)]
    largest_share = max(finite_shares, default=0.0)  # 0 if all shares are NaN: no bars
    range_texts = _describe_ranges(first.columns["t"], ranges)
    rows = []
    for index, timesteps in enumerate(ranges):
        masses = [f"{100 * view.columns['p'][timesteps].sum():.2f} %" for view in views]
        with np.errstate(invalid="ignore", over="ignore"):  # weights may be infinite, which `find_faults` reports
            weights = [f"{view.columns['w'][timesteps].mean():.4g}" for view in views]
        percentages = [f"{100 * view_shares[index]:.2f} %" for view_shares in shares]
        bar = text_bar(shares[0][index], largest_share)
        rows.append([range_texts[index], *masses, *weights, *percentages, bar])
    return rows


def _describe_ranges(t: Array, ranges: list[slice]) -> list[str]:
    """Return a text per range with its first and last time, aligned, such as `` 50 -  99``; one time if both are equal.

    Args:
        t: the times, (T,).
        ranges: ranges of timesteps.
    """
    ends = [(f"{t[timesteps.start]:.5g}", f"{t[timesteps.stop - 1]:.5g}") for timesteps in ranges]
    width = max(max(len(first), len(last)) for first, last in ends)
    texts = []
    for first, last in ends:
        text = first.rjust(width)
        if last != first:
            text += f" - {last.rjust(width)}"
        texts.append(text)
    return texts


def _effective_shares(view: View, ranges: list[slice]) -> list[float]:
    """Return the share of the sum of p w in each range of timesteps; NaN if the range has an infinite weight.

    The shares of finite ranges are then 0, since the sum is infinite. All shares are NaN if every p w is 0, or one of
    them is NaN.
    """
    effective = view.columns["effective"]
    with np.errstate(invalid="ignore", over="ignore"):  # weights may be infinite, which `find_faults` reports
        return [float(effective[timesteps].sum() / effective.sum()) for timesteps in ranges]
