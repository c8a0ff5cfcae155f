"""Loss terms: one number per sample each. The objective is the sum of the terms that an experiment names.

The strategy's weights multiply the terms that ask for them (`weighted`, the default); a term that must not be
reweighted, such as a learned variance's, says ``weighted: false``.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kairos.losses.registries import LossOptions, VbOptions
from kairos_timesteps.diffusion.processes import per_sample, shaped
from kairos_timesteps.randomness import Stream


@dataclass(frozen=True)
class LossBatch:
    """Random coordinates of a prediction's samples, which determine the random numbers of loss terms.

    `index` contains the indices in the global batch of step `step`.
    """

    seed: int
    step: int
    index: range


@dataclass(frozen=True)
class Prediction:
    """Prediction of a network and its inputs, as loss terms take it; tensors are (batch, ...), t is (batch,).

    Attributes:
        process: forward process.
        x0, noise, t, x_t: clean images, noise, times and noised images of the prediction.
        output: output of the network, with the channels of a learned variance.
        predict: calls the network again at t: ``predict(x_t, further conditions)``, (batch, ...); for loss terms.
        samples: random coordinates of the samples.
    """

    process: Any
    x0: Tensor
    noise: Tensor
    t: Tensor
    x_t: Tensor
    output: Tensor
    predict: Callable[[Tensor, dict[str, Tensor]], Tensor] | None = field(default=None, repr=False)
    samples: LossBatch = LossBatch(0, 0, range(0))

    @property
    def mean(self) -> Tensor:
        """The channels of the output that stand for x0, shape of x0."""
        mean: Tensor = self.process.prediction_channels(self.output, self.x0)
        return mean

    @functools.cached_property
    def masked(self) -> "Prediction":
        """A second pass with the same x0 and t, noise of its own, and tokens hidden (Gao et al. 2023, section 3.3).

        Condition ``mask`` is uniform on [0, 1), float32 (batch, height, width): a model hides where it is largest.
        All terms of the pass share it.
        """
        x0, of = self.x0, self.samples
        noise = Stream(of.seed, "masked noise").normal(of.step, of.index, tuple(x0.shape[1:]), x0.device, x0.dtype)
        mask = Stream(of.seed, "mask").uniform(of.step, of.index, tuple(x0.shape[2:]), x0.device).float()
        x_t = self.process.noised(x0, noise, self.t)
        assert self.predict is not None
        output = self.predict(x_t, {"mask": mask})
        return replace(self, noise=noise, x_t=x_t, output=output)


def mse(options: LossOptions, prediction: Prediction) -> Tensor:
    """Squared error of what the network predicts: the simple loss (Ho et al. 2020, eq. 14), shape (batch,)."""
    target = prediction.process.target(prediction.x0, prediction.noise, prediction.t)
    return per_sample((prediction.mean - target) ** 2)


def vlb(options: LossOptions, prediction: Prediction) -> Tensor:
    """The VLB term, c_t times the squared error of epsilon (Kim et al. 2025, eq. 4), shape (batch,)."""
    process, table = prediction.process, _coefficients(prediction.process, prediction.x0.device)
    cell = (process.fractions(prediction.t) * len(table)).long().clamp(0, len(table) - 1)
    return mse(options, prediction) * table[cell]


def vb(options: VbOptions, prediction: Prediction) -> Tensor:
    """Compute the variational bound of a learned variance, in bits per dimension, shape (batch,).

    Nichol and Dhariwal 2021, section 3.1: KL(q(x_{t-1} | x_t, x0) || p(x_{t-1} | x_t)), at t = 0 the negative
    log-likelihood of x0 rounded to 256 levels of [-1, 1]. The mean is held fixed: the term trains the variance alone.
    """
    process, x0, t = prediction.process, prediction.x0, prediction.t
    mean, v = prediction.mean.detach(), prediction.output[:, x0.shape[1] :].to(x0.dtype)
    large, small, share = (shaped(table[t], x0) for table in _posterior(process, x0.device))
    log_variance = small + (v + 1) / 2 * (large - small)
    off = x0 - process.estimate(mean.to(x0.dtype), prediction.x_t, t)
    kl = (log_variance - small + (small - log_variance).exp() + (share * off) ** 2 * (-log_variance).exp() - 1) / 2
    return per_sample(torch.where(shaped(t, x0) == 0, _discretised(x0, off, log_variance), kl)) / math.log(2)


def masked_mse(options: LossOptions, prediction: Prediction) -> Tensor:
    """`mse` of the masked pass, shape (batch,)."""
    return mse(options, prediction.masked)


def masked_vb(options: VbOptions, prediction: Prediction) -> Tensor:
    """`vb` of the masked pass, shape (batch,)."""
    return vb(options, prediction.masked)


def _discretised(x: Tensor, off: Tensor, log_variance: Tensor) -> Tensor:
    """Nats of x under N(x - off, variance), rounded to 256 levels of [-1, 1]; the outer ones are open, shape of x."""
    scale = (-log_variance / 2).exp()
    below, above = (_normal_cdf((off + half) * scale) for half in (-1 / 255, 1 / 255))
    below, above = torch.where(x < -0.999, 0.0, below), torch.where(x > 0.999, 1.0, above)
    return -(above - below).clamp_min(1e-12).log()


def _normal_cdf(x: Tensor) -> Tensor:
    """The standard normal distribution function, by the published approximation."""
    return (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)).tanh()) / 2


@functools.lru_cache(maxsize=4)
def _posterior(process: Any, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return ln beta, ln of the posterior's variance, and the factor of x0 in its mean, float64 (T,) on the device."""
    schedule = process.schedule
    before = torch.from_numpy(schedule.alphas_cumprod).roll(1)
    before[0] = 1.0
    betas = torch.from_numpy(schedule.betas)
    share = before.sqrt() * betas / (1 - torch.from_numpy(schedule.alphas_cumprod))
    small = torch.from_numpy(schedule.posterior_variance).log()
    return betas.log().to(device), small.to(device), share.to(device)


@functools.lru_cache(maxsize=4)
def _coefficients(process: Any, device: torch.device) -> Tensor:
    """c by cell, moved to the device once: a step waits for no copy."""
    weights = process.schedule.in_prediction(process.schedule.vlb, process.prediction)
    return torch.from_numpy(weights).to(device, torch.float32)
