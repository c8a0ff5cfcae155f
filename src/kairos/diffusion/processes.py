"""Forward processes: how x0 becomes x_t, and what the network is asked to predict.

A sampler draws *fractions* of the process in [0, 1); `times` turns them into this process' own time: an index for a
discrete process, a noise level for a continuous one. The training loop knows no more of time than that, and asks the
process for everything that depends on it: how the network is called, what its output stands for, what a sample weighs.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kairos.diffusion.registries import PROCESSES, DiscreteOptions
from kairos.diffusion.schedule import NoiseSchedule, make_schedule

if TYPE_CHECKING:
    from kairos.strategies import Weighting


def call(network: Any, x: Tensor, t: Tensor, conditions: dict[str, Tensor] | None) -> Tensor:
    """``network(x, t, conditions)``, or ``network(x, t)`` without conditions; a model of diffusers wraps its tensor."""
    output = network(x, t) if conditions is None else network(x, t, conditions)
    tensor: Tensor = getattr(output, "sample", output)
    return tensor


class Discrete:
    """The discrete Gaussian process of DDPM (Ho et al. 2020)."""

    def __init__(self, options: DiscreteOptions | NoiseSchedule, prediction: str = "epsilon"):
        self.schedule = options if isinstance(options, NoiseSchedule) else named_schedule(options)
        self.timesteps = self.schedule.timesteps
        self.prediction = prediction
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._weighting: Weighting | None = None
        self._weights = torch.empty(0)

    def times(self, fractions: Tensor) -> Tensor:
        """Timesteps min(floor(u T), T-1), int64, of fractions u in [0, 1), float64; shape (batch,)."""
        return (fractions * self.timesteps).long().clamp_(0, self.timesteps - 1)

    def _coefficients(self, t: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """sqrt(alpha-bar) and sqrt(1 - alpha-bar) at t, shaped (batch, 1, ...) to go with `like`."""
        if like.device not in self._tables:
            alphas_cumprod = torch.from_numpy(self.schedule.alphas_cumprod)
            tables = (alphas_cumprod.sqrt().float(), (1 - alphas_cumprod).sqrt().float())
            self._tables[like.device] = (tables[0].to(like.device), tables[1].to(like.device))
        shape = (-1, *[1] * (like.ndim - 1))
        signal, noise = self._tables[like.device]
        return signal[t].view(shape), noise[t].view(shape)

    def weights(self, weighting: "Weighting", t: Tensor) -> Tensor:
        """The factor of each sample's loss at t, float32 (batch,), on the device of t."""
        if self._weighting is not weighting or weighting.learned or self._weights.device != t.device:
            self._weighting, self._weights = weighting, torch.from_numpy(weighting.weights()).float().to(t.device)
        return self._weights[t]

    def predict(self, network: Any, x_t: Tensor, t: Tensor, conditions: dict[str, Tensor] | None = None) -> Tensor:
        """The network's output at t; preconditioned processes scale its input and output here."""
        return call(network, x_t, t, conditions)

    def scheduler_config(self, clip: bool) -> dict[str, Any] | None:
        """A configuration of diffusers' DDPMScheduler for this process; None where diffusers has none."""
        names = {"epsilon": "epsilon", "x0": "sample", "v": "v_prediction"}
        return {
            "_class_name": "DDPMScheduler",
            "num_train_timesteps": self.timesteps,
            "trained_betas": self.schedule.betas.tolist(),
            "prediction_type": names[self.prediction],
            "variance_type": self.schedule.variance,
            "clip_sample": clip,
            "timestep_spacing": "trailing",
        }

    def noised(self, x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """x_t = sqrt(alpha-bar) x0 + sqrt(1 - alpha-bar) noise, of x0's type; all (batch, ...), t (batch,)."""
        a, s = self._coefficients(t, x0)
        return (a * x0 + s * noise).to(x0.dtype)

    def target(self, x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """What the network should predict, shape of x0."""
        if self.prediction == "epsilon":
            return noise
        if self.prediction == "x0":
            return x0
        a, s = self._coefficients(t, x0)
        return a * noise - s * x0

    def epsilon(self, output: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
        """The noise that a network output stands for, shape of x_t."""
        if self.prediction == "epsilon":
            return output
        a, s = self._coefficients(t, x_t)
        if self.prediction == "x0":
            return (x_t - a * output) / s
        return s * x_t + a * output


def named_schedule(options: DiscreteOptions) -> NoiseSchedule:
    """The noise schedule that a process' options name."""
    return make_schedule(options.schedule, options.timesteps, options.scale_betas, options.variance)


def build_process(diffusion: dict[str, Any]) -> Any:
    """The forward process of a `diffusion` section given as plain values."""
    options = {key: value for key, value in diffusion["process"].items() if key != "name"}
    return PROCESSES.build(diffusion["process"]["name"], options, diffusion["prediction"])
