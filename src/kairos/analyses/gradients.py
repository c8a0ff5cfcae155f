"""Per-sample gradients of a network by level of noise: the core of several analyses, for any process and network.

With g the gradient of one sample's loss, G = E g and Sigma = Cov g at a level, over images, noise and times in it:
||G||² and tr Sigma are estimated without bias from n samples, and so are the products of the G of different levels,
whose samples are independent. tr Sigma / ||G||² is the simple noise scale, about the batch size from which on larger
ones gain little (McCandlish et al. 2018, "An empirical model of large-batch training", eq. 2.9).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kairos.losses.registries import LossOptions
from kairos.losses.terms import LossBatch, Prediction, mse
from kairos_timesteps.diffusion.schedule import Array
from kairos_timesteps.randomness import Stream
from kairos_timesteps.validation import evaluating

Loss = Callable[[Prediction], Tensor]  # the losses of some samples, (batch,)


@dataclass(frozen=True)
class Moments:
    """Moments of per-sample losses and gradients by level of noise.

    G is the mean gradient of a level and Sigma the covariance of its gradients.

    Attributes:
        losses: loss of every sample, (levels, n).
        variance: tr Sigma, (levels,).
        products: inner products of the G of two levels, (levels, levels). The diagonal is ||G||²; its unbiased estimate
            may be negative by chance.
    """

    losses: Array
    variance: Array
    products: Array

    @property
    def squared_mean(self) -> Array:
        """||G||², (levels,)."""
        return np.diag(self.products)

    @property
    def noise_scale(self) -> Array:
        """tr Sigma / ||G||², in samples, (levels,); NaN where the latter's estimate is not positive."""
        return self.variance / np.where(self.squared_mean > 0, self.squared_mean, np.nan)

    @property
    def cosines(self) -> Array:
        """Cosine similarity of the G of two levels, (levels, levels), clipped to [-1, 1].

        NaN where the estimate of a squared norm is not positive.
        """
        norms = np.sqrt(np.where(self.squared_mean > 0, self.squared_mean, np.nan))
        return (self.products / np.outer(norms, norms)).clip(-1, 1)


def gradients(
    model: torch.nn.Module,
    process: Any,
    x0: Tensor,
    levels: Sequence[tuple[float, float]],
    loss: Loss = lambda prediction: mse(LossOptions(), prediction),
    conditions: Mapping[str, Tensor] | None = None,
    metric: Sequence[Tensor] | None = None,
    seed: int = 0,
) -> Moments:
    """Moments of per-sample gradients at some levels of noise; a forward and a backward pass a sample.

    The network is in evaluation mode meanwhile; a gradient per level is held in memory.

    Args:
        model: the network, called as ``model(x_t, t)``, as ``model(x_t, t, conditions)`` with conditions.
        process: forward process, see `kairos_timesteps.diffusion.processes`.
        x0: images in model space, (levels x n, ...), where the model is: n of their own for every level, 2 or more.
        levels: ranges of fractions of the process, in which times are drawn evenly.
        loss: of some samples, (batch,); default: the squared error of what is predicted.
        conditions: of the images, each (levels x n, ...).
        metric: a positive diagonal metric D, a tensor a trained parameter, as `Meter.metric` gives Adam's: the moments
            are then those of sqrt(D) g, whose products are g' D g.
        seed: of noise and times.
    """
    parameters, count = [each for each in model.parameters() if each.requires_grad], len(x0) // len(levels)
    scale: Any = 1.0
    if metric is not None:
        scale = torch.cat([d.expand_as(each).sqrt().flatten() for d, each in zip(metric, parameters, strict=True)])
    losses, squares, means = np.empty((len(levels), count)), np.empty((len(levels), count)), []
    for level, (low, high) in enumerate(levels):
        u = low + (high - low) * Stream(seed, "analysed times").uniform(level, range(count))
        noise = Stream(seed, "analysed noise").normal(level, range(count), tuple(x0.shape[1:]))
        mean = torch.zeros((), dtype=torch.float64, device=x0.device)
        for i in range(count):
            row = slice(level * count + i, level * count + i + 1)
            told = None if conditions is None else {name: values[row] for name, values in conditions.items()}
            drawn = x0[row], noise[i : i + 1].to(x0), process.times(u[i : i + 1].to(x0.device))
            with evaluating(model):
                value = loss(_predicted(model, process, *drawn, told, LossBatch(seed, level, range(i, i + 1)))).sum()
            found = torch.autograd.grad(value, parameters, materialize_grads=True)
            gradient = scale * torch.cat([each.flatten() for each in found])
            norm = torch.linalg.vector_norm(gradient, dtype=torch.float64)
            losses[level, i], squares[level, i] = value.item(), norm.item() ** 2
            mean = mean + gradient.double() / count
        means.append(mean)
    stacked = torch.stack(means)  # (levels, parameters)
    products = (stacked @ stacked.T).cpu().numpy()
    variance = (squares.mean(1) - np.diag(products)) * count / (count - 1)
    return Moments(losses, variance, products - np.diag(variance / count))


def _predicted(
    model: Any, process: Any, x0: Tensor, noise: Tensor, t: Tensor, told: Any, samples: LossBatch
) -> Prediction:
    x_t = process.noised(x0, noise, t)

    def predict(x_t: Tensor, further: dict[str, Tensor]) -> Tensor:
        output: Tensor = process.predict(model, x_t, t, {**(told or {}), **further})
        return output

    return Prediction(process, x0, noise, t, x_t, process.predict(model, x_t, t, told), predict, samples)
