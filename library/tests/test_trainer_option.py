"""A trainer with an option for timestep strategies by dotted path: ``examples/trainer_option.py``."""

import sys
import types
from importlib import import_module
from pathlib import Path

import pytest
import torch

import kairos_timesteps

EXAMPLES = Path(__file__).parents[1] / "examples"
SMALL = ["--batch", "8", "--width", "8"]
KAIROS = ["--timestep_strategy", "kairos_timesteps.attach", "--timestep_strategy_args"]


@pytest.fixture
def trainer(monkeypatch):
    """The example's trainer, newly imported with the module that the examples share."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    for name in ("common", "trainer_option"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield import_module("trainer_option")
    for name in ("common", "trainer_option"):
        del sys.modules[name]


@pytest.mark.long
def test_without_the_option_the_package_is_not_required(trainer, monkeypatch):
    expected = trainer.main([*SMALL, "--steps", "3"])
    monkeypatch.setitem(sys.modules, "kairos_timesteps", None)  # its import fails
    assert trainer.main([*SMALL, "--steps", "3"]) == expected
    with pytest.raises(ImportError):
        trainer.main([*SMALL, "--steps", "3", *KAIROS, "name=uniform"])


@pytest.mark.parametrize("name", ["uniform", "log_normal+bell", "loss_rms"])
def test_with_the_option_losses_equal_those_of_the_explicit_form(trainer, name):
    common = import_module("common")
    torch.manual_seed(3)
    data = common.images(None, 8)
    network = common.Network(data.shape[1], 8, period=1)
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3)
    strategy = kairos_timesteps.Strategy(name, "flow", seed=3)
    losses = []
    for step in range(6):
        x0, noise = common.batch(data, 8, 3, step, "cpu")
        draw = strategy.draw(x0)
        t = draw.t.float()
        at = t.view(-1, 1, 1, 1)
        errors = (network((1 - at) * x0 + at * noise, t) - (noise - x0)).square().mean((1, 2, 3))
        loss = strategy.loss(draw, errors)
        optimizer.zero_grad()
        loss.backward()
        with strategy.observe(draw):
            optimizer.step()
        losses.append(loss.item())
    assert trainer.main([*SMALL, "--steps", "6", "--seed", "3", *KAIROS, f"name={name}"]) == losses


def test_options_reach_the_strategy(trainer):
    run = [*SMALL, "--steps", "2", *KAIROS, "name=log_normal"]
    plain, other = trainer.main(run), trainer.main([*run, "sampler={'m': 2.0}"])
    assert plain != other
    with pytest.raises(kairos_timesteps.errors.ConfigError, match="'mm'"):
        trainer.main([*run, "sampler={'mm': 2.0}"])


@pytest.mark.parametrize("more", [[], [*KAIROS, "name=loss_rms", "sampler={'start': 2, 'frequency': 1}"]])
def test_a_resumed_run_equals_an_uninterrupted_one(trainer, tmp_path, more):
    expected = trainer.main([*SMALL, "--steps", "8", *more])
    run = [*SMALL, "--checkpoint", str(tmp_path / "state.pt"), *more]
    first, second = trainer.main([*run, "--steps", "4"]), trainer.main([*run, "--steps", "8"])
    assert first + second == expected


def test_the_option_accepts_strategies_of_any_package(trainer, monkeypatch):
    class Middle:
        """Strategy that always returns t = 1/2."""

        def __init__(self, process, optimizer, network, time, seed, scale):
            self.scale = scale
            self.seen = (process, time, seed)

        def __call__(self, x0):
            return torch.full((len(x0),), 0.5)

        def loss(self, errors):
            return self.scale * errors.mean()

    monkeypatch.setitem(sys.modules, "other_package", types.SimpleNamespace(Middle=Middle))
    run = [*SMALL, "--steps", "1", "--timestep_strategy", "other_package.Middle", "--timestep_strategy_args"]
    (one,), (three,) = trainer.main([*run, "scale=1.0"]), trainer.main([*run, "scale=3.0"])
    assert three == pytest.approx(3 * one)
