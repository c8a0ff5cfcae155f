"""SpeeD's process increments (Wang et al. 2025, sections 2.5 and 2.6, theorem 1, table 8, figures 1 and 4).

The increment of a forward process x_t = s_t x0 + s_t sigma_t noise is delta_t = x_{t+1} - x_t. Its variance grows at an
increasing rate (acceleration), then at a decreasing rate (deceleration), and finally hardly at all (convergence).
Times are as in the paper: x_0 is the image and x_T pure noise; x_t is timestep t - 1 of kairos. This module imports
neither torch nor scipy.

Differences from the paper, and points that the paper leaves open:

- The paper treats the noise of x_t and of x_{t+1} as independent. The variance is then
  2 - alpha-bar_t (1 + alpha_{t+1}).
  The variance of the increment given x0 is (sqrt(alpha_{t+1}) - 1)² (1 - alpha-bar_t) + beta_{t+1}: 0.0045 instead of
  0.80 at timestep 220 (t = 221) of the linear schedule. `Increments` contains both.
- The bounds of the paper use the continuous form exp(-(beta_0 + Delta-beta t/2T) t) of a linear schedule's alpha-bar.
  For other schedules the bounds use alpha-bar itself, with which they hold too.
- The column d(sigma)/dt of table 8 contains d(sigma²)/dt in the rows of VE and EDM. Here it is d(sigma²)/dt for all
  three; for VP it is (1 + sigma²)(beta_0 + Delta-beta t).
- The magnitude r-hat is 1/alpha-bar = 1 + sigma² for VP. Here VE and EDM have 1 + sigma² too, the
  magnitude of the process scaled to unit variance. The variance of VE and EDM never converges, and its growth has no
  peak in time: the growth is constant for VE and increases for EDM.
- The paper does not state the time steps of VE and EDM. Here they follow Karras et al. 2022, table 1. For VE,
  sigma has equal ratios from 0.02 to 100; for EDM, sigma^(1/7) has equal steps between sigma = 0.002 and 80.
- The paper states r only as "one magnitude reduction", and its tau as 700 of 1000 timesteps of the linear schedule. By
  theorem 1 that tau is r = 138.6; r = 10 is tau = 477. `PUBLISHED_R` is 138.6, so that the area of convergence is the
  area that the paper suppresses. r stays an open point of the paper.
- The paper has no rectified flow, x_t = (1 - t) x0 + t noise. Here it has s = 1 - t and sigma = t/(1 - t), in equal
  steps. The growth of its variance increases too. The magnitude reaches r at t = sqrt(r - 1)/(1 + sqrt(r - 1)).
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Shaped

from kairos_timesteps.diffusion.schedule import (
    NoiseSchedule,
    linear_coefficients,
    start_of_convergence,
    tau_of_magnitude,
)
from kairos_timesteps.errors import ConfigError

PUBLISHED_R = 138.6  # tau = 700.0 on the linear schedule of 1000 timesteps
PROCESSES = ("vp", "ve", "edm", "flow")
AREAS = ("acceleration", "steady", "deceleration", "convergence")

Values = Float[np.ndarray, "*shape"]
PerIncrement = Float[np.ndarray, "increments"]
PerLevel = Float[np.ndarray, "levels"]
AreaNames = Shaped[np.ndarray, "increments"]


@dataclass(frozen=True)
class ProcessCoefficients:
    """Coefficients of table 8 at times t: scale s, sigma², and their derivatives by t, float64 with the shape of t."""

    s: Values
    sigma2: Values
    s_dot: Values
    sigma2_dot: Values

    def variance_dot(self) -> Values:
        """Return the derivative by t of 2 s² sigma², the noise variances at both ends of a small step, shape of t."""
        derivative: Values = 2 * (self.s**2 * self.sigma2_dot + 2 * self.s * self.s_dot * self.sigma2)
        return derivative


def process_coefficients(process: str, t: Values, beta_0: float = 0.0, slope: float = 0.0) -> ProcessCoefficients:
    """Return scale s, sigma² and their derivatives by t, the quantities of table 8, for a process at times t.

    Args:
        process: ``vp``, ``ve``, ``edm`` or ``flow``.
        t: times, any shape; below 1 for flow. The processes ve, edm and flow ignore the two arguments that follow.
        beta_0: beta at t = 0, for vp.
        slope: slope of beta, for vp: Delta-beta/T if t counts timesteps, Delta-beta if t runs from 0 to 1.

    Raises:
        ConfigError: the process is unknown.
    """
    t = np.asarray(t, np.float64)
    zeros, ones = np.zeros_like(t), np.ones_like(t)
    if process == "vp":
        beta = slope * t + beta_0
        exponent = slope * t**2 / 2 + beta_0 * t  # integral of beta from 0 to t
        s = np.exp(-exponent / 2)
        sigma2 = np.expm1(exponent)
        return ProcessCoefficients(s, sigma2, -beta * s / 2, (1 + sigma2) * beta)
    if process == "ve":
        return ProcessCoefficients(ones, t, zeros, ones)
    if process == "edm":
        return ProcessCoefficients(ones, t**2, zeros, 2 * t)
    if process == "flow":
        return ProcessCoefficients(1 - t, (t / (1 - t)) ** 2, -ones, 2 * t / (1 - t) ** 3)
    raise ConfigError(f"process: got {process!r}, allowed: {', '.join(PROCESSES)}")


@dataclass(frozen=True)
class Increments:
    """Increments of a process; arrays are (T,), with the increment from time t[k] to the next time in row k.

    Attributes:
        process: ``vp``, ``ve``, ``edm`` or ``flow``.
        t: times; 0 ... T - 1 for vp.
        s: scale of x0 at t.
        sigma: standard deviation of the noise at t, relative to s.
        mean: mean of the increment as a multiple of x0: phi_t, Delta.
        variance: variance in the paper, which treats the noise at both ends as independent: Psi_t, Sigma.
        own_variance: variance of the increment given x0.
        mean_squared_bound: upper bound of mean²: phi-hat_t.
        variance_bound: lower bound of `variance`: Psi-hat_t = 2 s² sigma².
        change: derivative of `variance_bound` by t.
        magnitude: r-hat_t.
        r: magnitude above which a timestep has converged.
        deceleration: time at which deceleration begins, the argmax of `change`; None if `change` is constant or is
            largest in its last row.
        convergence: time, not rounded to a row, at which the magnitude reaches r; None if that is not before the end.
        suppression: time from which sampler ``speed`` without r suppresses, 0.7 T; None without timesteps.
    """

    process: str
    t: PerIncrement
    s: PerIncrement
    sigma: PerIncrement
    mean: PerIncrement
    variance: PerIncrement
    own_variance: PerIncrement
    mean_squared_bound: PerIncrement
    variance_bound: PerIncrement
    change: PerIncrement
    magnitude: PerIncrement
    r: float
    deceleration: float | None
    convergence: float | None
    suppression: float | None

    def columns(self) -> dict[str, PerIncrement]:
        """Return the attributes that are arrays, by name and in their order; each (T,)."""
        return {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}

    def area(self) -> AreaNames:
        """Return the area of every increment, a name in `AREAS`, (T,).

        The area is ``convergence`` where the magnitude exceeds r. Elsewhere it is ``acceleration`` before time
        `deceleration`, and ``deceleration`` from then on. If the variance grows at a constant rate, it is ``steady``
        instead. If the growth is largest in the last row, it is ``acceleration`` up to convergence.
        """
        if np.ptp(self.change) == 0:
            unconverged_area = np.full(len(self.t), "steady")
        else:
            after_last_time = self.t[-1] + 1  # without a peak, all times are before it
            peak = after_last_time if self.deceleration is None else self.deceleration
            unconverged_area = np.where(self.t < peak, "acceleration", "deceleration")
        return np.where(self.magnitude > self.r, "convergence", unconverged_area)


def increments(
    process: str, schedule: NoiseSchedule | None = None, timesteps: int = 1000, r: float = PUBLISHED_R
) -> Increments:
    """Compute the moments of x_{t+1} - x_t at each noise level of a process, and the times at which its areas begin.

    The areas are defined in the paper: acceleration, deceleration and convergence of the increment's variance. The
    first increment starts at the image, t = 0.

    Args:
        process: ``vp`` with a noise schedule, or ``ve``, ``edm`` or ``flow`` with `timesteps` noise levels.
        schedule: noise schedule, for vp; other processes ignore it.
        timesteps: number of noise levels of the other processes, 2 or more.
        r: magnitude above which a timestep has converged.

    Raises:
        ConfigError: the process is unknown, process vp has no schedule, or r is not above 1.
    """
    if not 1 < r < np.inf:
        raise ConfigError(f"r: got {r:g}, allowed: number > 1, the magnitude where convergence begins")
    if process != "vp":
        levels = _continuous_levels(process, timesteps, r)
    elif schedule is not None:
        levels = _levels_of_schedule(schedule, r)
    else:
        raise ConfigError("schedule: none given, process vp needs one")
    t, s = levels.t, levels.s

    # moments of the increments
    noise_variance = (s * levels.sigma) ** 2
    start_variance, end_variance = noise_variance[:-1], noise_variance[1:]  # at x_t and at x_{t+1}
    ratio = s[1:] / s[:-1]
    # x_{t+1} is ratio * x_t plus independent noise of variance end_variance - ratio² start_variance;
    # the increment x_{t+1} - x_t is therefore (ratio - 1) * x_t plus that noise
    variance_given_x0 = (ratio - 1) ** 2 * start_variance + end_variance - ratio**2 * start_variance

    # beginnings of the areas
    change = levels.change[:-1]
    peak = int(np.argmax(change))
    has_peak = np.ptp(change) > 0 and peak < len(change) - 1
    return Increments(
        process=process,
        t=t[:-1],
        s=s[:-1],
        sigma=levels.sigma[:-1],
        mean=np.diff(s),
        variance=end_variance + start_variance,  # the paper takes the noise of both ends as independent
        own_variance=variance_given_x0,
        mean_squared_bound=levels.mean_squared_bound[:-1],
        variance_bound=levels.variance_bound[:-1],
        change=change,
        magnitude=levels.magnitude[:-1],
        r=r,
        deceleration=float(t[peak]) if has_peak else None,
        convergence=levels.convergence if levels.convergence < t[-1] else None,
        suppression=float(start_of_convergence(None, None, schedule)) if process == "vp" and schedule else None,
    )


class _Levels(NamedTuple):
    """Values of a process at t = 0, the image, and at each noise level; arrays are (T + 1,).

    `Increments` describes the fields, except `convergence`: the time at which the magnitude is r, in the process or
    beyond its end.
    """

    t: PerLevel
    s: PerLevel
    sigma: PerLevel
    mean_squared_bound: PerLevel
    variance_bound: PerLevel
    change: PerLevel
    magnitude: PerLevel
    convergence: float


def _continuous_levels(process: str, timesteps: int, r: float) -> _Levels:
    """Compute the values of ``flow``, ``ve`` or ``edm`` at the image and at `timesteps` noise levels, 2 or more.

    The magnitude is 1 + sigma². Solved for t, magnitude = r gives the time of convergence.

    Raises:
        ConfigError: the process is unknown.
    """
    fraction = np.arange(timesteps) / (timesteps - 1)
    if process == "flow":
        # at t = 1 the signal-to-noise ratio would be 0; `diffusion.processes.Flow` has an equal limit
        t = np.minimum((np.arange(timesteps) + 1) / timesteps, 1 - 1e-5)
        convergence = 1 - 1 / (1 + (r - 1) ** 0.5)  # solves sqrt(r - 1) = sigma = t / (1 - t) = 1 / (1 - t) - 1
    elif process == "ve":
        t = (0.02 * (100 / 0.02) ** fraction) ** 2  # sigma from 0.02 to 100, squared
        convergence = r - 1  # r - 1 = sigma² = t
    elif process == "edm":
        low, high = 0.002 ** (1 / 7), 80 ** (1 / 7)
        t = (low + fraction * (high - low)) ** 7
        convergence = (r - 1) ** 0.5  # sqrt(r - 1) = sigma = t
    else:
        raise ConfigError(f"process: got {process!r}, allowed: {', '.join(PROCESSES)}")
    t = np.concatenate([[0.0], t])
    form = process_coefficients(process, t)
    largest_drop_of_s = np.abs(np.diff(form.s)).max()  # s never rises
    return _Levels(
        t=t,
        s=form.s,
        sigma=np.sqrt(form.sigma2),
        mean_squared_bound=np.full_like(t, largest_drop_of_s**2),
        variance_bound=2 * form.s**2 * form.sigma2,
        change=form.variance_dot(),
        magnitude=1 + form.sigma2,
        convergence=float(convergence),
    )


def _levels_of_schedule(schedule: NoiseSchedule, r: float) -> _Levels:
    """Compute the values of VP at the image and at each timestep of a noise schedule.

    The linear schedule has table 8's closed form, which gives the bounds, the change and the magnitude. For other
    schedules, and if the last beta is clipped, these use alpha-bar itself, and the change is a numerical derivative.
    The time of convergence is then interpolated, or infinite if the magnitude stays below r. Scale and sigma follow
    from alpha-bar in both cases.
    """
    t = np.arange(schedule.timesteps + 1.0)  # 0 is the image
    alphas_cumprod = np.concatenate([[1.0], schedule.alphas_cumprod])
    if schedule.name == "linear" and schedule.betas[-1] < 0.999:  # the limit at which `make_schedule` clips
        delta, beta_0 = linear_coefficients(schedule)
        form = process_coefficients("vp", t, beta_0, delta / schedule.timesteps)
        decay = form.s**2  # alpha-bar in continuous form
        change = form.variance_dot()
        convergence = tau_of_magnitude(r, schedule)
    else:
        decay = alphas_cumprod
        change = np.gradient(2 * (1 - decay))
        # the magnitude 1 / decay reaches r where -log(decay) reaches log(r)
        convergence = np.interp(np.log(r), -np.log(decay), t, right=np.inf)
    # mean_squared_bound: mean² = alpha-bar_t (1 - sqrt(1 - beta_{t+1}))² <= alpha-bar_t beta_{t+1},
    # since 1 - sqrt(1 - beta) is between 0 and beta, and beta <= 1
    return _Levels(
        t=t,
        s=np.sqrt(alphas_cumprod),
        sigma=np.sqrt(1 / alphas_cumprod - 1),
        mean_squared_bound=schedule.betas.max() * decay,
        variance_bound=2 * (1 - decay),
        change=change,
        magnitude=1 / decay,
        convergence=float(convergence),
    )
