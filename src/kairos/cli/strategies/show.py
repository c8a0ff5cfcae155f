"""``kairos strategies show``."""

import argparse
import re
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import yaml

from kairos import options
from kairos.cli.strategies.listing import described
from kairos.cli.strategies.output import aligned, bar, deliver, ranges_text, strata, warn
from kairos.diffusion.registries import DiscreteOptions
from kairos.diffusion.schedule import PREDICTIONS, NoiseSchedule, make_schedule
from kairos.errors import ConfigError
from kairos.registry import Registry
from kairos.strategies.base import Array, Sampler, Weighting
from kairos.strategies.columns import strategy_csv
from kairos.strategies.names import parse_name, table, warnings_of
from kairos.strategies.registries import SAMPLERS, WEIGHTINGS


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
        parts = [
            (kind, f"{part['name']}: {stated}" if (stated := described(options_of(part))) else str(part["name"]))
            for kind, part in (("sampler", self.sampler), ("weighting", self.weighting))
        ]
        return [("strategy", self.name), *parts, ("process", self.process), *(("note", note) for note in self.notes)]


def run(arguments: argparse.Namespace) -> None:
    """Show the strategy that the arguments name, and warn of what is wrong with it."""
    view = _view(arguments)
    for found in warnings_of(view.columns):
        warn(found)

    def png() -> Any:
        from kairos.report.strategy_figure import draw_strategy

        return draw_strategy(view.columns, view.name, [f"{word}  {what}" for word, what in view.head()[1:]])

    deliver(arguments, view.name, lambda: _text(view), lambda: strategy_csv(view.columns), png)


def _view(arguments: argparse.Namespace) -> View:
    if arguments.checkpoint is not None:
        if arguments.progress is not None:
            raise ConfigError("--progress: a checkpoint has its own place in the curriculum; allowed: one of the two")
        from kairos.cli.strategies.recorded import view_of_checkpoint

        return view_of_checkpoint(arguments)
    return _computed(arguments)


def named_parts(arguments: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Sampler and weighting that the arguments name, with their options.

    Raises:
        ConfigError: no or an unknown name, an option that does not exist, is ambiguous or has an impossible value.
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
    checked = options.parse(DiscreteOptions, {k: v for k, v in given.items() if v is not None}, "process")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        schedule = make_schedule(checked.schedule, checked.timesteps)
    for warning in caught:
        warn(str(warning.message))
    return schedule


def prediction_of(arguments: argparse.Namespace) -> str:
    """What the network predicts, epsilon where nothing is said."""
    prediction = arguments.prediction or "epsilon"
    if prediction not in PREDICTIONS:
        raise ConfigError(f"prediction: got {prediction!r}, allowed: {', '.join(PREDICTIONS)}")
    return str(prediction)


def set_options(settings: list[str], sampler: str, weighting: str) -> dict[str, dict[str, Any]]:
    """The settings ``part.option=value``, or ``option=value`` where one part alone has the option, by part.

    Raises:
        ConfigError: an option is unknown, ambiguous or given twice; the message lists what exists.
    """
    parts = {"sampler": SAMPLERS.entry(sampler), "weighting": WEIGHTINGS.entry(weighting)}
    names = {part: list(options.dump(entry.options())) for part, entry in parts.items()}
    existing = [f"{part}.{option}" for part, every in names.items() for option in every]
    given: dict[str, dict[str, Any]] = {part: {} for part in parts}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise ConfigError(f"--set: got {setting!r}, allowed: OPTION=VALUE, such as sampler.k=5")
        part, dot, option = key.strip().rpartition(".")
        owners = [part] if dot else [owner for owner, every in names.items() if option in every]
        if len(owners) > 1:
            both = " or ".join(f"{owner}.{option}" for owner in owners)
            raise ConfigError(f"--set {option}: both {sampler} and {weighting} have it; allowed: {both}")
        if not owners or owners[0] not in names or option not in names[owners[0]]:
            raise options.unknown_key(key.strip(), existing, f"{sampler}+{weighting}")
        if option in given[owners[0]]:
            raise ConfigError(f"--set {owners[0]}.{option}: given twice, allowed: once")
        given[owners[0]][option] = scalar(text, setting)
    return given


def scalar(text: str, setting: str) -> Any:
    """A value written in YAML; numbers such as 1e-3, which YAML takes for text, are numbers here."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"--set {setting}: not a value; allowed: a number, true, false, null or a word") from None
    if isinstance(value, str) and re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+", value):
        number = float(value)
        return int(number) if number.is_integer() and abs(number) < 1e15 else number
    return value


def _computed(arguments: argparse.Namespace) -> View:
    named = named_parts(arguments)
    schedule, prediction = noise_schedule(arguments), prediction_of(arguments)
    sampler: Sampler = _build(SAMPLERS, named[0], schedule)
    weighting: Weighting = _build(WEIGHTINGS, named[1], schedule, prediction)
    notes = _begin(sampler, named[0]["name"], arguments.progress)
    if sampler.learned:
        notes.append("p(t) is the initial density: this sampler learns; --checkpoint shows what it has learned")
    if sampler.corrected:
        notes.append("w(t) holds the importance weight 1/(T p(t)) as well")
    if weighting.learned:
        notes.append("w(t) is the initial one: this weighting learns; --checkpoint shows what it has learned")
    complete = [
        {"name": part["name"], **options.dump(registry.parse(part["name"], options_of(part)))}
        for part, registry in zip(named, (SAMPLERS, WEIGHTINGS))
    ]
    process = f"{schedule.name} schedule, T = {schedule.timesteps}, prediction {prediction}"
    with np.errstate(all="ignore"):  # what is not finite is warned of by its place
        columns = table(sampler, weighting)
    return View(complete[0], complete[1], process, columns, tuple(notes))


def _build(registry: Registry, named: dict[str, Any], schedule: NoiseSchedule, *further: Any) -> Any:
    given = options_of(named)
    parsed = registry.parse(named["name"], given)
    try:
        if hasattr(parsed, "check_fits"):
            parsed.check_fits(schedule.timesteps, schedule.name)
    except ValueError as error:
        raise ConfigError(f"{registry.kind} {named['name']}.{error}") from None
    try:
        return registry.build(named["name"], given, schedule, *further)
    except ValueError as error:  # what only the component itself can know; its message names the option
        raise ConfigError(str(error)) from None


def options_of(named: dict[str, Any]) -> dict[str, Any]:
    """What a named part has but its name."""
    return {key: value for key, value in named.items() if key != "name"}


def _begin(sampler: Sampler, name: str, progress: float | None) -> list[str]:
    """Put a curriculum where it should be; returns what to say about it.

    Raises:
        ConfigError: the sampler has no curriculum, or it does not go there.
    """
    if not hasattr(sampler, "progress"):
        if progress is not None:
            raise ConfigError(
                f"--progress: got {progress:g}, but sampler {name} "
                + ("learns from what it observes" if sampler.learned else "is the same at every step")
                + "; allowed: curricula, such as clts"
            )
        return []
    share = 0.0 if progress is None else progress
    if not 0 <= share <= 1:
        raise ConfigError(f"--progress: got {share:g}, allowed: 0 to 1")
    length = sampler.options.length
    sampler.begin(round(share * length))
    place = f"curriculum at step {round(share * length)} of {length}"
    return [place if progress is not None else f"{place}; --progress 0..1 shows other places"]


def _text(view: View) -> str:
    head = "".join(f"{word:10} {what}\n" for word, what in view.head())
    t, p, w, effective = view.columns.values()
    width = len(str(len(t) - 1))
    with np.errstate(invalid="ignore", over="ignore"):
        total = effective.sum()
        rows, shares = [], []
        for start, end in strata(len(t)):
            share = effective[start:end].sum() / total
            shares.append(float(share))
            mass, mean = f"{100 * p[start:end].sum():.2f} %", f"{w[start:end].mean():.4g}"
            rows.append([ranges_text(start, end, width), mass, mean, f"{100 * share:.2f} %"])
    largest = max((share for share in shares if np.isfinite(share)), default=0.0)
    for row, share in zip(rows, shares):
        row.append(bar(share, largest))
    body = aligned([["timesteps", "mass of p", "mean w", "share of p*w", ""], *rows])
    return f"{head}\n{body}sum of p = {p.sum():.15g}, sum of p*w = {total:.6g}\n"
