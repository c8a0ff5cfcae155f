"""Learned uncertainty of EDM2: a weighting that is trained together with the network."""

import copy
import logging
import math
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from kairos_timesteps import distributed
from kairos_timesteps.base import Learned, Observation, Weighting
from kairos_timesteps.diffusion.schedule import NoiseSchedule
from kairos_timesteps.lazy import Tensor, torch
from kairos_timesteps.numeric import Array
from kairos_timesteps.options import option
from kairos_timesteps.randomness import Stream
from kairos_timesteps.registry import WEIGHTINGS, weighting

if TYPE_CHECKING:
    from kairos_timesteps.diffusion.processes import Process

LOG = logging.getLogger("kairos_timesteps")
_STEPS_OF_WARNING = 10
_BASES = ("none", "vlb", "p2", "min_snr", "soft_min_snr", "debiased", "edm", "change_aware")


@weighting("edm2", "learned uncertainty of EDM2 (Karras et al. 2024)")
class Uncertainty(Learned, Weighting):
    r"""Trained uncertainty u (Karras et al. 2024, eq. 21), linear in Fourier features of ln sigma.

    $$\frac{w(\sigma)}{e^{u(\sigma)}} L + u(\sigma)$$

    u is the logarithm of the loss to be expected at a noise level, so all levels contribute equally. It starts at 0 and
    is trained by an Adam optimizer of its own; its gradient is not part of the network's gradient clipping.
    """

    base: str = option("edm", "weighting w", choices=_BASES, component=True)
    sigma_data: float | None = option(None, "standard deviation of the data, for base edm", gt=0)
    channels: int = option(128, "Fourier features of ln sigma that u is linear in", ge=1)
    lr: float = option(1e-2, "learning rate of u", gt=0)

    def __init__(self, options: Any, schedule: NoiseSchedule, prediction: str = "epsilon"):
        from kairos_timesteps.optimizers import Adam  # imports torch

        super().__init__(options, schedule, prediction)
        base_options = {"sigma_data": self.sigma_data} if self.base == "edm" else {}
        self.base_weighting: Weighting = WEIGHTINGS.build(self.base, base_options, schedule, prediction)
        self._base_weights: Array = self.base_weighting.weights()
        level = torch.from_numpy(-np.log(schedule.snr) / 8).float()[:, None]  # ln(sigma)/4, EDM's c_noise
        random = Stream(0, "uncertainty")
        frequency = 2 * math.pi * random.normal(0, range(self.channels))
        phase = 2 * math.pi * random.uniform(1, range(self.channels)).float()
        self._features = torch.cos(level * frequency + phase) * math.sqrt(2 / self.channels)  # (T, channels)
        self.linear = torch.nn.Parameter(torch.zeros(self.channels))
        self.optimizer = Adam([self.linear], lr=self.lr)
        self._steps_without_gradient = 0

    def _move(self, device: "torch.device | str") -> None:
        """Move everything to the device of the losses."""
        if self.linear.device != torch.device(device):
            self._features, self.linear.data = self._features.to(device), self.linear.data.to(device)
            for state in self.optimizer.state.values():
                state.update({name: state[name].to(device) for name in ("exp_avg", "exp_avg_sq")})

    def expected(self) -> Tensor:
        """Return u of every timestep, (T,)."""
        return self._linear_in(self._features)

    def _linear_in(self, features: Tensor) -> Tensor:
        """Return u of features (..., channels), float32 also under autocast."""
        kind = features.device.type
        with torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext():
            return features @ self.linear

    def weights(self, step: Any = 0) -> Array:
        """Return w/exp(u) of every timestep, float64 (T,)."""
        uncertainty: Array = self.expected().detach().double().cpu().numpy()
        return self._base_weights * np.exp(-uncertainty)

    def uncertainty(self, fractions: Tensor) -> Tensor:
        """Return u at fractions of the process, float32, shape and device of `fractions`."""
        self._move(fractions.device)
        return self._linear_in(self._features[self.schedule.cells(fractions)])

    def at(self, process: "Process", t: Tensor, step: Any = 0) -> Tensor:
        """Return w/exp(u) at times of a process, float32, for measurements; never cached, because u is trained."""
        uncertainty = self.uncertainty(process.fractions(t)).detach()
        return self.base_weighting.at(process, t, step) * torch.exp(-uncertainty)

    def apply(self, losses: Tensor, weights: Tensor, importance: Tensor, fractions: Tensor) -> Tensor:
        """Return the formula times the importance weights; `weights` contain w, without exp(u).

        The gradient of the result also reaches u, except from losses that are not finite.
        """
        u, weighted = self.uncertainty(fractions), weights * losses
        u = torch.where(weighted.isfinite(), u, u.detach())  # equal values; a NaN would stay in u for good
        return importance * (weighted * (-u).exp() + u)

    def step(self, observation: Observation) -> None:
        """Take an optimizer step on u with the gradient of the backward pass, averaged over ranks, and clear it.

        Without a gradient nothing changes. After ten successive steps with losses and without a gradient, a warning
        says that u is not trained.
        """
        if self.linear.grad is None:
            self._steps_without_gradient += observation.losses is not None
            if self._steps_without_gradient == _STEPS_OF_WARNING:
                LOG.warning(
                    "edm2: no gradient in %d steps, so it is not trained: call loss.backward(), not "
                    "torch.autograd.grad of the network's parameters alone",
                    _STEPS_OF_WARNING,
                )
            return
        self._steps_without_gradient = 0
        distributed.sum_tensors([self.linear.grad], self.group)
        self.linear.grad /= distributed.ranks(self.group)
        self.optimizer.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        """Clear the gradient of u."""
        self.optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """Return u and the state of its optimizer."""
        # the optimizer returns the tensors that it updates
        return {"linear": self.linear.detach().clone(), "optimizer": copy.deepcopy(self.optimizer.state_dict())}

    def load_state_dict(self, state: dict[str, Any], device: "torch.device | str" = "cpu") -> None:
        """Restore a state that `state_dict` returned."""
        self._move(device)
        with torch.no_grad():
            self.linear.copy_(state["linear"])
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))  # it keeps the tensors that it loads
