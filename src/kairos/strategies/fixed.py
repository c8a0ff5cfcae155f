"""Samplers with a fixed density."""

import math
from typing import Any

import numpy as np

from kairos.diffusion.schedule import NoiseSchedule, linear_coefficients
from kairos.strategies.base import Array, Sampler, normal_cdf


class Uniform(Sampler):
    """p(t) = 1/T (Ho et al. 2020)."""

    def cdf(self, fraction: Array) -> Array:
        """The fraction itself."""
        return fraction

    def quantile(self, probability: Array) -> Array:
        """The probability itself."""
        return probability


class LogNormal(Sampler):
    """t/T = sigmoid(N(m, s²)): Kim et al. 2025, appendix 10; the logit-normal density of Esser et al. 2024.

    It never reaches the ends of the process.
    """

    def cdf(self, fraction: Array) -> Array:
        """Phi((logit(fraction) - m) / s)."""
        with np.errstate(divide="ignore"):
            logit = np.log(fraction) - np.log1p(-fraction)
        return normal_cdf((logit - self.options.m) / self.options.s)

    def quantile(self, probability: Array) -> Array:
        """sigmoid(m + s Phi^-1(probability))."""
        import torch

        normal = torch.special.ndtri(torch.from_numpy(np.asarray(probability)))
        return torch.sigmoid(self.options.m + self.options.s * normal).numpy()


class Speed(Sampler):
    """SpeeD's asymmetric sampling (Wang et al. 2025, eq. 6): k before tau, 1 from tau on, normalised.

    ``tau`` defaults to 0.7 T (the paper's 700 of 1000); with ``r`` it is derived from that magnitude.

    Raises:
        ValueError: tau is not before the end of the process.
    """

    def __init__(self, options: Any, schedule: NoiseSchedule, seed: int = 0):
        super().__init__(options, schedule, seed)
        timesteps = schedule.timesteps
        if options.r is not None:
            self.tau = min(math.ceil(tau_of_magnitude(options.r, schedule)), timesteps)
        else:
            self.tau = options.tau if options.tau is not None else round(0.7 * timesteps)
        if not 0 < self.tau < timesteps:
            raise ValueError(f"sampler speed.tau: got {self.tau}, allowed: 1 to T - 1 = {timesteps - 1}")
        self._edge = self.tau / timesteps
        self._total = options.k * self._edge + (1 - self._edge)

    def cdf(self, fraction: Array) -> Array:
        """Piecewise linear with a kink at tau."""
        before = np.minimum(fraction, self._edge)
        return (self.options.k * before + (fraction - before)) / self._total

    def quantile(self, probability: Array) -> Array:
        """The inverse of the piecewise linear function."""
        mass = np.asarray(probability) * self._total
        kink = self.options.k * self._edge
        return np.where(mass < kink, mass / self.options.k, self._edge + (mass - kink))


def tau_of_magnitude(r: float, schedule: NoiseSchedule) -> float:
    """The timestep from which 1/alpha-bar, in SpeeD's continuous form, exceeds r (Wang et al. 2025, Theorem 1).

    Raises:
        ValueError: the schedule is not linear; the closed form holds for that one alone.
    """
    if schedule.name != "linear":
        raise ValueError(
            f"sampler speed.r: got {r} with schedule {schedule.name}, allowed: schedule linear, or give tau"
        )
    timesteps = schedule.timesteps
    change, first = linear_coefficients(schedule)
    offset = timesteps * first / change
    return math.sqrt(2 * timesteps * math.log(r) / change + offset**2) - offset
