"""Number of collectives of a training step at 8 and 1,024 ranks, in a fake process group with tensors on the CPU."""

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
from kairos_timesteps.errors import ConfigError
from kairos_timesteps.strategy import Strategy
from test_fake_cuda import DEFAULTS, LOGGING, MEASURING, ORDINARY, STEPS, make_experiment
from training_case import build_training, experiment, make_latents

COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "barrier",
               "broadcast", "broadcast_object_list", "gather", "reduce", "scatter")  # fmt: skip


@contextmanager
def count_collectives() -> Iterator[Counter]:
    """Count collectives by function and caller, except those of DistributedDataParallel."""
    counts: Counter = Counter()

    def wrap(name: str, function: Any) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            counts[f"{name} in {caller()}"] += 1
            return function(*arguments, **keywords)

        return call

    with ExitStack() as stack:
        for name in COLLECTIVES:
            function = getattr(torch.distributed, name)
            stack.enter_context(mock.patch.object(torch.distributed, name, wrap(name, function)))
        yield counts


@pytest.fixture(scope="module")
def latents(tmp_path_factory):
    return open_latents(make_latents(tmp_path_factory.mktemp("collectives")))


def collectives_of_run(plain: dict, latents, folder, ranks: int, length: int, monkeypatch) -> Counter:
    """Count the collectives of a run of `length` steps, including its checkpoints and its snapshot."""
    store_of_ranks = torch.distributed.HashStore()
    store_of_ranks.add(rank_processes._COUNTER, 10**9)  # all other ranks have always arrived
    monkeypatch.setattr(rank_processes, "_store", store_of_ranks)
    # the reducer of DistributedDataParallel does not take the results of a fake process group
    monkeypatch.setattr("torch.nn.parallel.DistributedDataParallel", Replicated)
    with process_group(ranks):
        training = build_training(plain, next(iter(plain["methods"])), 0, latents, torch.device("cpu"))
        store = RunFolder(folder / "out", "identity")
        store.prepare([length])
        progress = ProgressFile(folder / "out" / ".state", length, reports=False)
        with count_collectives() as counts:
            job = TrainingJob(store, training, {}, "label", progress, StopRequest())
            assert job.train_until([length], [length]) == length
    return counts


def test_ranks_agree_on_stopping_in_less_than_half_of_the_steps(latents, tmp_path, monkeypatch):
    lengths, counts = (10, 60), []
    for length in lengths:
        plain = experiment(
            {"uniform": {}}, training__batch_size=1024, training__log_every=1000, training__checkpoint_every=1000
        )
        counts.append(collectives_of_run(plain, latents, tmp_path / str(length), 1024, length, monkeypatch))
    difference = counts[1] - counts[0]
    assert difference.total() < (lengths[1] - lengths[0]) / 2, difference


def steps_until_all_stop(ranks: int, signalled_rank: int, request: int, seconds: list[float]) -> list[int]:
    """Return the number of steps that each rank, a thread of this process, takes until it stops.

    Args:
        ranks: number of ranks.
        signalled_rank: rank that receives the request to stop.
        request: step after which that rank receives the request.
        seconds: duration of a step of each rank.
    """
    steps = [0] * ranks
    store = torch.distributed.HashStore()

    def run(rank: int) -> None:
        torch.distributed.init_process_group("threaded", rank=rank, world_size=ranks, store=store)
        stop_request = StopRequest()
        stop_request.begin()
        collective_stop = CollectiveStop(stop_request)
        stopped = False
        while not stopped:
            time.sleep(seconds[rank])
            steps[rank] += 1
            if rank == signalled_rank and steps[rank] == request:
                stop_request.reason = "SIGTERM"
            stopped = collective_stop.after_step(0.0)
        torch.distributed.destroy_process_group()

    _install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    try:
        with ThreadPoolExecutor(ranks) as threads:
            list(threads.map(run, range(ranks), timeout=60))
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        _uninstall_threaded_pg()
    return steps


@pytest.mark.timeout(60)
def test_all_ranks_stop_after_the_same_step_within_seconds():
    start = time.monotonic()
    steps = steps_until_all_stop(3, signalled_rank=2, request=100, seconds=[0.001, 0.002, 0.004])
    assert len({*steps}) == 1 and 100 <= steps[0] < 1000
    assert time.monotonic() - start < 30


@pytest.mark.long
@pytest.mark.timeout(60)
def test_ranks_with_slow_steps_stop_after_the_step_of_the_request():
    assert steps_until_all_stop(2, signalled_rank=0, request=3, seconds=[1.2, 1.1]) == [3, 3]


def collectives_by_step(options: dict, latents) -> list[Counter]:
    """Count the collectives of each of four steps: the first one, an ordinary, a measuring and a logging one."""
    plain, counts_by_step = make_experiment(options), []
    with process_group(options["ranks"]), mock.patch("torch.nn.parallel.DistributedDataParallel", Replicated):
        training = build_training(plain, "method", 0, latents, torch.device("cpu"))
        running = train_steps(training, STEPS)
        for _ in range(STEPS):
            with count_collectives() as counts:
                next(running)
            counts_by_step.append(counts)
        running.close()
    return counts_by_step


# Upper bounds of the collectives of an ordinary, a measuring and a logging step, without the sums of gradients by
# DistributedDataParallel. The options of the test set 2 bins of gradients, and rewards at 2 timesteps. A measuring step
# also exchanges the ranks' numbers of samples with a loss.
BOUNDS = {
    ("uniform", "none"): (0, 0, 1),
    ("speed_official", "min_snr"): (0, 0, 1),
    ("loss_second_moment", "none"): (1, 1, 2),
    ("loss_rms", "none"): (1, 1, 2),
    ("info_rate", "none"): (1, 1, 2),
    ("gradient_norm", "none"): (0, 3, 1),
    ("gradient_variance", "none"): (0, 5, 1),
    ("first_order", "none"): (0, 7, 1),
    ("adaptive", "none"): (0, 8, 2),
    ("adaptive_official", "none"): (0, 8, 2),
    ("uniform", "edm2"): (1, 1, 2),
    ("uniform", "coarse_to_fine"): (1, 1, 2),
}


@pytest.mark.parametrize("ranks", [8, 1024])
@pytest.mark.parametrize(("sampler", "weighting"), BOUNDS, ids=["+".join(names) for names in BOUNDS])
def test_collectives_of_a_step_are_few_and_do_not_grow_with_the_ranks(sampler, weighting, ranks, latents):
    options = DEFAULTS | {"sampler": sampler, "weighting": weighting, "ranks": ranks}
    counts_by_step = collectives_by_step(options, latents)
    counts = tuple(counts_by_step[step].total() for step in (ORDINARY, MEASURING, LOGGING))
    bounds = BOUNDS[sampler, weighting]
    assert all(count <= bound for count, bound in zip(counts, bounds, strict=True)), (counts, bounds, counts_by_step)


def test_a_process_group_without_this_process_is_rejected():
    with process_group(4):
        others = torch.distributed.new_group([0, 2])
        with pytest.raises(ConfigError, match="process_group"):
            Strategy("uniform", process_group=others)
        half = torch.distributed.new_group([1, 3])
        draw = Strategy("uniform", process_group=half).draw(torch.zeros(3, 1))
    assert draw.coordinates.batch_size == 6
