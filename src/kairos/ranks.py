"""Start, synchronisation and end of a training run on several ranks."""

import os
import time
from typing import TYPE_CHECKING, Any, TypeVar

from kairos_timesteps.distributed import gather_objects, rank, ranks, sum_tensors
from kairos_timesteps.errors import KairosError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

T = TypeVar("T")
LONGEST_WAIT = 600.0  # seconds that ranks wait for each other in a step; use `barrier` if one may take longer
_POLL_INTERVAL = 0.02  # seconds between two checks whether all ranks have arrived
_store: Any = None  # torchrun's key-value store, which all ranks share
_COUNTER = "barriers"  # key in the store: calls of `barrier` on all ranks
_barriers = 0  # calls of `barrier` on this rank


def join(processes: int, device: "torch.device") -> None:
    """Join torch.distributed's default process group of the processes that torchrun has started.

    The call returns after all ranks have called it, without a time limit.

    CPU tensors are exchanged by gloo, and GPU tensors by NCCL. The caller has selected this process's GPU. The
    key-value store of torchrun is kept for `barrier`.

    Args:
        processes: number of processes.
        device: device of this process.

    Raises:
        KairosError: torchrun has started another number of processes, or has not started this process.
    """
    from datetime import timedelta

    from torch import distributed
    from torch.distributed.rendezvous import rendezvous

    global _store
    if os.environ.get("WORLD_SIZE") != str(processes):
        raise KairosError(
            f"training.processes: got {processes}, but {os.environ.get('WORLD_SIZE', 1)} were started; use kairos train"
        )
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    # "env://": torchrun has set the address of the store, and the rank, in environment variables
    _store, this_rank, _ = next(rendezvous("env://"))
    barrier(processes)  # without the time limit of the next line
    distributed.init_process_group(
        backend, store=_store, rank=this_rank, world_size=processes, timeout=timedelta(seconds=LONGEST_WAIT)
    )


def barrier(processes: int | None = None) -> None:
    """Wait until all ranks have called this function, without a time limit; with one rank nothing happens.

    All ranks add to one counter. With three ranks, the second barrier ends when the counter reaches 6. All ranks
    therefore have to call this function equally often. With several ranks, `join` must have been called before.

    Args:
        processes: number of ranks, before torch.distributed is initialised; None: the number that it was initialised
            with, or one rank if it was not.
    """
    global _barriers
    if processes is None:
        processes = ranks()
    if processes == 1:
        return
    _barriers += 1
    _store.add(_COUNTER, 1)
    # adding 0 returns the counter; if a rank dies, torchrun ends all ranks, so none waits here for ever
    while _store.add(_COUNTER, 0) < _barriers * processes:
        time.sleep(_POLL_INTERVAL)


def leave() -> None:
    """Wait until all ranks have called this function, and leave the process group; with one rank nothing happens."""
    if ranks() > 1:
        from torch import distributed

        barrier()
        time.sleep(_POLL_INTERVAL)  # torch 2.4 waits for ever if gloo's thread still holds the last tensor
        distributed.destroy_process_group()


def add(values: list[float]) -> list[float]:
    """Return the sums of values over the ranks, element by element in float64; every rank gets all sums.

    All ranks must call this function, with equally many values. With one rank the sums are the values.
    """
    import torch

    sums = torch.tensor(values, dtype=torch.float64)
    sum_tensors([sums])
    totals: list[float] = sums.tolist()
    return totals


def call_on_rank_0(function: "Callable[[], T]") -> "T":
    """Call a function on rank 0 alone and return its result on all ranks, which must all call this.

    The function may take long. With several ranks, its result is pickled. If it raises an error, rank 0 raises it, and
    the other ranks wait until torchrun ends them.
    """
    value = function() if rank() == 0 else None
    barrier()  # without a time limit, which the exchange of the results has
    result_of_first, *_ = gather_objects(value)
    return result_of_first  # type: ignore[return-value]  # rank 0 gathers a T, the other ranks None
