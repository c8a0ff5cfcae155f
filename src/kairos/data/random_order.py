"""Random permutations as functions of a random stream and an epoch."""

import torch
from jaxtyping import Int64
from torch import Tensor

from kairos_timesteps.randomness import Stream

Permutation = Int64[Tensor, "count"]

_CHUNK = 2**16  # keys drawn at a time


def random_order(stream: Stream, count: int, epoch: int = 0) -> Permutation:
    """Return a random permutation of 0 ... count - 1, int64 (count,) on the CPU.

    The numbers are sorted by random 64-bit keys. The key of each number is drawn from the stream with the epoch as
    `step` and the number as `index`, so the result is a function of the arguments.
    """
    keys = torch.empty(count, dtype=torch.int64)
    for start in range(0, count, _CHUNK):
        end = min(start + _CHUNK, count)
        words = stream.words(epoch, range(start, end), 2)  # two words of 32 bits for each number
        keys[start:end] = (words[:, 0] << 32) + words[:, 1]
    return keys.argsort(stable=True)
