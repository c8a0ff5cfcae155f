"""Conversion of a noise schedule of any training loop to a forward process."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from kairos_timesteps.diffusion.processes import DIFFUSERS, Discrete, Edm, Flow, Process
from kairos_timesteps.diffusion.schedule import CONTINUOUS, PREDICTIONS, SCHEDULES, NoiseSchedule, make_schedule
from kairos_timesteps.errors import ConfigError, demand
from kairos_timesteps.numeric import Array
from kairos_timesteps.registry import PROCESSES

_PREDICTIONS = {prediction_type: prediction for prediction, prediction_type in DIFFUSERS.items()}


def as_process(process: Any, timesteps: int = 1000, prediction: str = "epsilon") -> Process:
    """Convert a process, a noise schedule or a scheduler of diffusers to a forward process.

    Args:
        process: a process, which is returned; a `NoiseSchedule`; alpha-bar as numbers, (T,); or the name of a schedule
            or of a process in continuous time. Of diffusers: a scheduler with ``alphas_cumprod`` (DDPM, DDIM, PNDM),
            whose ``prediction_type`` applies, or an EDM or flow-matching scheduler. The ``shift`` of a flow-matching
            scheduler applies, and the network is called with t times ``num_train_timesteps``.
        timesteps: T, for a schedule given by name.
        prediction: ``epsilon``, ``x0`` or ``v``, where `process` leaves it open.

    Raises:
        ConfigError: `process` or `prediction` is none of these.
    """
    demand(prediction in PREDICTIONS, "prediction", repr(prediction), ", ".join(PREDICTIONS))
    if isinstance(process, Process) or (hasattr(process, "times") and hasattr(process, "schedule")):
        look_alike: Process = process  # users may pass a process that derives from no class of kairos
        return look_alike
    if isinstance(process, str):
        if process in CONTINUOUS:
            continuous: Process = PROCESSES[process].component(prediction=prediction)
            return continuous
        demand(process in SCHEDULES, "schedule", repr(process), ", ".join((*SCHEDULES, *CONTINUOUS)))
        return Discrete(make_schedule(process, timesteps), prediction)
    if isinstance(process, NoiseSchedule):
        return Discrete(process, prediction)
    config = getattr(process, "config", None)
    if config is not None and type(process).__name__.startswith("EDM"):
        negated = getattr(config, "prediction_type", "epsilon") == "v_prediction"
        low, high = float(config.sigma_min), float(config.sigma_max)
        return Edm(sigma_data=float(config.sigma_data), sigma_min=low, sigma_max=high, negated=negated)
    if config is not None and type(process).__name__.startswith("FlowMatch"):
        dynamic = getattr(config, "use_dynamic_shifting", False)  # depends on the image when sampling; trained without
        return Flow(time_scale=float(config.num_train_timesteps), shift=1.0 if dynamic else float(config.shift))
    if hasattr(process, "alphas_cumprod"):
        prediction_type = getattr(config, "prediction_type", None)
        return Discrete(_of_scheduler(process), _PREDICTIONS.get(str(prediction_type), prediction))
    try:
        return Discrete(_name_if_linear(NoiseSchedule.of_alphas_cumprod(_numbers(process))), prediction)
    except (TypeError, ValueError, RuntimeError):
        raise ConfigError(
            f"process: got {type(process).__name__}, allowed: a process, a NoiseSchedule, a scheduler of diffusers, "
            f"alpha-bar as numbers, or one of {', '.join(SCHEDULES)}"
        ) from None


def _numbers(values: Any) -> Array:
    """Copy numbers of any kind, on any device, to float64; changes to the copy do not reach the user's numbers."""
    return torch.as_tensor(values, dtype=torch.float64, device="cpu").detach().numpy().copy()


def _of_scheduler(scheduler: Any) -> NoiseSchedule:
    """Build a schedule from the scheduler's betas; its float32 alpha-bar is off by a thousandth at small t.

    For a zero terminal signal-to-noise ratio the last beta is 1, and alpha-bar is used. A last alpha-bar of 0 is
    replaced by half of the one before; some schedulers replace it by 2**-24.
    """
    alphas_cumprod = _numbers(scheduler.alphas_cumprod)
    if len(alphas_cumprod) > 1 and alphas_cumprod[-1] == 0:
        # Zero terminal signal-to-noise ratio: half of what is before it stands for 0, whose weights are not all finite.
        alphas_cumprod[-1] = alphas_cumprod[-2] / 2
    elif hasattr(scheduler, "betas"):
        betas = _numbers(scheduler.betas)
        if betas[-1] < 1:
            return _name_if_linear(NoiseSchedule(betas))
    return _name_if_linear(NoiseSchedule.of_alphas_cumprod(alphas_cumprod))


def _name_if_linear(schedule: NoiseSchedule) -> NoiseSchedule:
    """Name a schedule linear if its betas are: SpeeD has closed forms for linear schedules, whatever their ends."""
    betas = schedule.betas
    even = np.linspace(betas[0], betas[-1], len(betas))
    linear = betas[0] < betas[-1] and bool(np.abs(betas - even).max() < 1e-6)
    return replace(schedule, name="linear") if linear else schedule
