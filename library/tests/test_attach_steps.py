"""attach: which losses and optimizer steps a strategy observes; closures and `detach`."""

import copy

import pytest
import torch

from attached_training import COUNT, LOSS_RMS_EDM2, TinyTraining, Trainer, validate
from kairos_timesteps import Strategy, attach
from kairos_timesteps.errors import ConfigError
from small_loop import IMAGES, TinyNetwork, equal_bits


def test_two_losses_of_one_backward_pass_are_both_observed():
    training = TinyTraining(sampler={"decay": 1 - 1e-16})
    first = training.timesteps.loss(training.errors(training.timesteps(IMAGES[:3])))
    second = training.timesteps.loss(training.errors(training.timesteps(IMAGES[3:8])))
    (first + second).backward()
    training.optimizer.step()
    assert training.observed == pytest.approx(8) and training.state["step"] == 1


def test_micro_batches_may_have_different_shapes_and_a_graph_may_be_used_twice():
    training = TinyTraining(sampler={"decay": 1 - 1e-16})
    for images in (torch.zeros(2, 1, 4, 4), torch.zeros(1, 1, 6, 3), torch.zeros(3, 1, 2, 4, 4)):
        t = training.timesteps(images.bfloat16())
        assert t.dtype == torch.int64
        loss = training.timesteps.loss(training.errors(t))
        loss.backward(retain_graph=True)
        loss.backward()
    training.optimizer.step()
    assert training.observed == pytest.approx(6)


def test_a_micro_batch_that_raises_an_error_is_not_observed():
    training = TinyTraining(sampler={"decay": 1 - 1e-16})
    with pytest.raises(RuntimeError, match="expected input"):
        training.network(torch.zeros(8, 3, 4, 4), training.timesteps(IMAGES))
    training.step(count=4)
    assert training.observed == pytest.approx(4) and training.state["step"] == 1


def test_a_step_that_raises_an_error_is_not_counted():
    network = TinyNetwork()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    options = {"frequency": 1, "feature_timesteps": 5, "width": 4}
    timesteps = attach("adaptive", "linear", optimizer, network, predict=network, sampler=options, timesteps=20)
    for fails in (True, False):
        timesteps.loss((network(IMAGES, timesteps(IMAGES)) - 1).square().mean((1, 2, 3))).backward()
        optimizer.param_groups[0]["lr"] = "no number" if fails else 0.1
        if fails:
            with pytest.raises(TypeError):
                optimizer.step()
        else:
            optimizer.step()
        optimizer.zero_grad()
    assert timesteps.state_dict()["strategy"]["step"] == 1
    assert len(timesteps.strategy.sampler.changes) == 1


def test_a_fixed_sampler_needs_no_loss():
    training = TinyTraining("log_normal")
    explicit = Strategy("log_normal")
    for _ in range(3):
        t = training.timesteps(IMAGES)
        draw = explicit.draw(IMAGES)
        assert equal_bits(t, draw.t)
        training.errors(t).mean().backward()
        training.optimizer.step()
        with explicit.observe(draw):
            pass


def test_a_learned_sampler_needs_the_loss():
    training = TinyTraining()
    training.errors(training.timesteps(IMAGES)).mean().backward()
    with pytest.raises(ConfigError, match=r"losses of a step: got none, allowed: .*timesteps.loss"):
        training.optimizer.step()


def test_a_closure_draws_within_the_step():
    training, other = TinyTraining(), TinyTraining()
    other.network.load_state_dict(training.network.state_dict())

    def closure():
        training.optimizer.zero_grad()
        loss = training.timesteps.loss(training.errors(training.timesteps(IMAGES)))
        loss.backward()
        return loss

    for _ in range(3):
        training.optimizer.step(closure)
        other.step()
    assert training.state["step"] == 3 and equal_bits(training.state, other.state)


def train_with_closures(attached, accumulated):
    """Measure the network around steps whose last micro-batch is in the optimizer's closure, as in Lightning."""
    torch.manual_seed(0)
    network, options = TinyNetwork(), {"frequency": 1, "start": 1, "bins": 4}
    optimizer = torch.optim.Adam(network.parameters(), lr=0.1)
    strategy, timesteps, draws = Strategy("gradient_norm", sampler=options), None, []
    if attached:
        timesteps = attach("gradient_norm", "linear", optimizer, network, predict=network, sampler=options)

    def micro_batch():
        if timesteps is None:
            draws.append(strategy.draw(IMAGES))
        t = timesteps(IMAGES) if attached else draws[-1].t
        errors = (network(IMAGES, t) - 1).square().mean((1, 2, 3))
        (timesteps.loss(errors) if attached else strategy.loss(draws[-1], errors)).backward()

    for _ in range(4):
        for _ in range(accumulated):
            micro_batch()
        if attached:
            optimizer.step(micro_batch)
        else:
            micro_batch()
            with strategy.observe(draws, network, optimizer):
                optimizer.step()
        draws.clear()
        optimizer.zero_grad()
    return (timesteps.strategy if attached else strategy).state_dict(), network.state_dict()


@pytest.mark.parametrize("accumulated", [0, 1])
def test_strategies_that_measure_work_with_a_closure(accumulated):
    assert equal_bits(train_with_closures(True, accumulated), train_with_closures(False, accumulated))


def test_strategies_that_measure_reject_closures_that_are_called_again():
    network = TinyNetwork()
    optimizer = torch.optim.LBFGS(network.parameters(), lr=0.1)
    timesteps = attach("gradient_norm", "linear", optimizer, network, predict=network)

    def closure():
        optimizer.zero_grad()
        loss = timesteps.loss((network(IMAGES, timesteps(IMAGES)) - 1).square().mean((1, 2, 3)))
        loss.backward()
        return loss

    with pytest.raises(ConfigError, match=r"several calls of its closure.*explicit form"):
        optimizer.step(closure)


def test_after_detach_training_draws_are_an_error_and_validations_work():
    training = TinyTraining()
    training.step()
    times = validate(training, batches=1, count=8)[0]
    training.timesteps(IMAGES)  # later validations begin anew
    training.timesteps.detach()
    for timesteps in (training.timesteps, copy.deepcopy(training.timesteps)):
        with pytest.raises(ConfigError, match="detached"):
            timesteps(IMAGES)
    assert equal_bits(validate(training, batches=1, count=8)[0], times)
    training.optimizer.step()
    assert training.timesteps.strategy.step == 1
    again = attach("loss_rms", "linear", training.optimizer, training.network)
    again.load_state_dict(training.timesteps.state_dict())
    training.timesteps.detach()  # a second call changes nothing, for the new hooks neither
    again.loss(training.errors(again(IMAGES))).backward()
    training.optimizer.step()
    assert again.strategy.step == 2 and training.timesteps.strategy.step == 1


def test_a_loss_without_a_gradient_is_not_observed():
    states = []
    for logged in (False, True):
        trainer = Trainer(LOSS_RMS_EDM2, True)
        for _ in range(3):
            trainer.network.train()
            trainer.timesteps(IMAGES[:COUNT])
            errors = trainer.network(IMAGES[:COUNT], torch.zeros(COUNT)).square().flatten(1).mean(1)
            loss = trainer.timesteps.loss(errors)
            if logged:
                trainer.timesteps.loss(errors.detach() * 0 + 7)
            loss.backward()
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()
        states.append(trainer.timesteps.state_dict()["strategy"]["sampler"])
    torch.testing.assert_close(*states, rtol=0, atol=0)
