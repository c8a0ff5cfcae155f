"""Which images a step sees: epochs are permutations that depend on (seed, epoch) alone, steps cut them into batches."""

import functools

import torch
from torch import Tensor

from kairos.randomness import generator


@functools.lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, count: int) -> Tensor:
    return torch.randperm(count, generator=generator(seed, "order", epoch))


def batch_positions(seed: int, step: int, count: int, batch_size: int) -> Tensor:
    """Positions in the training set of the images of a step, int64 (batch_size,)."""
    positions = torch.arange(step * batch_size, (step + 1) * batch_size)
    epochs = positions // count
    parts = [
        _permutation(seed, epoch, count)[positions[epochs == epoch] % count]
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1)
    ]
    return torch.cat(parts)
