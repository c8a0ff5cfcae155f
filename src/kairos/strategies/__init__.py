"""Timestep strategies: a sampler draws timesteps, a weighting weights their losses, any with any.

`kairos.Strategy` is both together in a training loop; `make_sampler` and `make_weighting` are the parts. Densities need
numpy alone; torch is imported with the first draw.
"""

from typing import Any

from kairos.diffusion.schedule import NoiseSchedule
from kairos.registry import split
from kairos.strategies.base import Observation, Sampler, Weighting
from kairos.strategies.registries import SAMPLERS, WEIGHTINGS

__all__ = ["SAMPLERS", "WEIGHTINGS", "Observation", "Sampler", "Weighting", "make_sampler", "make_weighting"]


def make_sampler(named: dict[str, Any], schedule: NoiseSchedule, seed: int = 0) -> Sampler:
    """A sampler from ``{"name": ..., option: ...}``."""
    return SAMPLERS.build(*split(named), schedule, seed)


def make_weighting(named: dict[str, Any], schedule: NoiseSchedule, prediction: str = "epsilon") -> Weighting:
    """A weighting from ``{"name": ..., option: ...}``."""
    return WEIGHTINGS.build(*split(named), schedule, prediction)
