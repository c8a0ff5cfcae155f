"""Adam and AdamW without torch's compiler equal torch's classes."""

import subprocess
import sys

import pytest
import torch

from kairos_timesteps import optimizers


def train(optimizer_class, parameters, batches, **settings):
    optimizer = optimizer_class(parameters, lr=1e-2, weight_decay=0.1, **settings)
    for batch in batches:
        optimizer.zero_grad()
        (parameters[0] * batch + parameters[1]).square().mean().backward()
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
@pytest.mark.parametrize("settings", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_steps_and_states_equal_those_of_torch(name, settings):
    batches = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    results = []
    for optimizer_class in (getattr(torch.optim, name), getattr(optimizers, name)):
        parameters = [torch.nn.Parameter(torch.linspace(-1, 1, 5)), torch.nn.Parameter(torch.zeros(5))]
        state = train(optimizer_class, parameters, batches[:3], **settings).state_dict()
        resumed = optimizer_class(parameters, lr=1.0)
        resumed.load_state_dict(state)
        assert resumed.state_dict()["param_groups"] == state["param_groups"]
        (parameters[0] * batches[3]).sum().backward()
        resumed.step()
        results.append((parameters, resumed.state_dict()))
    (expected, expected_state), (values, state) = results
    assert all(torch.equal(*pair) for pair in zip(expected, values, strict=True))
    torch.testing.assert_close(state, expected_state, rtol=0, atol=0)


@pytest.mark.long
def test_a_step_and_a_checkpoint_do_not_import_the_compiler():
    code = """
import sys, torch
from kairos_timesteps.optimizers import Adam
optimizer = Adam([torch.zeros(2, requires_grad=True)])
optimizer.zero_grad()
optimizer.step()
optimizer.load_state_dict(optimizer.state_dict())
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
