"""A strategy's name, and what it trains on as a table. No torch here."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from kairos_timesteps.base import NOTHING, Sampler, Weighting
from kairos_timesteps.components import SAMPLERS, WEIGHTINGS, checked
from kairos_timesteps.coordinates import Place
from kairos_timesteps.errors import ConfigError
from kairos_timesteps.numeric import Array
from kairos_timesteps.options import suggestion

Options = Mapping[str, Any] | None


def parse_name(name: str) -> tuple[str, str]:
    """Sampler and weighting of ``sampler+weighting``; of a bare name what has it, else ``uniform`` or ``none``.

    Raises:
        ConfigError: a part is unknown; the message lists what exists.
    """
    first, plus, second = (part.strip() for part in name.partition("+"))
    if not plus:
        second = first if first in WEIGHTINGS else "none"
        first = "uniform" if second == first not in SAMPLERS else first
    if not plus and first not in SAMPLERS and first not in SAMPLERS.refused:
        samplers, weightings = (", ".join(sorted(registry)) for registry in (SAMPLERS, WEIGHTINGS))
        hint = suggestion(first, [*SAMPLERS, *WEIGHTINGS])
        raise ConfigError(
            f"unknown strategy {name!r}{hint} Allowed: a sampler ({samplers}), a weighting ({weightings}), or "
            "sampler+weighting"
        )
    SAMPLERS.entry(first)
    WEIGHTINGS.entry(second)
    return first, second


def parts(
    process: Any, names: tuple[str, str], sampler: Options, weighting: Options, seed: int = 0
) -> tuple[Sampler, Weighting]:
    """A sampler and a weighting with their options on a process; the weighting takes sigma_data from it where it can.

    Raises:
        ConfigError: an option is unknown, not allowed, or does not fit the process.
    """
    schedule = process.schedule
    its_sampler = checked(SAMPLERS, names[0], sampler, schedule.timesteps, schedule.name)
    its_weighting = checked(WEIGHTINGS, names[1], weighting, schedule.timesteps, schedule.name)
    if getattr(its_weighting, "sigma_data", 0) is None:
        its_weighting = replace(its_weighting, sigma_data=getattr(process, "sigma_data", None))
    try:
        return (
            SAMPLERS[names[0]].load()(its_sampler, schedule, seed),
            WEIGHTINGS[names[1]].load()(its_weighting, schedule, process.prediction),
        )
    except ValueError as error:  # what only the component itself can know; its message names the option
        raise ConfigError(str(error)) from None


def table(sampler: Sampler, weighting: Weighting, x0: Any = None, place: Place = NOTHING) -> dict[str, Array]:
    """What a strategy trains on at a place's step and context, each (T,).

    ``t`` (the process' own time), ``p`` (the mass of its cell), ``w`` with importance weights, ``effective`` = p w.
    """
    p, w = sampler.density(x0, place), weighting.weights(place.step)
    if sampler.corrected:
        w = np.where(p > 0, w / (len(p) * np.where(p > 0, p, 1.0)), w)
    return {"t": sampler.schedule.times, "p": p, "w": w, "effective": p * w}


def warnings_of(columns: dict[str, Array]) -> list[str]:
    """What is wrong with a table: weights that are negative or not finite, timesteps that are never drawn."""
    found = []
    for what, bad in (
        ("weight is negative", columns["w"] < 0),
        ("weight is not finite", ~np.isfinite(columns["w"])),
        ("timestep is never drawn (p = 0)", columns["p"] == 0),
    ):
        if bad.any():
            first, last = columns["t"][bad][[0, -1]]
            found.append(f"{what} at {bad.sum()} of {len(bad)} timesteps between t = {first:g} and {last:g}")
    return found
