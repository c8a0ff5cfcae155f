"""What every sampler and weighting is.

A sampler draws fractions of the process, u in [0, 1): timestep floor(u T) of a discrete process, or the same share of a
continuous one. A weighting gives a factor for each sample's loss. The two know nothing of each other.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kairos.diffusion.schedule import NoiseSchedule

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Observation:
    """What a sampler that learns may look at around one optimiser step.

    Attributes:
        step: number of the step, from 0.
        x0: the batch, (batch, ...).
        fractions: what the sampler drew for it, float64 (batch,).
        error: per-sample squared error of epsilon, float32 (n,), of the model as it now is, in evaluation mode and
            without gradients: ``error(index, fractions, noise)`` with the samples `index` of the batch, int64 (n,), at
            `fractions` of the process, float64 (n,), with `noise` (n, ...).
        generator: for what is random in the measurement; the same state before and after is the sampler's business.
    """

    step: int
    x0: "Tensor"
    fractions: "Tensor"
    error: "Callable[[Tensor, Tensor, Tensor], Tensor]"
    generator: "torch.Generator"


class Sampler:
    """Base of all samplers: a fixed density given by its cumulative distribution function and its inverse.

    Args:
        options: the sampler's options dataclass.
        schedule: the noise schedule, for samplers that look at it.
        seed: for samplers with initial weights of their own.
    """

    learned = False

    def __init__(self, options: Any, schedule: NoiseSchedule, seed: int = 0):
        self.options = options
        self.schedule = schedule
        self.seed = seed

    def cdf(self, fraction: Array) -> Array:
        """Probability of a draw below each fraction."""
        raise NotImplementedError

    def quantile(self, probability: Array) -> Array:
        """The inverse of `cdf`."""
        raise NotImplementedError

    def density(self, x0: "Tensor | None" = None) -> Array:
        """Probability of every timestep, shape (T,): the exact mass of its cell. Learned samplers average over `x0`."""
        edges = np.arange(self.schedule.timesteps + 1) / self.schedule.timesteps
        return np.diff(self.cdf(edges))

    def fractions(self, x0: "Tensor", generator: "torch.Generator") -> "Tensor":
        """One draw per sample: float64 (batch,) in [0, 1), on the CPU, from a CPU generator."""
        import torch

        u = torch.rand(len(x0), generator=generator, dtype=torch.float64)
        return torch.from_numpy(np.clip(self.quantile(u.numpy()), 0.0, 1.0 - 2**-53))

    @contextmanager
    def observe(self, observation: Observation) -> Iterator[None]:
        """Surround the optimiser step; fixed samplers look at nothing."""
        yield

    def statistics(self) -> dict[str, float]:
        """What is worth a curve, for the log."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Everything a resume needs."""
        return {}

    def load_state_dict(self, state: dict[str, Any], device: "torch.device | str" = "cpu") -> None:
        """Restore what `state_dict` gave, tensors on `device`."""
        if state:
            raise ValueError(f"{type(self).__name__} keeps no state, got {sorted(state)}")


class Weighting:
    """Base of all weightings: a factor per timestep on the loss of what the network predicts."""

    def __init__(self, options: Any, schedule: NoiseSchedule, prediction: str = "epsilon"):
        self.options = options
        self.schedule = schedule
        self.prediction = prediction

    def weights(self) -> Array:
        """The factor of every timestep, float64 (T,)."""
        raise NotImplementedError


def normal_cdf(x: Array) -> Array:
    """Standard normal distribution function, elementwise."""
    return 0.5 * np.asarray(np.vectorize(math.erfc, otypes=[float])(-np.asarray(x) / math.sqrt(2)))
