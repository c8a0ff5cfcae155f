"""Two processes (gloo): the same sampler state on both, and the timesteps that one process draws."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kairos.strategies import SAMPLERS
from kairos.training.checkpoint import _hash_value

SCRIPT = Path(__file__).with_name("rank.py")
NAMES = [*sorted(SAMPLERS), "adaptive+min_snr", "uniform+edm2"]


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
    assert _hash_value(first["state"]) == _hash_value(second["state"])
    close(first["state"], alone["state"])
    close(first["network"], alone["network"])


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
