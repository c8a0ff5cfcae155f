"""Images from a model: the noise is a function of (seed, interval, image index), so images are independent.

On the CPU the network gives an image equal bits in every batch of at least `SMALLEST_BATCH` images (measured with one
thread, DiT and U-Net). In smaller batches, matrix products have other shapes and differ in the last bits. A smaller
last batch is therefore filled with further images, which are dropped. With a `batch_size` below `SMALLEST_BATCH`, and
on GPUs, images are equal up to rounding.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kairos import compute
from kairos.conditions import nulls
from kairos.sampling.time_grids import GridPoint
from kairos.shapes import Images, Output, PerSample, Rows, Times, VarianceChannels
from kairos_timesteps.diffusion.processes import shaped
from kairos_timesteps.randomness import Stream

SMALLEST_BATCH = 16

Predictor = Callable[[Images, Times], Output]  # function of x_t and t that returns the network's output
NoiseSource = Callable[[int], Images]  # function of an interval's number that returns noise in the batch's shape


def iterate_batches(rows: range, batch_size: int) -> Iterator[tuple[range, int]]:
    """Yield batches of image indices that cover `rows`, each with the number of its images that are kept.

    A batch has at least `SMALLEST_BATCH` indices, or `batch_size` if that is smaller. The kept indices come first. The
    other indices are padding, and may exceed the end of `rows`.
    """
    smallest_size = min(SMALLEST_BATCH, batch_size)
    for start in range(rows.start, rows.stop, batch_size):
        kept_count = min(batch_size, rows.stop - start)
        padded_size = max(kept_count, smallest_size)
        yield range(start, start + padded_size), kept_count


def make_noise_source(seed: int, indices: range, shape: tuple[int, ...], device: torch.device | str) -> NoiseSource:
    """Return a function from k to the standard normal noise of the images `indices`, float64 (batch, *shape).

    The noise of an image depends on seed, k and its index alone. The noise of k = 0 is the start of sampling; k = 1, 2,
    ... is the noise that interval k adds.
    """

    def noise(k: int) -> Images:
        return Stream(seed, "sample").normal(k, indices, shape, device, torch.float64)

    return noise


@dataclass(frozen=True)
class Guidance:
    """Classifier-free guidance, with its dependence on time and channels.

    Attributes:
        scale: s in null + s (conditional - null); 1 evaluates the conditional network alone, 0 the unconditional one.
        channels: number of guided channels, the first ones of x0; None: all. Other channels are not guided.
        power: p of a scale that grows from 1 at noise to `scale` at the image: (scale - 1)(1 - cos(pi (1 - t/T)^p))/2
            + 1 (Gao et al. 2023); None: constant.
        interval: smallest and largest noise over signal that are guided (Kynkäänniemi et al. 2024); None: all.
    """

    scale: float = 1.0
    channels: int | None = None
    power: float | None = None
    interval: list[float] | None = None

    def scales(self, process: Any, t: Times) -> PerSample:
        """Return the guidance scale at the times t (batch,), float64 (batch,), on the device of t.

        The scale is 1 outside of the interval, which includes its ends. Integer times are timesteps of a discrete
        process.
        """
        scale = torch.full(t.shape, self.scale, dtype=torch.float64, device=t.device)
        if self.power is not None:
            if t.is_floating_point():
                fraction = process.fractions(t)  # 0 at the image, 1 at noise
            else:  # the formula has t/T, and `fractions` is the middle of a timestep
                fraction = t / process.schedule.timesteps
            scale = (scale - 1) * (1 - (math.pi * (1 - fraction) ** self.power).cos()) / 2 + 1
        if self.interval is not None:
            smallest, largest = self.interval
            sigma = process.snr(t) ** -0.5  # noise over signal
            scale = scale.where((smallest <= sigma) & (sigma <= largest), 1.0)
        return scale


def build_guided_predictor(
    process: Any, model: Any, conditions: dict[str, Rows], descriptions: dict[str, Any], guidance: Guidance
) -> Predictor:
    """Return the prediction function of a batch with classifier-free guidance (Ho and Salimans 2022).

    Channels of a learned variance are not guided: the conditional network predicts them. A guided prediction is one
    forward pass of twice the batch, and has the dtype of x_t. Without conditions, guidance has no effect.

    Args:
        process: the forward process.
        model: ``model(x, t, conditions)``.
        conditions: conditions of the batch, each (batch, ...); empty for an unconditional model.
        descriptions: descriptions of the conditions, which define the null values.
        guidance: strength of the guidance; with scale 1, only the conditional network is evaluated, also where a scale
            that depends on time is 1 for the whole batch.
    """

    def predict_conditional(x_t: Images, t: Times) -> Output:
        output: Output = process.predict(model, x_t, t, conditions)
        return output

    if guidance.scale == 1 or not conditions:
        return predict_conditional
    null_values = nulls(conditions, descriptions)
    doubled = {name: torch.cat([values, null_values[name]]) for name, values in conditions.items()}

    def predict_guided(x_t: Images, t: Times) -> Output:
        scale = guidance.scales(process, t)
        # a constant scale is not 1 here, and comparing it would synchronise a GPU
        depends_on_time = guidance.power is not None or guidance.interval is not None
        if depends_on_time and bool((scale == 1).all()):
            return predict_conditional(x_t, t)
        # the first half of the doubled batch has the conditions, the second half the null values
        output = process.predict(model, x_t.repeat(2, 1, 1, 1), t.repeat(2), doubled)
        conditional, null = output.to(x_t.dtype).chunk(2)
        guided_channels = guidance.channels or x_t.shape[1]
        difference = (conditional - null)[:, :guided_channels]
        guided = null[:, :guided_channels] + shaped(scale, null) * difference
        return torch.cat([guided, conditional[:, guided_channels:]], 1)  # (batch, channels of the output, h, w)

    return predict_guided


@dataclass(frozen=True)
class DataPrediction:
    """Prediction of x0 by a network at a grid point; the call returns x0 in the shape and dtype of x.

    Attributes:
        process: the forward process.
        predict: the network's output at x_t and t.
        clip: clip x0 to [-1, 1].
        precision: precision of the network; everything else is computed in the dtype of x.
    """

    process: Any
    predict: Predictor
    clip: bool
    precision: str = "fp32"

    def __call__(self, x: Images, point: GridPoint) -> Images:
        """Return x0 (batch, channels, height, width) predicted at `point` from x in the coordinates of the grid."""
        return self.with_variance_channels(x, point)[0]

    def with_variance_channels(self, x: Images, point: GridPoint) -> tuple[Images, VarianceChannels]:
        """Return x0 predicted at `point`, and the output's channels of a learned variance.

        Without a learned variance the second tensor has 0 channels. Both are in the dtype of x, which is in the
        coordinates of the grid; the network gets x_t in float32. Only x0 is clipped. The caller ensures that the point
        has a time. TF32 is forbidden in this process afterwards, see `compute.precision`.
        """
        x_t = point.scale * x  # (batch, channels, height, width)
        time = torch.as_tensor(point.t)
        # filled with a number: copying the tensor `time` to a GPU would synchronise
        t = torch.full((len(x),), time.item(), dtype=time.dtype, device=x.device)
        with compute.precision(self.precision, x.device):
            output = self.predict(x_t.float(), t).to(x.dtype)
        x0: Images = self.process.estimate(self.process.prediction_channels(output, x), x_t, t)
        if self.clip:
            x0 = x0.clamp(-1, 1)
        return x0, output[:, x.shape[1] :]
