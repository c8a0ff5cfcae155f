"""attach: draws and losses of a validation."""

import copy

import pytest
import torch
from torch import nn

from attached_training import COUNT, TinyTraining, validate
from kairos_timesteps import Strategy, attach
from kairos_timesteps.errors import ConfigError
from small_loop import IMAGES, TinyNetwork, equal_bits


@pytest.mark.parametrize(("process", "time"), [("linear", None), ("flow", "data_is_one"), ("edm", None)])
def test_validations_have_equal_even_times_and_change_nothing(process, time):
    training, other = (
        TinyTraining("loss_rms+min_snr", process, time=time),
        TinyTraining("loss_rms+min_snr", process, time=time),
    )
    other.network.load_state_dict(training.network.state_dict())
    seen = []
    for _ in range(3):
        training.step()
        other.step()
        seen.append(validate(training, batches=10)[0])
        assert equal_bits(training.state, other.state)
    assert equal_bits(seen[0], seen[1]) and equal_bits(seen[0], seen[2])
    fractions = training.timesteps.time.process.fractions(training.timesteps.time.to_process(seen[0]))
    counts = torch.histc(fractions, bins=8, min=0, max=1)
    assert counts.sum() == 50 and counts.min() >= 4 and counts.max() <= 9


def test_a_validation_loss_is_the_plain_mean():
    training = TinyTraining("loss_rms+min_snr")
    times, loss = validate(training)
    assert equal_bits(loss, training.errors(times[-5:]).mean().detach())


@pytest.mark.parametrize("index", [range(8), torch.arange(8)])
def test_indices_without_a_total_are_those_of_the_batch_also_in_a_validation(index):
    timesteps = TinyTraining("uniform").timesteps
    timesteps.network.eval()
    t, later = timesteps(IMAGES, index=index), timesteps(IMAGES, index=index)
    other = TinyTraining("uniform").timesteps
    other.network.eval()
    assert equal_bits(t, other(IMAGES)) and equal_bits(later, other(IMAGES))


def test_indices_beyond_the_total_are_rejected_in_a_validation():
    timesteps = TinyTraining("uniform").timesteps
    timesteps.network.eval()
    with pytest.raises(ConfigError, match=r"index: got range\(8, 16\), allowed: .* 0 to 7"):
        timesteps(IMAGES, index=range(8, 16))
    slices = [timesteps(IMAGES, index=range(start, start + 8), total=16) for start in (0, 8)]
    assert len({*torch.cat(slices).tolist()}) == 16


class Wrapped(nn.Module):
    """A wrapper such as DistributedDataParallel, whose modes the network inside follows."""

    def __init__(self):
        super().__init__()
        self.module = TinyNetwork()

    def forward(self, x_t, t):
        return self.module(x_t, t)


@pytest.mark.parametrize(
    ("attached", "evaluated", "gradients", "validation"),
    [
        # network given to attach, network whose method eval is called, gradients: is it a validation
        ("network", None, torch.enable_grad, False),
        ("network", None, torch.no_grad, False),
        ("network", "network", torch.no_grad, True),
        ("network", "network", torch.enable_grad, True),
        ("network", "wrapper", torch.no_grad, True),
        ("wrapper", "wrapper", torch.no_grad, True),
        ("wrapper", "network", torch.no_grad, False),
        (None, None, torch.enable_grad, False),
        (None, None, torch.no_grad, True),
        (None, None, torch.inference_mode, True),
        (None, "network", torch.enable_grad, False),
        ("function", "network", torch.enable_grad, False),
        ("function", None, torch.no_grad, True),
    ],
)
def test_the_mode_of_the_given_network_decides_what_a_validation_is(attached, evaluated, gradients, validation):
    """A training draw counts as used even if its loss has no gradient; a draw of a validation changes nothing."""
    wrapper = Wrapped()
    networks = {"network": wrapper.module, "wrapper": wrapper, "function": lambda x_t, t: wrapper(x_t, t), None: None}
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    timesteps = attach("loss_rms+min_snr", "linear", optimizer, networks[attached])
    before = copy.deepcopy(timesteps.strategy.state_dict())
    if evaluated:
        networks[evaluated].eval()
    with gradients():
        t = timesteps(IMAGES)
        errors = (wrapper(IMAGES, t) - 1).square().mean((1, 2, 3))
        loss = timesteps.loss(errors)
    draw = Strategy("loss_rms+min_snr").draw(IMAGES)
    assert equal_bits(t, draw.t) is not validation
    assert equal_bits(loss.detach(), errors.mean().detach()) is validation
    assert equal_bits(timesteps.strategy.state_dict(), {**before, "drawn": [0 if validation else len(IMAGES), 0]})
    wrapper.train()
    later = timesteps(IMAGES)
    assert equal_bits(later, draw.t) is validation
    timesteps.loss((wrapper(IMAGES, later) - 1).square().mean((1, 2, 3))).backward()
    optimizer.step()
    taken = timesteps.strategy.sampler._sums[1].sum().item()
    assert taken == pytest.approx(len(IMAGES), rel=0.1)  # the loss without a gradient is not learned from


def test_training_with_draws_in_evaluation_mode_alone_is_an_error():
    training = TinyTraining()
    training.network.eval()
    training.errors(training.timesteps(IMAGES)).mean().backward()
    with pytest.raises(ConfigError, match=r"draws of a validation alone, allowed: a training draw"):
        training.optimizer.step()


def test_weights_of_frames_apply_in_a_validation():
    network = TinyNetwork()
    timesteps = attach("uniform", "cosine", torch.optim.Adam(network.parameters()), network)
    network.eval()
    t = timesteps(torch.zeros(4, 3, 2, 2), times=(3,))
    assert t.shape == (4, 3)
    errors, weights = torch.rand(4, 3), torch.rand(4, 3)
    expected = (errors * weights).mean()
    torch.testing.assert_close(timesteps.loss(errors, weights=weights), expected)


@pytest.mark.parametrize("name", ["uniform", "loss_rms"])
def test_a_validation_between_a_draw_and_its_loss_is_an_error(name):
    network = TinyNetwork()
    timesteps = attach(name, "cosine", torch.optim.Adam(network.parameters()), network)
    timesteps(IMAGES[:COUNT])
    network.eval()
    timesteps(IMAGES[:COUNT])
    network.train()
    with pytest.raises(ConfigError, match="draw of a validation"):
        timesteps.loss(torch.ones(COUNT, requires_grad=True))
