"""Moments of per-sample gradients of a network by noise level, for any process and network.

Let g be the gradient of one sample's loss, G = E g and Sigma = Cov g at a level, over images, noise and times. ||G||²
and tr Sigma are estimated without bias from n samples. So are inner products of the G of two levels, whose samples are
independent. tr Sigma / ||G||² is the simple noise scale: about the batch size above which larger batches gain little
(McCandlish et al. 2018, "An empirical model of large-batch training", eq. 2.9).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from kairos.losses.settings import MseOptions
from kairos.losses.terms import Prediction, SampleCoordinates, mse
from kairos.shapes import Images, Output, PerSample, Rows, Scalar, Times, Vector
from kairos_timesteps.diffusion.processes import Process
from kairos_timesteps.randomness import Stream
from kairos_timesteps.validation import evaluating

Loss = Callable[[Prediction], PerSample]  # computes the loss of each sample, (batch,)

PerLevel = Float[np.ndarray, "levels"]
LevelLosses = Float[np.ndarray, "levels samples"]
LevelPairs = Float[np.ndarray, "levels levels"]


@dataclass(frozen=True)
class GradientMoments:
    """Moments of per-sample losses and gradients by noise level.

    G is the mean gradient of a level and Sigma the covariance of its gradients.

    Attributes:
        losses: loss of every sample, (levels, n).
        variance: tr Sigma, (levels,).
        products: inner products of the G of two levels, (levels, levels). The diagonal is ||G||²; its unbiased estimate
            may be negative by chance.
    """

    losses: LevelLosses
    variance: PerLevel
    products: LevelPairs

    @property
    def squared_mean(self) -> PerLevel:
        """Squared norm of the mean gradient, ||G||², (levels,)."""
        return np.diag(self.products)

    @property
    def noise_scale(self) -> PerLevel:
        """Noise scale tr Sigma / ||G||² in samples, (levels,); NaN if the estimate of ||G||² is not positive."""
        return self.variance / np.where(self.squared_mean > 0, self.squared_mean, np.nan)

    @property
    def cosines(self) -> LevelPairs:
        """Cosine similarity of the G of two levels, (levels, levels), clipped to [-1, 1].

        NaN if the estimate of a squared norm is not positive.
        """
        norms = np.sqrt(np.where(self.squared_mean > 0, self.squared_mean, np.nan))
        return np.asarray((self.products / np.outer(norms, norms)).clip(-1, 1))


def compute_gradient_moments(
    model: torch.nn.Module,
    process: Process,
    x0: Images,
    levels: Sequence[tuple[float, float]],
    loss: Loss = lambda prediction: mse(MseOptions(), prediction),
    conditions: Mapping[str, Rows] | None = None,
    metric: Sequence[Tensor] | None = None,
    seed: int = 0,
) -> GradientMoments:
    """Compute moments of per-sample gradients by noise level, with a forward and a backward pass per sample.

    The network is in evaluation mode during the computation, and its modes are restored. Gradients are for the
    parameters with ``requires_grad``. Memory holds one gradient per level. Results are float64.

    Args:
        model: the network, called as ``model(x_t, t)`` or, with conditions, as ``model(x_t, t, conditions)``.
        process: forward process, see `kairos_timesteps.diffusion.processes`.
        x0: images in model space on the model's device, (levels x n, ...). The first n belong to level 0 and so on. The
            caller ensures that n is equal for all levels and at least 2.
        levels: start and end of each level as fractions of the process; times are uniform in between.
        loss: function that computes the loss of each sample, (batch,); by default the mean squared error.
        conditions: conditions of the images by name, each (levels x n, ...).
        metric: positive diagonal metric D, a tensor per trained parameter, such as Adam's from `Meter.metric`. The
            moments are then moments of sqrt(D) g, whose inner products are g' D g. None: moments of g.
        seed: seed of noise and times.

    Raises:
        ValueError: the metric has another number of tensors than the network has trained parameters.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # factor of gradients: a number, or the root of the metric (parameters,)
    gradient_scale = 1.0 if metric is None else _flatten_metric(metric, parameters)
    count = len(x0) // len(levels)  # images of a level

    # sums over the samples of each level
    losses = np.empty((len(levels), count))
    squared_norms = np.empty((len(levels), count))
    mean_gradients = []
    for level, (low, high) in enumerate(levels):
        u = low + (high - low) * Stream(seed, "analysed times").uniform(level, range(count))
        noise = Stream(seed, "analysed noise").normal(level, range(count), tuple(x0.shape[1:]))
        # a single 0, which the first addition broadcasts to (parameters,)
        mean_gradient = torch.zeros((), dtype=torch.float64, device=x0.device)
        for i in range(count):  # one sample at a time: its gradient needs a separate backward pass
            row_in_level = slice(i, i + 1)
            row_in_all = slice(level * count + i, level * count + i + 1)
            sample_conditions = None
            if conditions is not None:
                sample_conditions = {name: values[row_in_all] for name, values in conditions.items()}
            with evaluating(model):
                prediction = _predict(
                    model,
                    process,
                    x0=x0[row_in_all],
                    noise=noise[row_in_level].to(x0),
                    t=process.times(u[row_in_level].to(x0.device)),
                    conditions=sample_conditions,
                    samples=SampleCoordinates(seed, level, range(i, i + 1)),
                )
                sample_loss = loss(prediction).sum()  # a scalar
            gradient = gradient_scale * _flatten_gradients(sample_loss, parameters)
            losses[level, i] = sample_loss.item()
            squared_norms[level, i] = torch.linalg.vector_norm(gradient, dtype=torch.float64).item() ** 2
            mean_gradient = mean_gradient + gradient.double() / count
        mean_gradients.append(mean_gradient)

    # unbiased estimates from the means over samples
    stacked = torch.stack(mean_gradients)  # (levels, parameters)
    products = (stacked @ stacked.T).cpu().numpy()
    # each level: the mean of ||g||² minus ||mean of g||² is the biased variance, which n / (n - 1) corrects
    variance = (squared_norms.mean(1) - np.diag(products)) * count / (count - 1)
    # the squared norm of a mean over n samples exceeds ||G||² by tr Sigma / n; other products have no bias
    return GradientMoments(losses, variance, products - np.diag(variance / count))


def _flatten_gradients(loss: Scalar, parameters: Sequence[Tensor]) -> Vector:
    """Return the gradient of a loss as one vector, (parameters,); 0 for parameters that it does not depend on."""
    gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
    return torch.cat([gradient.flatten() for gradient in gradients])


def _flatten_metric(metric: Sequence[Tensor], parameters: Sequence[Tensor]) -> Vector:
    """Return the square root of a diagonal metric as one vector, (values of all parameters,).

    Each tensor is expanded to its parameter's shape.

    Raises:
        ValueError: the metric has another number of tensors.
    """
    roots = []
    for diagonal, parameter in zip(metric, parameters, strict=True):
        roots.append(diagonal.expand_as(parameter).sqrt().flatten())
    return torch.cat(roots)


def _predict(
    model: torch.nn.Module,
    process: Process,
    x0: Images,
    noise: Images,
    t: Times,
    conditions: Mapping[str, Rows] | None,
    samples: SampleCoordinates,
) -> Prediction:
    """Add noise to images up to times t, and return the network's prediction with everything that loss functions read.

    The network is called once here, and again by each call of the result's `predict`.
    """
    x_t = process.noised(x0, noise, t)

    def predict(x_t: Images, more_conditions: dict[str, Rows]) -> Output:
        """Return the network's output at the times t for another x_t; `more_conditions` replace equal names."""
        output: Output = process.predict(model, x_t, t, {**(conditions or {}), **more_conditions})
        return output

    output = process.predict(model, x_t, t, conditions)
    return Prediction(
        process=process, x0=x0, noise=noise, t=t, x_t=x_t, output=output, predict=predict, coordinates=samples
    )
