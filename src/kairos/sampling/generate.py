"""Images from a model: noise is a function of (seed, interval, image index), so an image depends on no other.

The network's own arithmetic is the same for all batches of at least `SMALLEST_BATCH` images (measured on CPU, one
thread, DiT and U-Net: bit for bit); below it matrix products of another shape change the last bits. A smaller last
batch is therefore filled up with further images, which are thrown away. Batch sizes below it and GPUs give images that
are equal up to rounding.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kairos import compute
from kairos.conditions import nulls
from kairos.sampling.time_grids import GridPoint
from kairos_timesteps.diffusion.processes import shaped
from kairos_timesteps.randomness import Stream

SMALLEST_BATCH = 16

Predictor = Callable[[Tensor, Tensor], Tensor]
NoiseSource = Callable[[int], Tensor]


def iterate_batches(rows: range, batch_size: int) -> Iterator[tuple[range, int]]:
    """Batches of image indices for the images `rows`, with the number of images in each that are kept."""
    for start in range(rows.start, rows.stop, batch_size):
        kept = min(batch_size, rows.stop - start)
        yield range(start, start + max(kept, min(SMALLEST_BATCH, batch_size))), kept


def make_noise_source(seed: int, indices: range, shape: tuple[int, ...], device: torch.device | str) -> NoiseSource:
    """The noise of the images `indices`, (batch, *shape): k = 0 where they start, k = 1 ... in interval k."""
    return lambda k: Stream(seed, "sample").normal(k, indices, shape, device, torch.float64)


@dataclass(frozen=True)
class Guidance:
    """Classifier-free guidance, with its dependence on time and channels.

    Attributes:
        scale: null + scale (cond - null); 1 evaluates the conditional network alone, 0 the unconditional one.
        channels: number of guided channels, the first ones; others are the conditional network's. None: all of x0.
        power: p of a scale that is full at the image and 1 at noise: (scale - 1)(1 - cos(pi (1 - t/T)^p))/2 + 1 (Gao
            et al. 2023); None: constant.
        interval: least and largest noise over signal that are guided (Kynkäänniemi et al. 2024); None: all.
    """

    scale: float = 1.0
    channels: int | None = None
    power: float | None = None
    interval: list[float] | None = None

    def scales(self, process: Any, t: Tensor) -> Tensor:
        """The scale at every t, float64 (batch,)."""
        scale = torch.full(t.shape, self.scale, dtype=torch.float64, device=t.device)
        if self.power is not None:
            share = process.fractions(t) if t.is_floating_point() else t / process.schedule.timesteps
            scale = (scale - 1) * (1 - (math.pi * (1 - share) ** self.power).cos()) / 2 + 1
        if self.interval is not None:
            sigma = process.snr(t) ** -0.5
            scale = scale.where((self.interval[0] <= sigma) & (sigma <= self.interval[1]), 1.0)
        return scale


def build_guided_predictor(
    process: Any, model: Any, conditions: dict[str, Tensor], descriptions: dict[str, Any], guidance: Guidance
) -> Predictor:
    """The prediction for a batch with classifier-free guidance (Ho and Salimans 2022); a variance is not guided.

    Args:
        process: the forward process.
        model: ``model(x, t, conditions)``.
        conditions: of the batch; empty for an unconditional model.
        descriptions: of the conditions, which say what the null values are.
        guidance: its strength; where it is 1 the conditional network alone is evaluated.
    """

    def alone(x_t: Tensor, t: Tensor) -> Tensor:
        output: Tensor = process.predict(model, x_t, t, conditions)
        return output

    if guidance.scale == 1 or not conditions:
        return alone
    null_values = nulls(conditions, descriptions)
    doubled = {name: torch.cat([values, null_values[name]]) for name, values in conditions.items()}

    def both(x_t: Tensor, t: Tensor) -> Tensor:
        scale = guidance.scales(process, t)
        if (guidance.power or guidance.interval) and bool((scale == 1).all()):  # else it is not 1, and nobody waits
            return alone(x_t, t)
        output = process.predict(model, x_t.repeat(2, 1, 1, 1), t.repeat(2), doubled)
        conditional, null = output.to(x_t.dtype).chunk(2)
        first = slice(guidance.channels or x_t.shape[1])
        mixed = null[:, first] + shaped(scale, null) * (conditional - null)[:, first]
        return torch.cat([mixed, conditional[:, first.stop :]], 1)  # (batch, channels of the output, h, w)

    return both


@dataclass(frozen=True)
class DataPrediction:
    """DataPrediction of x0 by the network, computed in `precision`; the rest is computed in the dtype of x."""

    process: Any
    predict: Predictor
    clip: bool
    precision: str = "fp32"

    def __call__(self, x: Tensor, place: GridPoint) -> Tensor:
        """x0, shape of x."""
        return self.both(x, place)[0]

    def both(self, x: Tensor, place: GridPoint) -> tuple[Tensor, Tensor]:
        """x0, and the channels behind it, which tell of the variance."""
        x_t = place.scale * x  # (batch, c, h, w)
        time = torch.as_tensor(place.t)
        t = torch.full((len(x),), time.item(), dtype=time.dtype, device=x.device)  # a copy of `time` would wait
        with compute.precision(self.precision, x.device):
            output = self.predict(x_t.float(), t).to(x.dtype)
        x0: Tensor = self.process.estimate(self.process.prediction_channels(output, x), x_t, t)
        return x0.clamp(-1, 1) if self.clip else x0, output[:, x.shape[1] :]
