"""Samplers and weightings built from ``{"name": ..., option: ...}``."""

from typing import Any

from kairos_timesteps.base import Sampler, Weighting
from kairos_timesteps.components import SAMPLERS, WEIGHTINGS
from kairos_timesteps.diffusion.schedule import NoiseSchedule
from kairos_timesteps.registry import split


def make_sampler(component: dict[str, Any], schedule: NoiseSchedule, seed: int = 0) -> Sampler:
    """Build a sampler on a schedule."""
    return SAMPLERS.build(*split(component), schedule, seed)


def make_weighting(component: dict[str, Any], schedule: NoiseSchedule, prediction: str = "epsilon") -> Weighting:
    """Build a weighting on a schedule, for the error of a prediction."""
    return WEIGHTINGS.build(*split(component), schedule, prediction)
