"""Ranks as forks of a server process that has imported torch once; training runs of four ranks in a 2x2 mesh."""

import multiprocessing
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.device_mesh
from torch import distributed

RANKS = 4
# modules that every rank needs; torch's optimizers import torch._dynamo
PRELOADED = ["torch", "torch._dynamo", "torch.distributed.device_mesh", "kairos_timesteps.strategy", "small_loop"]


def run(
    function: Callable[..., Any],
    folder: Path,
    ranks: int,
    *arguments: Any,
    join: bool = True,
    preloaded: Sequence[str] = (),
) -> list[Any]:
    """Call ``function(*arguments)`` on several ranks, each a process; returns the results by rank.

    Args:
        function: a function of a module; what it returns is saved by ``torch.save``.
        folder: folder for the results.
        ranks: number of processes.
        arguments: arguments of the function.
        join: False if the function itself joins the process group, by the variables that torchrun sets.
        preloaded: further modules that the server process imports once for all ranks, if it was not started before.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, *preloaded])
    port = None if join else free_port()
    processes = [
        context.Process(target=_one, args=(function, folder, rank, ranks, port, arguments), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * ranks
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(ranks)]


def free_port() -> int:
    """Return a port of this machine on which no process listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def case(name: str) -> Iterator[None]:
    """Add the name of the case to an assertion that fails within."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{name}: {error}") from error


def _one(
    function: Callable[..., Any], folder: Path, rank: int, ranks: int, port: int | None, arguments: tuple[Any, ...]
) -> None:
    """Join the other ranks unless a port is given, call the function and save its result."""
    torch.set_num_threads(1)
    if port is None:
        distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    else:
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
        os.environ.update({name: str(number) for name, number in numbers.items()}, MASTER_ADDR="127.0.0.1")
    torch.save(function(*arguments), folder / f"{rank}.pt")
    if port is None:
        distributed.destroy_process_group()


def train_in_mesh(specifications: list[Any]) -> dict[str, list[dict[str, Any]]]:
    """Train on four ranks, of which two have the first half of the batch and two the second; returns draws and states.

    The strategy gets the ranks over which the batch is split as a process group or as one dimension of a mesh. Draws
    get `index` and `total` with the process group alone; otherwise the samples are dealt to the halves in turn.
    """
    mesh = distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    half, group = mesh.get_local_rank("data"), mesh.get_group("data")
    return {
        "group": [train(specification, half, indexed=True, process_group=group) for specification in specifications],
        "mesh": [train(specification, half, process_group=mesh["data"]) for specification in specifications],
        "micro-batches": [
            train(specification, half, process_group=group, micro_batches=2) for specification in specifications
        ],
    }


def train(
    specification: Any, half: int | None, indexed: bool = False, process_group: Any = None, micro_batches: int = 1
) -> dict[str, Any]:
    """Train with one half of each micro-batch on this rank, or with all of it if `half` is None.

    A half is every second sample, or with `indexed` the first or the last samples.
    """
    from small_loop import BATCH, IMAGES, SmallLoop

    loop, draws = SmallLoop(specification, process_group=process_group), []
    count = BATCH // micro_batches // (1 if half is None else 2)
    for step in range(4):
        noise = torch.randn(IMAGES.shape, generator=torch.Generator().manual_seed(step))
        for number in range(micro_batches):
            first, end = number * BATCH // micro_batches, (number + 1) * BATCH // micro_batches
            rows = slice(first, end)
            if half is not None:
                rows = (
                    slice(first + count * half, first + count * (half + 1)) if indexed else slice(first + half, end, 2)
                )
            arguments = {"index": range(rows.start, rows.stop), "total": BATCH} if indexed else {}
            draw = loop.strategy.draw(IMAGES[rows], **arguments)
            draws.append(draw.t)
            loss = loop.strategy.loss(draw, loop.errors(draw, noise[rows])) / micro_batches
            loss.backward()
        if half is not None:
            group = process_group.get_group() if hasattr(process_group, "get_group") else process_group
            for parameter in loop.network.parameters():
                distributed.all_reduce(parameter.grad, group=group)
                parameter.grad /= 2
        with loop.strategy.observe(draw, loop.network, loop.optimizer):
            loop.optimizer.step()
        loop.optimizer.zero_grad()
    return {"t": torch.stack(draws), "state": loop.state()}
