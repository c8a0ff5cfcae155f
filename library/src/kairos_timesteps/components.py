"""Registries of samplers, weightings and couplings; any sampler goes with any weighting.

A component is one class: its options, paper and formula are declared there, and a decorator registers it.
"""

from collections.abc import Mapping
from typing import Any

from kairos_timesteps.errors import ConfigError
from kairos_timesteps.registry import Registry

_SAMPLERS = (
    "fixed", "log_snr", "combined", "speed", "losses", "info_noise", "gradients", "adaptive", "adaptive_official"
)  # fmt: skip
_WEIGHTINGS = ("fixed", "change_aware", "coarse_to_fine", "uncertainty")

SAMPLERS = Registry("sampler", *(f"kairos_timesteps.samplers.{name}" for name in _SAMPLERS))
WEIGHTINGS = Registry("weighting", *(f"kairos_timesteps.weightings.{name}" for name in _WEIGHTINGS))
COUPLINGS = Registry("coupling", "kairos_timesteps.couplings")

sampler = SAMPLERS.register
weighting = WEIGHTINGS.register
coupling = COUPLINGS.register

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
