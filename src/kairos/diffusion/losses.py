"""Loss terms: one number per sample each. The objective is the sum of the terms that an experiment names.

The strategy's weights multiply the terms that ask for them (`weighted`, the default); a term that must not be
reweighted, such as a learned variance's, says ``weighted: false``.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kairos.diffusion.registries import LossOptions


@dataclass(frozen=True)
class Prediction:
    """What a loss term may look at; tensors are (batch, ...), t is (batch,)."""

    process: Any
    x0: Tensor
    noise: Tensor
    t: Tensor
    x_t: Tensor
    output: Tensor


def per_sample(values: Tensor) -> Tensor:
    """Mean over everything but the batch, float32 (batch,)."""
    return values.float().flatten(1).mean(1)


def mse(options: LossOptions, prediction: Prediction) -> Tensor:
    """Squared error of what the network predicts: the simple loss (Ho et al. 2020, eq. 14), shape (batch,)."""
    target = prediction.process.target(prediction.x0, prediction.noise, prediction.t)
    return per_sample((prediction.output - target) ** 2)


def vlb(options: LossOptions, prediction: Prediction) -> Tensor:
    """The VLB term, c_t times the squared error of epsilon (Kim et al. 2025, eq. 4), shape (batch,)."""
    process, table = prediction.process, _coefficients(prediction.process, prediction.x0.device)
    cell = (process.fractions(prediction.t) * len(table)).long().clamp(0, len(table) - 1)
    return mse(options, prediction) * table[cell]


@functools.lru_cache(maxsize=4)
def _coefficients(process: Any, device: torch.device) -> Tensor:
    """c by cell, moved to the device once: a step waits for no copy."""
    weights = process.schedule.in_prediction(process.schedule.vlb, process.prediction)
    return torch.from_numpy(weights).to(device, torch.float32)
