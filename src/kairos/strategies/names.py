"""A strategy's name, and what it trains on as a table. No torch here."""

from typing import Any

import numpy as np

from kairos.errors import ConfigError
from kairos.strategies.base import Array, Sampler, Weighting
from kairos.strategies.registries import SAMPLERS, WEIGHTINGS


def parse_name(name: str) -> tuple[str, str]:
    """Sampler and weighting of ``sampler+weighting``; of a bare name, the other is ``uniform`` or ``none``.

    Raises:
        ConfigError: a part is unknown; the message lists what exists.
    """
    first, plus, second = (part.strip() for part in name.partition("+"))
    if plus:
        SAMPLERS.entry(first)
        WEIGHTINGS.entry(second)
        return first, second
    if first in WEIGHTINGS:
        return "uniform", first
    if first not in SAMPLERS and first not in SAMPLERS.refused:
        samplers, weightings = (", ".join(sorted(registry)) for registry in (SAMPLERS, WEIGHTINGS))
        raise ConfigError(
            f"unknown strategy {name!r}. Allowed: a sampler ({samplers}), a weighting ({weightings}), or "
            "sampler+weighting"
        )
    SAMPLERS.entry(first)
    return first, "none"


def table(sampler: Sampler, weighting: Weighting, x0: Any = None) -> dict[str, Array]:
    """What a strategy trains on now, each (T,): ``t``, ``p``, ``w`` with importance weights, ``effective`` = p w."""
    p, w = sampler.density(x0), weighting.weights()
    if sampler.corrected:
        w = np.where(p > 0, w / (len(p) * np.where(p > 0, p, 1.0)), w)
    return {"t": np.arange(len(p), dtype=np.float64), "p": p, "w": w, "effective": p * w}


def warnings_of(columns: dict[str, Array]) -> list[str]:
    """What is wrong with a table: weights that are negative or not finite, timesteps that are never drawn."""
    found = []
    for what, bad in (
        ("weight is negative", columns["w"] < 0),
        ("weight is not finite", ~np.isfinite(columns["w"])),
        ("timestep is never drawn (p = 0)", columns["p"] == 0),
    ):
        if bad.any():
            places = np.flatnonzero(bad)
            found.append(f"{what} at {len(places)} of {len(bad)} timesteps between t = {places[0]} and {places[-1]}")
    return found
