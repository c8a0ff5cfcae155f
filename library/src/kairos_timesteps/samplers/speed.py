"""Samplers of SpeeD (Wang et al. 2025): the paper's, and those of two versions of its public code."""

from typing import Any

import numpy as np

from kairos_timesteps.base import FixedDensity, TableDensity
from kairos_timesteps.coordinates import RandomCoordinates
from kairos_timesteps.diffusion.schedule import (
    NoiseSchedule,
    check_convergence,
    check_published_form,
    start_of_convergence,
)
from kairos_timesteps.errors import demand
from kairos_timesteps.lazy import Tensor, torch
from kairos_timesteps.numeric import Array, Tables, Values, namespace, same_kind
from kairos_timesteps.options import option, parse
from kairos_timesteps.registry import sampler


@sampler("speed", "SpeeD, eq. 6: k times more often before tau")
class Speed(FixedDensity):
    r"""Asymmetric sampling of SpeeD (Wang et al. 2025, eq. 6): k before tau, 1 from tau on, normalised.

    $$p(t) = \frac{1}{k \tau + T - \tau} \cdot \begin{cases} k & t < \tau \\ 1 & t \ge \tau \end{cases}$$

    ``tau`` defaults to 0.7 T (the paper's 700 of 1000). With ``r`` it is the result of theorem 1, rounded up. This
    closed form is a few timesteps late: r = 100 gives 677, and 1/alpha-bar first exceeds 100 at timestep 673.

    Raises:
        ConfigError: tau is not before the end of the process.
    """

    k: float = option(5.0, "how much more often timesteps before tau are drawn", gt=0)
    tau: int | None = option(None, "first timestep of the convergence area; null: 0.7 T", ge=1)
    r: float | None = option(None, "tau is where 1/alpha-bar exceeds r (theorem 1, linear schedule)", gt=1)

    def __init__(self, options: Any, schedule: NoiseSchedule, seed: int = 0):
        super().__init__(options, schedule, seed)
        self._edge = start_of_convergence(options.tau, options.r, schedule) / schedule.timesteps
        self._total = self.k * self._edge + (1 - self._edge)

    @staticmethod
    def check(options: Any) -> None:
        """Reject tau together with r."""
        both = options.tau is not None and options.r is not None
        demand(not both, "tau and r", f"{options.tau} and {options.r}", "one of them")

    @staticmethod
    def check_process(options: Any, timesteps: int, schedule: str) -> None:
        """Reject tau outside of the process, and r unless the schedule is linear."""
        check_convergence(options.tau, options.r, timesteps, schedule)

    def cdf(self, u: Values, **context: Any) -> Values:
        """Return the distribution function, piecewise linear with a kink at tau."""
        before: Values = u.clip(None, self._edge)
        return (self.k * before + (u - before)) / self._total

    def quantile(self, p: Values, **context: Any) -> Values:
        """Return the inverse of the piecewise linear distribution function."""
        mass = p * self._total
        kink = self.k * self._edge
        return namespace(mass).where(mass < kink, mass / self.k, self._edge + (mass - kink))


class Reflected(TableDensity, FixedDensity):
    """Draws of SpeeD's public code: one half of a batch from a density, the other half its reflection.

    The first n//2 + 1 of n draws come from the density. Draw i of the rest is the reflection of draw i at m: m - t
    before m, t - m from m on. m - 1 is the first timestep where the central difference of sqrt(1 - alpha-bar) falls
    under 1e-4. The density of this sampler is that of the batch size last drawn by `draw`, which is part of the state.
    Before the first draw and within other samplers it is that of a large batch.
    """

    state_names = ("batch",)

    def __init__(self, options: Any, schedule: NoiseSchedule, seed: int = 0):
        super().__init__(options, schedule, seed)
        self.batch: int | None = None
        self.m = reflection_timestep(schedule)
        t = np.arange(schedule.timesteps)
        reflection = np.where(t < self.m, self.m - t, t - self.m).clip(0, schedule.timesteps - 1)
        self._reflection = Tables(reflection)
        self._half = TableDensity(parse(TableDensity, {}), schedule, seed)
        self._half.set_masses(self.half_masses())
        self.set_masses(self.masses())

    @staticmethod
    def check_process(options: Any, timesteps: int, schedule: str) -> None:
        """Reject continuous processes, whose increments the public code does not define."""
        check_published_form(getattr(options, "tau", None), timesteps, schedule)

    def half_masses(self) -> Array:
        """Return the relative probabilities of the half that is drawn, (T,)."""
        raise NotImplementedError

    def masses(self, x0: Tensor | None = None, **context: Any) -> Array:
        """Return the probability of every timestep in both halves together, (T,)."""
        half = self._half.masses()
        (reflection,) = self._reflection.like(half)
        reflected = np.bincount(reflection, weights=half, minlength=len(half))
        share = 0.5 if not self.batch else min((self.batch // 2 + 1) / self.batch, 1.0)
        return share * half + (1 - share) * reflected

    def draw(self, coordinates: RandomCoordinates, x0: Tensor | None = None) -> Tensor:
        """Draw half of the batch and reflect it; with a floor, that share of both halves is uniform instead.

        `masses` and `probabilities` are then those of this batch size.
        """
        self.batch, timesteps = coordinates.batch_size, self.schedule.timesteps
        count, index = coordinates.batch_size // 2 + 1, coordinates.index_tensor()
        reflected = (index >= count).view(-1, *[1] * len(coordinates.times_shape))
        # draw count + i is the reflection of draw i
        of_half = coordinates.replace(
            sample_indices=torch.where(index >= count, index - count, index), batch_size=count
        )
        position = self._half.quantile(self.uniforms(of_half)) * timesteps
        cell = position.long().clamp(max=timesteps - 1)
        (reflection,) = self._reflection.like(position)
        mirrored = reflection[cell] + (position - cell)
        draws = torch.where(reflected, mirrored, position) / timesteps
        if self.floor:
            other = coordinates.uniform("floor", 2)
            draws = torch.where(other[..., 0] < self.floor, other[..., 1], draws)
        return draws.clamp(0.0, 1.0 - 2**-53)

    def sample(self, *arguments: Any, **context: Any) -> Tensor:
        """Draw fractions without a batch; see `Sampler.sample`. The density does not change."""
        batch = self.batch
        draws = super().sample(*arguments, **context)
        self.batch = batch
        return draws

    def load_state_dict(self, state: dict[str, Any], device: "torch.device | str" = "cpu") -> None:
        """Restore a state that `state_dict` returned; states of earlier versions contain no batch size."""
        super().load_state_dict({"batch": None, **state}, device)

    def importance_weights(self, x0: Tensor, fractions: Tensor, coordinates: RandomCoordinates) -> Tensor | None:
        """Return 1/(T p(t)) of both halves together, float32; None without `importance`."""
        if not self.importance:
            return None
        timesteps = self.schedule.timesteps
        cell = (fractions * timesteps).long().clamp(0, timesteps - 1)
        return (1 / (timesteps * same_kind(self.probabilities(), fractions)[cell])).float()


@sampler("speed_official", "SpeeD's public code: half a batch reflected")
class SpeedOfficial(Reflected):
    r"""SpeeD as its public code draws it: q of eq. 6 for the drawn share s of a batch of n, the rest reflected at m.

    $$p(t) = s \, q(t) + (1 - s) \sum_{t': \, |t' - m| = t} q(t'), \qquad s = \frac{\lfloor n / 2 \rfloor + 1}{n}$$

    Against the paper it halves the concentration: at k = 5, tau = 700 the mass from tau on is (n//2 + 1)/n of 7.9 %.
    """

    k: float = option(5.0, "how much more often timesteps before tau are drawn, in the half that is drawn", gt=0)
    tau: int | None = option(None, "first timestep of the convergence area; null: 0.7 T", ge=1)

    def half_masses(self) -> Array:
        """Return k before tau, 1 from tau on, (T,)."""
        tau = start_of_convergence(self.tau, None, self.schedule)
        return np.where(np.arange(self.schedule.timesteps) < tau, self.k, 1.0)


@sampler("speed_v1", "SpeeD's first public code: tanh threshold, reflected")
class SpeedV1(Reflected):
    r"""SpeeD's first public version, half of it reflected: about 2.5 where the noise still grows, else 0.5.

    $$q(t) \propto \tanh\left(10^6 \left(\frac{d}{dt} \sqrt{1 - \bar\alpha_t} - 10^{-4}\right)\right) + 1.5$$
    """

    def half_masses(self) -> Array:
        """Return tanh(1e6 (slope - 1e-4)) + 1.5, (T,)."""
        return np.tanh(1e6 * (_slope(self.schedule) - _FLAT)) + 1.5


_FLAT = 1e-4  # slope from which the public code counts a timestep as meaningless


def _slope(schedule: NoiseSchedule) -> Array:
    """Return the change of sqrt(1 - alpha-bar) in a thousandth of the process, the public code's timestep, (T,)."""
    return np.asarray(np.gradient(np.sqrt(1 - schedule.alphas_cumprod))) * schedule.timesteps / 1000


def reflection_timestep(schedule: NoiseSchedule) -> int:
    """Return the timestep m at which the public code reflects; 1 if the slope never falls under 1e-4."""
    return int(np.argmax(_slope(schedule) < _FLAT)) + 1
