"""Optimisers, learning-rate schedules and averages of weights: short functions, named in `training.registries`.

A schedule gives the factor of the learning rate at a step, an average the weight of what was averaged before; steps
count from 0.
"""

import functools
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kairos.training.registries import (
    AdamOptions,
    CosineOptions,
    DecayOptions,
    DecaysOptions,
    HalfLifeOptions,
    InverseSqrtOptions,
    PowerOptions,
)
from kairos_timesteps.registry import NoOptions


def adam(options: AdamOptions, parameters: list[Any]) -> torch.optim.Optimizer:
    """Adam."""
    return torch.optim.Adam(parameters, options.lr, options.betas, options.eps, options.weight_decay)  # type: ignore[arg-type]


def adamw(options: AdamOptions, parameters: list[Any]) -> torch.optim.Optimizer:
    """AdamW."""
    return torch.optim.AdamW(parameters, options.lr, options.betas, options.eps, options.weight_decay)  # type: ignore[arg-type]


def constant(options: NoOptions, step: int, length: int) -> float:
    """1."""
    return 1.0


def cosine(options: CosineOptions, step: int, length: int) -> float:
    """From 1 at the first step to `final` after `length`."""
    share = min(step / length, 1.0)
    return options.final + (1 - options.final) * (1 + math.cos(math.pi * share)) / 2


def decays(options: DecaysOptions, step: int, length: int) -> float:
    """Linear from 1 to 0 over the last `share` of the steps before each end (Hägele et al. 2024, section 3), else 1.

    The rate at a step does not depend on later ends, so one training gives what a training of each length would, but
    for the shorter decays on its way.
    """
    end = next((end for end in options.at if step < end), math.inf)
    return min(1.0, (end - step) / (options.share * end)) if end < math.inf else 1.0


def inverse_sqrt(options: InverseSqrtOptions, step: int, length: int) -> float:
    """1/sqrt(max(step/reference, 1)) (Karras et al. 2024, appendix B)."""
    return max(step / options.reference, 1.0) ** -0.5


def decay(options: DecayOptions, step: int, batch_size: int) -> float:
    """The decay, smaller in the first steps."""
    n = step + options.count_from
    return min(options.decay, (1 + n) / (10 + n)) if options.warmup else options.decay


def half_life(options: HalfLifeOptions, step: int, batch_size: int) -> float:
    """0.5^(batch/half-life), the half-life growing with the images seen before the step until it is reached."""
    seen = options.images if options.rampup is None else min(options.images, step * batch_size * options.rampup)
    return float(0.5 ** (batch_size / max(seen, 1e-8)))


def power(options: PowerOptions, step: int, batch_size: int) -> float:
    """(1 - 1/t)^(gamma + 1) (Karras et al. 2024, section 3.1)."""
    return float((1 - 1 / (step + 1)) ** (_gamma(options.width) + 1))


@functools.cache
def _gamma(width: float) -> float:
    """The exponent of a profile of relative width sigma_rel (Karras et al. 2024, section 3.1)."""
    inverse = width**-2
    return float(np.roots([1, 7, 16 - inverse, 12 - inverse]).real.max())


class Average:
    """An average of a model's weights, under the names that its file has.

    Args:
        weights: the live ones, which are changed in place; those that are not real numbers are kept as they are.
        share: gives the weight of what was averaged before, at a step.
    """

    def __init__(self, weights: dict[str, Tensor], share: Any):
        self.weights = {name: value.detach().clone() for name, value in weights.items()}
        self._share = share
        pairs = [(self.weights[name], value.detach()) for name, value in weights.items()]  # as the optimiser moves them
        self._real = [list(part) for part in zip(*(pair for pair in pairs if pair[0].is_floating_point()))]
        self._other = [pair for pair in pairs if not pair[0].is_floating_point()]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after a step."""
        torch._foreach_lerp_(*self._real, 1 - self._share(step))
        for mine, live in self._other:
            mine.copy_(live)

    def load(self, weights: dict[str, Tensor]) -> None:
        """Go on from another average."""
        for name, value in weights.items():
            self.weights[name].copy_(value)
