"""Discrete noise schedules and the quantities strategies are built from, in float64 numpy: no torch needed.

Index convention: t = 0 ... T-1 (the papers write 1 ... T).
"""

import functools
import math
import warnings
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from kairos_timesteps.errors import demand, rejection
from kairos_timesteps.lazy import Tensor
from kairos_timesteps.numeric import Array as Array
from kairos_timesteps.numeric import Values, integers

SCHEDULES = ("linear", "cosine", "quadratic", "scaled_linear")
PREDICTIONS = ("epsilon", "x0", "v")
CONTINUOUS = ("edm", "fdm", "flow", "vp")  # kairos' processes in continuous time
VARIANCES = ("fixed_large", "fixed_small", "learned_range")
ENDS = {"linear": (1e-4, 0.02), "quadratic": (1e-4, 0.02), "scaled_linear": (0.00085, 0.012)}  # usual betas
CELLS = 1000  # cells of a continuous process: rows of tables, and timesteps of strategies defined per timestep


@dataclass(frozen=True, eq=False)
class NoiseSchedule:
    """A discrete Gaussian process given by its betas, shape (T,), or a continuous one cut into T cells.

    `cell_times` are the process' times of the cells, (T,): 0 ... T - 1 for a discrete process.
    """

    betas: Array
    variance: str = "fixed_large"
    name: str = "custom"
    cell_times: Array | None = None

    @classmethod
    def of_alphas_cumprod(cls, alphas_cumprod: Array) -> "NoiseSchedule":
        """Return the schedule with the given alpha-bar, (T,).

        Raises:
            ConfigError: the values do not fall from one to the next within (0, 1).
        """
        values = np.asarray(alphas_cumprod, np.float64)
        allowed = "alpha-bar (not betas), two or more decreasing numbers between 0 and 1"
        demand(values.ndim == 1 and len(values) > 1, "alphas_cumprod", f"shape {values.shape}", allowed)
        rises = np.flatnonzero(~(np.diff(values) < 0))  # also at NaN
        if len(rises):
            first = int(rises[0])
            got = f"{values[first]:.6g} at {first} and {values[first + 1]:.6g} at {first + 1}"
            raise rejection("alphas_cumprod", got, f"{allowed}, not rounded to less than float32")
        got = f"{values[0]:.6g} to {values[-1]:.6g}"
        allowed += "; a schedule of zero terminal signal-to-noise ratio must end above 0"
        demand(values[0] < 1 and values[-1] > 0, "alphas_cumprod", got, allowed)
        return cls(1 - values / np.concatenate([[1.0], values[:-1]]))

    @property
    def timesteps(self) -> int:
        """Number of timesteps T."""
        return len(self.betas)

    @overload
    def cells(self, fractions: Array) -> NDArray[np.int64]: ...
    @overload
    def cells(self, fractions: Tensor) -> Tensor: ...
    def cells(self, fractions: Any) -> Any:
        """Return the timestep of each fraction of the process, min(floor(u T), T - 1), int64, elementwise."""
        return integers(fractions * self.timesteps).clip(0, self.timesteps - 1)

    @property
    def times(self) -> Array:
        """The process' own time of every cell, float64 (T,)."""
        return np.arange(self.timesteps, dtype=np.float64) if self.cell_times is None else self.cell_times

    @functools.cached_property
    def alphas_cumprod(self) -> Array:
        """alpha-bar_t = prod (1 - beta), shape (T,)."""
        return np.asarray(np.cumprod(1 - self.betas), np.float64)

    @functools.cached_property
    def snr(self) -> Array:
        """Signal-to-noise ratio alpha-bar / (1 - alpha-bar), shape (T,)."""
        return self.alphas_cumprod / (1 - self.alphas_cumprod)

    @functools.cached_property
    def posterior_variance(self) -> Array:
        """Variance of q(x_{t-1} | x_t, x_0), shape (T,); 0 at t = 0 is replaced by its value at t = 1."""
        before = np.append(1.0, self.alphas_cumprod[:-1])
        variance: Array = self.betas * (1 - before) / (1 - self.alphas_cumprod)
        variance[0] = variance[1]
        return variance

    @functools.cached_property
    def vlb(self) -> Array:
        """c_t, the VLB's coefficient of the squared error of epsilon, shape (T,) (Kim et al. 2025, eq. 7)."""
        sigma2 = self.posterior_variance if self.variance == "fixed_small" else self.betas
        return self.betas**2 / (2 * sigma2 * (1 - self.betas) * (1 - self.alphas_cumprod))

    def in_prediction(self, epsilon_weight: Array, prediction: str) -> Array:
        """Convert weights on the squared error of epsilon, (T,), to weights on the squared error of a prediction.

        MSE_epsilon = SNR * MSE_x0 = alpha-bar * MSE_v; see `error_ratio`.
        """
        if prediction == "epsilon":
            return epsilon_weight
        return epsilon_weight * self.snr / error_ratio(self.snr, prediction)


def error_ratio(snr: Values, prediction: str) -> Values:
    """Return the squared error of a prediction over the squared error of the implied x0, elementwise.

    epsilon: SNR; x0: 1; v: SNR + 1; flow (noise - x0 of x_t = (1 - t) x0 + t noise): (1 + sqrt(SNR))².
    """
    if prediction == "epsilon":
        return snr
    if prediction == "flow":
        return (1 + snr**0.5) ** 2
    return snr**0 if prediction == "x0" else snr + 1


def make_schedule(
    schedule: str = "linear",
    timesteps: int = 1000,
    scale_betas: bool = True,
    variance: str = "fixed_large",
    beta_start: float | None = None,
    beta_end: float | None = None,
) -> NoiseSchedule:
    """Return a noise schedule by its name; warn if its process does not end in noise.

    Linear and quadratic: end points of beta are 1e-4 and 0.02 (Ho et al. 2020). scaled_linear is quadratic with the end
    points of latent diffusion, 0.00085 and 0.012 (Rombach et al. 2022). `beta_start` and `beta_end` replace these end
    points; they do not change cosine (Nichol and Dhariwal 2021, eq. 17). With `scale_betas`, end points are multiplied
    by 1000/T for other T, as in improved DDPM; otherwise the process of T = 100 does not reach noise. Betas are capped
    at 0.999.

    Raises:
        ConfigError: an unknown schedule.
    """
    scale = 1000 / timesteps if scale_betas else 1.0
    usual_first, usual_last = ENDS.get(schedule, (0.0, 0.0))
    first, last = (beta_start or usual_first) * scale, (beta_end or usual_last) * scale
    if schedule == "linear":
        betas = np.linspace(first, last, timesteps)
    elif schedule in ("quadratic", "scaled_linear"):
        betas = np.linspace(first**0.5, last**0.5, timesteps) ** 2
    elif schedule == "cosine":
        u = np.arange(timesteps + 1) / timesteps
        f = np.cos((u + 0.008) / 1.008 * np.pi / 2) ** 2
        betas = 1 - f[1:] / f[:-1]
    else:
        raise rejection("schedule", repr(schedule), ", ".join(SCHEDULES))
    result = NoiseSchedule(np.minimum(betas, 0.999), variance, schedule)
    if result.alphas_cumprod[-1] > 5e-3:  # that of latent diffusion ends at 4.7e-3
        warnings.warn(
            f"alpha-bar at the last timestep is {result.alphas_cumprod[-1]:.3g}: the process does not end in noise, "
            "and sampling from N(0, I) is wrong; raise the betas (scale_betas: true)",
            stacklevel=2,
        )
    return result


def linear_coefficients(schedule: NoiseSchedule) -> tuple[float, float]:
    """Return Delta-beta and beta_0 of a linear schedule (SpeeD, section 2.3).

    The schedule is beta_t = beta_0 + Delta-beta t/T for t = 1 ... T.
    """
    change = float(schedule.betas[-1] - schedule.betas[0])
    return change, float(schedule.betas[0]) - change / schedule.timesteps


def tau_of_magnitude(r: float, schedule: NoiseSchedule) -> float:
    """Return the real-valued timestep tau of SpeeD's magnitude r, by the closed form of theorem 1.

    In its continuous time 1/alpha-bar exceeds r after tau; the discrete 1/alpha-bar does so a few timesteps earlier.

    Raises:
        ConfigError: the schedule is not linear; the closed form holds for linear schedules alone.
    """
    allowed = "linear; the closed form holds for linear schedules alone"
    demand(schedule.name == "linear", "schedule", schedule.name, allowed)
    timesteps = schedule.timesteps
    change, first = linear_coefficients(schedule)
    offset = timesteps * first / change
    # solve beta_0 tau + Delta-beta tau²/(2 T) = ln r, the continuous form of -ln alpha-bar, for tau
    return math.sqrt(2 * timesteps * math.log(r) / change + offset**2) - offset


def start_of_convergence(tau: int | None, r: float | None, schedule: NoiseSchedule) -> int:
    """Return the first timestep of SpeeD's convergence area: tau, or derived from the magnitude r, or 0.7 T.

    The magnitude r has priority over tau. The paper counts timesteps from 1 and suppresses those after tau. Timestep t
    here is t + 1 there, hence the first suppressed one is the floor of tau. Theorem 1 holds for linear schedules. For
    other processes kairos takes the first timestep or cell at which 1/alpha-bar = 1 + sigma² exceeds r.

    Raises:
        ConfigError: the timestep is not in 1 ... T - 1.
    """
    timesteps = schedule.timesteps
    if r is not None:
        if schedule.name == "linear":
            first = math.floor(tau_of_magnitude(r, schedule))
        else:
            exceeds = r * schedule.alphas_cumprod < 1
            first = int(exceeds.argmax()) if exceeds.any() else timesteps
        is_inside = 0 < first < timesteps
        allowed = "a magnitude between those of the first and of the last timestep of the process, 1/alpha-bar"
        demand(is_inside, "r", f"{r:g}", allowed)
        return first
    if tau is None:
        tau = min(max(round(0.7 * timesteps), 1), timesteps - 1)
    check_convergence(tau, timesteps)
    return tau


def check_convergence(tau: int | None, timesteps: int) -> None:
    """Reject tau of SpeeD outside 1 ... T - 1; raises ConfigError."""
    demand(tau is None or 0 < tau < timesteps, "tau", tau, f"1 to T - 1 = {timesteps - 1}")


def check_published_form(tau: int | None, timesteps: int, schedule: str) -> None:
    """Reject continuous processes: SpeeD's public code is defined for discrete ones; raises ConfigError."""
    demand(schedule not in (*CONTINUOUS, "continuous"), "process", schedule, "discrete, as in the public code")
    check_convergence(tau, timesteps)
