"""Timestep strategies for training diffusion models: which timesteps to train on, and how to weight their losses.

    import kairos_timesteps
    strategy = kairos_timesteps.Strategy("speed+change_aware", "cosine")

Importing the package is free: each name below is imported when it is first used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kairos_timesteps.attached import Attached, attach
    from kairos_timesteps.build import density, weighting
    from kairos_timesteps.diffusion.processes import Discrete, Edm, Flow, Vp
    from kairos_timesteps.diffusion.schedule import NoiseSchedule, make_schedule
    from kairos_timesteps.monitoring import LossByLevel
    from kairos_timesteps.presets import preset
    from kairos_timesteps.strategy import Draw, Strategy
    from kairos_timesteps.validation import ValidationLoss

__version__ = "0.1.0"
__all__ = [
    "Attached", "Discrete", "Draw", "Edm", "Flow", "LossByLevel", "NoiseSchedule", "Strategy", "ValidationLoss", "Vp",
    "__version__", "attach", "density", "make_schedule", "names", "preset", "weighting",
]  # fmt: skip

_MODULES = {
    "strategy": ("Strategy", "Draw"),
    "attached": ("Attached", "attach"),
    "monitoring": ("LossByLevel",),
    "validation": ("ValidationLoss",),
    "diffusion.processes": ("Discrete", "Edm", "Flow", "Vp"),
    "diffusion.schedule": ("NoiseSchedule", "make_schedule"),
    "build": ("density", "weighting"),
    "presets": ("preset",),
}
MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}  # below the package, by name


def names(kind: str) -> list[str]:
    """Return the names of all components of a kind: ``sampler``, ``weighting``, ``coupling`` or ``preset``, sorted.

    Raises:
        ConfigError: another kind.
    """
    from kairos_timesteps import components
    from kairos_timesteps.errors import demand

    if kind == "preset":
        from kairos_timesteps.presets import presets

        return presets()
    all_registries = (components.SAMPLERS, components.WEIGHTINGS, components.COUPLINGS)
    registries = {registry.kind: registry for registry in all_registries}
    demand(kind in registries, "kind", repr(kind), ", ".join((*registries, "preset")))
    return sorted(registries[kind])


def __getattr__(name: str) -> Any:
    if name not in MODULE_OF:
        raise AttributeError(f"module 'kairos_timesteps' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"kairos_timesteps.{MODULE_OF[name]}"), name)
