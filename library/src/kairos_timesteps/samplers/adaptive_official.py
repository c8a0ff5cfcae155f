"""The adaptive sampler as its public code has it, so that what the repairs change can be measured."""

import numpy as np
import torch
from torch import Tensor

from kairos_timesteps.base import NOTHING
from kairos_timesteps.coordinates import Place
from kairos_timesteps.diffusion.schedule import NoiseSchedule
from kairos_timesteps.numeric import Array
from kairos_timesteps.samplers.adaptive import Adaptive, select


class AdaptiveOfficial(Adaptive):
    r"""`Adaptive` with the public code's choices (Kim et al. 2025).

    $$u \sim \mathrm{Beta}(a, b), \quad (a, b) = \pi_\phi(x_0), \qquad
    r = \sum_{t \in S} c_t \left(\|\epsilon - \epsilon_\theta\|^2 - \|\epsilon' - \epsilon_{\theta'}\|^2\right)$$

    Fresh noise after the optimiser step; dropout on; S = {0, 1, 2} until the queue holds two rows, then the largest
    F-statistics whatever their sign; the sum over S as it is for a reward; the entropy multiplied by log pi within the
    reward; u rounded to the nearest of T points, so that the first and the last timestep have half a cell. What is not
    copied: two network passes per loss (the result is the same), and the crash at the third update.
    """

    dropout = True
    noise_after = "measurement after the step"
    rows = 2

    def __init__(self, options: object, schedule: NoiseSchedule, seed: int = 0):
        super().__init__(options, schedule, seed)
        self.density_scale = schedule.timesteps / (schedule.timesteps - 1)
        self.selected = torch.arange(self.options.selected)

    def to_fraction(self, u: Tensor) -> Tensor:
        """A fraction within timestep round(u (T - 1)), elementwise."""
        return (u * (self.schedule.timesteps - 1) + 0.5) / self.schedule.timesteps

    def from_fraction(self, fractions: Tensor) -> Tensor:
        """Map fractions of the process to draws of the policy, elementwise: the inverse of `to_fraction`."""
        return (fractions * self.schedule.timesteps - 0.5) / (self.schedule.timesteps - 1)

    def importance(self, x0: Tensor, fractions: Tensor, place: Place = NOTHING) -> Tensor | None:
        """Return importance weights, 1 over the density of each draw given its image, float32 (batch, *times).

        Timesteps 0 and T - 1 are drawn from half a cell, so their weights are doubled.
        """
        weights = super().importance(x0, fractions, place)
        if weights is None or self.floor:
            return weights
        timestep, last = (fractions * self.schedule.timesteps).floor(), self.schedule.timesteps - 1
        half_drawn = (timestep == 0) | (timestep == last)  # the policy draws in the inner half of these alone
        return torch.where(half_drawn, 2 * weights, weights)

    def borders(self) -> Array:
        """Half-way between the points."""
        timesteps = self.schedule.timesteps
        return np.clip((np.arange(timesteps + 1) - 0.5) / (timesteps - 1), 0.0, 1.0)

    def select(self, queue: Tensor) -> Tensor:
        """The largest F-statistics of a linear regression on the target, whatever the sign."""
        rows = queue if len(queue) > 2 else torch.zeros_like(queue)  # of two rows every F-statistic is 0
        return select(rows, self.options.selected, signed=False)

    def advantage(self, change: Tensor) -> Tensor:
        """The sum over S, as it is."""
        rewards = change.sum(1)
        self._reward = rewards.mean().item()
        return rewards

    def objective(self, log_density: Tensor, entropy: Tensor, advantage: Tensor) -> Tensor:
        """The entropy is part of what multiplies log pi."""
        return log_density * (advantage + self.options.entropy * entropy.detach())
