"""SpeeD (Wang et al. 2025): its samplers, the paper's and the two that its public code has held, and its weights."""

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from kairos_timesteps.base import NOTHING, Sampler, Tabled, Weighting
from kairos_timesteps.component_options import check_linear, check_tau
from kairos_timesteps.coordinates import Place
from kairos_timesteps.diffusion.schedule import NoiseSchedule, linear_coefficients
from kairos_timesteps.numeric import Array, Values, like, of

if TYPE_CHECKING:
    from torch import Tensor


class Speed(Sampler):
    r"""SpeeD's asymmetric sampling (Wang et al. 2025, eq. 6): k before tau, 1 from tau on, normalised.

    $$p(t) = \frac{1}{k \tau + T - \tau} \cdot \begin{cases} k & t < \tau \\ 1 & t \ge \tau \end{cases}$$

    ``tau`` defaults to 0.7 T (the paper's 700 of 1000); with ``r`` it is derived from that magnitude.

    Raises:
        ValueError: tau is not before the end of the process.
    """

    def __init__(self, options: Any, schedule: NoiseSchedule, seed: int = 0):
        super().__init__(options, schedule, seed)
        self.tau = first_of_convergence(options.tau, options.r, schedule)
        self._edge = self.tau / schedule.timesteps
        self._total = options.k * self._edge + (1 - self._edge)

    def cdf(self, fraction: Values, place: Place = NOTHING) -> Values:
        """Piecewise linear with a kink at tau."""
        before = fraction.clip(None, self._edge)
        return (self.options.k * before + (fraction - before)) / self._total

    def quantile(self, probability: Values, place: Place = NOTHING) -> Values:
        """The inverse of the piecewise linear function."""
        mass = probability * self._total
        kink = self.options.k * self._edge
        return of(mass).where(mass < kink, mass / self.options.k, self._edge + (mass - kink))


class Reflected(Tabled):
    """The draws of SpeeD's public code: half of a batch from a density, the other half its reflection.

    Of n draws the first n//2 + 1 come from the density; draw i of the rest is the reflection of draw i at m, the first
    timestep where the central difference of sqrt(1 - alpha-bar) falls under 1e-4, plus 1: m - t before m, t - m from m
    on. The density shown is that of the size of batch last drawn, and of a large batch before the first draw and as a
    component of another sampler.
    """

    def __init__(self, options: Any, schedule: NoiseSchedule, seed: int = 0):
        super().__init__(options, schedule, seed)
        self.batch: int | None = None
        self.m = meaningful_steps(schedule)
        t = np.arange(schedule.timesteps)
        self._reflection = np.where(t < self.m, self.m - t, t - self.m).clip(0, schedule.timesteps - 1)
        self._half = Tabled(options, schedule, seed)
        self._half.set_masses(self.drawn_half())
        self.set_masses(self.masses())

    def drawn_half(self) -> Array:
        """Relative mass of every timestep in the half that is drawn, (T,)."""
        raise NotImplementedError

    def masses(self, x0: "Tensor | None" = None, place: Place = NOTHING) -> Array:
        """Both halves together."""
        drawn = self._half.masses()
        reflected = np.bincount(self._reflection, weights=drawn, minlength=len(drawn))
        share = 0.5 if self.batch is None else min((self.batch // 2 + 1) / self.batch, 1.0)
        return share * drawn + (1 - share) * reflected

    def drawn(self, place: Place) -> "Tensor":
        """Draw and reflect; with a floor, that share of both halves is uniform instead."""
        import torch

        self.batch, timesteps, half = place.total, self.schedule.timesteps, place.total // 2 + 1
        index = place.index
        if isinstance(index, range):
            index = torch.arange(index.start, index.stop, device=place.device)
        second = (index >= half).view(-1, *[1] * len(place.shape))
        of_half = place.but(index=torch.where(index >= half, index - half, index), total=half)
        position = self._half.quantile(self.uniforms(of_half)) * timesteps
        cell = position.long().clamp(max=timesteps - 1)
        both = torch.where(second, like(self._reflection, position)[cell] + (position - cell), position) / timesteps
        if self.floor:
            other = place.uniform("floor", 2)
            both = torch.where(other[..., 0] < self.floor, other[..., 1], both)
        return both.clamp(0.0, 1.0 - 2**-53)

    def importance(self, x0: "Tensor", fractions: "Tensor", place: Place = NOTHING) -> "Tensor | None":
        """From both halves together."""
        if not self.corrected:
            return None
        timesteps = self.schedule.timesteps
        cell = (fractions * timesteps).long().clamp(0, timesteps - 1)
        return (1 / (timesteps * like(self.density(), fractions)[cell])).float()


class SpeedOfficial(Reflected):
    r"""SpeeD as its public code draws it: q of eq. 6 for the drawn share s of a batch of n, the rest reflected at m.

    $$p(t) = s \, q(t) + (1 - s) \sum_{t': \, |t' - m| = t} q(t'), \qquad s = \frac{\lfloor n / 2 \rfloor + 1}{n}$$

    Against the paper it halves the concentration: at k = 5, tau = 700 the mass from tau on is (n//2 + 1)/n of 7.9 %.
    """

    def drawn_half(self) -> Array:
        """k before tau, 1 from tau on."""
        self.tau = first_of_convergence(self.options.tau, None, self.schedule)
        return np.where(np.arange(self.schedule.timesteps) < self.tau, self.options.k, 1.0)


class SpeedV1(Reflected):
    r"""SpeeD's first public version, half of it reflected: about 2.5 where the noise still grows, else 0.5.

    $$q(t) \propto \tanh\left(10^6 \left(\frac{d}{dt} \sqrt{1 - \bar\alpha_t} - 10^{-4}\right)\right) + 1.5$$
    """

    def drawn_half(self) -> Array:
        """tanh(1e6 (slope - 1e-4)) + 1.5."""
        return np.tanh(1e6 * (_slope(self.schedule) - _FLAT)) + 1.5


class ChangeAware(Weighting):
    r"""SpeeD's change-aware weights (Wang et al. 2025, section 2.4): the derivative of the process' variance, rescaled.

    $$w(t) = (1 - \lambda) + (2 \lambda - 1) \frac{\Psi'_t - \min \Psi'}{\max \Psi' - \min \Psi'}, \qquad
    \Psi_t = 1 - \bar\alpha_t$$

    Linear schedule: the paper's closed form of Psi'_t, t from 1. Other schedules: the central difference of
    1 - alpha-bar. The smallest value (at least 0) becomes 1 - lambda, the largest (at most 1) lambda. The weights apply
    to whatever is predicted.
    """

    def weights(self, step: Any = 0) -> Array:
        """The rescaled change."""
        schedule, timesteps = self.schedule, self.schedule.timesteps
        if schedule.name == "linear":
            slope, first = linear_coefficients(schedule)
            t = np.arange(1, timesteps + 1)
            change = 2 * (first + slope * t / timesteps) * np.exp(-(first + slope * t / (2 * timesteps)) * t)
        else:
            change = np.gradient(1 - schedule.alphas_cumprod)
        low, high = max(change.min(), 0.0), min(change.max(), 1.0)
        share = np.clip((change - low) / (high - low), 0.0, 1.0)
        lam = self.options.lam
        return np.asarray((1 - lam) + (2 * lam - 1) * share)


class ChangeAwareOfficial(ChangeAware):
    r"""Change-aware weights as SpeeD's public code has them: 1 from tau on, which is more than any weight before it.

    $$w(t) = \begin{cases} w_{\mathrm{change\ aware}}(t) & t < \tau \\ 1 & t \ge \tau \end{cases}$$
    """

    def __init__(self, options: Any, schedule: NoiseSchedule, prediction: str = "epsilon"):
        super().__init__(options, schedule, prediction)
        self.tau = first_of_convergence(options.tau, None, schedule)

    def weights(self, step: Any = 0) -> Array:
        """The rescaled change before tau."""
        return np.where(np.arange(self.schedule.timesteps) < self.tau, super().weights(step), 1.0)


_FLAT = 1e-4  # slope from which the public code counts a timestep as meaningless


def _slope(schedule: NoiseSchedule) -> Array:
    """Change of sqrt(1 - alpha-bar) in a thousandth of the process, the public code's timestep, (T,)."""
    return np.asarray(np.gradient(np.sqrt(1 - schedule.alphas_cumprod))) * schedule.timesteps / 1000


def meaningful_steps(schedule: NoiseSchedule) -> int:
    """The timestep m at which the public code reflects; 0 + 1 where the slope never falls under 1e-4, as it has it."""
    return int(np.argmax(_slope(schedule) < _FLAT)) + 1


def first_of_convergence(tau: int | None, r: float | None, schedule: NoiseSchedule) -> int:
    """tau as given, derived from the magnitude r, or 0.7 T.

    Raises:
        ValueError: it is not in 1 ... T - 1.
    """
    timesteps = schedule.timesteps
    if r is not None:
        tau = min(math.ceil(tau_of_magnitude(r, schedule)), timesteps)
    elif tau is None:
        tau = min(max(round(0.7 * timesteps), 1), timesteps - 1)
    check_tau(tau, timesteps)
    return tau


def tau_of_magnitude(r: float, schedule: NoiseSchedule) -> float:
    """The timestep from which 1/alpha-bar, in SpeeD's continuous form, exceeds r (Wang et al. 2025, Theorem 1).

    Raises:
        ValueError: the schedule is not linear; the closed form holds for that one alone.
    """
    check_linear(r, schedule.name)
    timesteps = schedule.timesteps
    change, first = linear_coefficients(schedule)
    offset = timesteps * first / change
    return math.sqrt(2 * timesteps * math.log(r) / change + offset**2) - offset
