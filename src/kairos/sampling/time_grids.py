"""Time grids of solvers: points from noise to the image, in coordinates in which the ODE of the process is straight.

For a flow these coordinates are x_t itself. For every other process they are x_t divided by the signal coefficient.
That is EDM's form, x0 plus noise of level sigma (Karras et al. 2022, eq. 4), so EDM's sampler serves all processes.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int, Num

from kairos_timesteps.diffusion.processes import Discrete
from kairos_timesteps.errors import ConfigError, demand

if TYPE_CHECKING:
    from kairos.sampling.settings import SolverOptions

TimeArray = Num[np.ndarray, "times"]
Timesteps = Int[np.ndarray, "times"]
NoiseLevels = Float[np.ndarray, "times"]

_BISECTIONS = 60  # halvings of an interval of length 2: below the spacing of float64 numbers


class GridPoint(NamedTuple):
    """A point of a solver's time grid: x = alpha * x0 + sigma * epsilon, and x_t = scale * x.

    Attributes:
        t: time in the unit of the process; None where the network is not evaluated.
        alpha: coefficient of x0 in the coordinates of the grid.
        sigma: coefficient of epsilon in the coordinates of the grid.
        scale: factor from the coordinates of the grid to x_t.
    """

    t: Any
    alpha: float
    sigma: float
    scale: float


IMAGE_POINT = GridPoint(t=None, alpha=1.0, sigma=0.0, scale=1.0)


def build_time_grid(process: Any, steps: int, scheduler: "SolverOptions") -> list[GridPoint]:
    """Return the `steps` + 1 points that bound the intervals from noise to the image.

    The last point is the image, or the first timestep of the process if the solver has an option `end` of ``first``.
    The caller has replaced spacing ``auto`` of the solver, see `resolve_solver`.

    Raises:
        ConfigError: two noise levels of spacing karras fall on one timestep of a discrete process, or the options leave
            it no range of noise levels.
    """
    times = _grid_times(process, steps, scheduler)
    points = grid_points_at(process, times)
    if getattr(scheduler, "end", "image") != "first":
        return [*points, IMAGE_POINT]
    signal, noise = process.coefficients(np.array([0]))
    # latent diffusion takes x_t at the first timestep for the image, so x_t is not divided by the signal
    first_timestep = GridPoint(t=0, alpha=float(signal[0]), sigma=float(noise[0]), scale=1.0)
    return [*points, first_timestep]


def _grid_times(process: Any, steps: int, scheduler: "SolverOptions") -> TimeArray:
    """Return the times at which the intervals begin, (steps,), descending; timesteps for a discrete process.

    Spacing ``uniform`` has equal fractions of the process. Timesteps include the option `offset`, if there is one. The
    caller ensures that the process allows the spacing.

    Raises:
        ConfigError: two noise levels of spacing karras fall on one timestep, or the options leave it no range of noise
            levels.
    """
    spacing = scheduler.spacing
    if spacing == "uniform":
        return np.asarray(process.times(np.arange(steps, 0, -1) / steps))
    if spacing != "karras":
        return spaced_timesteps(spacing, steps, process.schedule.timesteps) + getattr(scheduler, "offset", 0)
    times = times_of_noise_levels(process, karras_noise_levels(process, steps, scheduler))
    distinct = len(set(times.tolist()))
    if distinct < steps:
        raise ConfigError(
            f"sampling.steps: got {steps} with spacing karras, allowed: at most {distinct}, the number of distinct "
            "timesteps at its noise levels; set fewer steps, a larger sigma_min or another spacing"
        )
    return times


def grid_points_at(process: Any, times: TimeArray) -> list[GridPoint]:
    """Return the grid points at `times`, (n,): timesteps of a discrete process, times of a continuous one.

    The coordinates are x_t for a flow (scale 1), and x_t over the signal coefficient for other processes (alpha 1).
    """
    signal, noise = process.coefficients(times)
    # a flow has signal + noise = 1 at all times, and its path is straight in x_t itself
    is_flow = np.isclose(signal + noise, 1)
    scale = np.where(is_flow, 1.0, signal)
    alpha, sigma = signal / scale, noise / scale
    # `times` is no list: elements keep their dtype, which distinguishes timesteps (integers) from continuous times
    return list(map(GridPoint, times, alpha.tolist(), sigma.tolist(), scale.tolist()))


def spaced_timesteps(spacing: str, steps: int, timesteps: int) -> Timesteps:
    """Return the distinct timesteps at which `steps` intervals begin, (steps,), descending (Lin et al. 2024, table 2).

    Spacing ``trailing`` includes t = T - 1, ``leading`` includes t = 0, ``linspace`` includes both, or T - 1 alone for
    one step. Any other text is treated as ``linspace``. The caller ensures that there are at most `timesteps` steps.
    """
    ascending: TimeArray
    if spacing == "leading":
        ascending = np.arange(steps) * (timesteps // steps)
    elif spacing == "trailing":
        ascending = np.round(np.arange(1, steps + 1) * timesteps / steps) - 1
    elif steps > 1:
        ascending = np.round(np.linspace(0, timesteps - 1, steps))
    else:
        ascending = np.array([timesteps - 1])
    return ascending.astype(np.int64)[::-1].copy()  # torch accepts no negative strides


def karras_noise_levels(process: Any, steps: int, scheduler: "SolverOptions") -> NoiseLevels:
    """Return EDM's noise levels (noise over signal), (steps,), descending (Karras et al. 2022, eq. 5).

    The last level is `sigma_min` or the smallest of the process; the noise-free image is not included. With one step,
    the only level is the largest. Options `sigma_min` and `sigma_max` can only narrow the range of the process. For a
    discrete process, the levels may differ from the levels of its timesteps.

    Raises:
        ConfigError: `sigma_min` is not below the largest level of the process, or `sigma_max` not above its smallest.
    """
    signal, noise = process.coefficients(process.times(np.array([0.0, 1.0])))
    process_smallest, process_largest = noise / signal  # levels of the process at fractions 0 and 1
    smallest, largest = process_smallest, process_largest
    sigma_min, sigma_max = scheduler.sigma_min, scheduler.sigma_max
    if sigma_min is not None:
        allowed = f"less than {process_largest:.6g}, the largest noise level of the process"
        demand(sigma_min < process_largest, "sampling.scheduler.sigma_min", sigma_min, allowed)
        smallest = max(smallest, sigma_min)
    if sigma_max is not None:
        allowed = f"greater than {process_smallest:.6g}, the smallest noise level of the process"
        demand(sigma_max > process_smallest, "sampling.scheduler.sigma_max", sigma_max, allowed)
        largest = min(largest, sigma_max)
    rho = scheduler.rho
    position = np.linspace(0, 1, steps)
    return np.asarray(((1 - position) * largest ** (1 / rho) + position * smallest ** (1 / rho)) ** rho)


def times_of_noise_levels(process: Any, sigma: NoiseLevels) -> TimeArray:
    """Return the times of a process at noise levels (noise over signal), (n,).

    For a discrete process they are the timesteps with the nearest sigma, int64. For a continuous process they are
    float64 times between fraction 0 (image) and 2; fraction 1 is pure noise, and churn goes beyond it. Levels outside
    give these ends.
    """
    if isinstance(process, Discrete):
        timestep_levels = process.schedule.snr**-0.5  # (T,)
        nearest: TimeArray = np.abs(timestep_levels[:, None] - sigma).argmin(0)
        return nearest
    # bisection of all fractions at once; the noise level grows with the fraction
    low_fraction = np.zeros_like(sigma)
    high_fraction = np.full_like(sigma, 2.0)  # churn adds noise beyond fraction 1
    for _ in range(_BISECTIONS):
        middle = (low_fraction + high_fraction) / 2
        is_above = process.snr(process.times(middle)) ** -0.5 > sigma
        low_fraction = np.where(is_above, low_fraction, middle)
        high_fraction = np.where(is_above, middle, high_fraction)
    return np.asarray(process.times((low_fraction + high_fraction) / 2))
