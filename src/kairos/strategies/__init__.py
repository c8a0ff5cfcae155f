"""Timestep strategies: a sampler draws timesteps, a weighting weights their losses, any with any.

`Strategy` is both together in a training loop; `make_sampler` and `make_weighting` are the parts. Densities need numpy
alone; torch is imported with the first draw.
"""

from typing import TYPE_CHECKING, Any

from kairos.diffusion.schedule import NoiseSchedule
from kairos.registry import split
from kairos.strategies.base import Observation, Sampler, Weighting
from kairos.strategies.registries import SAMPLERS, WEIGHTINGS

if TYPE_CHECKING:
    from kairos.strategies.strategy import Draw, Strategy

__all__ = [
    "SAMPLERS",
    "WEIGHTINGS",
    "Draw",
    "Observation",
    "Sampler",
    "Strategy",
    "Weighting",
    "make_sampler",
    "make_weighting",
]


def __getattr__(name: str) -> Any:
    if name in ("Draw", "Strategy"):
        from kairos.strategies import strategy

        return getattr(strategy, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def make_sampler(named: dict[str, Any], schedule: NoiseSchedule, seed: int = 0) -> Sampler:
    """A sampler from ``{"name": ..., option: ...}``."""
    return SAMPLERS.build(*split(named), schedule, seed)


def make_weighting(named: dict[str, Any], schedule: NoiseSchedule, prediction: str = "epsilon") -> Weighting:
    """A weighting from ``{"name": ..., option: ...}``."""
    return WEIGHTINGS.build(*split(named), schedule, prediction)
