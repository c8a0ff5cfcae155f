"""Forward processes and loss terms by name."""

from dataclasses import dataclass

from kairos.errors import ConfigError
from kairos.options import option
from kairos.registry import Registry

CELLS = 1000  # of a continuous process, on which strategies are shown and those of discrete processes stand


@dataclass(frozen=True)
class DiscreteOptions:
    """A discrete Gaussian process (DDPM)."""

    timesteps: int = option(1000, "number of timesteps T", ge=2, le=100_000)
    schedule: str = option("linear", "noise schedule", choices=("linear", "cosine", "quadratic"))
    scale_betas: bool = option(True, "multiply the end points of linear and quadratic by 1000/T")
    variance: str = option("fixed_large", "reverse variance in the VLB", choices=("fixed_large", "fixed_small"))

    predictions = ("epsilon", "x0", "v")


@dataclass(frozen=True)
class EdmOptions:
    """Noise levels sigma with EDM's preconditioning."""

    sigma_data: float | None = option(None, "standard deviation of the data; null: measured on the training data", gt=0)
    sigma_min: float = option(0.002, "smallest noise level", gt=0)
    sigma_max: float = option(80.0, "largest noise level", gt=0)
    time_scale: float = option(400.0, "factor of ln(sigma)/4 that the network is shown; EDM's own networks: 1", gt=0)
    negated: bool = option(False, "the network's output is subtracted (v_prediction of diffusers' EDM schedulers)")

    def __post_init__(self) -> None:
        if not self.sigma_min < self.sigma_max:
            raise ValueError(
                f"sigma_min and sigma_max: got {self.sigma_min} and {self.sigma_max}, allowed: 0 < min < max"
            )


@dataclass(frozen=True)
class FlowOptions:
    """Rectified flow."""

    shift: float = option(1.0, "fraction u is time shift u/(1 + (shift - 1) u), SD3's for larger images", gt=0, le=100)
    time_scale: float = option(1000.0, "factor of t that the network is shown", gt=0)


@dataclass(frozen=True)
class VpOptions:
    """The variance-preserving process in continuous time."""

    beta_min: float = option(0.1, "beta at t = 0", ge=0)
    beta_max: float = option(20.0, "beta at t = 1", gt=0)
    t_min: float = option(1e-5, "smallest time trained and sampled", gt=0, lt=1)
    time_scale: float = option(999.0, "factor of t that the network is shown", gt=0)

    predictions = ("epsilon", "x0", "v")


PROCESSES = Registry("process")
PROCESSES.add("discrete", "kairos.diffusion.processes:Discrete", DiscreteOptions, "DDPM: T steps of Gaussian noise")
PROCESSES.add("edm", "kairos.diffusion.processes:Edm", EdmOptions, "EDM: noise levels, preconditioned (estimates x0)")
PROCESSES.add("flow", "kairos.diffusion.processes:Flow", FlowOptions, "rectified flow: a straight path to noise")
PROCESSES.add("vp", "kairos.diffusion.processes:Vp", VpOptions, "DDPM's process in continuous time")


def chosen_prediction(process: str, prediction: str | None) -> str | None:
    """What the network predicts: what is asked for, else the process' first choice; None where it leaves none.

    Raises:
        ConfigError: the process does not leave that choice.
    """
    choices: tuple[str, ...] = getattr(PROCESSES.entry(process).options, "predictions", ())
    if prediction is not None and prediction not in choices:
        raise ConfigError(
            f"diffusion.prediction: got {prediction!r} with process {process}, allowed: "
            f"{', '.join(choices) or 'null, for the process says what is predicted'}"
        )
    return prediction or next(iter(choices), None)


@dataclass(frozen=True)
class LossOptions:
    """A per-sample loss term."""

    scale: float = option(1.0, "factor of the term", gt=0)
    weighted: bool = option(True, "whether the strategy's weights multiply the term")


LOSSES = Registry("loss")
LOSSES.add("mse", "kairos.diffusion.losses:mse", LossOptions, "mean squared error of the prediction (simple loss)")
LOSSES.add("vlb", "kairos.diffusion.losses:vlb", LossOptions, "the VLB term: c_t times the squared error of epsilon")
