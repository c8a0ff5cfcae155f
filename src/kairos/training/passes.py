"""How the global batch of a step is cut into forward passes."""

from itertools import pairwise


def cut(batch_size: int, microbatch: int | None, rank: int, ranks: int) -> list[tuple[int, slice]]:
    """The forward passes of one process: number and place of each in the global batch, one after the other.

    Microbatches are cut from the global batch, so that each is the same for any number of processes; without them every
    process has one pass.
    """
    borders = (
        [batch_size * k // ranks for k in range(ranks)] if microbatch is None else range(0, batch_size, microbatch)
    )
    parts = list(enumerate(slice(*pair) for pair in pairwise([*borders, batch_size])))
    return parts[len(parts) * rank // ranks : len(parts) * (rank + 1) // ranks]
