"""The learned uncertainty of EDM2 as a weighting that is trained beside the network."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kairos_timesteps import distributed
from kairos_timesteps.base import Observation, Weighting
from kairos_timesteps.components import WEIGHTINGS
from kairos_timesteps.diffusion.schedule import NoiseSchedule
from kairos_timesteps.numeric import Array
from kairos_timesteps.randomness import Stream


class Uncertainty(Weighting):
    r"""An uncertainty u that is trained (Karras et al. 2024, eq. 21), linear in Fourier features of ln sigma.

    $$\frac{w(\sigma)}{e^{u(\sigma)}} L + u(\sigma)$$

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

    def _go(self, device: torch.device | str) -> None:
        """Be where the losses are."""
        if self.linear.device != torch.device(device):
            self._features, self.linear.data = self._features.to(device), self.linear.data.to(device)
            for its in self.optimizer.state.values():
                its.update({name: its[name].to(device) for name in ("exp_avg", "exp_avg_sq")})

    def expected(self) -> Tensor:
        """u of every timestep, (T,)."""
        return self._features @ self.linear

    def weights(self, step: Any = 0) -> Array:
        """w/exp(u) of every timestep, float64 (T,)."""
        return self._base * np.exp(-self.expected().detach().double().cpu().numpy())

    def uncertainty(self, fractions: Tensor) -> Tensor:
        """u at fractions of the process, float32, shape and device of `fractions`."""
        self._go(fractions.device)
        cell = (fractions * len(self._features)).long().clamp_(0, len(self._features) - 1)
        return self._features[cell] @ self.linear

    def at(self, process: Any, t: Tensor, step: Any = 0) -> Tensor:
        """w/exp(u) at times of a process, float32, for measurements; never cached, since u is trained."""
        return self.base.at(process, t, step) * torch.exp(-self.uncertainty(process.fractions(t)).detach())

    def apply(self, losses: Tensor, weights: Tensor, importance: Tensor, fractions: Tensor) -> Tensor:
        """The sum above, times the importance; `weights` hold w, without exp(u)."""
        u = self.uncertainty(fractions)
        return importance * (weights * losses * torch.exp(-u) + u)

    def step(self, observation: Observation) -> None:
        """Take a step on u with the gradient that the backward pass has left."""
        if self.linear.grad is None:
            return
        distributed.sum_tensors([self.linear.grad], self.group)
        self.linear.grad /= distributed.ranks(self.group)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """u and its optimiser."""
        return {"linear": self.linear.detach().clone(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any], device: torch.device | str = "cpu") -> None:
        """Restore what `state_dict` gave."""
        self._go(device)
        with torch.no_grad():
            self.linear.copy_(state["linear"])
        self.optimizer.load_state_dict(state["optimizer"])
