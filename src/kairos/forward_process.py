"""Forward processes, built from the fields of section `diffusion` of an experiment file."""

from typing import Any

from kairos.library_components import LibraryComponent
from kairos_timesteps.components import PROCESSES
from kairos_timesteps.diffusion.processes import DIFFUSERS, Discrete, Flow, Process
from kairos_timesteps.errors import demand


def select_prediction(process: LibraryComponent, prediction: str | None) -> str | None:
    """Return the prediction target of the network: `prediction`, or if it is None the process's first choice.

    The result is None if the process declares no choices, because it has one prediction target.

    Raises:
        ConfigError: `prediction` is not among the choices of the process.
    """
    choices: tuple[str, ...] = process.facts.get("predictions", ())
    allowed = ", ".join(choices) or "null, since the process has one prediction target"
    valid = prediction is None or prediction in choices
    demand(valid, "diffusion.prediction", f"{prediction!r} with process {process.name}", allowed)
    if prediction is not None or not choices:
        return prediction
    return choices[0]


def prediction_name(prediction: str) -> str:
    """Return the name of a prediction target in metrics and texts: ``flow`` is called ``velocity``.

    The velocity of rectified flow is noise - x0. The target ``v`` is signal times noise - noise level times x0.
    """
    return "velocity" if prediction == "flow" else prediction


def with_sigma_data(process: LibraryComponent, sigma_data: float | None) -> LibraryComponent:
    """Return the process with option `sigma_data`, the standard deviation of the data, set to the argument.

    The process is returned as it is if it lacks the option, if the option is set already, or if the argument is None.
    """
    options = process.plain_options()
    is_unset = "sigma_data" in options and options["sigma_data"] is None
    if sigma_data is None or not is_unset:
        return process
    return LibraryComponent.select(PROCESSES, {**process.plain(), "sigma_data": sigma_data})


def build_process(process: LibraryComponent, prediction: str | None, sigma_data: float | None = None) -> Process:
    """Build the forward process of section `diffusion` with its prediction target.

    Args:
        process: field `process` of section `diffusion`.
        prediction: prediction target of the network, the section's field `prediction`.
        sigma_data: standard deviation of the data, for a process that needs it and whose option `sigma_data` is unset.
            A configured option has priority.

    Raises:
        ConfigError: the process needs `sigma_data`, and neither the option nor the argument has a value.
    """
    built: Process = with_sigma_data(process, sigma_data).build(prediction)
    return built


def output_channels(process: Process, channels: int) -> int:
    """Return the number of output channels of the network: `channels`, doubled if the process learns variances."""
    return channels * (2 if process.schedule.variance == "learned_range" else 1)


def scheduler_config(process: Process, clip: bool) -> dict[str, Any] | None:
    """Return the configuration of diffusers' scheduler for a process; None if kairos exports no scheduler.

    The schedulers are DDPMScheduler for a discrete process, and FlowMatchEulerDiscreteScheduler for a flow. They pass
    timesteps from 0 to the network, and times of a flow multiplied by 1000. Other processes, such as EDM, have no
    scheduler; neither have discrete timesteps from 1 and a flow with another `time_scale`. The result has the form of
    the file ``scheduler_config.json``; diffusers' defaults apply to the options without a key.

    Args:
        process: forward process.
        clip: clip estimates of x0 to [-1, 1]; ignored for a flow, whose scheduler does not clip.
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
