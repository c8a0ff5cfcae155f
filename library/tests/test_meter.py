"""Measurements of the gradients of networks that are functions."""

import pytest
import torch
from torch import nn

from kairos_timesteps.errors import ConfigError
from kairos_timesteps.strategy import Strategy

MEASURING = ("gradient_norm", "auto", "gradient_variance", "first_order")


def take_step(name: str, network, optimizer) -> Strategy:
    """Take one step of a strategy that measures gradients; returns the strategy."""
    options = {} if name == "auto" else {"bins": 2, "samples": 2, "start": 1}
    strategy = Strategy(name, "cosine", timesteps=20, sampler=options)
    images = torch.randn(4, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    draw = strategy.draw(images)
    strategy.loss(draw, torch.ones(4))
    with strategy.observe(draw, network, optimizer):
        pass
    return strategy


@pytest.mark.parametrize("name", MEASURING)
def test_a_function_is_measured_by_the_parameters_of_its_optimizer(name):
    torch.manual_seed(0)
    module = nn.Conv2d(1, 1, 3, padding=1)
    optimizer = torch.optim.Adam(module.parameters())

    def function(x, t):
        return module(x)

    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = module

        def forward(self, x, t):
            return self.module(x)

    states = [take_step(name, network, optimizer).sampler.state_dict() for network in (function, Module())]
    assert states[0]["updates"] == 1
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)


@pytest.mark.parametrize("name", MEASURING)
def test_a_function_without_parameters_is_rejected_by_name(name):
    with pytest.raises(ConfigError, match=r"network.*function.*nn\.Module.*optimizer"):
        take_step(name, lambda x, t: x, None)
