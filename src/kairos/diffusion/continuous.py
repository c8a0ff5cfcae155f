"""Continuous-time processes: EDM's noise levels with its preconditioning, and flow matching.

Each has a `schedule` of as many cells as asked for, on which densities and weights are shown and discrete strategies
stand; weights that are formulas of the signal-to-noise ratio are exact at every time.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kairos.diffusion.processes import call
from kairos.diffusion.schedule import NoiseSchedule
from kairos.errors import ConfigError


class Continuous:
    """What the two share: times are float64 (batch,), weights are taken at each one's signal-to-noise ratio."""

    prediction: str
    schedule: NoiseSchedule

    def snr(self, t: Tensor) -> Tensor:
        """Signal-to-noise ratio at times t, elementwise."""
        raise NotImplementedError

    def weights(self, weighting: Any, t: Tensor) -> Tensor:
        """The factor of each sample's loss at t, float32 (batch,), on the device of t."""
        values = weighting.at_snr(self.snr(t.double()).cpu().numpy())
        return torch.from_numpy(np.ascontiguousarray(values)).float().to(t.device)

    def scheduler_config(self, clip: bool) -> dict[str, Any] | None:
        """None: there is no scheduler of diffusers that stands for it in our sampling."""
        return None


def _shaped(coefficient: Tensor, like: Tensor) -> Tensor:
    """Coefficients (batch,), computed in the precision of t, as (batch, 1, ...) in that of `like`."""
    return coefficient.to(like.dtype).view(-1, *[1] * (like.ndim - 1))


class Edm(Continuous):
    """x = x0 + sigma noise, and a network with EDM's preconditioning that stands for x0 (Karras et al. 2022, table 1).

    Fractions are evenly spread in ln sigma, so sampler ``uniform`` is log-uniform in sigma and ``edm_log_normal`` is
    EDM's own; weighting ``edm`` is its lambda(sigma).

    Args:
        sigma_data: standard deviation of the data.
        sigma_min: smallest noise level.
        sigma_max: largest noise level.
        cells: of the schedule that strategies are shown on.
        negated: the network's output is subtracted (``v_prediction`` of diffusers' EDM schedulers).
    """

    prediction = "x0"

    def __init__(
        self,
        sigma_data: float = 0.5,
        sigma_min: float = 0.002,
        sigma_max: float = 80.0,
        cells: int = 1000,
        negated: bool = False,
    ):
        if not 0 < sigma_min < sigma_max:
            raise ConfigError(f"sigma_min and sigma_max: got {sigma_min} and {sigma_max}, allowed: 0 < min < max")
        if sigma_data <= 0:
            raise ConfigError(f"sigma_data: got {sigma_data}, allowed: > 0")
        self.sigma_data, self._sign = sigma_data, -1.0 if negated else 1.0
        self._low, self._width = math.log(sigma_min), math.log(sigma_max / sigma_min)
        sigma = np.exp(self._low + self._width * (np.arange(cells) + 0.5) / cells)
        self.schedule = NoiseSchedule.of_alphas_cumprod(1 / (1 + sigma**2))
        self.timesteps = cells

    def times(self, fractions: Tensor) -> Tensor:
        """Noise levels sigma, float64 (batch,), of fractions in [0, 1)."""
        return torch.exp(self._low + self._width * fractions)

    def snr(self, t: Tensor) -> Tensor:
        """1/sigma²."""
        return t**-2

    def noised(self, x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """x0 + sigma noise."""
        return (x0 + _shaped(t, x0) * noise).to(x0.dtype)

    def predict(self, network: Any, x_t: Tensor, t: Tensor, conditions: dict[str, Tensor] | None = None) -> Tensor:
        """D(x; sigma) = c_skip x + c_out F(c_in x, ln(sigma)/4): an estimate of x0."""
        data, total = self.sigma_data, t**2 + self.sigma_data**2
        output = call(network, _shaped(total**-0.5, x_t) * x_t, (t.log() / 4).to(x_t.dtype), conditions)
        skip, out = data**2 / total, self._sign * data * t * total**-0.5
        return _shaped(skip, x_t) * x_t + _shaped(out, x_t) * output

    def target(self, x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """x0."""
        return x0

    def epsilon(self, output: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
        """(x - D)/sigma."""
        return (x_t - output) / _shaped(t, x_t)


class Flow(Continuous):
    """Rectified flow: x_t = (1 - t) x0 + t noise for t in [0, 1), the network predicts noise - x0 (Liu et al. 2023).

    Fractions are times, so ``log_normal`` and ``mode`` are SD3's densities (Esser et al. 2024).

    Args:
        cells: of the schedule that strategies are shown on.
        scale: the network is called with t times this.
        shift: fraction u is time shift u/(1 + (shift - 1) u), SD3's for larger images.
    """

    prediction = "flow"

    def __init__(self, cells: int = 1000, scale: float = 1.0, shift: float = 1.0):
        if shift <= 0:
            raise ConfigError(f"shift: got {shift}, allowed: > 0")
        self.timesteps, self.scale, self.shift = cells, scale, shift
        t = self.times((torch.arange(cells, dtype=torch.float64) + 0.5) / cells).numpy()
        self.schedule = NoiseSchedule.of_alphas_cumprod((1 - t) ** 2 / ((1 - t) ** 2 + t**2))

    def times(self, fractions: Tensor) -> Tensor:
        """The shifted fractions, kept from the ends by 1e-5, where the signal-to-noise ratio is no number."""
        return (self.shift * fractions / (1 + (self.shift - 1) * fractions)).clamp(1e-5, 1 - 1e-5)

    def snr(self, t: Tensor) -> Tensor:
        """((1 - t)/t)²."""
        return ((1 - t) / t) ** 2

    def noised(self, x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """(1 - t) x0 + t noise."""
        return torch.lerp(x0, noise.to(x0.dtype), _shaped(t, x0))

    def predict(self, network: Any, x_t: Tensor, t: Tensor, conditions: dict[str, Tensor] | None = None) -> Tensor:
        """The network at t times `scale`."""
        return call(network, x_t, (self.scale * t).to(x_t.dtype), conditions)

    def target(self, x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """noise - x0."""
        return noise - x0

    def epsilon(self, output: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
        """x_t + (1 - t) v."""
        return x_t + _shaped(1 - t, x_t) * output
