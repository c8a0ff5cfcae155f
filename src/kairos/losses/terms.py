"""Loss terms, each with one value per sample; the objective of an experiment is the sum of its terms.

The strategy's weights multiply the terms with option ``weighted``, which is the default. Terms that must not be
reweighted, such as the term of a learned variance, have ``weighted: false``. The callers multiply by these weights and
by option ``scale``; the functions here apply neither.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from kairos.losses.settings import LossOptions, VbOptions
from kairos.shapes import Images, Output, PerSample, PerTimestep, Rows, Times
from kairos_timesteps.diffusion.processes import per_sample, shaped
from kairos_timesteps.randomness import Stream

PerCell = Float[Tensor, "cells"]  # one real number per cell; cells have equal fractions of the process


@dataclass(frozen=True)
class SampleCoordinates:
    """Random coordinates of the samples of a prediction: the random numbers of loss terms are functions of them.

    Attributes:
        seed: seed of the training run.
        step: training step.
        sample_indices: indices of the samples in the global batch of the step.
    """

    seed: int
    step: int
    sample_indices: range


@dataclass(frozen=True)
class Prediction:
    """Prediction of a network with its inputs, the argument of loss terms; tensors are (batch, ...), t is (batch,).

    Attributes:
        process: forward process.
        x0, noise, t, x_t: clean images, noise, times and noised images.
        output: output of the network, with the channels of a learned variance.
        predict: evaluates the network again at t: ``predict(x_t, further conditions)``, shape of `output`.
        coordinates: random coordinates of the samples.
    """

    process: Any
    x0: Images
    noise: Images
    t: Times
    x_t: Images
    output: Output
    predict: Callable[[Images, dict[str, Rows]], Output] | None = field(default=None, repr=False)
    coordinates: SampleCoordinates = SampleCoordinates(seed=0, step=0, sample_indices=range(0))

    @property
    def mean(self) -> Images:
        """Channels of the output that predict the target, in the shape of x0, without those of a learned variance."""
        mean: Images = self.process.prediction_channels(self.output, self.x0)
        return mean

    @functools.cached_property
    def masked(self) -> "Prediction":
        """Prediction of a second forward pass with equal x0 and t, fresh noise and masked tokens.

        Source: MDT (Gao et al. 2023, section 3.3). Condition ``mask`` is uniform on [0, 1), float32 (batch, height,
        width); a model hides the tokens with the largest values. Noise and mask are functions of `coordinates`. The
        first access computes the pass, which all terms share. The caller ensures that `predict` is not None.
        """
        assert self.predict is not None
        x0 = self.x0
        sample_shape, mask_shape = tuple(x0.shape[1:]), tuple(x0.shape[2:])
        seed, step, indices = self.coordinates.seed, self.coordinates.step, self.coordinates.sample_indices
        noise = Stream(seed, "masked noise").normal(step, indices, sample_shape, x0.device, x0.dtype)
        mask = Stream(seed, "mask").uniform(step, indices, mask_shape, x0.device).float()
        x_t = self.process.noised(x0, noise, self.t)
        output = self.predict(x_t, {"mask": mask})
        return replace(self, noise=noise, x_t=x_t, output=output)


def mse(options: LossOptions, prediction: Prediction) -> PerSample:
    """Compute the simple loss, each sample's mean squared error of the target (Ho et al. 2020, eq. 14), (batch,)."""
    target = prediction.process.target(prediction.x0, prediction.noise, prediction.t)
    mean = prediction.mean.to(target.dtype)  # older versions of torch cannot differentiate mse_loss of two types
    return per_sample(functional.mse_loss(mean, target, reduction="none"))


def vlb(options: LossOptions, prediction: Prediction) -> PerSample:
    """Compute the VLB term, c_t times the mean squared error of epsilon (Kim et al. 2025, eq. 4), shape (batch,).

    The code computes `mse`, the error of the prediction target, and converts c_t to that target. The process is cut
    into cells of equal fractions with one weight each, see `_vlb_weights`. A time outside the process has the weight
    of the first or the last cell.
    """
    process = prediction.process
    weights = _vlb_weights(process, prediction.x0.device)
    cell_count = len(weights)
    # cell that contains the fraction of each time, (batch,)
    cell = (process.fractions(prediction.t) * cell_count).long().clamp(0, cell_count - 1)
    return mse(options, prediction) * weights[cell]


def vb(options: VbOptions, prediction: Prediction) -> PerSample:
    """Compute the variational bound of a learned variance, in bits per dimension, shape (batch,).

    It is KL(q(x_{t-1} | x_t, x0) || p(x_{t-1} | x_t)) (Nichol and Dhariwal 2021, section 3.1). At t = 0 it is the
    negative log-likelihood of x0 rounded to 256 levels of [-1, 1]. The mean is held fixed: the term trains the
    variance alone. The caller ensures that the process is discrete with a learned variance, for which the output has
    channels.
    """
    process, x0, t = prediction.process, prediction.x0, prediction.t
    mean = prediction.mean.detach()
    v = prediction.output[:, x0.shape[1] :].to(x0.dtype)  # the channels after the mean's channels
    log_betas, log_posterior_variances, x0_factors = _posterior(process, x0.device)  # by timestep
    log_beta = shaped(log_betas[t], x0)
    log_posterior_variance = shaped(log_posterior_variances[t], x0)
    x0_factor = shaped(x0_factors[t], x0)
    # v interpolates the logarithm, from the posterior's variance at v = -1 to beta at v = 1
    log_variance = log_posterior_variance + (v + 1) / 2 * (log_beta - log_posterior_variance)
    error = x0 - process.estimate(mean.to(x0.dtype), prediction.x_t, t)
    # KL of two Gaussians with variances s1 and s2: (ln s2/s1 + s1/s2 + (m1 - m2)²/s2 - 1) / 2. The posterior is the
    # first. Both means are linear in x0 (or its estimate) and x_t, with equal factors: m1 - m2 = x0_factor · error.
    variance_terms = log_variance - log_posterior_variance + (log_posterior_variance - log_variance).exp()
    kl = (variance_terms + (x0_factor * error) ** 2 * (-log_variance).exp() - 1) / 2
    is_first_timestep = shaped(t, x0) == 0  # there x0_factor is 1, and the mean of p is the estimate x0 - error
    nats = torch.where(is_first_timestep, _rounded_nll(x0, error, log_variance), kl)
    return per_sample(nats) / math.log(2)


def masked_mse(options: LossOptions, prediction: Prediction) -> PerSample:
    """Compute `mse` of the forward pass with masked tokens, `Prediction.masked`, shape (batch,)."""
    return mse(options, prediction.masked)


def masked_vb(options: VbOptions, prediction: Prediction) -> PerSample:
    """Compute `vb` of the forward pass with masked tokens, `Prediction.masked`, shape (batch,)."""
    return vb(options, prediction.masked)


def _rounded_nll(x: Images, error: Images, log_variance: Images) -> Images:
    """Return the negative log-likelihood in nats of each value of x, one of 256 levels of [-1, 1].

    The distribution is N(x - error, variance), rounded to the levels. The first and the last level extend to infinity.
    A probability is at least 1e-12. All tensors have the shape of x.
    """
    inverse_deviation = (-log_variance / 2).exp()
    # Levels are 2/255 apart, so a level reaches 1/255 to each side, from x - 1/255 to x + 1/255. Minus the mean,
    # x - error, these edges are error - 1/255 and error + 1/255.
    below = _normal_cdf((error - 1 / 255) * inverse_deviation)
    above = _normal_cdf((error + 1 / 255) * inverse_deviation)
    # x is a level up to rounding: only the first, -1, is below -0.999, and only the last, 1, is above 0.999
    below = torch.where(x < -0.999, 0.0, below)
    above = torch.where(x > 0.999, 1.0, above)
    return -(above - below).clamp_min(1e-12).log()


def _normal_cdf(x: Images) -> Images:
    """Return the standard normal distribution function at x, by the tanh approximation of the published code."""
    return (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)).tanh()) / 2


@functools.lru_cache(maxsize=4)  # spares each step copies to the device, as for `_vlb_weights`
def _posterior(process: Any, device: torch.device) -> tuple[PerTimestep, PerTimestep, PerTimestep]:
    """Return ln beta, ln of the posterior's variance, and the factor of x0 in its mean, float64 (T,) on the device.

    The posterior is q(x_{t-1} | x_t, x0) of a discrete process. Its variance at t = 0, which is 0, is replaced by the
    variance at t = 1.
    """
    schedule = process.schedule
    alphas_cumprod = torch.from_numpy(schedule.alphas_cumprod)
    previous_alphas_cumprod = alphas_cumprod.roll(1)  # a copy: `alphas_cumprod` shares the memory of the schedule
    previous_alphas_cumprod[0] = 1.0  # the image, before the first timestep
    betas = torch.from_numpy(schedule.betas)
    x0_factor = previous_alphas_cumprod.sqrt() * betas / (1 - alphas_cumprod)
    log_posterior_variance = torch.from_numpy(schedule.posterior_variance).log()
    return betas.log().to(device), log_posterior_variance.to(device), x0_factor.to(device)


@functools.lru_cache(maxsize=4)  # spares each step a copy to the device, which would synchronise
def _vlb_weights(process: Any, device: torch.device) -> PerCell:
    """Return the VLB weight of the network's prediction by cell, float32 (cells,) on the device.

    Cells have equal fractions of the process; a discrete process has a cell per timestep.
    """
    # `vlb` is c_t, the factor of the error of epsilon; it is converted to the error of the prediction target
    weights = process.schedule.in_prediction(process.schedule.vlb, process.prediction)
    return torch.from_numpy(weights).to(device, torch.float32)
