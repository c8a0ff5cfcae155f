"""Timestep strategies: a sampler draws timesteps, a weighting weights their losses, any with any.

`kairos_timesteps.Strategy` is both together in a training loop; `make_sampler` and `make_weighting` build one of them.
Densities need numpy alone; torch is imported with the first draw.
"""

from typing import Any

from kairos_timesteps.base import FixedDensity, Sampler, Weighting
from kairos_timesteps.components import SAMPLERS, WEIGHTINGS
from kairos_timesteps.diffusion.schedule import PREDICTIONS, NoiseSchedule
from kairos_timesteps.errors import demand
from kairos_timesteps.lookup import build_pair
from kairos_timesteps.registry import split


def make_sampler(named: dict[str, Any], schedule: NoiseSchedule, seed: int = 0) -> Sampler:
    """A sampler from ``{"name": ..., option: ...}``."""
    return SAMPLERS.build(*split(named), schedule, seed)


def make_weighting(named: dict[str, Any], schedule: NoiseSchedule, prediction: str = "epsilon") -> Weighting:
    """A weighting from ``{"name": ..., option: ...}``."""
    return WEIGHTINGS.build(*split(named), schedule, prediction)


def density(name: str, process: Any = "flow", **options: Any) -> Sampler:
    """A sampler of a fixed density by its name and options, for those who carry times or sigma through their own code.

    It has `sample`, `pdf`, `cdf` and `quantile` of fractions of the process, 0 the image and 1 noise.

    Raises:
        ConfigError: an unknown name or option, a value that is not allowed, or a sampler that learns.
    """
    from kairos_timesteps.diffusion.adapters import as_process  # torch

    demand(issubclass(SAMPLERS.entry(name).load(), FixedDensity), "density", name, "samplers of a fixed density")
    return build_pair(as_process(process), (name, "none"), options, None)[0]


def weighting(name: str, process: Any = "flow", prediction: str | None = None, **options: Any) -> Weighting:
    """A weighting by its name and options: a call with signal-to-noise ratios gives the factors of losses, elementwise.

    Args:
        prediction: whose squared error is weighted, ``epsilon``, ``x0``, ``v`` or ``flow``; None: the process'.

    Raises:
        ConfigError: an unknown name, prediction or option, or a value that is not allowed.
    """
    from kairos_timesteps.diffusion.adapters import as_process

    allowed = (*PREDICTIONS, "flow")
    demand(prediction in (None, *allowed), "prediction", prediction, ", ".join(allowed))
    found = build_pair(as_process(process), ("uniform", name), None, options)[1]
    found.prediction = prediction or found.prediction
    return found
