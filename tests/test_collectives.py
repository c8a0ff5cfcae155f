"""Collectives of a training step at 8 and 1,024 ranks: torch's fake process group, tensors on the CPU."""

import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch.testing._internal.distributed.multi_threaded_pg import _install_threaded_pg, _uninstall_threaded_pg

from fake_cuda import Replicated, caller, process_group
from kairos import ranks as rank_processes
from kairos.data.latents import open_latents
from kairos.training.job import CollectiveStop, ProgressFile, StopRequest
from kairos.training.loop import train_steps
from kairos.training.run import TrainingJob
from kairos.training.run_folder import RunFolder
from kairos.training.state import TrainingState
from kairos_timesteps.errors import ConfigError
from kairos_timesteps.strategy import Strategy
from test_fake_cuda import DEFAULTS, LOGGING, MEASURING, ORDINARY, STEPS, make_experiment
from training_case import experiment, make_latents

COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "barrier",
               "broadcast", "broadcast_object_list", "gather", "reduce", "scatter")  # fmt: skip


@contextmanager
def counted() -> Iterator[Counter]:
    """Count collectives by function and caller, those of DistributedDataParallel excepted."""
    counts: Counter = Counter()

    def counting(name: str, function: Any) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            counts[f"{name} in {caller()}"] += 1
            return function(*arguments, **keywords)

        return call

    with ExitStack() as stack:
        for name in COLLECTIVES:
            function = getattr(torch.distributed, name)
            stack.enter_context(mock.patch.object(torch.distributed, name, counting(name, function)))
        yield counts


@pytest.fixture(scope="module")
def latents(tmp_path_factory):
    return open_latents(make_latents(tmp_path_factory.mktemp("collectives")))


def collectives_of_run(plain: dict, latents, folder, ranks: int, length: int, monkeypatch) -> Counter:
    """Collectives of a run of `length` steps, checkpoints and milestone included."""
    met = torch.distributed.HashStore()
    met.add("met", 10**9)  # all other ranks have always come
    monkeypatch.setattr(rank_processes, "_store", met)
    # the reducer of DistributedDataParallel does not take the results of a fake process group
    monkeypatch.setattr("torch.nn.parallel.DistributedDataParallel", Replicated)
    with process_group(ranks):
        training = TrainingState(plain, next(iter(plain["methods"])), 0, latents, torch.device("cpu"))
        store = RunFolder(folder / "out", "identity")
        store.prepare([length])
        progress = ProgressFile(folder / "out" / ".state", length, reports=False)
        with counted() as found:
            job = TrainingJob(store, training, "label", progress, StopRequest())
            assert job.train_until([length], [length]) == length
    return found


def test_a_run_asks_whether_to_leave_now_and_then_and_not_in_every_step(latents, tmp_path, monkeypatch):
    lengths, counts = (10, 60), []
    for length in lengths:
        plain = experiment(
            {"uniform": {}}, training__batch_size=1024, training__log_every=1000, training__checkpoint_every=1000
        )
        counts.append(collectives_of_run(plain, latents, tmp_path / str(length), 1024, length, monkeypatch))
    more = counts[1] - counts[0]
    assert more.total() < (lengths[1] - lengths[0]) / 2, more


def steps_until_all_leave(ranks: int, asked: int, request: int, seconds: list[float]) -> list[int]:
    """Steps that each of several ranks, threads of this process, takes until it leaves.

    Args:
        ranks: number of ranks.
        asked: rank that is asked to leave.
        request: step at which it is asked.
        seconds: of a step of each rank.
    """
    taken = [0] * ranks
    store = torch.distributed.HashStore()

    def run(rank: int) -> None:
        torch.distributed.init_process_group("threaded", rank=rank, world_size=ranks, store=store)
        leave = StopRequest()
        leave.begin()
        together = CollectiveStop(leave)
        leaving = False
        while not leaving:
            time.sleep(seconds[rank])
            taken[rank] += 1
            if rank == asked and taken[rank] == request:
                leave.reason = "SIGTERM"
            leaving = together.after_step(0.0)
        torch.distributed.destroy_process_group()

    _install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    try:
        with ThreadPoolExecutor(ranks) as threads:
            list(threads.map(run, range(ranks), timeout=60))
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        _uninstall_threaded_pg()
    return taken


@pytest.mark.timeout(60)
def test_all_ranks_leave_after_the_same_step_within_seconds():
    begun = time.monotonic()
    taken = steps_until_all_leave(3, asked=2, request=100, seconds=[0.001, 0.002, 0.004])
    assert len({*taken}) == 1 and 100 <= taken[0] < 1000
    assert time.monotonic() - begun < 30


@pytest.mark.long
@pytest.mark.timeout(60)
def test_slow_steps_leave_after_the_step_of_the_request():
    taken = steps_until_all_leave(2, asked=0, request=3, seconds=[1.2, 1.1])
    assert taken == [3, 3]


def collectives_by_step(chosen: dict, latents) -> list[Counter]:
    """Collectives of each of four steps: the set-up, an ordinary, a measuring and a logging one."""
    plain, found = make_experiment(chosen), []
    with process_group(chosen["ranks"]), mock.patch("torch.nn.parallel.DistributedDataParallel", Replicated):
        training = TrainingState(plain, "method", 0, latents, torch.device("cpu"))
        running = train_steps(training, STEPS)
        for _ in range(STEPS):
            with counted() as counts:
                next(running)
            found.append(counts)
        running.close()
    return found


# Upper bounds of the collectives of an ordinary, a measuring and a logging step, next to the sums of gradients by
# DistributedDataParallel. With the options of the test: 2 bins of gradients, and rewards at 2 timesteps.
BOUNDS = {
    ("uniform", "none"): (0, 0, 1),
    ("speed_official", "min_snr"): (0, 0, 1),
    ("loss_second_moment", "none"): (1, 1, 2),
    ("loss_rms", "none"): (1, 1, 2),
    ("info_rate", "none"): (1, 1, 2),
    ("gradient_norm", "none"): (0, 2, 1),
    ("gradient_variance", "none"): (0, 4, 1),
    ("first_order", "none"): (0, 6, 1),
    ("adaptive", "none"): (0, 7, 2),
    ("adaptive_official", "none"): (0, 7, 2),
    ("uniform", "edm2"): (1, 1, 2),
    ("uniform", "coarse_to_fine"): (1, 1, 2),
}


@pytest.mark.parametrize("ranks", [8, 1024])
@pytest.mark.parametrize(("sampler", "weighting"), BOUNDS, ids=["+".join(names) for names in BOUNDS])
def test_collectives_of_a_step_are_few_and_do_not_grow_with_the_ranks(sampler, weighting, ranks, latents):
    chosen = DEFAULTS | {"sampler": sampler, "weighting": weighting, "ranks": ranks}
    found = collectives_by_step(chosen, latents)
    counts = tuple(found[step].total() for step in (ORDINARY, MEASURING, LOGGING))
    bounds = BOUNDS[sampler, weighting]
    assert all(count <= bound for count, bound in zip(counts, bounds, strict=True)), (counts, bounds, found)


def test_a_process_group_without_this_process_is_rejected():
    with process_group(4):
        others = torch.distributed.new_group([0, 2])
        with pytest.raises(ConfigError, match="process_group"):
            Strategy("uniform", process_group=others)
        half = torch.distributed.new_group([1, 3])
        draw = Strategy("uniform", process_group=half).draw(torch.zeros(3, 1))
    assert draw.coordinates.batch_size == 6
