"""Sampling schemes: from noise to x0 along the places of a process.

A scheme is a function ``scheme(options, process, grid, estimate, noise)``: `grid` holds the places from noise to the
image, ``estimate(x, place)`` is the network's x0 there, and ``noise(k)`` is standard normal of the batch's shape, for
k = 0 what the first place begins with and for k = 1 ... what is added in interval k. All of it is in the coordinates of
`sampling.places`, where DDIM without noise, Euler's method on a flow and EDM's Euler are one and the same step.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
from torch import Tensor

from kairos.sampling.places import Place, places_at, times_of
from kairos.sampling.registries import DdimOptions, DdpmOptions, EulerOptions

Estimate = Callable[[Tensor, Place], Tensor]
Noise = Callable[[int], Tensor]


def ddpm(options: DdpmOptions, process: Any, grid: list[Place], estimate: Estimate, noise: Noise) -> Tensor:
    """Ancestral sampling (Ho et al. 2020, algorithm 2) on the visited places alone (Nichol and Dhariwal 2021, sec. 4).

    The variance is that of q(x_s | x_t, x0), or with ``fixed_large`` that of q(x_s | x_t) for x0 ~ N(0, I): beta_t.
    """
    x = grid[0].noise * noise(0)
    for k, (place, end) in enumerate(pairwise(grid), 1):
        x0 = estimate(x, place)
        ratio = _ratio(place, end)
        x = end.signal * x0 + end.noise * ratio * _epsilon(x, x0, place)
        if end.noise > 0:
            variance = end.noise**2 * (1 - ratio**2)
            if options.variance == "fixed_large":
                before, after = (p.signal**2 / (p.signal**2 + p.noise**2) for p in (place, end))  # alpha-bar
                variance = (end.signal**2 + end.noise**2) * (1 - before / after)
            x = x + variance**0.5 * noise(k)
    return x


def ddim(options: DdimOptions, process: Any, grid: list[Place], estimate: Estimate, noise: Noise) -> Tensor:
    """DDIM (Song et al. 2021, eq. 12 and 16)."""
    x = grid[0].noise * noise(0)
    for k, (place, end) in enumerate(pairwise(grid), 1):
        x0 = estimate(x, place)
        share = options.eta**2 * (1 - _ratio(place, end) ** 2)  # of the noise at the end, drawn anew
        x = end.signal * x0 + end.noise * (1 - share) ** 0.5 * _epsilon(x, x0, place)
        if end.noise * share > 0:
            x = x + end.noise * share**0.5 * noise(k)
    return x


def edm(options: EulerOptions, process: Any, grid: list[Place], estimate: Estimate, noise: Noise) -> Tensor:
    """EDM's sampler (Karras et al. 2022, algorithm 2): ``heun``, and ``euler`` without its lines 9 to 11."""
    x = grid[0].noise * noise(0)
    gamma = min(options.s_churn / (len(grid) - 1), 2**0.5 - 1)
    for k, (place, end) in enumerate(pairwise(grid), 1):
        if gamma > 0 and options.s_min <= place.noise <= (options.s_max or float("inf")):
            less = place.noise
            (place,) = places_at(process, times_of(process, np.array([less * (1 + gamma)])))
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


def _epsilon(x: Tensor, x0: Tensor, place: Place) -> Tensor:
    """The noise that x0 leaves; from a clipped x0 it follows too."""
    return (x - place.signal * x0) / place.noise


def _ratio(place: Place, end: Place) -> float:
    """Square root of SNR before over SNR after, 0 where the end is the image."""
    return place.signal * end.noise / (end.signal * place.noise)
