"""Two processes (gloo) have equal states of the sampler, and draw the timesteps of one process."""

import io

import pytest
import torch

import rank
import rank_groups
from kairos_timesteps.base import Learned
from kairos_timesteps.components import SAMPLERS

NAMES = [*sorted(SAMPLERS), "adaptive+min_snr", "uniform+coarse_to_fine", "uniform+edm2"]


@pytest.mark.long
def test_two_processes_draw_the_timesteps_of_one_and_have_equal_states(tmp_path):
    both = rank_groups.run(rank.train_all, tmp_path, 2, NAMES)
    whole = rank.train_all(NAMES)
    for name in NAMES:
        alone, first, second = whole[name], both[0][name], both[1][name]
        with rank_groups.case(name):
            assert first["t"] == second["t"] == alone["t"]
            assert file_content(first["state"]) == file_content(second["state"])
            assert_close(first["state"], alone["state"])
            assert_close(first["network"], alone["network"])


def file_content(state):
    """Return the content of a file with a state."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def assert_close(one, other):
    """Assert that two nested states are equal up to the order of sums."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_close(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        for left, right in zip(one, other, strict=True):
            assert_close(left, right)
    elif isinstance(one, (torch.Tensor, float)):
        if isinstance(one, torch.Tensor) and one.dtype == torch.float32:
            # parameters of the policy: if a gradient is a rounding error, Adam turns it into a step of size lr
            assert (one - other).norm() <= 1e-2 * other.norm()
        else:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    else:
        assert one == other


@pytest.mark.long
def test_samples_without_a_loss_are_not_learned_from(tmp_path):
    names = [name for name in sorted(SAMPLERS) if issubclass(SAMPLERS[name].component, Learned)]
    both = rank_groups.run(rank.observe_half_of_all, tmp_path, 2, names, 2)
    alone = rank.observe_half_of_all(names, 1)
    for name in names:
        with rank_groups.case(name):
            assert file_content(both[0][name]) == file_content(both[1][name])
            assert_close(both[0][name], alone[name])
    assert alone["loss_rms"]["sums"][1].sum() == pytest.approx(4 * (1 + 0.999 + 0.999**2 + 0.999**3))
