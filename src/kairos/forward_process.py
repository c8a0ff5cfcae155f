"""The forward process of an experiment, from its `diffusion` section."""

from typing import Any

from kairos_timesteps.diffusion.processes import DIFFUSERS, Discrete, Flow, Process
from kairos_timesteps.diffusion.registries import PROCESSES
from kairos_timesteps.errors import demand
from kairos_timesteps.registry import split


def chosen_prediction(process: str, prediction: str | None) -> str | None:
    """Return the prediction target of the network: `prediction`, or by default the first choice of the process.

    None if the process leaves no choice.

    Raises:
        ConfigError: the process does not have the requested prediction target.
    """
    choices: tuple[str, ...] = PROCESSES.entry(process).facts.get("predictions", ())
    allowed = ", ".join(choices) or "null, for the process says what is predicted"
    good = prediction is None or prediction in choices
    demand(good, "diffusion.prediction", f"{prediction!r} with process {process}", allowed)
    return prediction or next(iter(choices), None)


def measured(process: dict[str, Any], sigma_data: float | None) -> dict[str, Any]:
    """A process with its options, and the standard deviation of the data where it asks for it and is not told."""
    return {key: sigma_data if key == "sigma_data" and value is None else value for key, value in process.items()}


def build_process(diffusion: dict[str, Any], sigma_data: float | None = None) -> Process:
    """The forward process of a `diffusion` section given as plain values.

    Args:
        diffusion: the section.
        sigma_data: standard deviation of the data, for a process that asks for it and is not told.
    """
    process: Process = PROCESSES.build(*split(measured(diffusion["process"], sigma_data)), diffusion["prediction"])
    return process


def scheduler_config(process: Process, clip: bool) -> dict[str, Any] | None:
    """Return the configuration of diffusers' scheduler for a process; None if diffusers has none.

    Schedulers of diffusers pass timesteps from 0 to the network, and times of a flow multiplied by 1000.

    Args:
        process: forward process.
        clip: clip estimates of x0 to [-1, 1].
    """
    if isinstance(process, Discrete) and not process.first_index:
        return {
            "_class_name": "DDPMScheduler",
            "num_train_timesteps": process.schedule.timesteps,
            "trained_betas": process.schedule.betas.tolist(),
            "prediction_type": DIFFUSERS[process.prediction],
            "variance_type": process.schedule.variance,
            "clip_sample": clip,
            "timestep_spacing": "trailing",
        }
    if isinstance(process, Flow) and process.time_scale == 1000:
        name = "FlowMatchEulerDiscreteScheduler"
        return {"_class_name": name, "num_train_timesteps": 1000, "shift": process.shift}
    return None
