"""Couplings of noise with images: which noise of a batch an image gets, beside when (sampler) and how much (weighting).

Paths from noise to images cross less where near ones are paired; what the network learns is then less of an average.
"""

from typing import Any

import torch
from torch import Tensor

from kairos_timesteps.coordinates import Place
from kairos_timesteps.errors import needed


class Coupling:
    r"""Base of all couplings: noise stays with the image that it was drawn for.

    $$\epsilon_i \sim N(0, I)$$
    """

    def __init__(self, options: Any):
        self.options = options

    def __call__(self, x0: Tensor, noise: Tensor, fractions: Tensor, place: Place) -> Tensor:
        """The noise of each image of this rank's part of the batch, both (batch, ...), of the type of `noise`."""
        return noise


class Antithetic(Coupling):
    r"""Of every two images that are next to each other in time, the one has the other's noise with its sign changed.

    $$\epsilon_{i + 1} = -\epsilon_i, \qquad t_1 \le t_2 \le \dots$$

    Ours: what a gradient has of odd order in the noise nearly cancels in the batch (Hammersley and Morton 1956); each
    image's noise on its own is as normal as before, so the objective stays. Best with even points. Within this rank's
    part.
    """

    def __call__(self, x0: Tensor, noise: Tensor, fractions: Tensor, place: Place) -> Tensor:
        """Where the batch is, without waiting; an odd one out keeps its own."""
        order = fractions.reshape(len(fractions), -1).mean(1).argsort(stable=True)
        pairs = len(order) // 2
        noise = noise.clone()
        noise[order[1 : 2 * pairs : 2]] = -noise[order[: 2 * pairs : 2]]
        return noise


class Assignment(Coupling):
    r"""The batch's noise, given to its images so that the sum of squared distances is least (Li et al. 2024).

    $$\min_\pi \sum_i \left\|x_i - \epsilon_{\pi(i)}\right\|^2$$

    It is immiscible diffusion, and the optimal transport within a batch of OT-CFM (Tong et al. 2024). A permutation of
    this rank's own noise: the noise of a batch is what it was. It waits for the device and solves on the CPU.

    Raises:
        ConfigError: scipy is not installed.
    """

    def __init__(self, options: Any):
        super().__init__(options)
        self.solve = needed("scipy.optimize", "couplings", "coupling assignment").linear_sum_assignment

    def __call__(self, x0: Tensor, noise: Tensor, fractions: Tensor, place: Place) -> Tensor:
        """By products alone: the squared norms are the same sum in every order."""
        products = x0.flatten(1).double() @ noise.flatten(1).double().T  # (images, noises)
        order = self.solve(products.cpu().numpy(), maximize=True)[1]
        return noise[torch.from_numpy(order).to(noise.device)]


class Nearest(Coupling):
    r"""Of k noises for each image, its own and k - 1 more, the nearest (Li et al. 2025).

    $$\|x_i - \epsilon_i\| = \min_{j \le k} \|x_i - \epsilon_{ij}\|$$

    Each image alone, where the batch is, without waiting. The noise is then no longer quite normal: it leans towards
    the image, the less the more numbers an image has.
    """

    def __call__(self, x0: Tensor, noise: Tensor, fractions: Tensor, place: Place) -> Tensor:
        """The further ones are a function of the seed, the step and the image's number in the global batch."""
        shape, device = (self.options.k - 1, *x0.shape[1:]), x0.device
        more = place.stream("coupling").normal(place.step, place.numbers, shape, device, noise.dtype)
        every = torch.cat([noise[:, None], more], 1)  # (batch, k, ...)
        nearest = (every.double() - x0[:, None].double()).square().flatten(2).sum(2).argmin(1)
        return every[torch.arange(len(every), device=device), nearest]
