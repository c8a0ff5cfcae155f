"""kairos: train diffusion models on the timesteps that matter.

    import kairos
    strategy = kairos.Strategy("speed+change_aware")

The names below are imported when they are first used: ``import kairos`` is free, strategies need numpy and torch alone.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kairos.diffusion.processes import Discrete, Edm, Flow, Vp
    from kairos.diffusion.schedule import NoiseSchedule, make_schedule
    from kairos.strategies import density, weighting
    from kairos.strategies.own_loop import LossByLevel
    from kairos.strategies.presets import preset, presets
    from kairos.strategies.strategy import Draw, Strategy
    from kairos.strategies.validation import ValidationLoss

__version__ = "0.1.0"
__all__ = [
    "Discrete", "Draw", "Edm", "Flow", "LossByLevel", "NoiseSchedule", "Strategy", "ValidationLoss", "Vp",
    "__version__", "density", "make_schedule", "preset", "presets", "weighting",
]  # fmt: skip

_NAMES = {
    "strategies.strategy": ("Strategy", "Draw"),
    "strategies.own_loop": ("LossByLevel",),
    "strategies.validation": ("ValidationLoss",),
    "diffusion.processes": ("Discrete", "Edm", "Flow", "Vp"),
    "diffusion.schedule": ("NoiseSchedule", "make_schedule"),
    "strategies": ("density", "weighting"),
    "strategies.presets": ("preset", "presets"),
}
_WHERE = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'kairos' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"kairos.{_WHERE[name]}"), name)
