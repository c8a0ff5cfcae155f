"""Couplings of noise with images: which noise of a batch each image is combined with.

Paths from noise to images cross less if near ones are paired. The regression target then has less variance given x_t.
"""

from typing import Any

from kairos_timesteps.coordinates import RandomCoordinates
from kairos_timesteps.errors import optional_module
from kairos_timesteps.lazy import Tensor, torch
from kairos_timesteps.options import Component, option
from kairos_timesteps.registry import coupling


@coupling("independent", "every image its own noise")
class Coupling(Component):
    r"""Base of all couplings: noise stays with the image that it was drawn for.

    $$\epsilon_i \sim N(0, I)$$
    """

    def __call__(self, x0: Tensor, noise: Tensor, fractions: Tensor, coordinates: RandomCoordinates) -> Tensor:
        """Return the noise of each image of this rank's slice of the batch, (batch, ...), with the type of `noise`."""
        return noise


@coupling("antithetic", "neighbours in time have opposite noise", by_rank=True)
class Antithetic(Coupling):
    r"""Opposite noise for every two images that are neighbours in time.

    $$\epsilon_{i + 1} = -\epsilon_i, \qquad t_1 \le t_2 \le \dots$$

    A method of kairos: the part of a gradient that is odd in the noise nearly cancels in the batch (Hammersley and
    Morton 1956). The noise of each image alone stays normal, so the objective stays. It works best with even points,
    and within this rank's slice.
    """

    def __call__(self, x0: Tensor, noise: Tensor, fractions: Tensor, coordinates: RandomCoordinates) -> Tensor:
        """Negate the noise of every second image in the order of time; a last one without a pair is unchanged."""
        order = fractions.reshape(len(fractions), -1).mean(1).argsort(stable=True)
        pairs = len(order) // 2
        noise = noise.clone()
        noise[order[1 : 2 * pairs : 2]] = -noise[order[: 2 * pairs : 2]]
        return noise


@coupling("assignment", "in the batch, least distance (immiscible, OT-CFM)", by_rank=True)
class Assignment(Coupling):
    r"""Assignment of a batch's noise to its images with the least sum of squared distances (Li et al. 2024).

    $$\min_\pi \sum_i \left\|x_i - \epsilon_{\pi(i)}\right\|^2$$

    It is immiscible diffusion, and the optimal transport within a batch of OT-CFM (Tong et al. 2024). The noise of this
    rank's slice is permuted, not changed. The solver runs on the CPU, which synchronises with the device.

    Raises:
        ConfigError: scipy is not installed.
    """

    def __init__(self, options: Any):
        super().__init__(options)
        self.solve = optional_module("scipy.optimize", "couplings", "coupling assignment").linear_sum_assignment

    def __call__(self, x0: Tensor, noise: Tensor, fractions: Tensor, coordinates: RandomCoordinates) -> Tensor:
        """Permute the noise to the least sum of squared distances from the images.

        The squared norms have the same sum in every order, so the sum of products is maximised.
        """
        products = x0.flatten(1).double() @ noise.flatten(1).double().T  # (images, noises)
        order = self.solve(products.cpu().numpy(), maximize=True)[1]
        return noise[torch.from_numpy(order).to(noise.device)]


@coupling("nearest", "the nearest of k noises (improved immiscible)")
class Nearest(Coupling):
    r"""Nearest of k noises for each image, its own and k - 1 more (Li et al. 2025).

    $$\|x_i - \epsilon_i\| = \min_{j \le k} \|x_i - \epsilon_{ij}\|$$

    Each image chooses alone, on the device of the batch, without synchronisation. The noise is then not quite normal:
    it is biased towards the image, and the bias falls with the number of dimensions.
    """

    k: int = option(4, "noises that each image chooses from", ge=2)

    def __call__(self, x0: Tensor, noise: Tensor, fractions: Tensor, coordinates: RandomCoordinates) -> Tensor:
        """Return the nearest noise of each image; further noises depend on seed, step and the image's index alone."""
        shape, device = (self.k - 1, *x0.shape[1:]), x0.device
        step, indices = coordinates.step, coordinates.indices_in_step
        more = coordinates.stream("coupling").normal(step, indices, shape, device, noise.dtype)
        every = torch.cat([noise[:, None], more], 1)  # (batch, k, ...)
        nearest = (every.double() - x0[:, None].double()).square().flatten(2).sum(2).argmin(1)
        return every[torch.arange(len(every), device=device), nearest]
