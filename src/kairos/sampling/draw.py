"""Images from a model: noise is a function of (seed, interval, image index), so an image depends on no other.

The network's own arithmetic is the same for all batches of at least `SMALLEST_BATCH` images (measured on CPU, one
thread, DiT and U-Net: bit for bit); below it matrix products of another shape change the last bits. A smaller last
batch is therefore filled up with further images, which are thrown away. Batch sizes below it and GPUs give images that
are equal up to rounding.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from kairos import compute
from kairos import conditions as condition_kinds
from kairos.randomness import Stream
from kairos.sampling.places import Place
from kairos.sampling.schemes import Estimate, Noise

SMALLEST_BATCH = 16

Predict = Callable[[Tensor, Tensor], Tensor]


def batches(rows: range, batch_size: int) -> Iterator[tuple[range, int]]:
    """Batches of image indices for the images `rows`, with the number of images in each that are kept."""
    for start in range(rows.start, rows.stop, batch_size):
        kept = min(batch_size, rows.stop - start)
        yield range(start, start + max(kept, min(SMALLEST_BATCH, batch_size))), kept


def noise_of(seed: int, indices: range, shape: tuple[int, ...], device: torch.device | str) -> Noise:
    """The noise of the images `indices`, (batch, *shape): k = 0 where they start, k = 1 ... in interval k."""
    return lambda k: Stream(seed, "sample").normal(k, indices, shape, device, torch.float64)


def guided(
    process: Any, model: Any, conditions: dict[str, Tensor], descriptions: dict[str, Any], scale: float
) -> Predict:
    """The prediction for a batch with classifier-free guidance (Ho and Salimans 2022): null + scale (cond - null).

    Args:
        process: the forward process.
        model: ``model(x, t, conditions)``.
        conditions: of the batch; empty for an unconditional model.
        descriptions: of the conditions, which say what the null values are.
        scale: 1 evaluates the conditional network alone, 0 the unconditional one.
    """
    if scale == 1 or not conditions:
        return lambda x_t, t: process.predict(model, x_t, t, conditions)
    kinds = condition_kinds.build({name: descriptions[name] for name in conditions})
    doubled = {name: torch.cat([values, kinds[name].null(values)]) for name, values in conditions.items()}

    def both(x_t: Tensor, t: Tensor) -> Tensor:
        conditional, null = process.predict(model, x_t.repeat(2, 1, 1, 1), t.repeat(2), doubled).chunk(2)
        return null + scale * (conditional - null)  # each (batch, c, h, w)

    return both


def estimate_of(process: Any, predict: Predict, clip: bool, precision: str = "fp32") -> Estimate:
    """The estimate of x0 at a place; the network computes in `precision`, everything else in that of x."""

    def estimate(x: Tensor, place: Place) -> Tensor:
        x_t = place.scale * x  # (batch, c, h, w)
        t = torch.as_tensor(place.t, device=x.device).expand(len(x))
        with compute.precision(precision, x.device):
            output = predict(x_t.float(), t)
        x0: Tensor = process.estimate(output.to(x.dtype), x_t, t)
        return x0.clamp(-1, 1) if clip else x0

    return estimate
