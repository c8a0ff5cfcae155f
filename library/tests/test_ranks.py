"""Two processes (gloo): the same sampler state on both, and the timesteps that one process draws."""

import io

import torch

import rank
import rank_groups
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
