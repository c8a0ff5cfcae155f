"""attach rejects trainers whose steps run no hooks and copies of strategies, and accepts other optimizers."""

import copy
import logging
import math
import pickle
import types

import pytest
import torch
from torch import nn

from attached_training import COUNT, MEASURING, TinyTraining, validate
from kairos_timesteps import attach
from kairos_timesteps.errors import ConfigError
from marks import mark_long
from small_loop import IMAGES, TinyNetwork, equal_bits


@pytest.mark.parametrize(
    ("optimizer", "network", "words"),
    [
        ([1, 2], None, "got 2 optimizers, allowed: one torch.optim.Optimizer; use the explicit form"),
        (types.SimpleNamespace(), None, "got SimpleNamespace, allowed: one torch.optim.Optimizer; use the explicit"),
        (None, type("Engine", (), {"__module__": "deepspeed.runtime.engine"})(), "got DeepSpeed.*explicit form"),
    ],
)
def test_optimizers_that_run_no_hooks_are_rejected(optimizer, network, words):
    optimizer = optimizer or torch.optim.SGD(TinyNetwork().parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=words):
        attach("uniform", "linear", optimizer, network)


def test_a_step_within_the_backward_pass_is_rejected():
    network = TinyNetwork()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    network.time.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(ConfigError, match=r"steps within the backward pass .*Strategy.draw"):
        attach("uniform", "linear", optimizer, network)


@pytest.mark.parametrize("name", MEASURING)
def test_an_optimizer_of_master_copies_is_rejected_by_strategies_that_measure_the_network(name):
    """With float32 copies of half-precision parameters the network changes after the optimizer's step."""
    network = TinyNetwork()
    masters = torch.optim.SGD([nn.Parameter(p.detach().clone()) for p in network.parameters()], lr=0.1)
    with pytest.raises(ConfigError, match="no parameter of the network"):
        attach(name, "linear", masters, network, predict=network)
    attach("loss_rms", "linear", masters, network)


def test_many_losses_without_an_observed_step_are_an_error():
    training = TinyTraining()
    with pytest.raises(ConfigError, match="explicit form"):
        for _ in range(300):
            training.timesteps.loss(training.errors(training.timesteps(IMAGES))).backward()
            training.optimizer.zero_grad()


def train_with_another_optimizer(optimizer, training, steps, name="loss_rms", accumulate=1):
    """Train a network by an optimizer that is not the attached one."""
    for number in range(steps * accumulate):
        errors = training.errors(training.timesteps(IMAGES))
        (training.timesteps.loss(errors) if name == "loss_rms" else errors.mean()).backward()
        if (number + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("name", ["uniform", "loss_rms"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_steps_of_a_rebuilt_optimizer_are_an_error(name, accumulate):
    """A trainer that builds its optimizer again, or copies it without its parameters."""
    training = TinyTraining(name)
    training.step()
    for optimizer in (torch.optim.Adam(training.network.parameters()), copy.copy(training.optimizer)):
        with pytest.raises(ConfigError, match=r"another (Adam|SGD) took steps of its parameters.*copy.deepcopy"):
            train_with_another_optimizer(optimizer, training, 4, name, accumulate)
        training.timesteps.load_state_dict(training.timesteps.state_dict())


def copy_network_and_optimizer(training):
    """Return a network and an optimizer that were copied together."""
    network, optimizer = copy.deepcopy((training.network, training.optimizer))
    other = copy.copy(training)
    other.network, other.optimizer = network, optimizer
    return other


def test_a_network_and_an_optimizer_that_were_copied_together_are_an_error_or_a_warning(caplog):
    """Their losses leave no gradient in the attached optimizer; without losses, steps of others remain as evidence."""
    learned, fixed = (
        copy_network_and_optimizer(TinyTraining("loss_rms")),
        copy_network_and_optimizer(TinyTraining("uniform")),
    )
    with pytest.raises(ConfigError, match=r"gradients of 200 steps vanished.*copy.deepcopy"):
        train_with_another_optimizer(learned.optimizer, learned, 250)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "kairos_timesteps"):
        train_with_another_optimizer(fixed.optimizer, fixed, 250, "uniform")
    (record,) = caplog.records
    assert "SGD took steps of other parameters" in record.getMessage() and "copy.deepcopy" in record.getMessage()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda parts: pickle.loads(pickle.dumps(parts))])
def test_a_copied_strategy_evaluates_but_draws_no_training_timesteps(duplicate):
    """Copies for an exponential moving average contain the strategy of a network that has it as an attribute."""
    training = TinyTraining()
    training.step()
    network, optimizer, timesteps = duplicate((training.network, training.optimizer, training.timesteps))
    network.eval()
    assert equal_bits(timesteps(IMAGES), validate(training, batches=1, count=8)[0])
    network.train()
    with pytest.raises(ConfigError, match=r"copy of an attached strategy.*load_state_dict"):
        timesteps(IMAGES)
    again = attach("loss_rms", "linear", optimizer, network)
    again.load_state_dict(timesteps.state_dict())
    assert equal_bits(again(IMAGES), training.timesteps(IMAGES))


@pytest.mark.parametrize("fused", mark_long([True, False], [True]))
def test_other_optimizers_and_skipped_steps_are_no_copies(fused, caplog):
    """No error and no warning, although other optimizers take steps between the draws of an accumulated step.

    The attached optimizer is a wrapper whose inner optimizer has its parameters. A discriminator is trained on every
    micro-batch, and GradScaler skips 60 successive steps.
    """

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner):
            super().__init__(inner.param_groups, {})
            self.inner = inner

        def step(self, closure=None):
            return self.inner.step(closure)

    network, discriminator = TinyNetwork(), nn.Linear(1, 1)
    inner = torch.optim.AdamW(network.parameters(), fused=fused)
    discriminator_optimizer = torch.optim.SGD(discriminator.parameters(), lr=0.1)
    optimizer = inner if fused else Wrapper(inner)
    timesteps = attach("loss_rms+edm2", "linear", optimizer, network, weighting={"channels": 8})
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60)
    with caplog.at_level(logging.WARNING, "kairos_timesteps"):
        for step in range(100):
            for _ in range(5):
                errors = (network(IMAGES, timesteps(IMAGES)) - 1).square().mean((1, 2, 3))
                scaler.scale(timesteps.loss(errors * (math.inf if step < 60 else 1.0))).backward()
                discriminator(torch.ones(1, 1)).sum().backward()
                discriminator_optimizer.step()
            network.eval()
            timesteps(IMAGES)
            network.train()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    timesteps.state_dict()
    assert timesteps.strategy.step == 40 and not caplog.records


def test_a_scheduler_that_changes_its_prediction_type_after_attach_is_rejected():
    """Scripts of diffusers set ``--prediction_type`` in the loop, between the draw and the target."""
    config = types.SimpleNamespace(prediction_type="epsilon")
    scheduler = types.SimpleNamespace(config=config, alphas_cumprod=torch.linspace(0.99, 0.01, 20))
    network = TinyNetwork()
    timesteps = attach("uniform+min_snr", scheduler, torch.optim.Adam(network.parameters()), network)
    for prediction_type in ("epsilon", "v_prediction"):
        timesteps(IMAGES[:COUNT])
        config.prediction_type = prediction_type
        errors = network(IMAGES[:COUNT], torch.zeros(COUNT)).square().flatten(1).mean(1)
        if prediction_type == "epsilon":
            timesteps.loss(errors).backward()
        else:
            with pytest.raises(ConfigError, match=r"prediction_type.*v_prediction.*epsilon"):
                timesteps.loss(errors)
