"""Timestep strategies: a sampler draws timesteps, a weighting weights their losses, any with any."""

from typing import Any

from kairos.diffusion.schedule import NoiseSchedule
from kairos.strategies.base import Observation, Sampler, Weighting
from kairos.strategies.registries import SAMPLERS, WEIGHTINGS

__all__ = ["SAMPLERS", "WEIGHTINGS", "Observation", "Sampler", "Weighting", "make_sampler", "make_weighting"]


def make_sampler(named: dict[str, Any], schedule: NoiseSchedule, seed: int = 0) -> Sampler:
    """A sampler from ``{"name": ..., option: ...}``."""
    options = {key: value for key, value in named.items() if key != "name"}
    sampler: Sampler = SAMPLERS.build(named["name"], options, schedule, seed)
    return sampler


def make_weighting(named: dict[str, Any], schedule: NoiseSchedule, prediction: str = "epsilon") -> Weighting:
    """A weighting from ``{"name": ..., option: ...}``."""
    options = {key: value for key, value in named.items() if key != "name"}
    weighting: Weighting = WEIGHTINGS.build(named["name"], options, schedule, prediction)
    return weighting
