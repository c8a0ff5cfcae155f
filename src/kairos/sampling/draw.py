"""Images from a model: one generator per image index, so that an image depends on the seed and its index alone.

Starting noise and the noise of every step of image i come from the generator of (seed, i), whatever batch i is in. The
network's own arithmetic is the same for all batches of at least `SMALLEST_BATCH` images (measured on CPU, one thread,
DiT and U-Net: bit for bit); below it matrix products of another shape change the last bits. A smaller last batch is
therefore filled up with further images, which are thrown away. Batch sizes below it and GPUs give images that are equal
up to rounding.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kairos import conditions as condition_kinds
from kairos.randomness import generator
from kairos.sampling.schedulers import Network

SMALLEST_BATCH = 16


def batches(num: int, batch_size: int) -> Iterator[tuple[range, int]]:
    """Batches of image indices, with the number of images in each that are kept."""
    for start in range(0, num, batch_size):
        kept = min(batch_size, num - start)
        yield range(start, start + max(kept, min(SMALLEST_BATCH, batch_size))), kept


def guided(model: Any, conditions: dict[str, Tensor], descriptions: dict[str, Any], scale: float) -> Network:
    """The network of a batch with classifier-free guidance (Ho and Salimans 2022): null + scale (conditional - null).

    Args:
        model: ``model(x, t, conditions)``.
        conditions: of the batch; empty for an unconditional model.
        descriptions: of the conditions, which say what the null values are.
        scale: 1 evaluates the conditional network alone, 0 the unconditional one.
    """
    kinds = condition_kinds.build({name: descriptions[name] for name in conditions})
    null = {name: kinds[name].null(values) for name, values in conditions.items()}

    def plain(x: Tensor, t: int) -> Tensor:
        return model(x, torch.full((len(x),), t, device=x.device), conditions)

    def both(x: Tensor, t: int) -> Tensor:
        doubled = {name: torch.cat([values, null[name]]) for name, values in conditions.items()}
        output = model(torch.cat([x, x]), torch.full((2 * len(x),), t, device=x.device), doubled)
        conditional, unconditional = output.chunk(2)  # each (batch, c, h, w)
        return unconditional + scale * (conditional - unconditional)

    return plain if scale == 1 or not conditions else both


def starting_noise(
    seed: int, indices: range, shape: tuple[int, ...], device: torch.device | str
) -> tuple[Tensor, list[torch.Generator]]:
    """Noise N(0, I) of the images `indices`, (batch, *shape), and the generators it came from.

    Noise is drawn on the CPU whatever the device, so that a GPU starts from the same noise.
    """
    generators = [generator(seed, "sample", index) for index in indices]
    noise = torch.stack([torch.randn(shape, generator=g) for g in generators])
    return noise.to(device), generators
