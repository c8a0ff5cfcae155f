"""The learned uncertainty of EDM2 as a weighting that is trained beside the network."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kairos import distributed
from kairos.diffusion.schedule import NoiseSchedule
from kairos.randomness import Stream
from kairos.strategies.base import Array, Weighting
from kairos.strategies.registries import WEIGHTINGS


class Uncertainty(Weighting):
    """loss w/exp(u(sigma)) + u(sigma) (Karras et al. 2024, eq. 21), u linear in Fourier features of ln sigma.

    u is the logarithm of the loss that is to be expected at a noise level, so all levels contribute alike. It starts
    at 0 and is trained by an Adam of its own, without a part in the network's gradient clipping.
    """

    learned = True

    def __init__(self, options: Any, schedule: NoiseSchedule, prediction: str = "epsilon"):
        super().__init__(options, schedule, prediction)
        given = {"sigma_data": options.sigma_data} if options.base == "edm" else {}
        self.base: Weighting = WEIGHTINGS.build(options.base, given, schedule, prediction)
        self._base = self.base.weights()
        level = torch.from_numpy(-np.log(schedule.snr) / 8).float()[:, None]  # ln(sigma)/4, EDM's c_noise
        random = Stream(0, "uncertainty")
        frequency = 2 * math.pi * random.normal(0, range(options.channels))
        phase = 2 * math.pi * random.uniform(1, range(options.channels)).float()
        self._features = torch.cos(level * frequency + phase) * math.sqrt(2 / options.channels)  # (T, channels)
        self.linear = nn.Parameter(torch.zeros(options.channels))
        self.optimizer = torch.optim.Adam([self.linear], lr=options.lr)

    def expected(self) -> Tensor:
        """u of every timestep, (T,)."""
        return self._features @ self.linear

    def weights(self) -> Array:
        """w/exp(u) of every timestep, float64 (T,)."""
        return self._base * np.exp(-self.expected().detach().double().numpy())

    def apply(self, losses: Tensor, weights: Tensor, importance: Tensor, fractions: Tensor) -> Tensor:
        """The sum above, times the importance; `weights` hold w, without exp(u)."""
        cell = (fractions * len(self._features)).long().clamp_(0, len(self._features) - 1)
        u = (self._features[cell] @ self.linear).to(losses.device)
        return importance * (weights * losses * torch.exp(-u) + u)

    def step(self) -> None:
        """Take a step on u with the gradient that the backward pass has left."""
        if self.linear.grad is None:
            return
        self.linear.grad = distributed.gather(self.linear.grad[None]).mean(0)  # not reduced: NCCL takes no CPU tensors
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """u and its optimiser."""
        return {"linear": self.linear.detach().clone(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any], device: torch.device | str = "cpu") -> None:
        """Restore what `state_dict` gave; u stays on the CPU."""
        with torch.no_grad():
            self.linear.copy_(state["linear"])
        self.optimizer.load_state_dict(state["optimizer"])
