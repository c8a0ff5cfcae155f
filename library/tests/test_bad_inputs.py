"""Mistakes in a training loop: each is named where it is made, and correct loops get no false alarm."""

import weakref

import pytest
import torch
from torch import nn

import kairos_timesteps
from kairos_timesteps.errors import ConfigError


class Timeless(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(2, 2, 1)

    def forward(self, x, t, **conditions):
        return self.convolution(x)


def attach(name, process="flow", **options):
    """Return a strategy attached to a small network, the network and its optimizer."""
    torch.manual_seed(0)
    network = Timeless()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    time = "noise_is_one" if process == "flow" else None
    predict = network if name.split("+")[0] in ("auto", "adaptive", "gradient_norm") else None
    timesteps = kairos_timesteps.attach(name, process, optimizer, network, time=time, predict=predict, **options)
    return timesteps, network, optimizer


X0 = torch.randn(4, 2, 6, 6, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("conditions", "message"),
    [
        ({"mask": None}, r"conditions\.mask: got NoneType, allowed: a tensor with 4 rows"),
        ({"guidance": 3.5}, r"conditions\.guidance: got float"),
        ({"added": {"size": torch.zeros(4, 3)}}, r"conditions\.added: got dict"),
        ({"prompt": ["a"] * 4}, r"conditions\.prompt: got list"),
        ({"text": torch.zeros(3, 5)}, r"conditions\.text: got shape \(3, 5\), allowed: a tensor with 4 rows"),
        ({"guidance": torch.tensor(3.5)}, r"conditions\.guidance: got shape \(\), allowed"),
        ([torch.zeros(4, 3)], "conditions: got list, allowed: a dictionary"),
        (torch.zeros(4, 3), "conditions: got Tensor, allowed: a dictionary"),
    ],
)
def test_conditions_are_checked_when_they_are_passed(conditions, message):
    timesteps, _, _ = attach("auto")
    with pytest.raises(ConfigError, match=message):
        timesteps(X0, conditions=conditions)
    fixed, _, _ = attach("log_normal")  # measures nothing, and ignores conditions
    fixed(X0, conditions=conditions)


def test_conditions_of_an_accumulated_step_have_one_shape_and_steps_may_differ():
    timesteps, network, optimizer = attach("auto")
    for tokens in (7, 8):
        for _ in range(2):
            timesteps(X0, conditions={"text": torch.zeros(4, tokens, 5)})
            timesteps.loss(network(X0, 0).square()).backward()
        with pytest.raises(ConfigError, match=r"conditions\.text: got shape \(4, 9, 5\), allowed: rows of shape .*pad"):
            timesteps(X0, conditions={"text": torch.zeros(4, 9, 5)})
        optimizer.step()
        optimizer.zero_grad()
    timesteps(X0, conditions={"text": torch.zeros(4, 7, 5)})
    timesteps.loss(network(X0, 0).square()).backward()
    optimizer.zero_grad()  # drops the micro-batch
    timesteps(X0, conditions={"text": torch.zeros(4, 6, 5)})


@pytest.mark.parametrize("frames", [16, 21])
def test_errors_of_elements_with_a_time_for_each_frame_are_rejected(frames):
    network = nn.Conv3d(16, 16, 1)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    timesteps = kairos_timesteps.attach("uniform+bell", "flow", optimizer, network, time="noise_is_one")
    x0 = torch.randn(2, 16, frames, 4, 4)
    errors = torch.rand_like(x0) * torch.arange(1, frames + 1).view(1, 1, frames, 1, 1)
    timesteps(x0, times=(frames,))
    with pytest.raises(ConfigError, match=r"errors: got shape .* allowed: one error per t"):
        timesteps.loss(errors)
    means = errors.mean((1, 3, 4))
    torch.testing.assert_close(timesteps.loss(means), (timesteps.weights * means).mean())


def test_a_time_for_each_frame_is_rejected_by_samplers_that_measure():
    timesteps, _, _ = attach("auto")
    with pytest.raises(ConfigError, match=r"strategy auto: times: got \(3,\), allowed: \(\): the sampler measures"):
        timesteps(X0, times=(3,))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda timesteps: timesteps([X0[0]] * 4), "draw: x0: got list, allowed: a tensor"),
        (lambda timesteps: timesteps(X0, tokens="1024"), "draw: tokens: got '1024', allowed: a number"),
        (lambda timesteps: timesteps.loss([1.0] * 4), "errors: got list, allowed: a tensor"),
        (lambda timesteps: timesteps.loss(torch.ones(4), weights=[1.0] * 4), "weights: got list, allowed: a tensor"),
        (lambda timesteps: timesteps.loss(torch.ones(4), weights=0.5), "weights: got float"),
        (lambda timesteps: timesteps.loss(torch.ones(4), mask=[True] * 4), "mask: got list, allowed: a tensor"),
    ],
)
def test_lists_and_texts_instead_of_tensors_are_named(call, message):
    timesteps, _, _ = attach("shift", sampler={"law": "exponential"})
    timesteps(X0, tokens=1024)
    with pytest.raises(ConfigError, match=message):
        call(timesteps)


def test_a_device_without_float64_is_named(monkeypatch):
    monkeypatch.setattr("kairos_timesteps.strategy._DEVICES_WITHOUT_FLOAT64", ("cpu",))
    with pytest.raises(ConfigError, match="draw: device of x0: got cpu, allowed: a device with float64"):
        kairos_timesteps.Strategy("uniform").draw(X0)


def test_a_forgotten_observe_and_an_untrained_edm2_are_warned_of(caplog):
    strategy = kairos_timesteps.Strategy("loss_rms")
    for _ in range(300):
        strategy.loss(strategy.draw(X0), torch.ones(4))
    assert [record.message for record in caplog.records if "observe" in record.message]
    caplog.clear()
    strategy = kairos_timesteps.Strategy("uniform+edm2")
    network = Timeless()
    for step in range(30):
        draw = strategy.draw(X0)
        loss = strategy.loss(draw, network(X0, draw.t).square().mean((1, 2, 3)))
        if step < 10:
            loss.backward()
        else:
            torch.autograd.grad(loss, list(network.parameters()))
        with strategy.observe(draw):
            pass
        assert bool(caplog.records) == (step >= 19), step
    assert len(caplog.records) == 1 and "edm2: no gradient" in caplog.records[0].message


@pytest.mark.parametrize(("name", "keeps"), [("loss_rms", False), ("uniform+edm2", False), ("gradient_norm", True)])
def test_latents_of_an_accumulation_are_kept_only_where_the_network_is_measured(name, keeps):
    timesteps, network, _ = attach(name, "linear" if name == "uniform+edm2" else "flow")
    latents = []
    for _ in range(3):
        x0 = torch.randn(4, 2, 6, 6)
        latents.append(weakref.ref(x0))
        timesteps(x0)
        timesteps.loss(network(torch.zeros(4, 2, 6, 6), 0).square()).backward()
        del x0
    assert [reference() is not None for reference in latents[:2]] == [keeps, keeps]


def test_check_has_no_false_alarms_and_no_internal_errors(caplog):
    timesteps, _, _ = attach("log_normal")

    def check(images, **changes):
        noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(1)).to(images.dtype)
        t = torch.linspace(0.1, 0.9, len(images))
        fractions = t.to(images.dtype).view(-1, *[1] * (images.ndim - 1))
        values = {"x0": images, "noise": noise, "x_t": (1 - fractions) * images + fractions * noise, "t": t}
        timesteps.check(**(values | changes))
        return values

    random = torch.Generator().manual_seed(0)
    zero = X0.clone()
    zero[1] = 0
    for x0 in (zero, X0.bfloat16(), torch.zeros(4, 2, 6, 6)):
        check(x0)
    check(torch.randn(5, 1, generator=random))
    for _ in range(200):
        check(torch.randn(5, 2, generator=random).bfloat16())
    assert any("no ratio" in record.message for record in caplog.records)
    values = check(X0)
    for name in ("x0", "noise", "x_t"):
        damaged = values[name].clone()
        damaged[2] = float("nan")
        with pytest.raises(ConfigError, match=f"check: {name}: got NaN"):
            check(X0, **{name: damaged})
    for x0 in (zero, X0.bfloat16()):  # an alarm where one is due
        values = check(x0)
        with pytest.raises(ConfigError, match="data_is_one"):
            check(x0, t=1 - values["t"])
