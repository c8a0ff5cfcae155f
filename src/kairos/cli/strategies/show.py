"""``kairos strategies show``: what a strategy trains on, computed from its name."""

import argparse
import warnings
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import yaml

from kairos.cli.common import demand
from kairos.cli.strategies.listing import described
from kairos.cli.strategies.output import aligned, bar, deliver, strata, warn
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

Named = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]  # sampler and weighting with options, `diffusion`


@dataclass(frozen=True)
class View:
    """A strategy's table, and what one has to know to read it.

    Attributes:
        sampler: name and options.
        weighting: name and options.
        diffusion: the process with its options, and the prediction.
        columns: ``t``, ``p``, ``w``, ``effective``, each (T,).
        notes: what state or place is shown, a sentence each.
    """

    sampler: dict[str, Any]
    weighting: dict[str, Any]
    diffusion: dict[str, Any]
    columns: dict[str, Array]
    notes: tuple[str, ...]

    @property
    def name(self) -> str:
        """``sampler+weighting``."""
        return f"{self.sampler['name']}+{self.weighting['name']}"

    @property
    def process(self) -> str:
        """Name of the process."""
        return str(self.diffusion["process"]["name"])

    def head(self) -> list[tuple[str, str]]:
        """Return the header lines that describe the strategy, each as a label and a text."""
        process = self.diffusion["process"]
        if process["name"] == "discrete":
            process = {"name": f"{process['schedule']} schedule, T = {process['timesteps']}"}
        named = (("sampler", self.sampler), ("weighting", self.weighting), ("process", process))
        said = {kind: ": ".join(filter(None, (part["name"], described(but_name(part))))) for kind, part in named}
        if self.diffusion["prediction"] is not None:
            said["process"] += f", prediction {self.diffusion['prediction']}"
        return [("strategy", self.name), *said.items(), *(("note", note) for note in self.notes)]


def run(arguments: argparse.Namespace) -> None:
    """Show the strategy that the arguments name, and warn of what is wrong with it."""
    if arguments.checkpoint is None:
        view = computed(arguments)
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
        picture=lambda figures: figures.draw_strategy(view.columns, view.name, lines, view.process),
    )


def warnings_of(columns: dict[str, Array]) -> list[str]:
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


def named_parts(arguments: argparse.Namespace) -> Named:
    """Sampler and weighting that the arguments name, with their options, and section `diffusion`.

    Raises:
        ConfigError: no or an unknown name, an option that does not exist or is ambiguous.
    """
    if arguments.strategy is None:
        allowed = "SAMPLER, WEIGHTING or SAMPLER+WEIGHTING, see kairos strategies list"
        raise ConfigError(f"strategy: none given; allowed: {allowed}")
    sampler, weighting = parse_name(arguments.strategy)
    process = arguments.process or "discrete"
    given = set_options(arguments.set, {"sampler": sampler, "weighting": weighting, "process": process})
    short = {key: getattr(arguments, key) for key in ("schedule", "timesteps")}
    given["process"] |= {key: value for key, value in short.items() if value is not None}
    its = {"name": process, **dump(PROCESSES.parse(process, given["process"]))}
    its = measured(its, 0.5)  # of pixels, as weighting edm has it
    diffusion = {"process": its, "prediction": chosen_prediction(process, arguments.prediction)}
    return {"name": sampler, **given["sampler"]}, {"name": weighting, **given["weighting"]}, diffusion


def process_of(diffusion: dict[str, Any]) -> Process:
    """The process of a section; that it does not end in noise is a warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        process = build_process(diffusion)
    for warning in caught:
        warn(str(warning.message))
    return process


def set_options(settings: list[str], names: dict[str, str]) -> dict[str, dict[str, Any]]:
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


def computed(arguments: argparse.Namespace) -> View:
    """The strategy that the arguments name, as it is before any training."""
    *named, diffusion = named_parts(arguments)
    names = named[0]["name"], named[1]["name"]
    sampler, weighting = build_pair(process_of(diffusion), names, but_name(named[0]), but_name(named[1]))
    context, notes = _shown_at(sampler, names[0], arguments.progress)
    if isinstance(sampler, Learned):
        notes.append("p(t) is the initial density: this sampler learns; --checkpoint shows what it has learned")
    if sampler.importance:
        notes.append("w(t) holds the importance weight 1/(T p(t)) as well")
    if isinstance(weighting, Learned):
        notes.append("w(t) is the initial one: this weighting learns; --checkpoint shows what it has learned")
    complete = [{"name": name, **dump(its)} for name, its in zip(names, (sampler.options, weighting.options))]
    with np.errstate(all="ignore"):  # `warnings_of` reports what is not finite
        columns = table(sampler, weighting, **context)
    return View(complete[0], complete[1], diffusion, columns, tuple(notes))


def _shown_at(sampler: Sampler, name: str, progress: float | None) -> tuple[dict[str, Any], list[str]]:
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


def _text(view: View) -> str:
    head = "".join(f"{word:10} {what}\n" for word, what in view.head())
    t, p, w, effective = view.columns.values()
    total, ranges = effective.sum(), strata(len(t))
    with np.errstate(invalid="ignore", over="ignore"):
        shares = [effective[inside].sum() / total for inside in ranges]
        weights = [w[inside].mean() for inside in ranges]
    largest = max(filter(np.isfinite, shares), default=0.0)
    ends = [[f"{t[place]:.5g}" for place in (inside.start, inside.stop - 1)] for inside in ranges]
    width = max(len(end) for pair in ends for end in pair)
    own = "timesteps" if view.process == "discrete" else PROCESSES[view.process].load().time_symbol
    rows = [[own, "mass of p", "mean w", "share of p*w", ""]]
    for inside, share, weight, pair in zip(ranges, shares, weights, ends):
        name = " - ".join(end.rjust(width) for end in dict.fromkeys(pair))
        mass, percent = (f"{100 * part:.2f} %" for part in (p[inside].sum(), share))
        rows.append([name, mass, f"{weight:.4g}", percent, bar(share, largest)])
    return f"{head}\n{aligned(rows)}sum of p = {p.sum():.15g}, sum of p*w = {total:.6g}\n"
