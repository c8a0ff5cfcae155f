"""One process or several: the global batch is the ranks' batches one after the other, in the order of the ranks.

Everything here is exact and the same on all ranks, and does nothing where torch.distributed is not initialised, so that
samplers are written once, for the global batch. Functions that take a `group` are limited to the ranks of that process
group: those over which the batch is split. None stands for all ranks.
"""

import os
import time
from typing import TYPE_CHECKING, Any, TypeVar

from kairos_timesteps.errors import ConfigError, KairosError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch
    from torch import Tensor

T = TypeVar("T")
LONGEST_WAIT = 600.0  # seconds that ranks wait for each other in a step; where one may be longer they `meet`
_PATIENCE = 0.02  # seconds between two looks whether all have come
_BUCKET = 2**25  # bytes that are exchanged at a time
_store: Any = None  # torchrun's, which all ranks see
_met = 0


def ranks(group: Any = None) -> int:
    """Number of processes that train together."""
    from torch import distributed

    return distributed.get_world_size(group) if distributed.is_available() and distributed.is_initialized() else 1


def rank(group: Any = None) -> int:
    """Number of this process among those that train together, from 0."""
    from torch import distributed

    return distributed.get_rank(group) if ranks(group) > 1 else 0


def batch_group(group: Any) -> Any:
    """Process group of the ranks over which the batch is split; None: all ranks.

    Args:
        group: a process group, a one-dimensional `torch.distributed.DeviceMesh` such as ``mesh["dp"]``, or None.

    Raises:
        ConfigError: the mesh has several dimensions, or this process is not a member of the group.
    """
    if hasattr(group, "get_group"):
        if group.ndim != 1:
            names = ", ".join(map(str, group.mesh_dim_names or ()))
            raise ConfigError(
                f"process_group: got a mesh of {group.ndim} dimensions ({names}), allowed: one of them, mesh[name]"
            )
        group = group.get_group()
    if group is not None:
        try:
            member = ranks(group) > 0 and rank(group) >= 0  # for a process outside of it, new_group returns a marker
        except ValueError:  # a group that exists elsewhere
            member = False
        if not member:
            raise ConfigError(
                "process_group: this process is not a member of the group; pass the group that contains it"
            )
    return group


def join(processes: int, device: "torch.device") -> None:
    """Meet the other processes that torchrun has started, one of which may first wait for a lock, or copy data.

    Numbers go through the CPU, gradients between GPUs by NCCL.

    Raises:
        KairosError: this is not one of so many processes.
    """
    from datetime import timedelta

    from torch import distributed

    global _store
    if os.environ.get("WORLD_SIZE") != str(processes):
        raise KairosError(
            f"training.processes: got {processes}, but {os.environ.get('WORLD_SIZE', 1)} were started; use kairos train"
        )
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    _store, number, _ = next(distributed.rendezvous("env://"))
    meet(processes)
    distributed.init_process_group(
        backend, store=_store, rank=number, world_size=processes, timeout=timedelta(seconds=LONGEST_WAIT)
    )


def meet(processes: int | None = None) -> None:
    """Wait for the other ranks, however long one writes or reads; `processes`: how many they are, before they know."""
    global _met
    processes = processes or ranks()
    if processes > 1:
        _met += 1
        _store.add("met", 1)
        while _store.add("met", 0) < _met * processes:  # torchrun ends all where one dies
            time.sleep(_PATIENCE)


def part() -> None:
    """Wait for the other ranks and leave them."""
    if ranks() > 1:
        from torch import distributed

        meet()
        time.sleep(_PATIENCE)  # torch 2.4 waits for ever where gloo's thread still lets go of the last tensor
        distributed.destroy_process_group()


def add(values: list[float]) -> list[float]:
    """Sums over the ranks, the same on all."""
    import torch

    sums = torch.tensor(values, dtype=torch.float64)
    sum_tensors([sums])
    return sums.tolist()


def on_first(function: "Callable[[], T]") -> "T":
    """What a function gives on rank 0, the only one to call it, on all ranks; it may take long."""
    value = function() if rank() == 0 else None
    meet()
    return _of_all(value)[0]  # type: ignore[return-value]


def gather(values: "Tensor", group: Any = None) -> "Tensor":
    """All ranks' values (n, ...), one after the other, on the CPU; gradients do not pass."""
    import torch

    return torch.cat(_of_all(values.detach().cpu(), group))


def joined(values: "Tensor", index: Any, total: int, group: Any = None) -> "Tensor":
    """All ranks' values (n, ...), which are rows `index` of `total`, where they are; nothing waits for a GPU."""
    if ranks(group) == 1:
        return values
    rows = slice(index.start, index.stop) if isinstance(index, range) else index
    every = values.new_zeros(total, *values.shape[1:])
    every[rows] = values.detach()
    sum_tensors([every], group)
    return every


def _of_all(value: T, group: Any = None) -> list[T]:
    if ranks(group) == 1:
        return [value]
    from torch import distributed

    values = [value] * ranks(group)
    distributed.all_gather_object(values, value, group=group)
    return values


def sum_tensors(tensors: "Iterable[Tensor]", group: Any = None) -> None:
    """Add up all ranks' tensors, in place; many small tensors take few collectives."""
    if ranks(group) == 1:
        return
    import torch
    from torch import distributed

    for bucket in _buckets(tensors):
        if len(bucket) == 1:
            distributed.all_reduce(bucket[0], group=group)
            continue
        joined = torch.cat([tensor.flatten() for tensor in bucket])
        distributed.all_reduce(joined, group=group)
        for tensor, summed in zip(bucket, joined.split([tensor.numel() for tensor in bucket])):
            tensor.copy_(summed.view_as(tensor))


def _buckets(tensors: "Iterable[Tensor]") -> "list[list[Tensor]]":
    """Group tensors of a device and type that follow each other, up to `_BUCKET` bytes a group."""
    buckets: list[list[Tensor]] = []
    held = 0  # bytes in the last bucket
    for tensor in tensors:
        last = buckets[-1][0] if buckets else None
        alike = last is not None and (last.device, last.dtype) == (tensor.device, tensor.dtype)
        if alike and held + tensor.nbytes <= _BUCKET:
            buckets[-1].append(tensor)
            held += tensor.nbytes
        else:
            buckets.append([tensor])
            held = tensor.nbytes
    return buckets
