"""Sampling schemes: from noise to x0 along the places of a process.

A scheme is a function ``scheme(options, process, grid, estimate, noise)``: `grid` holds the places from noise to the
image, ``estimate(x, place)`` is the network's x0 there, and ``noise(k)`` is standard normal of the batch's shape, for
k = 0 what the first place begins with and for k = 1 ... what is added in interval k. All of it is in the coordinates of
`sampling.time_grids`, where DDIM without noise, Euler's method on a flow and EDM's Euler are one and the same step.
"""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
from torch import Tensor

from kairos.sampling.generate import DataPrediction, NoiseSource
from kairos.sampling.registries import DdimOptions, DdpmOptions, EulerOptions, OdeOptions
from kairos.sampling.time_grids import GridPoint, grid_points_at, times_of_noise_levels


def ddpm(
    options: DdpmOptions, process: Any, grid: list[GridPoint], estimate: DataPrediction, noise: NoiseSource
) -> Tensor:
    """Ancestral sampling (Ho et al. 2020, algorithm 2) on the visited places alone (Nichol and Dhariwal 2021, sec. 4).

    The variance is that of q(x_s | x_t, x0), or with ``fixed_large`` that of q(x_s | x_t) for x0 ~ N(0, I): beta_t, or
    with ``learned_range`` between the two in its logarithm, as far as the network says (eq. 15 there).
    """
    x = grid[0].noise * noise(0)
    for k, (place, end) in enumerate(pairwise(grid), 1):
        x0, v = estimate.both(x, place)
        ratio = _ratio(place, end)
        x = end.signal * x0 + end.noise * ratio * _epsilon(x, x0, place)
        if end.noise > 0:
            before, after = (p.signal**2 / (p.signal**2 + p.noise**2) for p in (place, end))  # alpha-bar
            small, large = end.noise**2 * (1 - ratio**2), (end.signal**2 + end.noise**2) * (1 - before / after)
            learned = small * (large / small) ** ((v + 1) / 2)
            variance = {"fixed_small": small, "fixed_large": large, "learned_range": learned}[options.variance]
            x = x + variance**0.5 * noise(k)
    return x


def ddim(
    options: DdimOptions, process: Any, grid: list[GridPoint], estimate: DataPrediction, noise: NoiseSource
) -> Tensor:
    """DDIM (Song et al. 2021, eq. 12 and 16)."""
    x = grid[0].noise * noise(0)
    for k, (place, end) in enumerate(pairwise(grid), 1):
        x0 = estimate(x, place)
        share = options.eta**2 * (1 - _ratio(place, end) ** 2)  # of the noise at the end, drawn anew
        x = end.signal * x0 + end.noise * (1 - share) ** 0.5 * _epsilon(x, x0, place)
        if end.noise * share > 0:
            x = x + end.noise * share**0.5 * noise(k)
    return x


def edm(
    options: EulerOptions, process: Any, grid: list[GridPoint], estimate: DataPrediction, noise: NoiseSource
) -> Tensor:
    """EDM's sampler (Karras et al. 2022, algorithm 2): ``heun``, and ``euler`` without its lines 9 to 11."""
    x = grid[0].noise * noise(0)
    gamma = min(options.s_churn / (len(grid) - 1), 2**0.5 - 1)
    for k, (place, end) in enumerate(pairwise(grid), 1):
        if gamma > 0 and options.s_min <= place.noise <= (options.s_max or float("inf")):
            less = place.noise
            (place,) = grid_points_at(process, times_of_noise_levels(process, np.array([less * (1 + gamma)])))
            x = x + (place.noise**2 - less**2) ** 0.5 * options.s_noise * noise(k)
        x0 = estimate(x, place)
        epsilon = _epsilon(x, x0, place)
        there = end.signal * x0 + end.noise * epsilon
        if options.evaluations == 2 and end.noise > 0:  # the mean of the slopes at both ends; the image has none
            second = estimate(there, end)
            x0, epsilon = (x0 + second) / 2, (epsilon + _epsilon(there, second, end)) / 2
            there = x + (end.signal - place.signal) * x0 + (end.noise - place.noise) * epsilon
        x = there
    return x


def dpm_solver(
    options: OdeOptions, process: Any, grid: list[GridPoint], estimate: DataPrediction, noise: NoiseSource
) -> Tensor:
    """DPM-Solver++, singlestep of orders up to 3 (Lu et al. 2022, "DPM-Solver++", algorithm 1 and appendix).

    The places in between are the grid's own, as in U-ViT's code, so that the network is called once at each. The method
    has its full order where they cut a step into thirds of the log-SNR; a grid even in time nearly does.
    """
    sigma = [place.noise / place.signal for place in grid]
    x, k = sigma[0] * noise(0), 0
    for order in orders(len(grid) - 1, grid[-1].noise == 0):
        x = _singlestep(x, sigma[k : k + order + 1], lambda x, j: estimate(grid[j].signal * x, grid[j]), k)
        k += order
    return grid[-1].signal * x


def orders(intervals: int, to_image: bool) -> list[int]:
    """Orders of the steps of DPM-Solver-fast (Lu et al. 2022, "DPM-Solver", section 3.4), their sum is `intervals`.

    A step into the image, where the noise ends, can be of order 1 only.
    """
    whole, rest = divmod(intervals, 3)
    last = {0: [2, 1], 1: [1], 2: [1, 1] if to_image else [2]}[rest]
    return [3] * (whole - (rest == 0)) + last


def _singlestep(x: Tensor, sigma: list[float], data: Callable[[Tensor, int], Tensor], k: int) -> Tensor:
    """Take one step along the levels `sigma`, its order plus one, with ``data(x, place)`` from place k on.

    x is over the signal, so that a step that takes x0 for constant leads straight to it.
    """
    start, *levels = sigma
    x0 = data(x, k)
    straight = [x0 + level / start * (x - x0) for level in levels]
    if len(levels) == 1:
        return straight[0]
    h = [math.log(start / level) for level in levels]
    slope = (data(straight[0], k + 1) - x0) / h[0]
    if len(levels) == 2:
        return straight[1] - math.expm1(-h[1]) * h[1] / 2 * slope
    slope = (data(straight[1] + _phi(h[1]) * slope, k + 2) - x0) / h[1]
    return straight[2] + _phi(h[2]) * slope


def _phi(h: float) -> float:
    """Return h - 1 + exp(-h), the weight over a step h of an x0 that changes by 1 per unit of log-SNR/2."""
    return h + math.expm1(-h)


def _epsilon(x: Tensor, x0: Tensor, place: GridPoint) -> Tensor:
    """The noise that x0 leaves; from a clipped x0 it follows too."""
    return (x - place.signal * x0) / place.noise


def _ratio(place: GridPoint, end: GridPoint) -> float:
    """Square root of SNR before over SNR after, 0 where the end is the image."""
    return place.signal * end.noise / (end.signal * place.noise)
