"""Optimizers, learning-rate schedules and averages of weights; `kairos.training.settings` selects them by name.

A schedule returns the factor of the learning rate at a step. An average returns its decay at a step: the weight of the
previous average. Steps count from 0.

torch's LambdaLR and AveragedModel are not used: the first rounds differently, the second begins a step later.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kairos.training.settings import (
    ConstantDecayOptions,
    ConstantOptions,
    CosineOptions,
    HalfLifeOptions,
    InverseSqrtOptions,
    OptimizerOptions,
    PowerOptions,
    RepeatedDecayOptions,
)
from kairos_timesteps.optimizers import Adam, AdamW


def adam(options: OptimizerOptions, parameters: list[Any]) -> torch.optim.Optimizer:
    """Build Adam (Kingma and Ba 2015) for the parameters, with torch's fused kernels."""
    return Adam(parameters, **_adam_settings(options))


def adamw(options: OptimizerOptions, parameters: list[Any]) -> torch.optim.Optimizer:
    """Build AdamW, Adam with decoupled weight decay (Loshchilov and Hutter 2019), with torch's fused kernels."""
    return AdamW(parameters, **_adam_settings(options))


def _adam_settings(options: OptimizerOptions) -> dict[str, Any]:
    """Return keyword arguments of torch's Adam and AdamW; ``fused`` computes a step in one pass over the memory."""
    return {
        "lr": options.lr,
        "betas": tuple(options.betas),
        "eps": options.eps,
        "weight_decay": options.weight_decay,
        "fused": True,
    }


def constant(options: ConstantOptions, step: int, length: int) -> float:
    """Return the factor 1: the learning rate does not change."""
    return 1.0


def cosine(options: CosineOptions, step: int, length: int) -> float:
    """Return the factor of half a cosine: 1 at step 0, falling to `options.final` at step `length`, constant then.

    The caller ensures that `length` is above 0; `options.length` is not read.
    """
    progress = min(step / length, 1.0)
    return options.final + (1 - options.final) * (1 + math.cos(math.pi * progress)) / 2


def decays(options: RepeatedDecayOptions, step: int, length: int) -> float:
    """Return a factor that decays linearly from 1 towards 0 before each step in `options.at`, and is 1 elsewhere.

    The decay before step `end` takes the last ``share * end`` steps (Hägele et al. 2024, section 3). Its last step,
    ``end - 1``, has factor ``1 / (share * end)``, at most 1. Step `end` itself has factor 1, unless the next decay has
    begun. The factor does not depend on later ends. The weights at each `end` therefore approximate the weights of a
    run with only that length.
    """
    later_ends = [end for end in options.at if step < end]  # increasing
    if not later_ends:
        return 1.0
    next_end = later_ends[0]
    return min(1.0, (next_end - step) / (options.share * next_end))


def inverse_sqrt(options: InverseSqrtOptions, step: int, length: int) -> float:
    """Return the factor 1/sqrt(max(step/reference, 1)), which is 1 up to `reference` (Karras et al. 2024, app. B)."""
    return float(max(step / options.reference, 1.0) ** -0.5)


def decay(options: ConstantDecayOptions, step: int, batch_size: int) -> float:
    """Return the weight of the previous average: option `decay`, with warm-up at most (1 + n)/(10 + n).

    n is the step plus `count_from`.
    """
    if not options.warmup:
        return options.decay
    n = step + options.count_from
    return min(options.decay, (1 + n) / (10 + n))


def half_life(options: HalfLifeOptions, step: int, batch_size: int) -> float:
    """Return the weight of the previous average: 0.5^(batch_size/half-life), with the half-life in images.

    Ramp-up limits the half-life to `rampup` times the images seen before the step. The result at step 0 is then 0: the
    average becomes a copy of the weights.
    """
    half_life_images = options.images
    if options.rampup is not None:
        half_life_images = min(options.images, step * batch_size * options.rampup)
    # a half-life of 0 is replaced by 1e-8, and 0.5 ** (batch_size / 1e-8) is 0
    return float(0.5 ** (batch_size / max(half_life_images, 1e-8)))


def power(options: PowerOptions, step: int, batch_size: int) -> float:
    """Return the weight of the previous average: (1 - 1/t)^(gamma + 1) at t = step + 1, which is 0 at step 0.

    Source: Karras et al. 2024, section 3.1; `_power_exponent` computes gamma from `options.width`.
    """
    return float((1 - 1 / (step + 1)) ** (_power_exponent(options.width) + 1))


@functools.cache
def _power_exponent(width: float) -> float:
    """Return gamma of the power-function profile with relative width sigma_rel (Karras et al. 2024, section 3.1)."""
    inverse_square = width**-2
    # with s = 1/sigma_rel^2: 1/s = (gamma + 1) / ((gamma + 2)^2 (gamma + 3)), hence
    # (gamma + 2)^2 (gamma + 3) - s (gamma + 1) = gamma^3 + 7 gamma^2 + (16 - s) gamma + 12 - s = 0.
    # The largest root counts.
    return float(np.roots([1, 7, 16 - inverse_square, 12 - inverse_square]).real.max())


class Average:
    """Average of a model's weights over training, which starts as a copy of them.

    Args:
        weights: the model's weights by name, which the optimizer changes in place.
        decay_at: returns the weight of the previous average at a step.

    Attributes:
        weights: the averaged weights by name. Integers and booleans are not averaged but copied.
    """

    def __init__(self, weights: dict[str, Tensor], decay_at: Callable[[int], float]):
        self.weights = {name: value.detach().clone() for name, value in weights.items()}
        self._decay_at = decay_at
        # floating-point averages, and at equal positions the model's weights that they average
        self._averages: list[Tensor] = []
        self._averaged_weights: list[Tensor] = []
        self._copies: list[tuple[Tensor, Tensor]] = []  # copy and model's weight
        for name, model_weight in weights.items():
            average = self.weights[name]
            if average.is_floating_point():
                self._averages.append(average)
                self._averaged_weights.append(model_weight.detach())
            else:
                self._copies.append((average, model_weight.detach()))

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the average in place by the model's present weights, with the decay of a step, counted from 0.

        Integers and booleans are copied.
        """
        # lerp(average, weight, 1 - decay) = decay * average + (1 - decay) * weight
        torch._foreach_lerp_(self._averages, self._averaged_weights, 1 - self._decay_at(step))
        for copy, model_weight in self._copies:
            copy.copy_(model_weight)

    def load(self, weights: dict[str, Tensor]) -> None:
        """Replace averaged weights by saved ones, in place; weights whose name is not in `weights` do not change.

        Raises:
            KeyError: a saved weight has a name that the average lacks.
        """
        for name, value in weights.items():
            self.weights[name].copy_(value)
