"""Whatever a training loop has for a noise schedule, as a forward process of ours."""

from typing import Any

import numpy as np

from kairos.diffusion.processes import Discrete
from kairos.diffusion.registries import DiscreteOptions
from kairos.diffusion.schedule import PREDICTIONS, SCHEDULES, NoiseSchedule
from kairos.errors import ConfigError

_DIFFUSERS = {"epsilon": "epsilon", "sample": "x0", "v_prediction": "v"}


def as_process(process: Any, timesteps: int = 1000, prediction: str = "epsilon") -> Any:
    """A forward process.

    Args:
        process: one already; a `NoiseSchedule`; alpha-bar as numbers, (T,); the name of a schedule; a scheduler of
            diffusers: with ``alphas_cumprod`` (DDPM, DDIM, PNDM ...), which says what is predicted, or an EDM or
            flow-matching one.
        timesteps: T, for a schedule given by name.
        prediction: ``epsilon``, ``x0`` or ``v``, where `process` leaves it open.

    Raises:
        ConfigError: it is none of these.
    """
    if prediction not in PREDICTIONS:
        raise ConfigError(f"prediction: got {prediction!r}, allowed: {', '.join(PREDICTIONS)}")
    if hasattr(process, "times") and hasattr(process, "schedule"):
        return process
    if isinstance(process, str):
        if process not in SCHEDULES:
            raise ConfigError(f"schedule: got {process!r}, allowed: {', '.join(SCHEDULES)}")
        return Discrete(DiscreteOptions(timesteps=timesteps, schedule=process), prediction)
    if isinstance(process, NoiseSchedule):
        return Discrete(process, prediction)
    config = getattr(process, "config", None)
    if config is not None and type(process).__name__.startswith("EDM"):
        from kairos.diffusion.continuous import Edm

        return Edm(config.sigma_data, config.sigma_min, config.sigma_max)
    if config is not None and type(process).__name__.startswith("FlowMatch"):
        from kairos.diffusion.continuous import Flow

        return Flow()
    if hasattr(process, "alphas_cumprod"):
        wanted = getattr(config, "prediction_type", None)
        return Discrete(_schedule(process.alphas_cumprod), _DIFFUSERS.get(str(wanted), prediction))
    try:
        return Discrete(_schedule(process), prediction)
    except (TypeError, ValueError):
        raise ConfigError(
            f"process: got {type(process).__name__}, allowed: a process, a NoiseSchedule, a scheduler of diffusers, "
            f"alpha-bar as numbers, or one of {', '.join(SCHEDULES)}"
        ) from None


def _schedule(alphas_cumprod: Any) -> NoiseSchedule:
    return NoiseSchedule.of_alphas_cumprod(np.asarray(alphas_cumprod, np.float64))
