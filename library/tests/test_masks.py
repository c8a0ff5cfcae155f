"""Masks of `Strategy.loss`: learned components ignore samples whose mask is False."""

import pytest
import torch

from kairos_timesteps import Strategy
from kairos_timesteps.base import Learned
from kairos_timesteps.components import SAMPLERS
from small_loop import IMAGES, TinyNetwork, equal_bits

LEARNED = sorted(name for name, entry in SAMPLERS.items() if issubclass(entry.component, Learned))


def small_options(name):
    """Return options with which a strategy learns in its first steps."""
    options = {"frequency": 1, "start": 1, "feature_timesteps": 5, "bins": 4, "min_count": 1}
    return {key: value for key, value in options.items() if key in SAMPLERS[name].component.options}


class Conditional(TinyNetwork):
    """Network whose output depends on a condition of each sample."""

    def forward(self, x_t, t, conditions):
        return super().forward(x_t, t) * conditions["factor"].view(-1, 1, 1, 1)


def step(strategy, network, draw, mask=None, rows=slice(None)):
    """Run a step without an optimizer; errors and conditions are functions of the sample."""
    errors, conditions = torch.linspace(1, 2, 8)[rows], {"factor": torch.arange(8.0)[rows]}
    loss = strategy.loss(draw, errors, mask)
    with strategy.observe(draw, network, conditions=conditions):
        pass
    return loss


@pytest.mark.parametrize("name", LEARNED)
def test_masked_samples_are_ignored(name):
    torch.manual_seed(0)
    network = Conditional()
    masked, fewer = (Strategy(name, timesteps=20, sampler=small_options(name)) for _ in range(2))
    mask = torch.tensor([False, False, True, True, True, False, False, False])
    for _ in range(2):
        step(masked, network, masked.draw(IMAGES), mask)
        step(fewer, network, fewer.draw(IMAGES).rows(2, 5), rows=slice(2, 5))
    assert equal_bits(masked.state_dict(), fewer.state_dict())


@pytest.mark.parametrize("name", LEARNED)
def test_a_step_whose_samples_are_all_masked_changes_no_statistics(name):
    network = Conditional()
    strategy = Strategy(f"{name}+coarse_to_fine", timesteps=20, sampler=small_options(name))
    plain = Strategy(f"{name}+coarse_to_fine", timesteps=20, sampler=small_options(name))
    for trained in (strategy, plain):
        step(trained, network, trained.draw(IMAGES))
    before = strategy.state_dict()
    loss = step(strategy, network, strategy.draw(IMAGES), torch.zeros(8, dtype=torch.bool))
    assert equal_bits(loss, step(plain, network, plain.draw(IMAGES)))
    after = strategy.state_dict()
    assert after["step"] == 2
    assert equal_bits(after["sampler"], before["sampler"]) and equal_bits(after["weighting"], before["weighting"])
    assert not equal_bits(plain.state_dict(), after)


def test_one_micro_batch_may_have_a_mask_and_another_none():
    masked, fewer = (Strategy("loss_rms", sampler={"frequency": 1, "start": 1}) for _ in range(2))
    for strategy, mask in ((masked, torch.arange(4) < 2), (fewer, None)):
        first, second = strategy.draw(IMAGES[:4]), strategy.draw(IMAGES[4:])
        strategy.loss(first if mask is not None else first.rows(0, 2), torch.ones(4 if mask is not None else 2), mask)
        strategy.loss(second, torch.full((4,), 2.0))
        with strategy.observe(second):
            pass
    assert equal_bits(masked.state_dict(), fewer.state_dict())
