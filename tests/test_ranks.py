"""Two processes (gloo): the same sampler state on both, and the timesteps that one process draws."""

import io
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kairos import distributed
from kairos.strategies import SAMPLERS

SCRIPT = Path(__file__).with_name("rank.py")
NAMES = [*sorted(SAMPLERS), "adaptive+min_snr", "uniform+coarse_to_fine", "uniform+edm2"]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What one process computes, and each of two that share its batch."""
    folder = tmp_path_factory.mktemp("ranks")
    started = [
        subprocess.Popen(
            [sys.executable, SCRIPT, str(rank), str(ranks), folder / "group", folder / f"{ranks}.{rank}", *NAMES]
        )
        for ranks in (1, 2)
        for rank in range(ranks)
    ]  # fmt: skip
    assert [process.wait(timeout=240) for process in started] == [0, 0, 0]
    return [torch.load(folder / name, weights_only=True) for name in ("1.0", "2.0", "2.1")]


@pytest.mark.parametrize("name", NAMES)
def test_two_processes_draw_what_one_draws_and_hold_the_same_state(results, name):
    alone, first, second = (result[name] for result in results)
    assert first["t"] == second["t"] == alone["t"]
    assert content(first["state"]) == content(second["state"])
    close(first["state"], alone["state"])
    close(first["network"], alone["network"])


def content(state):
    """The bytes of a file that holds it."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def close(one, other):
    """Equal up to the order of sums."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            close(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        for left, right in zip(one, other, strict=True):
            close(left, right)
    elif isinstance(one, (torch.Tensor, float)):
        if isinstance(one, torch.Tensor) and one.dtype == torch.float32:
            # the policy's: where a gradient is a rounding error, Adam makes a step of lr out of it
            assert (one - other).norm() <= 1e-2 * other.norm()
        else:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    else:
        assert one == other


PATIENT = """
import faulthandler
import time
import torch
from kairos import distributed

faulthandler.dump_traceback_later(80)  # says where one hangs
distributed.LONGEST_WAIT = 4.0  # a busy machine's processes meet within that
if distributed.os.environ["RANK"] == "0":
    time.sleep(7)  # as one that queues for a lock
distributed.join(2, torch.device("cpu"))
print(distributed.on_first(lambda: time.sleep(6) or "read"), flush=True)
if distributed.rank() == 0:
    time.sleep(6)  # as one that writes a checkpoint
distributed.meet()
assert distributed.add([1.0]) == [2.0]
distributed.part()
"""


@pytest.mark.timeout(120)
def test_ranks_wait_for_one_that_takes_longer_than_a_step_may():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    started = [
        subprocess.Popen([sys.executable, "-c", PATIENT], env={**os.environ, **where, "RANK": str(rank)}, stdout=-1)
        for rank in range(2)
    ]
    said = [process.communicate(timeout=120)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0] and said == [b"read\n"] * 2
    assert distributed.LONGEST_WAIT <= 600
