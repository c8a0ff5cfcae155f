"""Arithmetic over the ranks of torch.distributed, which share a global batch.

All functions are exact and have equal results on all ranks. They do nothing if torch.distributed is not initialised, so
samplers are written once, for the global batch. A `group` limits a function to the ranks of a process group, those that
share the global batch; None stands for all ranks.
"""

from collections.abc import Iterable
from typing import Any, TypeAlias, TypeVar

from kairos_timesteps.errors import ConfigError
from kairos_timesteps.lazy import Tensor, torch

T = TypeVar("T")
Group: TypeAlias = "torch.distributed.ProcessGroup | None"  # ranks that share the global batch; None: all ranks
_BUCKET = 2**25  # bytes that are exchanged at a time


def ranks(group: Group = None) -> int:
    """Return the number of processes that train together."""
    initialised = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size(group) if initialised else 1


def rank(group: Group = None) -> int:
    """Return the number of this process among those that train together, from 0."""
    return torch.distributed.get_rank(group) if ranks(group) > 1 else 0


def batch_group(group: Any) -> Group:
    """Return the process group of the ranks that share the global batch; None: all ranks.

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
    process_group: Group = group
    if group is not None:
        try:
            # torch's new_group returns a marker instead of a group to processes outside the group
            member = ranks(process_group) > 0 and rank(process_group) >= 0
        except ValueError:  # a group that exists elsewhere
            member = False
        if not member:
            raise ConfigError(
                "process_group: this process is not a member of the group; pass the group that contains it"
            )
    return process_group


def join_ranks(values: Tensor, index: Any, total: int, group: Group = None) -> Tensor:
    """Join all ranks' values (n, ...), which are rows `index` of `total`, on their device without synchronisation.

    With one rank the values are returned as they are. Otherwise the result has no gradient.
    """
    if ranks(group) == 1:
        return values
    rows = slice(index.start, index.stop, index.step) if isinstance(index, range) else index
    global_values = values.new_zeros(total, *values.shape[1:])
    global_values[rows] = values.detach()
    sum_tensors([global_values], group)  # every other rank adds zeros to these rows
    return global_values


def gather_objects(value: T, group: Group = None) -> list[T]:
    """Gather one value of each rank, on all ranks, in the order of the ranks."""
    if ranks(group) == 1:
        return [value]
    values = [value] * ranks(group)
    torch.distributed.all_gather_object(values, value, group=group)
    return values


def sum_tensors(tensors: Iterable[Tensor], group: Group = None) -> None:
    """Sum tensors over all ranks, in place; many small tensors take few collectives.

    All ranks pass tensors of equal shapes, in equal order. With one rank nothing happens.
    """
    if ranks(group) == 1:
        return
    for bucket in _buckets(tensors):
        if len(bucket) == 1:
            torch.distributed.all_reduce(bucket[0], group=group)
            continue
        flat = torch.cat([tensor.flatten() for tensor in bucket])
        torch.distributed.all_reduce(flat, group=group)
        for tensor, summed in zip(bucket, flat.split([tensor.numel() for tensor in bucket])):
            tensor.copy_(summed.view_as(tensor))


def _buckets(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group consecutive tensors with equal device and type, up to `_BUCKET` bytes a group."""
    buckets: list[list[Tensor]] = []
    bucket_bytes = 0  # of the last bucket
    for tensor in tensors:
        last = buckets[-1][0] if buckets else None
        has_equal_device_and_type = last is not None and (last.device, last.dtype) == (tensor.device, tensor.dtype)
        if has_equal_device_and_type and bucket_bytes + tensor.nbytes <= _BUCKET:
            buckets[-1].append(tensor)
            bucket_bytes += tensor.nbytes
        else:
            buckets.append([tensor])
            bucket_bytes = tensor.nbytes
    return buckets
