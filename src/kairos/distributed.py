"""One process or several: the global batch is the ranks' batches one after the other, in the order of the ranks.

Everything here is exact and the same on all ranks, and does nothing where torch.distributed is not initialised, so that
samplers are written once, for the global batch.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor


def ranks() -> int:
    """Number of processes that train together."""
    from torch import distributed

    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def share(size: int) -> tuple[int, slice]:
    """Size of the global batch, and this rank's part of it, for a batch of `size` samples here."""
    if ranks() == 1:
        return size, slice(0, size)
    from torch import distributed

    sizes: list[int] = [0] * ranks()
    distributed.all_gather_object(sizes, size)
    begin = sum(sizes[: distributed.get_rank()])
    return sum(sizes), slice(begin, begin + size)


def gather(values: "Tensor") -> "Tensor":
    """All ranks' values (n, ...), one after the other, on the CPU; gradients do not pass."""
    values = values.detach().cpu()
    if ranks() == 1:
        return values
    import torch
    from torch import distributed

    parts: list[Tensor] = [values] * ranks()
    distributed.all_gather_object(parts, values)
    return torch.cat(parts)


def sum_tensors(tensors: "Iterable[Tensor]") -> None:
    """Add up all ranks' tensors, in place."""
    if ranks() == 1:
        return
    from torch import distributed

    for tensor in tensors:
        distributed.all_reduce(tensor)
