"""Samplers that follow the losses of the training step: no forward pass beyond the step's own.

Their state is tensors on the device of the batch from the first step on. Nothing synchronises with the device.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from kairos_timesteps import distributed
from kairos_timesteps.base import Learned, Observation, TableDensity
from kairos_timesteps.diffusion.schedule import NoiseSchedule, error_ratio
from kairos_timesteps.errors import rejection
from kairos_timesteps.lazy import Tensor, torch
from kairos_timesteps.numeric import Array, Tables, on_device
from kairos_timesteps.options import option
from kairos_timesteps.registry import sampler


class FollowsLosses(Learned, TableDensity):
    """Base of densities that follow the losses observed at the drawn timesteps, with importance weights 1/(T p(t)).

    The weights keep the objective of uniform timesteps. Its gradient has less noise where the density follows the size
    of the gradient.
    """

    importance = True
    state_names: tuple[str, ...] = ("updates", "_masses")

    @contextmanager
    def observe(self, observation: Observation) -> Iterator[None]:
        """Learn after the optimizer step."""
        yield
        self.learn(observation)

    def learn(self, observation: Observation) -> None:
        """Learn from the losses of all micro-batches of the step, of all ranks; all ranks must call it.

        The state moves to the device of the losses. Samples without a loss on any rank are ignored, like losses that
        are not finite.

        Raises:
            ConfigError: `Strategy.loss` was not called in the step.
        """
        if observation.losses is None:
            allowed = "the step's losses; call strategy.loss(draw, errors) before"
            raise rejection(f"{type(self).__name__}: observe", "no losses", allowed)
        losses = self.followed_losses(observation).double()
        is_numpy_state = isinstance(self._masses, np.ndarray)  # before the first step after a start or a resume
        for name in self.state_names:
            value = getattr(self, name)
            if hasattr(value, "shape"):
                setattr(self, name, torch.as_tensor(value, device=losses.device))
        if is_numpy_state:  # compute the density on the device, where a resume computes it
            self.restored()
        coordinates = observation.coordinates
        stacked = torch.stack([observation.fractions, losses, torch.ones_like(losses)], 1)
        global_values = distributed.join_ranks(stacked, coordinates.sample_indices, coordinates.batch_size, self.group)
        fractions, losses, is_known = global_values.transpose(0, 1).flatten(1)
        self.add_losses(self.schedule.cells(fractions), torch.where(is_known > 0, losses, torch.nan))

    def followed_losses(self, observation: Observation) -> Any:
        """Return the values whose averages set the density, shape of the draws: here the losses."""
        return observation.losses

    def add_losses(self, cells: Tensor, losses: Tensor) -> None:
        """Learn from the followed values (batch,) at timesteps `cells`, int64 (batch,).

        Values that are not finite are ignored: a single one would make the density NaN for the rest of the run.
        """
        raise NotImplementedError

    def restored(self) -> None:
        """Set the density from the restored state, so that it is bit-identical."""
        self.set_masses(self._masses, normalised=True)


@sampler("loss_second_moment", "loss-second-moment resampling of improved DDPM")
class LossSecondMoment(FollowsLosses):
    r"""Density by the last 10 losses L at each timestep (Nichol and Dhariwal 2021, eq. 18).

    $$p(t) \propto \sqrt{\frac{1}{10} \sum_{i=1}^{10} L_{t, i}^2}, \qquad w(t) = \frac{1}{T p(t)}$$

    It is mixed with 0.1 % uniform, and uniform until every timestep has 10 losses. The public code starts over on
    resume; here the history is part of the state.
    """

    floor: float = option(0.001, "share of draws that are uniform instead", gt=0, lt=1)
    history: int = option(10, "losses kept per timestep; uniform until each has them", ge=1)

    state_names = ("_losses", "_counts", "updates", "_masses")

    def __init__(self, options: Any, schedule: NoiseSchedule, seed: int = 0):
        super().__init__(options, schedule, seed)
        self._losses = torch.zeros(schedule.timesteps, self.history, dtype=torch.float64)
        self._counts = torch.zeros(schedule.timesteps, dtype=torch.int64)

    def add_losses(self, cells: Tensor, losses: Tensor) -> None:
        """Replace the oldest losses of each timestep by the finite ones of `losses`.

        Then set the density, which is uniform until each timestep has enough losses.
        """
        timesteps = len(self._counts)
        # losses that are not finite come last, as if they were of a further timestep
        cells, order = torch.where((losses**2).isfinite(), cells, timesteps).sort(stable=True)
        is_finite = cells < timesteps
        first, end = torch.searchsorted(cells, cells), torch.searchsorted(cells, cells, right=True)
        number = torch.arange(len(cells), device=cells.device)
        # new losses of a timestep replace its oldest ones; number - first counts those of this step
        slot = (self._counts[cells.clamp(max=timesteps - 1)] + number - first) % self.history
        # if a timestep has more new losses, its last ones: each has its own slot
        kept = is_finite & (end - number <= self.history)
        target = torch.where(kept, cells * self.history + slot, self._losses.numel())
        # a further entry at the end takes the losses that are not kept
        extended = torch.cat([self._losses.flatten(), losses[:1]]).scatter(0, target, losses[order])
        self._losses = extended[:-1].view_as(self._losses)
        self._counts = self._counts.index_put((cells.clamp(max=timesteps - 1),), is_finite.long(), accumulate=True)
        complete = self._counts.min() >= self.history
        mean = (self._losses**2).mean(1).sqrt()
        self.set_masses(torch.where(complete, mean, torch.ones_like(mean)))
        self.updates = self.updates + complete.long()


class SmoothedLosses(FollowsLosses):
    """Base of densities by a mean of the loss that is smoothed over t and decays over steps.

    Attributes:
        power: power of the losses that is averaged; the density takes the corresponding root.
    """

    floor: float = option(0.1, "share of draws that are uniform instead", gt=0, lt=1)
    width: float = option(0.02, "standard deviation of the smoothing in t, as a fraction of T", gt=0, le=1)
    decay: float = option(0.999, "decay per step of earlier observations", gt=0, lt=1)
    start: int = option(100, "warm-up steps with the initial density", ge=1)
    frequency: int = option(10, "steps between updates of the density", ge=1)

    state_names = ("_sums", "_taken", "updates", "_masses")
    power = 1

    def __init__(self, options: Any, schedule: NoiseSchedule, seed: int = 0):
        super().__init__(options, schedule, seed)
        self._sums = torch.zeros(2, schedule.timesteps, dtype=torch.float64)  # of powers of losses, and of their number
        self._taken = 0  # number of observed steps
        reach = max(math.ceil(3 * self.width * schedule.timesteps), 1)
        offset = torch.arange(-reach, reach + 1, dtype=torch.float64) / (self.width * schedule.timesteps)
        self._kernel = torch.exp(-(offset**2) / 2)

    def add_losses(self, cells: Tensor, losses: Tensor) -> None:
        """Decay the sums and add the step's finite losses.

        After `start` steps, set the density every `frequency` steps.
        """
        powers = losses**self.power
        is_finite = powers.isfinite()
        values = torch.stack([torch.where(is_finite, powers, 0.0), is_finite.to(powers.dtype)])
        rows = torch.arange(2, device=cells.device)[:, None]
        self._sums = (self._sums * self.decay).index_put((rows, cells[None]), values, accumulate=True)
        self._taken = self._taken + 1
        if self._taken >= self.start and self._taken % self.frequency == 0:
            self.set_masses(self.relative_masses(self.smoothed_means()))
            self.updates = self.updates + 1

    def relative_masses(self, mean: Tensor) -> Tensor:
        """Return probabilities up to a factor, (T,): the root of the mean power near every timestep."""
        return mean ** (1 / self.power)

    def smoothed_means(self) -> Tensor:
        """Return the mean of loss ** power near every timestep, (T,): decayed sums, smoothed by a Gaussian in t.

        A timestep without losses nearby gets the mean of the nearest timestep below that has losses, or else above.
        """
        self._kernel = on_device(self._kernel, self._sums.device)
        around = torch.nn.functional.conv1d(self._sums[:, None], self._kernel.view(1, 1, -1), padding="same")[:, 0]
        known = around[1] > 1e-12 * around[1].max()
        below, above = neighbours(known)
        nearest = torch.where(below >= 0, below, above).clamp(max=len(known) - 1)
        means = torch.where(known.any(), (around[0] / around[1])[nearest], 1.0)  # 1: no loss at any timestep
        return means.clamp(min=1e-300)


def neighbours(known: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nearest known index at or below, and at or above each index of a bool tensor (n,); -1 or n if none."""
    number = torch.arange(len(known), device=known.device)
    below = torch.where(known, number, -1).cummax(0).values
    above = torch.where(known, number, len(known)).flip(0).cummin(0).values.flip(0)
    return below, above


@sampler("loss_rms", "kairos: loss_second_moment smoothed over t, with a floor")
class LossRms(SmoothedLosses):
    r"""Density by the root mean square of the loss near t: the second moment, smoothed over t and in time.

    $$p(t) \propto \sqrt{\frac{\sum_{t'} K(t - t') \sum_k d^{\,n - k} L_{t', k}^2}
    {\sum_{t'} K(t - t') \sum_k d^{\,n - k}}},
    \qquad w(t) = \frac{1}{T p(t)}$$

    A method of kairos. Sums of squared losses and of their numbers decay from step to step. A Gaussian in t smooths
    them before they are divided. The density is available after 100 steps, not after 10 losses at every timestep.
    """

    power = 2


@sampler("loss_mean", "mean weighted loss, after VDM++, in ln SNR or any time")
class LossMean(SmoothedLosses):
    r"""Density by the mean weighted loss near t.

    $$p(t) \propto E[w L \mid t], \qquad \text{times } \frac{1}{T p(t)} \text{ in the loss}$$

    After VDM++ (Kingma and Gao 2023), which adapts a binned density so that the weighted loss is constant in lambda.
    The smoothing is that of kairos. Without importance weights it is the loss map of public trainers.
    """

    importance: bool = option(
        True, "multiply losses by 1/(T p(t)), which keeps uniform's objective; false: the density changes it (loss map)"
    )


class FollowsErrors(FollowsLosses):
    """Base of densities that follow unweighted errors instead of losses.

    Attributes:
        stated_for: prediction whose squared errors are followed; errors of any other prediction are converted.
        per_log_snr: multiply errors by |d ln SNR/dt|, so that the density is one of ln SNR.
    """

    importance: bool = option(
        False, "multiply losses by 1/(T p(t)), which keeps uniform's objective; false, as published: no such weights"
    )
    stated_for = "epsilon"
    per_log_snr = True
    _factors: Tables | None = None  # (T,): the value that `followed_losses` returns, over the error of the prediction

    def followed_losses(self, observation: Observation) -> Any:
        """Return the unweighted errors, converted to errors of `stated_for`; with `per_log_snr`, per unit of ln SNR."""
        if self._factors is None:
            snr = self.schedule.snr
            ratio = error_ratio(snr, self.stated_for) / error_ratio(snr, observation.prediction)
            self._factors = Tables(-np.gradient(np.log(snr)) * ratio if self.per_log_snr else ratio)
        errors: Any = observation.errors
        (factors,) = self._factors.like(errors)
        return errors * factors[self.schedule.cells(observation.fractions)]


@sampler("info_rate", "error of epsilon per ln SNR: the rate of conditional entropy, without InfoNoise's gate")
class InfoRate(FollowsErrors, SmoothedLosses):
    r"""Density by the mean error of epsilon per lambda = ln SNR, which is the rate of conditional entropy.

    $$p(\lambda) \propto E\left[\|\hat\epsilon - \epsilon\|^2 \mid \lambda\right]$$

    The rate of InfoNoise (2602.18647), dH/d sigma = mmse/sigma³, without its gate; `info_noise` is the whole method.
    """


class ErrorOfEpsilon(FollowsErrors, SmoothedLosses):
    """Mean error of epsilon near every timestep, for components that use it."""

    per_log_snr = False

    def mean(self) -> Array:
        """Return the mean error near every timestep, float64 (T,)."""
        return self.smoothed_means().cpu().numpy()
