"""``kairos strategies show``: what a strategy trains on, computed from its name."""

import argparse
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import yaml

from kairos import options
from kairos.cli.strategies.listing import described
from kairos.cli.strategies.output import aligned, bar, deliver, strata, warn
from kairos.diffusion.registries import DiscreteOptions
from kairos.diffusion.schedule import PREDICTIONS, NoiseSchedule, make_schedule
from kairos.errors import ConfigError
from kairos.strategies import make_sampler, make_weighting
from kairos.strategies.base import Array, Sampler
from kairos.strategies.columns import strategy_csv
from kairos.strategies.names import parse_name, table, warnings_of
from kairos.strategies.registries import SAMPLERS, WEIGHTINGS, checked


@dataclass(frozen=True)
class View:
    """A strategy's table, and what one has to know to read it.

    Attributes:
        sampler: name and options.
        weighting: name and options.
        process: schedule, T and prediction in words.
        columns: ``t``, ``p``, ``w``, ``effective``, each (T,).
        notes: what state or place is shown, a sentence each.
    """

    sampler: dict[str, Any]
    weighting: dict[str, Any]
    process: str
    columns: dict[str, Array]
    notes: tuple[str, ...]

    @property
    def name(self) -> str:
        """``sampler+weighting``."""
        return f"{self.sampler['name']}+{self.weighting['name']}"

    def head(self) -> list[tuple[str, str]]:
        """What it is, line by line: a word and what there is to say."""
        parts = (("sampler", self.sampler), ("weighting", self.weighting))
        said = [(kind, ": ".join(filter(None, (part["name"], described(options_of(part)))))) for kind, part in parts]
        return [("strategy", self.name), *said, ("process", self.process), *(("note", note) for note in self.notes)]


def run(arguments: argparse.Namespace) -> None:
    """Show the strategy that the arguments name, and warn of what is wrong with it."""
    if arguments.checkpoint is None:
        view = _computed(arguments)
    elif arguments.progress is not None:
        raise ConfigError("--progress: a checkpoint has its own place in the curriculum; allowed: one of the two")
    else:
        from kairos.cli.strategies.recorded import view_of_checkpoint

        view = view_of_checkpoint(arguments)
    for found in warnings_of(view.columns):
        warn(found)
    lines = [f"{word}  {what}" for word, what in view.head()[1:]]
    deliver(
        arguments,
        view.name,
        table=lambda: _text(view),
        csv=lambda: strategy_csv(view.columns),
        picture=lambda figures: figures.draw_strategy(view.columns, view.name, lines),
    )


def named_parts(arguments: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Sampler and weighting that the arguments name, with their options.

    Raises:
        ConfigError: no or an unknown name, an option that does not exist or is ambiguous.
    """
    if arguments.strategy is None:
        raise ConfigError(
            "strategy: none given; allowed: SAMPLER, WEIGHTING or SAMPLER+WEIGHTING, see kairos strategies list"
        )
    sampler, weighting = parse_name(arguments.strategy)
    given = set_options(arguments.options, sampler, weighting)
    return {"name": sampler, **given["sampler"]}, {"name": weighting, **given["weighting"]}


def noise_schedule(arguments: argparse.Namespace) -> NoiseSchedule:
    """The schedule that the arguments name; that it does not end in noise is a warning.

    Raises:
        ConfigError: unknown, or an impossible number of timesteps.
    """
    given = {"schedule": arguments.schedule, "timesteps": arguments.timesteps}
    found = options.parse(DiscreteOptions, {k: v for k, v in given.items() if v is not None}, "process")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        schedule = make_schedule(found.schedule, found.timesteps)
    for warning in caught:
        warn(str(warning.message))
    return schedule


def prediction_of(arguments: argparse.Namespace) -> str:
    """What the network predicts, epsilon where nothing is said."""
    prediction = arguments.prediction or "epsilon"
    if prediction not in PREDICTIONS:
        raise ConfigError(f"prediction: got {prediction!r}, allowed: {', '.join(PREDICTIONS)}")
    return str(prediction)


def process_in_words(schedule: str, timesteps: int, prediction: str) -> str:
    """A discrete process, for the head of a table."""
    return f"{schedule} schedule, T = {timesteps}, prediction {prediction}"


def set_options(settings: list[str], sampler: str, weighting: str) -> dict[str, dict[str, Any]]:
    """The settings ``part.option=value``, or ``option=value`` where one part alone has the option, by part.

    Raises:
        ConfigError: an option is unknown, ambiguous or given twice; the message lists what exists.
    """
    parts = {"sampler": SAMPLERS.entry(sampler), "weighting": WEIGHTINGS.entry(weighting)}
    existing = [f"{part}.{option}" for part, entry in parts.items() for option in options.dump(entry.options())]
    given: dict[str, dict[str, Any]] = {part: {} for part in parts}
    for setting in settings:
        key, equals, text = map(str.strip, setting.partition("="))
        if not equals:
            raise ConfigError(f"--set: got {setting!r}, allowed: OPTION=VALUE, such as sampler.k=5")
        meant = [name for name in existing if key in (name, name.partition(".")[2])]
        if len(meant) > 1:
            raise ConfigError(f"--set {key}: both {sampler} and {weighting} have it; allowed: {' or '.join(meant)}")
        if not meant:
            raise options.unknown_key(key, existing, f"{sampler}+{weighting}")
        part, _, option = meant[0].partition(".")
        if option in given[part]:
            raise ConfigError(f"--set {meant[0]}: given twice, allowed: once")
        given[part][option] = scalar(text, setting)
    return given


def scalar(text: str, setting: str) -> Any:
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


def _computed(arguments: argparse.Namespace) -> View:
    named = named_parts(arguments)
    schedule, prediction = noise_schedule(arguments), prediction_of(arguments)
    complete = []
    for registry, part in zip((SAMPLERS, WEIGHTINGS), named):
        found = checked(registry, part["name"], options_of(part), schedule.timesteps, schedule.name)
        complete.append({"name": part["name"], **options.dump(found)})
    try:
        sampler, weighting = make_sampler(named[0], schedule), make_weighting(named[1], schedule, prediction)
    except ValueError as error:  # what only the component itself can know; its message names the option
        raise ConfigError(str(error)) from None
    notes = _begin(sampler, named[0]["name"], arguments.progress)
    if sampler.learned:
        notes.append("p(t) is the initial density: this sampler learns; --checkpoint shows what it has learned")
    if sampler.corrected:
        notes.append("w(t) holds the importance weight 1/(T p(t)) as well")
    if weighting.learned:
        notes.append("w(t) is the initial one: this weighting learns; --checkpoint shows what it has learned")
    process = process_in_words(schedule.name, schedule.timesteps, prediction)
    with np.errstate(all="ignore"):  # what is not finite is warned of by its place
        columns = table(sampler, weighting)
    return View(complete[0], complete[1], process, columns, tuple(notes))


def options_of(named: Mapping[str, Any]) -> dict[str, Any]:
    """What a named part has but its name."""
    return {key: value for key, value in named.items() if key != "name"}


def _begin(sampler: Sampler, name: str, progress: float | None) -> list[str]:
    """Put a curriculum where it should be; returns what to say about it.

    Raises:
        ConfigError: the sampler has no curriculum, or it does not go there.
    """
    if not hasattr(sampler, "progress"):
        if progress is not None:
            why = "learns from what it observes" if sampler.learned else "is the same at every step"
            raise ConfigError(
                f"--progress: got {progress:g}, but sampler {name} {why}; allowed: curricula, such as clts"
            )
        return []
    share = 0.0 if progress is None else progress
    if not 0 <= share <= 1:
        raise ConfigError(f"--progress: got {share:g}, allowed: 0 to 1")
    length = sampler.options.length
    step = round(share * length)
    sampler.begin(step)
    place = f"curriculum at step {step} of {length}"
    return [place if progress is not None else f"{place}; --progress 0..1 shows other places"]


def _text(view: View) -> str:
    head = "".join(f"{word:10} {what}\n" for word, what in view.head())
    t, p, w, effective = view.columns.values()
    width, total = len(str(len(t) - 1)), effective.sum()
    ranges = strata(len(t))
    with np.errstate(invalid="ignore", over="ignore"):
        shares = [effective[inside].sum() / total for inside in ranges]
        weights = [w[inside].mean() for inside in ranges]
    largest = max(filter(np.isfinite, shares), default=0.0)
    rows = [["timesteps", "mass of p", "mean w", "share of p*w", ""]]
    for inside, share, weight in zip(ranges, shares, weights):
        first, last = inside.start, inside.stop - 1
        name = f"{first:>{width}}" + (f" - {last:>{width}}" if last > first else " " * (width + 3))
        mass = f"{100 * p[inside].sum():.2f} %"
        rows.append([name, mass, f"{weight:.4g}", f"{100 * share:.2f} %", bar(share, largest)])
    return f"{head}\n{aligned(rows)}sum of p = {p.sum():.15g}, sum of p*w = {total:.6g}\n"
