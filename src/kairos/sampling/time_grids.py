"""Where sampling visits a process: places from noise to the image, in coordinates in which its ODE is straight.

For a flow these are x_t itself. For every other process they are x_t over the signal, in which it is EDM's: x0 plus
noise of level sigma (Karras et al. 2022, eq. 4), so that EDM's sampler serves all of them.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kairos_timesteps.diffusion.processes import Discrete
from kairos_timesteps.errors import ConfigError

Array = NDArray[Any]


class GridPoint(NamedTuple):
    """A place of the process: x_t = scale x with x = signal x0 + noise eps, at the process' own time t."""

    t: Any
    signal: float
    noise: float
    scale: float


IMAGE_POINT = GridPoint(None, 1.0, 0.0, 1.0)


def build_time_grid(process: Any, steps: int, scheduler: dict[str, Any]) -> list[GridPoint]:
    """The ends of `steps` intervals from noise to the image, steps + 1 places, as the `resolve_solver` scheme spreads them.

    Raises:
        ConfigError: karras' levels are closer than the timesteps of a discrete process.
    """
    spacing = scheduler.get("spacing", "uniform")
    if spacing == "karras":
        times = times_of_noise_levels(process, karras_noise_levels(process, steps, scheduler))
        if len(set(times.tolist())) < steps:
            raise ConfigError(
                f"sampling.steps: got {steps} with spacing karras, allowed: as many as there are timesteps near its "
                "noise levels; fewer steps, a larger sigma_min or another spacing"
            )
    elif spacing == "uniform":
        times = process.times(np.arange(steps, 0, -1) / steps)
    else:
        times = spaced_timesteps(spacing, steps, process.schedule.timesteps) + scheduler.get("offset", 0)
    if scheduler.get("end") == "first":
        signal, noise = process.coefficients(np.array([0]))
        return [
            *grid_points_at(process, times),
            GridPoint(0, float(signal[0]), float(noise[0]), 1.0),
        ]  # x_t itself is the image
    return [*grid_points_at(process, times), IMAGE_POINT]


def grid_points_at(process: Any, times: Array) -> list[GridPoint]:
    """The places of some times of the process."""
    signal, noise = process.coefficients(times)
    scale = np.where(np.isclose(signal + noise, 1), 1.0, signal)  # of a flow the path is straight as it is
    return list(map(GridPoint, times, *(values.tolist() for values in (signal / scale, noise / scale, scale))))


def spaced_timesteps(spacing: str, steps: int, timesteps: int) -> NDArray[np.int64]:
    """The timesteps that `steps` intervals begin at, descending, distinct (Lin et al. 2024, table 2).

    ``trailing`` holds t = T - 1, ``leading`` holds t = 0, ``linspace`` both.
    """
    ascending: Array
    if spacing == "leading":
        ascending = np.arange(steps) * (timesteps // steps)
    elif spacing == "trailing":
        ascending = np.round(np.arange(1, steps + 1) * timesteps / steps) - 1
    else:
        ascending = np.round(np.linspace(0, timesteps - 1, steps)) if steps > 1 else np.array([timesteps - 1])
    return ascending.astype(np.int64)[::-1].copy()


def karras_noise_levels(process: Any, steps: int, scheduler: dict[str, Any]) -> Array:
    """Noise over signal as EDM spreads it (Karras et al. 2022, eq. 5), descending; the image comes after the last."""
    signal, noise = process.coefficients(process.times(np.array([0.0, 1.0])))
    low, high = noise / signal
    low, high = max(low, scheduler["sigma_min"] or low), min(high, scheduler["sigma_max"] or high)
    rho, share = scheduler["rho"], np.linspace(0, 1, steps)
    return np.asarray(((1 - share) * high ** (1 / rho) + share * low ** (1 / rho)) ** rho)


def times_of_noise_levels(process: Any, sigma: Array) -> Array:
    """The process' own times of noise over signal; of a discrete process the nearest timestep's."""
    if isinstance(process, Discrete):
        return np.abs(process.schedule.snr[:, None] ** -0.5 - sigma).argmin(0)
    low, high = np.zeros_like(sigma), np.full_like(sigma, 2.0)  # fractions; churn goes beyond the last
    for _ in range(60):
        middle = (low + high) / 2
        above = process.snr(process.times(middle)) ** -0.5 > sigma
        low, high = np.where(above, low, middle), np.where(above, middle, high)
    return np.asarray(process.times((low + high) / 2))
