"""Samplers with a fixed density, given by its distribution function and the inverse of that."""

import functools
from typing import Any

import numpy as np

from kairos.diffusion.schedule import NoiseSchedule
from kairos.strategies.base import Array, Sampler, Tabled, normal_cdf
from kairos.strategies.beta import beta_cdf


def normal_quantile(probability: Array) -> Array:
    """The inverse of the standard normal distribution function, elementwise."""
    import torch

    return np.asarray(torch.special.ndtri(torch.from_numpy(np.asarray(probability, np.float64))).numpy())


class Uniform(Sampler):
    """p(t) = 1/T (Ho et al. 2020), or 1/(end - start) on timesteps start ... end - 1 and 0 elsewhere.

    Raises:
        ValueError: the range is not one of the process.
    """

    def __init__(self, options: Any, schedule: NoiseSchedule, seed: int = 0):
        super().__init__(options, schedule, seed)
        options.check_fits(schedule.timesteps, schedule.name)
        self._end = schedule.timesteps if options.end is None else options.end
        self._start = options.start / schedule.timesteps
        self._width = (self._end - options.start) / schedule.timesteps

    def cdf(self, fraction: Array) -> Array:
        """Linear within the range."""
        return np.clip((fraction - self._start) / self._width, 0.0, 1.0)

    def masses(self, x0: Any = None) -> Array:
        """Exactly 0 outside of the range."""
        t = np.arange(self.schedule.timesteps)
        return np.where((t >= self.options.start) & (t < self._end), 1 / (self._end - self.options.start), 0.0)

    def quantile(self, probability: Array) -> Array:
        """Linear."""
        return self._start + self._width * np.asarray(probability)


class LogNormal(Sampler):
    """t/T = sigmoid(N(m, s²)): Kim et al. 2025, appendix 10; the logit-normal density of Esser et al. 2024.

    It never reaches the ends of the process.
    """

    def cdf(self, fraction: Array) -> Array:
        """Phi((logit(fraction) - m) / s)."""
        with np.errstate(divide="ignore"):
            logit = np.log(fraction) - np.log1p(-np.asarray(fraction))
        return normal_cdf((logit - self.options.m) / self.options.s)

    def quantile(self, probability: Array) -> Array:
        """sigmoid(m + s Phi^-1(probability))."""
        with np.errstate(over="ignore"):
            return 1 / (1 + np.exp(-(self.options.m + self.options.s * normal_quantile(probability))))


class EdmLogNormal(Tabled):
    """ln sigma ~ N(mean, std²) (Karras et al. 2022, table 1), on a schedule whose noise levels are given.

    A timestep has the mass of its cell in ln sigma, sigma² = 1/SNR, with borders half-way to its neighbours; the tails
    go to the first and the last.
    """

    def __init__(self, options: Any, schedule: NoiseSchedule, seed: int = 0):
        super().__init__(options, schedule, seed)
        level = -0.5 * np.log(schedule.snr)  # ln sigma
        borders = (level[1:] + level[:-1]) / 2
        below = normal_cdf((borders - options.mean) / options.std)
        above = normal_cdf((options.mean - borders) / options.std)  # exact in the far tail, where 1 - below is not
        inner = np.where(borders[1:] < options.mean, np.diff(below), -np.diff(above))
        self.set_masses(np.concatenate([below[:1], inner, above[-1:]]))


class Mode(Sampler):
    """Mode sampling of SD3 (Esser et al. 2024, eq. 19): t/T = 1 - u - m (cos²(pi u/2) - 1 + u), u uniform.

    Monotone for -1 <= m <= 2/(pi - 2); m > 0 prefers the middle, m < 0 the ends.
    """

    def _time(self, u: Array) -> Array:
        return 1 - u - self.options.m * (np.cos(np.pi / 2 * u) ** 2 - 1 + u)

    def quantile(self, probability: Array) -> Array:
        """The formula at u = 1 - probability: it falls with u."""
        return np.clip(self._time(1 - np.asarray(probability)), 0.0, 1.0)

    def cdf(self, fraction: Array) -> Array:
        """The inverse, by bisection to the last bit."""
        fraction = np.asarray(fraction, np.float64)
        low, high = np.zeros_like(fraction), np.ones_like(fraction)
        for _ in range(54):
            middle = (low + high) / 2
            below = self._time(1 - middle) <= fraction
            low, high = np.where(below, middle, low), np.where(below, high, middle)
        return np.where(fraction <= 0, 0.0, np.where(fraction >= 1, 1.0, (low + high) / 2))


class Beta(Sampler):
    """t/T ~ Beta(a, b) (B-TTDM, Zheng et al. 2024; a = 0.8, b = 1 recommended).

    With b = 1 or a = 1 the inverse is a power; otherwise it is interpolated in a table of 64 nodes per timestep, exact
    in the mass of every timestep.
    """

    def cdf(self, fraction: Array) -> Array:
        """The regularised incomplete beta function."""
        return beta_cdf(fraction, np.array(self.options.a), np.array(self.options.b))

    def quantile(self, probability: Array) -> Array:
        """Its inverse."""
        a, b, probability = self.options.a, self.options.b, np.asarray(probability)
        if b == 1:
            return probability ** (1 / a)
        if a == 1:
            return 1 - (1 - probability) ** (1 / b)
        return np.interp(probability, *self._nodes)

    @functools.cached_property
    def _nodes(self) -> tuple[Array, Array]:
        edges = np.arange(64 * self.schedule.timesteps + 1) / (64 * self.schedule.timesteps)
        return self.cdf(edges), edges


class Clts(Sampler):
    """Curriculum of Xu et al. 2024 (CLTS): (1 - l) uniform + l N(mu, s²) on the range, l from 0 to 1 over training.

    No public code; the paper does not state s. The normal density is truncated to the process and l grows linearly over
    the first `length` steps, an option of its own: it does not follow the number of steps that a training is given.
    """

    def __init__(self, options: Any, schedule: NoiseSchedule, seed: int = 0):
        super().__init__(options, schedule, seed)
        self._low, self._high = normal_cdf((np.array([0.0, 1.0]) - options.mu) / options.s)

    @property
    def progress(self) -> float:
        """The mixture's l, at the step last begun."""
        return min(self.now / self.options.length, 1.0)

    def cdf(self, fraction: Array) -> Array:
        """The mixture at the step last begun."""
        below = normal_cdf((np.asarray(fraction) - self.options.mu) / self.options.s)
        truncated = np.clip((below - self._low) / (self._high - self._low), 0.0, 1.0)
        return (1 - self.progress) * np.asarray(fraction) + self.progress * truncated

    def quantile(self, probability: Array) -> Array:
        """A share 1 - l of the range goes to the uniform part, the rest to the normal one."""
        probability, part = np.asarray(probability), 1 - self.progress
        rest = np.maximum(probability - part, 0.0) / max(self.progress, 1e-300)
        normal = self.options.mu + self.options.s * normal_quantile(self._low + rest * (self._high - self._low))
        return np.where(probability < part, probability / max(part, 1e-300), np.clip(normal, 0.0, 1.0))
