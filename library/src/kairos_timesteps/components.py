"""Samplers, weightings, couplings and forward processes by name; any sampler goes with any weighting.

A component is one class: its options, paper and formula are declared there, and a decorator registers it. The imports
here register the components of the library. They import no torch.
"""

from collections.abc import Mapping
from typing import Any

from kairos_timesteps import couplings, samplers, weightings  # noqa: F401  # they register their components
from kairos_timesteps.diffusion import processes  # noqa: F401
from kairos_timesteps.errors import ConfigError
from kairos_timesteps.registry import (
    COUPLINGS,
    PROCESSES,
    SAMPLERS,
    WEIGHTINGS,
    Registry,
    coupling,
    process,
    sampler,
    weighting,
)

__all__ = ["COUPLINGS", "PROCESSES", "SAMPLERS", "WEIGHTINGS", "checked", "coupling", "process", "sampler", "weighting"]

SAMPLERS.unavailable["bs"] = (
    "Wang et al. 2025 (SpeeD, table 11) publish its numbers but not its density, so it cannot be rebuilt"
)


def checked(
    registry: Registry, name: str, values: Mapping[str, Any] | None, timesteps: int, schedule: str, where: str = ""
) -> Any:
    """Return the options of a sampler or weighting, checked against the process as well.

    Raises:
        ConfigError: an option is unknown, not allowed, or does not fit the number of timesteps or the schedule.
    """
    where = where or f"{registry.kind} {name}"
    options = registry.parse(name, values, where)
    try:
        registry[name].component.check_process(options, timesteps, schedule)
    except ValueError as error:
        raise ConfigError(f"{where}.{error}") from None
    return options
