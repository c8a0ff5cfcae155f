"""Two processes (gloo): the same sampler state on both, and the timesteps that one process draws."""

import io
import time

import pytest
import torch

import rank
import rank_groups
from kairos_timesteps import distributed
from kairos_timesteps.components import SAMPLERS

NAMES = [*sorted(SAMPLERS), "adaptive+min_snr", "uniform+coarse_to_fine", "uniform+edm2"]


def test_two_processes_draw_what_one_draws_and_hold_the_same_state(tmp_path):
    both = rank_groups.run(rank.train_all, tmp_path, 2, NAMES)
    whole = rank.train_all(NAMES)
    for name in NAMES:
        alone, first, second = whole[name], both[0][name], both[1][name]
        with rank_groups.case(name):
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


def meet_late():
    """Join, read and meet while rank 0 takes longer than a collective may; returns what `on_first` gives."""
    distributed.LONGEST_WAIT = 3.0  # a busy machine's processes meet within that
    late = distributed.os.environ["RANK"] == "0"
    if late:
        time.sleep(4)  # as a rank that waits for a lock
    distributed.join(2, torch.device("cpu"))
    read = distributed.on_first(lambda: time.sleep(4) or "read")
    if late:
        time.sleep(4)  # as a rank that writes a checkpoint
    distributed.meet()
    assert distributed.add([1.0]) == [2.0]
    distributed.part()
    return read


@pytest.mark.long
@pytest.mark.timeout(120)
def test_ranks_wait_for_one_that_takes_longer_than_a_step_may(tmp_path):
    assert rank_groups.run(meet_late, tmp_path, 2, join=False) == ["read", "read"]
    assert 60 <= distributed.LONGEST_WAIT <= 600
