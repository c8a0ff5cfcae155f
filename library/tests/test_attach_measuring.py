"""attach: strategies that measure the network call it as the trainer does, and need `predict`."""

import pytest
import torch
from torch import nn

import kairos_timesteps
from attached_training import CONVENTIONS, MEASURING
from kairos_timesteps import Attached, Strategy, attach
from kairos_timesteps.errors import ConfigError
from kairos_timesteps.time_convention import TimeConvention
from small_loop import IMAGES, TinyNetwork, equal_bits


class Conditional(nn.Module):
    """Network with the call signature of a trainer and a condition for each sample."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.factor = nn.Conv2d(1, 1, 3, padding=1), nn.Parameter(torch.tensor(0.5))

    def forward(self, hidden_states, timestep, encoder_hidden_states):
        shift = self.factor * encoder_hidden_states[:, :1].mean(1) + 0.1 * timestep.float()
        return {"sample": self.layer(hidden_states) + shift.view(-1, 1, 1, 1)}


@pytest.mark.parametrize("mask", [None, torch.arange(4) < 3])
def test_a_measurement_calls_the_network_as_the_trainer_does(mask):
    """The trainer's t = 1 is data and its output x0 - noise; a process converts both for the explicit form."""
    text = torch.randn(8, 5, generator=torch.Generator().manual_seed(2))

    class Reversed(kairos_timesteps.Flow):
        def predict(self, network, x_t, t, conditions=None):
            return -network(x_t, (1 - t).float(), conditions["text"])["sample"]

    def train(attached):
        network = Conditional()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        options = {"frequency": 1, "start": 1, "bins": 4}
        time = TimeConvention(kairos_timesteps.Flow(), "data_is_one")
        if attached:
            timesteps = attach(
                "gradient_norm", "flow", optimizer, network, time="data_is_one", sampler=options,
                predict=lambda x_t, t, text: network(x_t, timestep=t, encoder_hidden_states=text)["sample"],
            )  # fmt: skip
            strategy = timesteps.strategy
        else:
            strategy = Strategy("gradient_norm", Reversed(), sampler=options)
        for step in range(4):
            draws = []
            for half in (slice(0, 4), slice(4, 8)):
                x0, noise = IMAGES[half], torch.randn(4, 1, 4, 4, generator=torch.Generator().manual_seed(step))
                if attached:
                    t = timesteps(x0, conditions={"text": text[half]})
                else:
                    draws.append(strategy.draw(x0))
                    t = time.to_trainer(draws[-1].t)
                x_t = CONVENTIONS["data_is_one"](x0, noise, t.view(-1, 1, 1, 1))
                errors = (network(x_t, t, text[half])["sample"] - (x0 - noise)).square().mean((1, 2, 3))
                loss = timesteps.loss(errors, mask=mask) if attached else strategy.loss(draws[-1], errors, mask)
                loss.backward(retain_graph=True)
                loss.backward()  # two passes through one loss are one micro-batch
            if attached:
                optimizer.step()
            else:
                with strategy.observe(draws, network, optimizer, {"text": text}):
                    optimizer.step()
            optimizer.zero_grad()
        return strategy.state_dict(), network.state_dict()

    assert equal_bits(train(True), train(False))


@pytest.mark.parametrize(
    ("first", "second"),
    [(("text", "size"), ("text",)), (("text",), ("text", "size")), (("text",), ("size",)), (("text",), None)],
)
def test_micro_batches_with_conditions_of_different_names_are_rejected(first, second):
    network = TinyNetwork()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    timesteps = attach(
        "gradient_norm", "linear", optimizer, network, sampler={"start": 1, "frequency": 1},
        predict=lambda x_t, t, **conditions: network(x_t, t),
    )  # fmt: skip
    for names in (first, second):
        conditions = None if names is None else {name: torch.zeros(8, 2) for name in names}
        t = timesteps(IMAGES, conditions=conditions)
        timesteps.loss((network(IMAGES, t) - 1).square().mean((1, 2, 3))).backward()
    with pytest.raises(ConfigError, match=r"conditions.*got .*text.*allowed: .*same names"):
        optimizer.step()


@pytest.mark.parametrize("name", MEASURING)
def test_without_predict_a_strategy_that_measures_is_rejected(name):
    network = TinyNetwork()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for arguments in ({"network": network}, {"predict": network}, {}):
        with pytest.raises(ConfigError, match=rf"{name} measures the network.*predict=.*conditions"):
            attach(name, "linear", optimizer, **arguments)
    assert isinstance(attach(name, "linear", optimizer, network, predict=network), Attached)
