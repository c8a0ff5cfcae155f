"""Solvers: from noise to x0 along a time grid.

A solver is a function ``solver(options, process, grid, predict_x0, draw_noise)``:

* ``grid`` is the list of grid points from noise to the image, see `sampling.time_grids`;
* ``predict_x0(x, point)`` is the network's prediction of x0 at a grid point;
* ``draw_noise(k)`` is standard normal noise in the shape of the batch: the start for k = 0, and for k = 1, 2, ... the
  noise that interval k adds.

Solvers compute in the coordinates of the grid, x = alpha * x0 + sigma * epsilon, with the coefficients of each grid
point. There DDIM without noise, Euler's method on a flow and EDM's Euler are one step. The result is x at the end of
the grid: x0, or for a grid that ends at the first timestep the x that latent diffusion takes for x0.
"""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from kairos.sampling.generate import DataPrediction, NoiseSource
from kairos.sampling.settings import DdimOptions, DdpmOptions, EulerOptions, OdeOptions
from kairos.sampling.time_grids import GridPoint, grid_points_at, times_of_noise_levels
from kairos.shapes import Images, VarianceChannels


def ddpm(
    options: DdpmOptions, process: Any, grid: list[GridPoint], predict_x0: DataPrediction, draw_noise: NoiseSource
) -> Images:
    """Sample by DDPM's ancestral sampling (Ho et al. 2020, algorithm 2), with one step per interval of the grid.

    An interval may skip timesteps, as in Nichol and Dhariwal 2021, section 4. The new x is the mean of q(x_end | x,
    x0), with the predicted x0, plus noise of the reverse variance, see `_reverse_variance`. No noise is added at the
    image.

    Returns:
        x0 (batch, channels, height, width).
    """
    x = grid[0].sigma * draw_noise(0)
    for k, (point, end) in enumerate(pairwise(grid), 1):
        x0, variance_channels = predict_x0.with_variance_channels(x, point)
        # the mean of q in terms of x0 and epsilon: its factor of epsilon is noise(end) · sqrt(SNR(point) / SNR(end));
        # DDIM without noise keeps all of epsilon
        epsilon_fraction = _snr_ratio_root(point, end)
        x = end.alpha * x0 + end.sigma * epsilon_fraction * _epsilon(x, x0, point)
        if end.sigma > 0:
            variance = _reverse_variance(options.variance, point, end, variance_channels)
            x = x + variance**0.5 * draw_noise(k)
    return x


def _reverse_variance(kind: str, point: GridPoint, end: GridPoint, variance_channels: VarianceChannels) -> Any:
    """Return the variance of a reverse step of DDPM: a number, or for ``learned_range`` a tensor in the shape of x.

    It is the variance of x in the coordinates of the grid. ``fixed_small`` is the variance of q(x_s | x_t, x0).
    ``fixed_large`` is the variance of q(x_s | x_t) for x0 ~ N(0, I), which is beta_t. ``learned_range`` interpolates
    both in the logarithm (Nichol and Dhariwal 2021, eq. 15).

    Args:
        kind: option `variance` of the solver.
        point: grid point at which the step begins.
        end: grid point at which it ends. The caller ensures that it is not the image.
        variance_channels: output of the network for ``learned_range``: -1 gives the small variance, 1 the large one.
    """
    # x_t with alpha^2 + sigma^2 = 1 has beta = 1 - alpha_bar / alpha_bar_end, and DDPM's variances are beta and
    # (1 - alpha_bar_end) / (1 - alpha_bar) * beta = (1 - alpha_bar_end) * (1 - SNR / SNR_end). In the coordinates of
    # the grid both are multiplied by end.alpha^2 + end.sigma^2, and (1 - alpha_bar_end) times that is end.sigma^2.
    alpha_bar = point.alpha**2 / (point.alpha**2 + point.sigma**2)
    alpha_bar_end = end.alpha**2 / (end.alpha**2 + end.sigma**2)
    small = end.sigma**2 * (1 - _snr_ratio_root(point, end) ** 2)
    large = (end.alpha**2 + end.sigma**2) * (1 - alpha_bar / alpha_bar_end)
    if kind == "fixed_small":
        return small
    if kind == "fixed_large":
        return large
    return small * (large / small) ** ((variance_channels + 1) / 2)


def ddim(
    options: DdimOptions, process: Any, grid: list[GridPoint], predict_x0: DataPrediction, draw_noise: NoiseSource
) -> Images:
    """Sample by DDIM (Song et al. 2021, eq. 12 and 16); returns x0 (batch, channels, height, width).

    With `eta` 0, only the noise of the start is drawn.
    """
    x = grid[0].sigma * draw_noise(0)
    for k, (point, end) in enumerate(pairwise(grid), 1):
        x0 = predict_x0(x, point)
        # fraction of the noise variance at `end` that is drawn anew; epsilon keeps the rest. With `eta` 1 the drawn
        # variance is DDPM's `fixed_small`, see `_reverse_variance`; at the image it is 0.
        fresh_fraction = options.eta**2 * (1 - _snr_ratio_root(point, end) ** 2)
        x = end.alpha * x0 + end.sigma * (1 - fresh_fraction) ** 0.5 * _epsilon(x, x0, point)
        if end.sigma * fresh_fraction > 0:
            x = x + end.sigma * fresh_fraction**0.5 * draw_noise(k)
    return x


def edm(
    options: EulerOptions, process: Any, grid: list[GridPoint], predict_x0: DataPrediction, draw_noise: NoiseSource
) -> Images:
    """Sample by EDM's algorithm 2 (Karras et al. 2022): ``heun``, and ``euler`` without its lines 9 to 11.

    `options.evaluations`, the evaluations per interval, selects the method: 2 for ``heun``, 1 for ``euler``. Churn adds
    noise before an interval if the noise level is between `s_min` and `s_max`. With `s_churn` 0, only the noise of the
    start is drawn.

    Returns:
        x0 (batch, channels, height, width).
    """
    x = grid[0].sigma * draw_noise(0)
    intervals = len(grid) - 1
    # relative increase of the noise level by churn; at most sqrt(2) - 1, as in the algorithm
    gamma = min(options.s_churn / intervals, 2**0.5 - 1)
    largest_churned = math.inf if options.s_max is None else options.s_max
    is_heun = options.evaluations == 2
    for k, (point, end) in enumerate(pairwise(grid), 1):
        # churn, lines 5 and 6: add noise, and begin the interval at the higher noise level
        if gamma > 0 and options.s_min <= point.sigma <= largest_churned:
            churned_level = point.sigma * (1 + gamma)
            (churned,) = grid_points_at(process, times_of_noise_levels(process, np.array([churned_level])))
            # independent noises add their variances: the difference is what the higher level lacks
            x = x + (churned.sigma**2 - point.sigma**2) ** 0.5 * options.s_noise * draw_noise(k)
            point = churned

        # Euler's step, lines 7 and 8
        x0 = predict_x0(x, point)
        epsilon = _epsilon(x, x0, point)
        x_end = end.alpha * x0 + end.sigma * epsilon

        # Heun's correction by the mean slope of both ends; at the image the slope is undefined
        if is_heun and end.sigma > 0:
            x0_end = predict_x0(x_end, end)
            mean_x0 = (x0 + x0_end) / 2
            mean_epsilon = (epsilon + _epsilon(x_end, x0_end, end)) / 2
            x_end = x + (end.alpha - point.alpha) * mean_x0 + (end.sigma - point.sigma) * mean_epsilon
        x = x_end
    return x


def dpm_solver(
    options: OdeOptions, process: Any, grid: list[GridPoint], predict_x0: DataPrediction, draw_noise: NoiseSource
) -> Images:
    """Sample by DPM-Solver++, singlestep of orders up to 3 (Lu et al. 2022, "DPM-Solver++", algorithm 1, appendix).

    The intermediate points of a step are points of the grid, as in U-ViT's code, so each point costs one evaluation.
    The method has its full order where the points cut a step into thirds of the log-SNR. A grid that is even in time
    nearly does. Only the noise of the start is drawn.

    Returns:
        x0 (batch, channels, height, width).
    """
    # noise over signal of each point: here x is x0 + noise level * epsilon, also for a flow
    noise_levels = [point.sigma / point.alpha for point in grid]

    def predict_at(x: Images, index: int) -> Images:
        return predict_x0(grid[index].alpha * x, grid[index])

    x = noise_levels[0] * draw_noise(0)
    begin = 0
    for order in orders(intervals=len(grid) - 1, to_image=grid[-1].sigma == 0):
        end = begin + order
        x = _singlestep(x, noise_levels[begin : end + 1], predict_at, begin)
        begin = end
    return grid[-1].alpha * x


def orders(intervals: int, to_image: bool) -> list[int]:
    """Return the orders of the steps of DPM-Solver-fast (Lu et al. 2022, "DPM-Solver", section 3.4).

    A step of order n takes n intervals, so the orders sum to `intervals`, which is at least 1. They are 3 except at the
    end. A step that ends at the image, where the noise is 0, can only be of order 1.
    """
    threes, remainder = divmod(intervals, 3)
    if remainder == 0:  # the last three intervals as 2 + 1, so that the last step has order 1
        return [3] * (threes - 1) + [2, 1]
    if remainder == 1:
        return [3] * threes + [1]
    if to_image:  # the other remainders end with order 1 in any case
        return [3] * threes + [1, 1]
    return [3] * threes + [2]


def _singlestep(
    x: Images, noise_levels: list[float], predict_at: Callable[[Images, int], Images], first: int
) -> Images:
    """Take one step of DPM-Solver++ of order 1, 2 or 3 and return x at its end.

    Args:
        x: x_t over the signal, so that a step with a constant x0 leads straight to x0.
        noise_levels: noise over signal at the begin, the intermediate points and the end of the step, order + 1 of
            them.
        predict_at: ``predict_at(x, index)`` predicts x0 at the grid point with this index.
        first: index of the grid point at which the step begins.
    """
    start, *levels = noise_levels
    order = len(levels)

    # order 1: x0 is constant; x at each level is on the straight line to x0
    x0 = predict_at(x, first)
    straight = [x0 + level / start * (x - x0) for level in levels]
    if order == 1:
        return straight[0]

    # order 2: x0 changes with the slope between the first two points. The paper's weight of a slope in order 2 is
    # (1 - exp(-h)) * h / 2, which agrees with `_slope_weight` up to order h^2.
    h = [math.log(start / level) for level in levels]  # steps in log-SNR/2 from the begin to each level
    slope = (predict_at(straight[0], first + 1) - x0) / h[0]  # change of x0 per log-SNR/2
    if order == 2:
        return straight[1] - math.expm1(-h[1]) * h[1] / 2 * slope

    # order 3: the slope of order 2 leads to the second intermediate point, which gives a better slope
    x_second = straight[1] + _slope_weight(h[1]) * slope
    slope = (predict_at(x_second, first + 2) - x0) / h[1]
    return straight[2] + _slope_weight(h[2]) * slope


def _slope_weight(h: float) -> float:
    """Return h - 1 + exp(-h), the weight over a step h of an x0 that changes by 1 per unit of log-SNR/2."""
    return h + math.expm1(-h)


def _epsilon(x: Images, x0: Images, point: GridPoint) -> Images:
    """Return the noise of x at a grid point with noise, from x0; a clipped x0 changes the noise as well."""
    return (x - point.alpha * x0) / point.sigma


def _snr_ratio_root(point: GridPoint, end: GridPoint) -> float:
    """Return sqrt(SNR at `point` / SNR at `end`), below 1 because `end` has less noise; 0 if `end` is the image."""
    return point.alpha * end.sigma / (end.alpha * point.sigma)
