"""Forward processes and loss terms by name."""

from dataclasses import dataclass

from kairos.options import option
from kairos.registry import NoOptions, Registry


@dataclass(frozen=True)
class DiscreteOptions:
    """A discrete Gaussian process (DDPM)."""

    timesteps: int = option(1000, "number of timesteps T", ge=2, le=100_000)
    schedule: str = option("linear", "noise schedule", choices=("linear", "cosine", "quadratic"))
    scale_betas: bool = option(True, "multiply the end points of linear and quadratic by 1000/T")
    variance: str = option("fixed_large", "reverse variance in the VLB", choices=("fixed_large", "fixed_small"))


PROCESSES = Registry("process")
PROCESSES.add("discrete", "kairos.diffusion.processes:Discrete", DiscreteOptions, "DDPM: T steps of Gaussian noise")


@dataclass(frozen=True)
class LossOptions:
    """A per-sample loss term."""

    scale: float = option(1.0, "factor of the term", gt=0)
    weighted: bool = option(True, "whether the strategy's weights multiply the term")


LOSSES = Registry("loss")
LOSSES.add("mse", "kairos.diffusion.losses:mse", LossOptions, "mean squared error of the prediction (simple loss)")
LOSSES.add("vlb", "kairos.diffusion.losses:vlb", LossOptions, "the VLB term: c_t times the squared error of epsilon")

__all__ = ["LOSSES", "PROCESSES", "DiscreteOptions", "LossOptions", "NoOptions"]
