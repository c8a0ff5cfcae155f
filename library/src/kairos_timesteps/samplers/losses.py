"""Samplers that follow the losses of the training itself: no pass of the network beyond the step's own.

What they keep are tensors where the batch is, from the first step on; nothing waits for a device.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kairos_timesteps import distributed
from kairos_timesteps.base import Observation, Tabled
from kairos_timesteps.diffusion.schedule import NoiseSchedule, error_ratio
from kairos_timesteps.numeric import Array, on_device


class FromLosses(Tabled):
    """A density that follows the losses observed at the timesteps drawn, with importance weights 1/(T p(t)).

    The weights keep uniform's objective, with less noise in its gradient where the density follows the gradient's size.
    """

    learned = corrected = True
    kept: tuple[str, ...] = ("updates", "_masses")

    @contextmanager
    def observe(self, observation: Observation) -> Iterator[None]:
        """Learn from the losses of all the step's micro-batches, of all ranks."""
        yield
        if observation.losses is None:
            raise ValueError(f"{type(self).__name__}: observe needs the step's per-sample losses")
        losses = observation.losses.double()
        for name in self.kept:
            if hasattr(value := getattr(self, name), "shape"):
                setattr(self, name, torch.as_tensor(value, device=losses.device))
        both, place = torch.stack([observation.fractions, losses], 1), observation.place
        joined = distributed.joined(both, place.index, place.total, self.group)
        fractions, losses = joined.transpose(0, 1).flatten(1)
        self.take((fractions * self.schedule.timesteps).long().clamp(0, self.schedule.timesteps - 1), losses)

    def take(self, cells: Tensor, losses: Tensor) -> None:
        """Learn from losses (batch,) at timesteps `cells`, int64 (batch,)."""
        raise NotImplementedError

    def restored(self) -> None:
        """Draw from the density that was set last, the same bits."""
        self.set_masses(self._masses, normalised=True)


class LossSecondMoment(FromLosses):
    r"""Follows the last 10 losses L at each timestep (Nichol and Dhariwal 2021, eq. 18).

    $$p(t) \propto \sqrt{\frac{1}{10} \sum_{i=1}^{10} L_{t, i}^2}, \qquad w(t) = \frac{1}{T p(t)}$$

    Mixed with 0.1 % uniform; uniform until every timestep has its 10 losses. Unlike the public code, which starts over
    on resume, the history is part of the state.
    """

    kept = ("_losses", "_counts", "updates", "_masses")

    def __init__(self, options: Any, schedule: NoiseSchedule, seed: int = 0):
        super().__init__(options, schedule, seed)
        self._losses = torch.zeros(schedule.timesteps, options.history, dtype=torch.float64)
        self._counts = torch.zeros(schedule.timesteps, dtype=torch.int64)

    def take(self, cells: Tensor, losses: Tensor) -> None:
        """Put each loss in the place of the oldest at its timestep."""
        history = self.options.history
        cells, order = cells.sort(stable=True)
        first, behind = torch.searchsorted(cells, cells), torch.searchsorted(cells, cells, right=True)
        number = torch.arange(len(cells), device=cells.device)
        slot = (self._counts[cells] + number - first) % history
        kept = behind - number <= history  # of more losses at one timestep the last ones, each with a slot of its own
        here = torch.where(kept, cells * history + slot, self._losses.numel())
        grown = torch.cat([self._losses.flatten(), losses[:1]]).scatter(0, here, losses[order])
        self._losses = grown[:-1].view_as(self._losses)
        self._counts = self._counts.index_put((cells,), torch.ones_like(cells), accumulate=True)
        ready = self._counts.min() >= history
        mean = (self._losses**2).mean(1).sqrt()
        self.set_masses(torch.where(ready, mean, torch.ones_like(mean)))
        self.updates = self.updates + ready.long()


class LossRms(FromLosses):
    r"""Follows the root mean square of the loss near t: the second moment, smoothed over t and in time.

    $$p(t) \propto \sqrt{\frac{\sum_{t'} K(t - t') \sum_k d^{\,n - k} L_{t', k}^2}
    {\sum_{t'} K(t - t') \sum_k d^{\,n - k}}},
    \qquad w(t) = \frac{1}{T p(t)}$$

    Ours. Sums of squared losses and of their numbers decay from step to step and are smoothed by a Gaussian in t before
    they are divided, so a density is there after a hundred steps instead of after 10 losses at every timestep.
    """

    kept = ("_sums", "_taken", "updates", "_masses")
    power = 2  # of the losses whose mean is taken, and the root of that

    def __init__(self, options: Any, schedule: NoiseSchedule, seed: int = 0):
        super().__init__(options, schedule, seed)
        self._sums = torch.zeros(2, schedule.timesteps, dtype=torch.float64)  # of losses' powers and of their number
        self._taken = 0
        reach = max(math.ceil(3 * options.width * schedule.timesteps), 1)
        offset = torch.arange(-reach, reach + 1, dtype=torch.float64) / (options.width * schedule.timesteps)
        self._kernel = torch.exp(-(offset**2) / 2)

    def take(self, cells: Tensor, losses: Tensor) -> None:
        """Decay what is there, add the step's, and every so many steps set the density anew."""
        both = torch.stack([losses**self.power, torch.ones_like(losses)])
        rows = torch.arange(2, device=cells.device)[:, None]
        self._sums = (self._sums * self.options.decay).index_put((rows, cells[None]), both, accumulate=True)
        self._taken = self._taken + 1
        if self._taken >= self.options.start and self._taken % self.options.frequency == 0:
            self.set_masses(self._smoothed() ** (1 / self.power))
            self.updates = self.updates + 1

    def _smoothed(self) -> Tensor:
        """Mean power of the loss near every timestep, (T,); where there is none the next one's below, or above."""
        self._kernel = on_device(self._kernel, self._sums.device)
        around = torch.nn.functional.conv1d(self._sums[:, None], self._kernel.view(1, 1, -1), padding="same")[:, 0]
        known = around[1] > 1e-12 * around[1].max()
        number = torch.arange(len(known), device=known.device)
        below = torch.where(known, number, -1).cummax(0).values
        above = torch.where(known, number, len(known)).flip(0).cummin(0).values.flip(0)
        nearest = torch.where(below >= 0, below, above).clamp(max=len(known) - 1)
        return (around[0] / around[1])[nearest].clamp(min=1e-300)


class LossMean(LossRms):
    r"""Follows the mean weighted loss near t.

    $$p(t) \propto E[w L \mid t], \qquad \text{times } \frac{1}{T p(t)} \text{ in the loss}$$

    After VDM++ (Kingma and Gao 2023), whose density makes the weighted loss alike at all lambda, by bins there; the
    smoothing is ours. Without importance weights it is the loss map of people's trainers.
    """

    power = 1


class InfoRate(LossMean):
    r"""Follows the mean error of epsilon per lambda = ln SNR, which is the rate of conditional entropy.

    $$p(\lambda) \propto E\left[\|\hat\epsilon - \epsilon\|^2 \mid \lambda\right]$$

    After InfoNoise (2602.18647), whose formula we have from its abstract: dH/d sigma = mmse/sigma³. The error follows
    from the loss that the training has anyway; the estimate and its smoothing are ours.
    """

    _factor: Tensor | None = None  # from the error of what is predicted to that
    by_level = True  # per ln SNR

    @contextmanager
    def observe(self, observation: Observation) -> Iterator[None]:
        """Take in errors of epsilon per ln SNR instead of losses."""
        if observation.errors is not None:
            if self._factor is None or self._factor.device != observation.errors.device:
                snr = self.schedule.snr
                ratio = error_ratio(snr, "epsilon") / error_ratio(snr, observation.prediction)
                measure = -np.gradient(np.log(snr)) if self.by_level else 1.0
                self._factor = torch.from_numpy(measure * ratio).to(observation.errors.device)
            cells = (observation.fractions * self.schedule.timesteps).long().clamp(0, self.schedule.timesteps - 1)
            observation = replace(observation, losses=observation.errors * self._factor[cells])
        with super().observe(observation):
            yield


class Predicted(InfoRate):
    """Follows the error of epsilon itself, for whoever asks for it."""

    by_level = False

    def mean(self) -> Array:
        """The mean error near every timestep, float64 (T,)."""
        return self._smoothed().cpu().numpy()
