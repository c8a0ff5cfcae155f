"""Forward processes: how x0 becomes x_t, how the network is called, and how its output gives an estimate of x0.

A sampler draws *fractions* of the process in [0, 1), 0 the image and 1 noise. `times` maps them to times of the
process: an index for a discrete process, a noise level or a time for a continuous one. A process also defines
x_t = signal x0 + noise eps by the `coefficients` of t, and the signal-to-noise ratio. It defines the network's time
input, and how the network's output is converted to an estimate of x0.

Functions of time alone take numpy arrays as well as tensors, so tables of strategies need no torch.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, overload

import numpy as np
from numpy.typing import NDArray

from kairos_timesteps.diffusion.schedule import (
    CELLS,
    ENDS,
    PREDICTIONS,
    SCHEDULES,
    VARIANCES,
    NoiseSchedule,
    make_schedule,
)
from kairos_timesteps.errors import demand, rejection
from kairos_timesteps.lazy import Tensor, torch
from kairos_timesteps.numeric import Array, Tables, Values
from kairos_timesteps.options import Component, option, parse
from kairos_timesteps.registry import process

DIFFUSERS = {"epsilon": "epsilon", "x0": "sample", "v": "v_prediction"}  # what it calls predictions

# the x0 and the eps that a prediction f stands for, where x = a x0 + s eps
_FORMULAS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "epsilon": (lambda a, s, x, f: (x - s * f) / a, lambda a, s, x, f: f),
    "x0": (lambda a, s, x, f: f, lambda a, s, x, f: (x - a * f) / s),
    "v": (lambda a, s, x, f: a * x - s * f, lambda a, s, x, f: s * x + a * f),
    "flow": (lambda a, s, x, f: x - s * f, lambda a, s, x, f: x + a * f),
}


def call(network: Any, x: Tensor, t: Tensor, conditions: Mapping[str, Tensor] | None) -> Tensor:
    """Return ``network(x, t, conditions)``, or ``network(x, t)`` without conditions, as a tensor.

    Models of diffusers return an object that contains the tensor as ``sample``.
    """
    output = network(x, t) if conditions is None else network(x, t, conditions)
    prediction: Tensor = getattr(output, "sample", output)
    return prediction


def shaped(coefficient: Tensor, like: Tensor) -> Tensor:
    """Return coefficients (batch,) as (batch, 1, ...), with the number of axes and the type of `like`."""
    return coefficient.to(like.dtype).view(-1, *[1] * (like.ndim - 1))


def per_sample(values: Tensor) -> Tensor:
    """Return the mean over everything but the batch, float32 (batch,)."""
    return values.float().flatten(1).mean(1)


class Process(Component):
    """Base of all processes; t are times of the process, (batch,), images (batch, ...).

    Attributes:
        prediction: what `predict` returns: ``epsilon``, ``x0``, ``v`` (signal eps - noise x0) or ``flow`` (eps - x0).
        time_symbol: symbol of the process' time.
        time_scale: the network is called with `embedded` times this, so that its sinusoids resolve it.
        schedule_name: name of `schedule`: the name of the kairos process that this one is or derives from, or
            ``continuous``. It is not derived from the name of a user's class, which may equal that of a noise schedule.
    """

    library_defaults: ClassVar[dict[str, Any]] = {}  # defaults without an experiment, where they differ
    prediction = ""
    time_symbol = "t"
    schedule_name = "continuous"
    time_scale: float = 1.0

    def __init__(self, options: Any = None, prediction: str = "epsilon", **options_by_name: Any):
        where = f"process {type(self).__name__.lower()}"
        super().__init__(options or parse(type(self), {**self.library_defaults, **options_by_name}, where))
        self.prediction = self.prediction or prediction

    @overload
    def times(self, fractions: Array) -> NDArray[Any]: ...
    @overload
    def times(self, fractions: Tensor) -> Tensor: ...
    def times(self, fractions: Any) -> Any:
        """Return the times of fractions in [0, 1), elementwise."""
        raise NotImplementedError

    def fractions(self, t: Tensor) -> Tensor:
        """Return the fractions of times, the inverse of `times`; for a discrete process the middle of the timestep."""
        raise NotImplementedError

    def coefficients(self, t: Values) -> tuple[Values, Values]:
        """Return signal and noise coefficients of x_t, elementwise, in the precision of continuous times."""
        raise NotImplementedError

    def embedded(self, t: Tensor) -> Tensor:
        """Return the network's time input before it is multiplied by `time_scale`."""
        return t

    @functools.cached_property
    def schedule(self) -> NoiseSchedule:
        """The process cut into cells of equal fractions, by their centres.

        Its name is `schedule_name`.
        """
        t = self.times((np.arange(CELLS) + 0.5) / CELLS)
        signal, noise = self.coefficients(t)
        cut = NoiseSchedule.of_alphas_cumprod(signal**2 / (signal**2 + noise**2))
        return NoiseSchedule(cut.betas, name=self.schedule_name, cell_times=t)

    def snr(self, t: Values) -> Values:
        """Return the signal-to-noise ratio, elementwise."""
        signal, noise = self.coefficients(t)
        return (signal / noise) ** 2

    def noised(self, x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """Return x_t = signal x0 + noise eps, in the type of x0."""
        a, s = self._shaped_coefficients(t, x0)
        if x0.is_cuda and x0.dtype == noise.dtype:
            return torch.addcmul(s * noise, a, x0)  # two kernels, and one rounding less
        return (a * x0 + s * noise).to(x0.dtype)

    def predict(self, network: Any, x_t: Tensor, t: Tensor, conditions: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return the network's prediction at t, all its channels; preconditioned processes scale input and output."""
        return call(network, x_t, self._time_input(t, x_t), conditions)

    def prediction_channels(self, output: Tensor, like: Tensor) -> Tensor:
        """Return the prediction channels of an output, shape of `like`; further channels are the variance."""
        return output if output.shape == like.shape else output[:, : like.shape[1]]

    def target(self, x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """Return the target of the prediction, shape of x0."""
        if self.prediction == "v":
            a, s = self._shaped_coefficients(t, x0)
            return a * noise - s * x0
        if self.prediction == "flow":
            return noise - x0
        return noise if self.prediction == "epsilon" else x0

    def estimate(self, output: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
        """Return the estimate of x0 from a prediction, shape of x_t."""
        return _FORMULAS[self.prediction][0](*self._shaped_coefficients(t, x_t), x_t, output)

    def epsilon(self, output: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
        """Return the estimate of the noise from a prediction, shape of x_t."""
        return _FORMULAS[self.prediction][1](*self._shaped_coefficients(t, x_t), x_t, output)

    def _time_input(self, t: Tensor, x_t: Tensor) -> Tensor:
        # never in half precision: 562.5 would become 564 in bfloat16
        return (self.time_scale * self.embedded(t)).to(torch.promote_types(x_t.dtype, torch.float32))

    def _shaped_coefficients(self, t: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        a, s = self.coefficients(t)
        return shaped(a, like), shaped(s, like)


@process("discrete", "DDPM: T steps of Gaussian noise", predictions=PREDICTIONS)
class Discrete(Process):
    """The discrete Gaussian process of DDPM (Ho et al. 2020): t = 0 ... T-1."""

    timesteps: int = option(1000, "number of timesteps T", ge=2, le=100_000)
    schedule_name: str = option("linear", "noise schedule", choices=SCHEDULES, alias="schedule")
    scale_betas: bool = option(True, "multiply the end points of beta by 1000/T")
    variance: str = option("fixed_large", "reverse variance; learned_range: by twice the channels", choices=VARIANCES)
    beta_start: float | None = option(None, "beta of the first timestep; null: the schedule's usual", gt=0, lt=1)
    beta_end: float | None = option(None, "beta of the last timestep; null: the schedule's usual", gt=0, lt=1)
    first_index: int = option(0, "index of the first timestep for the network; U-ViT on latents: 1", choices=(0, 1))

    def __init__(self, options: Any, prediction: str = "epsilon"):
        self.prediction = prediction
        if isinstance(options, NoiseSchedule):
            self.schedule = options
            self.timesteps, self.schedule_name, self.variance = options.timesteps, options.name, options.variance
            self.first_index = 0
            return
        super().__init__(options, prediction)
        name, ends = self.schedule_name, (self.beta_start, self.beta_end)
        self.schedule = make_schedule(name, self.timesteps, self.scale_betas, self.variance, *ends)

    @staticmethod
    def check(options: Any) -> None:
        """Reject end points of beta that the schedule does not have, or that do not rise."""
        got = f"{options.beta_start} and {options.beta_end} with schedule cosine"
        has_ends = bool(options.beta_start or options.beta_end)
        demand(options.schedule_name != "cosine" or not has_ends, "beta_start and beta_end", got, "null")
        usual_first, usual_last = ENDS.get(options.schedule_name, (0, 1))
        first, last = options.beta_start or usual_first, options.beta_end or usual_last
        demand(first < last, "beta_start", first, f"less than beta_end = {last}")

    def times(self, fractions: Any) -> Any:
        """Return the timesteps min(floor(u T), T-1) of fractions u, int64."""
        return self.schedule.cells(fractions)

    def fractions(self, t: Tensor) -> Tensor:
        """Return the middles of the timesteps, (t + 1/2)/T."""
        return (t.double() + 0.5) / self.schedule.timesteps

    def coefficients(self, t: Values) -> tuple[Values, Values]:
        """Return signal sqrt(alpha-bar) and noise sqrt(1 - alpha-bar), float64."""
        signal, noise, _ = self._tables.like(t)
        return signal[t], noise[t]

    def snr(self, t: Values) -> Values:
        """Return the signal-to-noise ratio of the schedule."""
        ratio: Values = self._tables.like(t)[2][t]
        return ratio

    def _time_input(self, t: Tensor, x_t: Tensor) -> Tensor:
        return t + self.first_index  # an index, which networks embed in float32

    def _shaped_coefficients(self, t: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return both coefficients in the shape and type of `like`, by one lookup."""
        key = t.device, like.dtype
        if key not in self._stacked_coefficients:
            signal, noise, _ = self._tables.like(t)
            self._stacked_coefficients[key] = torch.stack([signal, noise], 1).to(like.dtype)
        signal, noise = self._stacked_coefficients[key][t].unbind(-1)
        return shaped(signal, like), shaped(noise, like)

    @functools.cached_property
    def _stacked_coefficients(self) -> dict[Any, Tensor]:
        """Signal and noise coefficients of all timesteps by device and type, each (T, 2)."""
        return {}

    @functools.cached_property
    def _tables(self) -> Tables:
        """sqrt(alpha-bar), sqrt(1 - alpha-bar) and the SNR of all timesteps, each (T,)."""
        alphas_cumprod = self.schedule.alphas_cumprod
        return Tables(np.sqrt(alphas_cumprod), np.sqrt(1 - alphas_cumprod), self.schedule.snr)


@process("edm", "EDM: noise levels, preconditioned (estimates x0)")
class Edm(Process):
    """EDM: x = x0 + sigma eps, with a preconditioned network that estimates x0 (Karras et al. 2022, table 1).

    Fractions are evenly spread in ln sigma, so sampler ``uniform`` is log-uniform in sigma and ``edm_log_normal`` is
    EDM's own; weighting ``edm`` is its lambda(sigma).

    Raises:
        ConfigError: sigma_data is not known; it is measured where there are training data.
    """

    sigma_data: float | None = option(None, "standard deviation of the data; null: measured on the training data", gt=0)
    sigma_min: float = option(0.002, "smallest noise level", gt=0)
    sigma_max: float = option(80.0, "largest noise level", gt=0)
    time_scale: float = option(400.0, "factor of ln(sigma)/4 in the network's time input; EDM's own networks: 1", gt=0)
    negated: bool = option(False, "the network's output is subtracted (v_prediction of diffusers' EDM schedulers)")

    prediction, time_symbol = "x0", "sigma"
    schedule_name = "edm"
    library_defaults: ClassVar = {"sigma_data": 0.5, "time_scale": 1.0}

    def __init__(self, options: Any = None, prediction: str = "", **options_by_name: Any):
        super().__init__(options, prediction, **options_by_name)
        if self.sigma_data is None:
            raise rejection("sigma_data", "null", "the standard deviation of the data, > 0")
        self._data, self._ratio = self.sigma_data, self.sigma_max / self.sigma_min

    @staticmethod
    def check(options: Any) -> None:
        """Reject an empty range of noise levels."""
        least, most = options.sigma_min, options.sigma_max
        demand(least < most, "sigma_min and sigma_max", f"{least} and {most}", "0 < min < max")

    def times(self, fractions: Values) -> Values:
        """Return the noise levels sigma of fractions."""
        return self.sigma_min * self._ratio**fractions

    def fractions(self, t: Tensor) -> Tensor:
        """Return the fractions of noise levels, linear in ln sigma."""
        return (t / self.sigma_min).log() / math.log(self._ratio)

    def coefficients(self, t: Values) -> tuple[Values, Values]:
        """Return signal 1 and noise sigma."""
        return t**0, t

    def embedded(self, t: Tensor) -> Tensor:
        """Return EDM's c_noise, ln(sigma)/4."""
        return t.log() / 4

    def predict(self, network: Any, x_t: Tensor, t: Tensor, conditions: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return the estimate of x0, D(x; sigma) = c_skip x + c_out F(c_in x, c_noise)."""
        data, total = self._data, t**2 + self._data**2
        output = call(network, shaped(self._input_scale(t), x_t) * x_t, self._time_input(t, x_t), conditions)
        skip, out = data**2 / total, (-1.0 if self.negated else 1.0) * data * t * total**-0.5
        return shaped(skip, x_t) * x_t + shaped(out, x_t) * output

    def _input_scale(self, t: Tensor) -> Tensor:
        """Return c_in, which gives the network's input unit variance."""
        return (t**2 + self._data**2) ** -0.5


@process("fdm", "EDM whose network's input has momentum (FDM)")
class Fdm(Edm):
    """EDM with fast diffusion's momentum: c_in = s(sigma) = exp(-m B)(1 + m B) (Wu et al. 2023).

    B is the integral of VP's beta up to the ratio of sigma to the largest noise level. s is the mean of a critically
    damped oscillator after the time m B.
    """

    multiplier: float = option(2.0, "m of the momentum's time; published: 2 for CIFAR-10, else 1", gt=0)
    schedule_name = "fdm"

    def _input_scale(self, t: Tensor) -> Tensor:
        share = (t - self.sigma_min) / (self.sigma_min * self._ratio - self.sigma_min)
        damped = self.multiplier * (0.1 * share + 19.9 * share**2 / 2)
        return math.e**-damped * (1 + damped)


@process("flow", "rectified flow: a straight path to noise")
class Flow(Process):
    """Rectified flow: x_t = (1 - t) x0 + t eps, the network predicts eps - x0 (Liu et al. 2023).

    With shift 1 fractions are times, so ``log_normal`` and ``mode`` are SD3's densities (Esser et al. 2024).
    """

    shift: float = option(1.0, "fraction u is time shift u/(1 + (shift - 1) u), SD3's for larger images", gt=0, le=100)
    time_scale: float = option(1000.0, "factor of t in the network's time input", gt=0)

    prediction = "flow"
    schedule_name = "flow"
    library_defaults: ClassVar = {"time_scale": 1.0}

    def times(self, fractions: Values) -> Values:
        """Return the times by SD3's shift, s u/(1 + (s - 1) u), at least 1e-5 from 0 and 1, where no SNR exists."""
        return (self.shift * fractions / (1 + (self.shift - 1) * fractions)).clip(1e-5, 1 - 1e-5)

    def fractions(self, t: Tensor) -> Tensor:
        """Return the fractions of times, by the inverse of the shift."""
        return t / (self.shift - (self.shift - 1) * t)

    def coefficients(self, t: Values) -> tuple[Values, Values]:
        """Return signal 1 - t and noise t."""
        return 1 - t, t


@process("vp", "DDPM's process in continuous time", predictions=PREDICTIONS)
class Vp(Process):
    """DDPM's process in continuous time (Song et al. 2021, eq. 11): beta(t) linear, t in [t_min, 1]."""

    beta_min: float = option(0.1, "beta at t = 0", ge=0)
    beta_max: float = option(20.0, "beta at t = 1", gt=0)
    t_min: float = option(1e-5, "smallest time trained and sampled", gt=0, lt=1)
    time_scale: float = option(999.0, "factor of t in the network's time input", gt=0)
    schedule_name = "vp"

    def times(self, fractions: Values) -> Values:
        """Return the times t_min + (1 - t_min) u."""
        return self.t_min + (1 - self.t_min) * fractions

    def fractions(self, t: Tensor) -> Tensor:
        """Return the fractions of times, (t - t_min)/(1 - t_min)."""
        return (t - self.t_min) / (1 - self.t_min)

    def coefficients(self, t: Values) -> tuple[Values, Values]:
        """Return signal exp(-B/2) and noise sqrt(1 - exp(-B)), where B is the integral of beta."""
        alphas_cumprod = math.e ** -(self.beta_min * t + (self.beta_max - self.beta_min) * t**2 / 2)
        return alphas_cumprod**0.5, (1 - alphas_cumprod) ** 0.5
