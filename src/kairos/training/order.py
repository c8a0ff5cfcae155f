"""Which images a step sees: epochs are permutations that depend on (seed, epoch) alone, steps cut them into batches."""

import functools
from itertools import pairwise

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


def passes(batch_size: int, microbatch: int | None, rank: int, ranks: int) -> list[tuple[int, slice]]:
    """The forward passes of one process: number and place of each in the global batch, one after the other.

    Microbatches are cut from the global batch, so that each is the same for any number of processes; without them every
    process has one pass.
    """
    borders = (
        [batch_size * k // ranks for k in range(ranks)] if microbatch is None else range(0, batch_size, microbatch)
    )
    cut = list(enumerate(slice(*pair) for pair in pairwise([*borders, batch_size])))
    return cut[len(cut) * rank // ranks : len(cut) * (rank + 1) // ranks]
