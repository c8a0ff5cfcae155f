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


def as_process(process: Any, timesteps: int = 1000, prediction: str | None = None) -> Process:
    """Convert a process, a noise schedule or a scheduler of diffusers to a forward process.

    Args:
        process: a process, which is returned; a `NoiseSchedule`; alpha-bar as numbers, (T,); or the name of a schedule
            or of a process in continuous time. Of diffusers: a scheduler with ``alphas_cumprod`` (DDPM, DDIM, PNDM),
            whose ``prediction_type`` applies, or an EDM or flow-matching scheduler. The ``shift`` of a flow-matching
            scheduler applies, and the network is called with t times ``num_train_timesteps``. A scheduler for both
            kinds (UniPC, DPMSolver) is one of flow matching if ``use_flow_sigmas`` is set.
        timesteps: T, for a schedule given by name.
        prediction: ``epsilon``, ``x0`` or ``v``, where `process` leaves it open; None: epsilon. Where `process` states
            it, None or the same.

    Raises:
        ConfigError: `process` or `prediction` is none of these, `process` states another prediction than `prediction`,
            or a prediction type is unknown.
    """
    allowed = (*PREDICTIONS, "flow")
    demand(prediction in (None, *allowed), "prediction", repr(prediction), ", ".join(allowed))
    converted = _convert(process, timesteps, None if prediction == "flow" else prediction)
    demand(
        prediction in (None, converted.prediction),
        "prediction",
        repr(prediction),
        f"{converted.prediction!r}, which the process states; for a scheduler set prediction_type, or pass its "
        "alphas_cumprod",
    )
    return converted


def _convert(process: Any, timesteps: int, prediction: str | None) -> Process:
    """Convert as `as_process` does; `prediction` is not compared with the one that `process` states."""
    if isinstance(process, Process) or (hasattr(process, "times") and hasattr(process, "schedule")):
        look_alike: Process = process  # users may pass a process that derives from no class of kairos
        return look_alike
    open_prediction = prediction or "epsilon"
    if isinstance(process, str):
        if process in CONTINUOUS:
            continuous: Process = PROCESSES[process].component(prediction=open_prediction)
            return continuous
        demand(process in SCHEDULES, "schedule", repr(process), ", ".join((*SCHEDULES, *CONTINUOUS)))
        return Discrete(make_schedule(process, timesteps), open_prediction)
    if isinstance(process, NoiseSchedule):
        return Discrete(process, open_prediction)
    config = getattr(process, "config", None)
    prediction_type = getattr(config, "prediction_type", None)
    if config is not None and type(process).__name__.startswith("EDM"):
        _demand_prediction_type(prediction_type, (None, "epsilon", "v_prediction"))
        low, high = float(config.sigma_min), float(config.sigma_max)
        negated = prediction_type == "v_prediction"
        return Edm(sigma_data=float(config.sigma_data), sigma_min=low, sigma_max=high, negated=negated)
    if config is not None and type(process).__name__.startswith("FlowMatch"):
        dynamic = getattr(config, "use_dynamic_shifting", False)  # depends on the image when sampling; trained without
        return Flow(time_scale=float(config.num_train_timesteps), shift=1.0 if dynamic else float(config.shift))
    if config is not None and getattr(config, "use_flow_sigmas", False):
        _demand_prediction_type(prediction_type, ("flow_prediction",))
        shift = getattr(config, "flow_shift", None)
        return Flow(time_scale=float(config.num_train_timesteps), shift=1.0 if shift is None else float(shift))
    if hasattr(process, "alphas_cumprod"):
        _demand_prediction_type(prediction_type, (None, *_PREDICTIONS))
        return Discrete(_of_scheduler(process), _PREDICTIONS.get(str(prediction_type), open_prediction))
    try:
        alphas_cumprod = _numbers(process)
    except (TypeError, ValueError, RuntimeError):
        raise ConfigError(
            f"process: got {type(process).__name__}, allowed: a process, a NoiseSchedule, a scheduler of diffusers, "
            f"alpha-bar as numbers, or one of {', '.join(SCHEDULES)}"
        ) from None
    return Discrete(_name_if_linear(NoiseSchedule.of_alphas_cumprod(alphas_cumprod)), open_prediction)


def _demand_prediction_type(prediction_type: Any, allowed: tuple[str | None, ...]) -> None:
    names = ", ".join(name for name in allowed if name)
    demand(prediction_type in allowed, "prediction_type of the scheduler", repr(prediction_type), names)


def _numbers(values: Any) -> Array:
    """Copy numbers of any kind, on any device, to float64; changes to the copy do not reach the user's numbers."""
    if isinstance(values, np.ndarray):
        return values.astype(np.float64)  # torch reads no flipped views
    return torch.as_tensor(values, dtype=torch.float64, device="cpu").detach().numpy().copy()


def _of_scheduler(scheduler: Any) -> NoiseSchedule:
    """Build a schedule from the scheduler's betas; its float32 alpha-bar is off by a thousandth at small t.

    alpha-bar is used where it does not follow from the betas: CogVideoX's schedulers shift it, and users may set it.
    For a zero terminal signal-to-noise ratio the last beta is 1. A last alpha-bar of 0 is replaced by half of the one
    before; some schedulers replace it by 2**-24, which can exceed the one before.
    """
    alphas_cumprod = _numbers(scheduler.alphas_cumprod)
    is_rescaled = getattr(getattr(scheduler, "config", None), "rescale_betas_zero_snr", False)
    if len(alphas_cumprod) > 1 and (alphas_cumprod[-1] == 0 or (is_rescaled and np.diff(alphas_cumprod)[-1] >= 0)):
        # Zero terminal signal-to-noise ratio: half of what is before it stands for 0, whose weights are not all finite.
        alphas_cumprod[-1] = alphas_cumprod[-2] / 2
    elif hasattr(scheduler, "betas"):
        betas = _numbers(scheduler.betas)
        if betas[-1] < 1:
            schedule = NoiseSchedule(betas)
            if (np.abs(schedule.alphas_cumprod - alphas_cumprod) <= _rounding(scheduler.alphas_cumprod)).all():
                return _name_if_linear(schedule)
    return _name_if_linear(NoiseSchedule.of_alphas_cumprod(alphas_cumprod))


def _rounding(alphas_cumprod: Any) -> Array:
    """Return the largest rounding errors of alpha-bar, (T,), a cumulative product in a floating type."""
    kind = alphas_cumprod.dtype if isinstance(alphas_cumprod, torch.Tensor) else torch.float32
    precision = torch.finfo(kind)
    factors = np.arange(len(alphas_cumprod)) + 2  # each is rounded, and so is the product
    return np.asarray(factors * precision.eps * _numbers(alphas_cumprod) + precision.tiny * precision.eps)


def _name_if_linear(schedule: NoiseSchedule) -> NoiseSchedule:
    """Name a schedule linear if its betas are: SpeeD has closed forms for linear schedules, whatever their ends."""
    betas = schedule.betas
    even = np.linspace(betas[0], betas[-1], len(betas))
    linear = betas[0] < betas[-1] and bool(np.abs(betas - even).max() < 1e-6)
    return replace(schedule, name="linear") if linear else schedule
