"""Samplers that follow the losses of the training itself: no pass of the network beyond the step's own."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from kairos import distributed
from kairos.diffusion.schedule import NoiseSchedule
from kairos.strategies.base import Array, Observation, Tabled


class FromLosses(Tabled):
    """A density that follows the losses observed at the timesteps drawn, with importance weights 1/(T p(t)).

    The weights keep uniform's objective, with less noise in its gradient where the density follows the gradient's size.
    """

    learned = corrected = True

    @contextmanager
    def observe(self, observation: Observation) -> Iterator[None]:
        """Take in the losses of the step, of all ranks."""
        yield
        if observation.losses is None:
            raise ValueError(f"{type(self).__name__}: observe needs the step's per-sample losses")
        timesteps = self.schedule.timesteps
        cells = (distributed.gather(observation.fractions) * timesteps).long().clamp_(0, timesteps - 1)
        self.take(cells.numpy(), distributed.gather(observation.losses.float()).double().numpy())

    def take(self, cells: Any, losses: Array) -> None:
        """Learn from losses (batch,) at timesteps `cells`, int64 (batch,)."""
        raise NotImplementedError


class LossSecondMoment(FromLosses):
    """p(t) in proportion to the root of the mean of the last 10 squared losses at t (Nichol and Dhariwal 2021, eq. 18).

    Mixed with 0.1 % uniform; uniform until every timestep has its 10 losses. Unlike the public code, which starts over
    on resume, the history is part of the state.
    """

    kept = ("_losses", "_counts", "updates")

    def __init__(self, options: Any, schedule: NoiseSchedule, seed: int = 0):
        super().__init__(options, schedule, seed)
        self._losses = np.zeros((schedule.timesteps, options.history))
        self._counts = np.zeros(schedule.timesteps, np.int64)

    def take(self, cells: Any, losses: Array) -> None:
        """Put each loss in the place of the oldest at its timestep."""
        for cell, loss in zip(cells, losses):
            self._losses[cell, self._counts[cell] % self.options.history] = loss
            self._counts[cell] += 1
        self.restored()
        self.updates += bool(self._counts.min() >= self.options.history)

    def restored(self) -> None:
        """Set the density that follows from the history, where that is long enough."""
        if self._counts.min() >= self.options.history:
            self.set_masses(np.sqrt((self._losses**2).mean(1)))


class LossRms(FromLosses):
    """p(t) in proportion to the root mean square of the loss near t: the second moment, smoothed over t and in time.

    Ours. Sums of squared losses and of their numbers decay from step to step and are smoothed by a Gaussian in t before
    they are divided, so a density is there after a hundred steps instead of after 10 losses at every timestep.
    """

    kept = ("_sums", "_taken", "updates", "_masses")

    def __init__(self, options: Any, schedule: NoiseSchedule, seed: int = 0):
        super().__init__(options, schedule, seed)
        self._sums = np.zeros((2, schedule.timesteps))  # of squared losses and of their number
        self._taken = 0
        reach = max(int(np.ceil(3 * options.width * schedule.timesteps)), 1)
        offset = np.arange(-reach, reach + 1) / (options.width * schedule.timesteps)
        self._kernel = np.exp(-(offset**2) / 2)

    def take(self, cells: Any, losses: Array) -> None:
        """Decay what is there, add the step's, and every so many steps set the density anew."""
        self._sums *= self.options.decay
        np.add.at(self._sums[0], cells, losses**2)
        np.add.at(self._sums[1], cells, 1.0)
        self._taken += 1
        if self._taken >= self.options.start and self._taken % self.options.frequency == 0:
            self.set_masses(np.sqrt(self._smoothed()))
            self.updates += 1

    def _smoothed(self) -> Array:
        """Mean squared loss near every timestep, (T,)."""
        timesteps, reach = self.schedule.timesteps, len(self._kernel) // 2
        squares, numbers = (np.convolve(row, self._kernel)[reach : reach + timesteps] for row in self._sums)
        known = numbers > 1e-12 * numbers.max()
        mean = np.interp(np.arange(timesteps), np.flatnonzero(known), squares[known] / numbers[known])
        return np.maximum(mean, 1e-300)

    def restored(self) -> None:
        """Draw from the density that was set last, the same bits."""
        self.set_masses(self._masses, normalised=True)
