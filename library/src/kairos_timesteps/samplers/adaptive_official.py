"""Adaptive sampler with the choices of its public code, to measure what the fixes of `adaptive` change."""

from typing import Any

import numpy as np

from kairos_timesteps.coordinates import RandomCoordinates
from kairos_timesteps.diffusion.schedule import NoiseSchedule
from kairos_timesteps.lazy import Tensor, torch
from kairos_timesteps.numeric import Array
from kairos_timesteps.options import option
from kairos_timesteps.registry import sampler
from kairos_timesteps.samplers.adaptive import Adaptive


@sampler("adaptive_official", "adaptive with the choices of its public code")
class AdaptiveOfficial(Adaptive):
    r"""`Adaptive` with the public code's choices (Kim et al. 2025).

    $$u \sim \mathrm{Beta}(a, b), \quad (a, b) = \pi_\phi(x_0), \qquad
    r = \sum_{t \in S} c_t \left(\|\epsilon - \epsilon_\theta\|^2 - \|\epsilon' - \epsilon_{\theta'}\|^2\right)$$

    - fresh noise after the optimizer step, dropout on;
    - S = {0, 1, 2} until the queue holds two rows, then the largest F-statistics whatever their sign;
    - the reward is the sum over S as it is, and the entropy, within the reward, multiplies log pi;
    - u is rounded to the nearest of T points, so that the first and the last timestep have half a cell.

    Not copied: two forward passes per loss (the result is equal), and the crash at the third update. The public code's
    policy has width 256; the default here is the paper's 128 for CIFAR-10.
    """

    queue: int = option(20, "|Q|: measurements that features are selected from", ge=2)
    feature_timesteps: int | None = option(
        None, "timesteps of the feature vector, one of each stratum, see `stratify_timesteps`; null: all T", ge=1
    )

    reward = "sum"
    entropy_in = "reward"
    correlation = "any"
    selection = "next"
    error = "mean"

    dropout = True
    noise_after = "measurement after the step"
    least_rows = 2

    def __init__(self, options: Any, schedule: NoiseSchedule, seed: int = 0):
        super().__init__(options, schedule, seed)
        self.density_scale = schedule.timesteps / (schedule.timesteps - 1)

    def reset(self) -> None:
        """Set the state before the first batch, with S = {0, 1, 2} by default."""
        super().reset()
        self.reward_timesteps = torch.arange(self.selected)

    def to_fraction(self, u: Tensor) -> Tensor:
        """Map draws to a fraction within timestep round(u (T - 1)), elementwise."""
        return (u * (self.schedule.timesteps - 1) + 0.5) / self.schedule.timesteps

    def from_fraction(self, fractions: Tensor) -> Tensor:
        """Map fractions of the process to draws of the policy, elementwise."""
        return (fractions * self.schedule.timesteps - 0.5) / (self.schedule.timesteps - 1)

    def importance_weights(self, x0: Tensor, fractions: Tensor, coordinates: RandomCoordinates) -> Tensor | None:
        """Return 1 over the density of each draw given its image; None without `importance`.

        The weights are float32 (batch, *times_shape). Without a floor, timesteps 0 and T - 1 are drawn from half a
        cell, so their weights are doubled.
        """
        weights = super().importance_weights(x0, fractions, coordinates)
        if weights is None or self.floor:
            return weights
        timestep, last = (fractions * self.schedule.timesteps).floor(), self.schedule.timesteps - 1
        half_cell = (timestep == 0) | (timestep == last)  # the policy draws in the inner half of these alone
        return torch.where(half_cell, 2 * weights, weights)

    def borders(self) -> Array:
        """Return the borders half-way between the points, (T + 1,)."""
        timesteps = self.schedule.timesteps
        return np.clip((np.arange(timesteps + 1) - 0.5) / (timesteps - 1), 0.0, 1.0)

    def select(self, changes: Tensor) -> Tensor:
        """Return indices of the largest F-statistics, whatever the sign of the correlation."""
        # with two rows every F-statistic is 0
        return super().select(changes if len(changes) > 2 else torch.zeros_like(changes))
