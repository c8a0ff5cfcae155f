"""SpeeD's process increments (Wang et al. 2025, sections 2.5 and 2.6, theorem 1, table 8, figures 1 and 4).

What a forward process x_t = s_t x0 + s_t sigma_t noise adds from one timestep to the next, delta_t = x_{t+1} - x_t, and
where its variance grows ever faster (acceleration), ever slower (deceleration) and hardly any more (convergence).
Time here is the paper's: x_0 is the image, x_T the last; x_t is our timestep t - 1. numpy alone.

What differs from the paper, or is left open by it:

- It treats the noise of x_t and of x_{t+1} as independent, which gives the variance 2 - alpha-bar_t (1 + alpha_{t+1}).
  The increment's own variance given x0 is (sqrt(alpha_{t+1}) - 1)² (1 - alpha-bar_t) + beta_{t+1}: 0.0045 instead of
  0.80 at our timestep 220 of the linear schedule (t = 221). Both are given.
- Its bounds stand on the continuous form exp(-(beta_0 + Delta-beta t/2T) t) of a linear schedule's alpha-bar. Other
  schedules have alpha-bar itself in its place, with which the same bounds hold.
- The column of d(sigma)/dt in its table 8 holds d(sigma²)/dt in the rows of VE and EDM; here it is d(sigma²)/dt for
  all three, VP's being (1 + sigma²)(beta_0 + Delta-beta t).
- The magnitude r-hat is 1/alpha-bar = 1 + sigma² for VP. VE and EDM have 1 + sigma² too: it is that of the process
  scaled to unit variance. Their own variance never converges, and its growth by time has no peak: it is constant for
  VE and ever faster for EDM.
- It does not state the time steps of VE and EDM; they are those of Karras et al. 2022, table 1: sigma from 0.02 to 100
  in equal ratios, and from 0.002 to 80, evenly spread in sigma^(1/7).
- It has no rectified flow, x_t = (1 - t) x0 + t noise; that is s = 1 - t and sigma = t/(1 - t), in equal steps. Its
  variance grows ever faster too, the magnitude reaches r at t = sqrt(r - 1)/(1 + sqrt(r - 1)).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kairos_timesteps.diffusion.schedule import Array, NoiseSchedule, linear_coefficients, tau_of_magnitude
from kairos_timesteps.errors import ConfigError

PROCESSES = ("vp", "ve", "edm", "flow")
AREAS = ("acceleration", "steady", "deceleration", "convergence")


@dataclass(frozen=True)
class Ingredients:
    """Table 8 at times t: scale s, sigma², and their derivatives by t; each of the shape of t."""

    s: Array
    sigma2: Array
    s_dot: Array
    sigma2_dot: Array

    def variance_dot(self) -> Array:
        """Derivative of 2 s² sigma², the variance of both ends of an infinitesimal increment."""
        return 2 * (self.s**2 * self.sigma2_dot + 2 * self.s * self.s_dot * self.sigma2)


def table_8(process: str, t: Array, beta_0: float = 0.0, slope: float = 0.0) -> Ingredients:
    """The ingredients of a process at times t.

    Args:
        process: ``vp``, ``ve``, ``edm`` or ``flow``.
        t: times, any shape; of flow below 1.
        beta_0: of vp, at t = 0.
        slope: of vp's beta; Delta-beta/T where t counts timesteps, Delta-beta where it runs to 1.

    Raises:
        ConfigError: an unknown process.
    """
    t = np.asarray(t, np.float64)
    zeros, ones = np.zeros_like(t), np.ones_like(t)
    if process == "vp":
        exponent, beta = slope * t**2 / 2 + beta_0 * t, slope * t + beta_0
        s, sigma2 = np.exp(-exponent / 2), np.expm1(exponent)
        return Ingredients(s, sigma2, -beta * s / 2, (1 + sigma2) * beta)
    if process == "ve":
        return Ingredients(ones, t, zeros, ones)
    if process == "edm":
        return Ingredients(ones, t**2, zeros, 2 * t)
    if process == "flow":
        return Ingredients(1 - t, (t / (1 - t)) ** 2, -ones, 2 * t / (1 - t) ** 3)
    raise ConfigError(f"process: got {process!r}, allowed: {', '.join(PROCESSES)}")


@dataclass(frozen=True)
class Increments:
    """The increments of a process; arrays are (T,), row k from time t[k] to the next.

    Attributes:
        process: ``vp``, ``ve``, ``edm`` or ``flow``.
        t: time; vp: 0 ... T - 1.
        s: scale of x0 at t.
        sigma: noise relative to it.
        mean: of the increment, in multiples of x0: phi_t, Delta.
        variance: as the paper has it, noise of both ends taken as independent: Psi_t, Sigma.
        own_variance: of the increment given x0.
        mean_squared_bound: upper bound of mean²: phi-hat_t.
        variance_bound: lower bound of `variance`: Psi-hat_t = 2 s² sigma².
        change: derivative of `variance_bound` by t.
        magnitude: r-hat_t.
        r: the magnitude from which on a timestep counts as converged.
        deceleration: time where deceleration begins, argmax of `change`; None where that is at no time within.
        convergence: time where the magnitude reaches r; None where it does not.
    """

    process: str
    t: Array
    s: Array
    sigma: Array
    mean: Array
    variance: Array
    own_variance: Array
    mean_squared_bound: Array
    variance_bound: Array
    change: Array
    magnitude: Array
    r: float
    deceleration: float | None
    convergence: float | None

    def columns(self) -> dict[str, Array]:
        """The arrays by name, each (T,)."""
        return {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}

    def area(self) -> NDArray[np.str_]:
        """The area of every increment, names of `AREAS`, (T,)."""
        if np.ptp(self.change) == 0:
            before = np.full(len(self.t), "steady")
        else:
            peak = self.t[-1] + 1 if self.deceleration is None else self.deceleration
            before = np.where(self.t < peak, "acceleration", "deceleration")
        return np.where(self.magnitude > self.r, "convergence", before)


def increments(
    process: str, schedule: NoiseSchedule | None = None, timesteps: int = 1000, r: float = 5.0
) -> Increments:
    """The increments of a process.

    Args:
        process: ``vp`` on the noise schedule, or ``ve``, ``edm`` or ``flow`` on `timesteps` levels of their own.
        schedule: of vp.
        timesteps: of the others, 2 or more.
        r: magnitude from which on a timestep counts as converged.

    Raises:
        ConfigError: an unknown process, or r is not above 1.
    """
    if not 1 < r < np.inf:
        raise ConfigError(f"r: got {r:g}, allowed: number > 1, the magnitude where convergence begins")
    if process != "vp":
        t, s, sigma, *bounds, reached = _of_levels(process, timesteps, r)
    elif schedule is not None:
        t, s, sigma, *bounds, reached = _of_schedule(schedule, r)
    else:
        raise ConfigError("schedule: none given, process vp needs one")
    noise, ratio = (s * sigma) ** 2, s[1:] / s[:-1]
    own = (ratio - 1) ** 2 * noise[:-1] + noise[1:] - ratio**2 * noise[:-1]
    both = noise[1:] + noise[:-1]
    mean_bound, variance_bound, change, magnitude = (values[:-1] for values in bounds)
    rows = (t[:-1], s[:-1], sigma[:-1], np.diff(s), both, own, mean_bound, variance_bound, change, magnitude)
    peak = int(np.argmax(change))
    deceleration = None if np.ptp(change) == 0 or peak == len(change) - 1 else float(t[peak])
    return Increments(process, *rows, r, deceleration, float(reached) if reached < t[-1] else None)


def _of_levels(process: str, timesteps: int, r: float) -> tuple[Any, ...]:
    """Compute values at t = 0, the image, and at each noise level of a process, all (T + 1,).

    The order is t, s, sigma, bounds of mean² and variance, change of the variance bound, magnitude. The last value is
    the time at which the magnitude is r.
    """
    place = np.arange(timesteps) / (timesteps - 1)
    if process == "flow":  # up to where its signal-to-noise ratio is still a number, as in `diffusion.processes.Flow`
        t, reached = np.minimum((np.arange(timesteps) + 1) / timesteps, 1 - 1e-5), 1 - 1 / (1 + (r - 1) ** 0.5)
    elif process == "ve":
        t, reached = (0.02 * (100 / 0.02) ** place) ** 2, r - 1
    else:
        low, high = 0.002 ** (1 / 7), 80 ** (1 / 7)
        t, reached = (low + place * (high - low)) ** 7, (r - 1) ** 0.5
    t = np.concatenate([[0.0], t])
    form = table_8(process, t)
    bound = np.full_like(t, np.diff(form.s, prepend=1).min() ** 2)
    growth = bound, 2 * form.s**2 * form.sigma2, form.variance_dot(), 1 + form.sigma2
    return t, form.s, np.sqrt(form.sigma2), *growth, reached


def _of_schedule(schedule: NoiseSchedule, r: float) -> tuple[Any, ...]:
    """Compute levels and bounds of VP at t = 0, the image, and at each timestep of the schedule, all (T + 1,).

    The order is that of `_of_levels`: t, s, sigma, bounds of mean² and variance, change of the variance bound,
    magnitude. The last value is the time at which the magnitude is r.
    """
    t = np.arange(schedule.timesteps + 1.0)
    alphas_cumprod = np.concatenate([[1.0], schedule.alphas_cumprod])
    if schedule.name == "linear" and schedule.betas[-1] < 0.999:  # where they are not cut off
        delta, beta_0 = linear_coefficients(schedule)
        form = table_8("vp", t, beta_0, delta / schedule.timesteps)
        decay, change, reached = form.s**2, form.variance_dot(), tau_of_magnitude(r, schedule)
    else:
        decay, change = alphas_cumprod, np.gradient(2 * (1 - alphas_cumprod))
        reached = float(np.interp(np.log(r), -np.log(decay), t, right=np.inf))
    growth = schedule.betas.max() * decay, 2 * (1 - decay), change, 1 / decay
    return t, np.sqrt(alphas_cumprod), np.sqrt(1 / alphas_cumprod - 1), *growth, reached
