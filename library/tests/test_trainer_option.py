"""A trainer with an option for timestep strategies of installed packages: ``examples/trainer_option.py``."""

import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

import kairos_timesteps
from attached_training import ADAPTIVE_EDM2, GRADIENT_NORM, LOSS_RMS_EDM2, sampler_name
from kairos_timesteps.integrations import trainer_option
from small_loop import IMAGES, TinyNetwork, equal_bits
from specifications import options_without_name

EXAMPLES = Path(__file__).parents[1] / "examples"
SMALL = ["--batch", "8", "--width", "8"]
# options for a strategy that changes in the first steps
QUICK = {
    "loss_rms": {"start": 2, "frequency": 1},
    "gradient_norm": {"start": 1, "frequency": 1, "bins": 4},
    "adaptive": {"frequency": 1, "feature_timesteps": 5, "width": 4},
}


def option(name):
    return ["--timestep_strategy", f"kairos:{name}", "--timestep_strategy_args", f"sampler={QUICK.get(name, {})}"]


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
    for module in ("kairos_timesteps", "kairos_timesteps.integrations.trainer_option"):
        monkeypatch.setitem(sys.modules, module, None)  # its import fails
    assert trainer.main([*SMALL, "--steps", "3"]) == expected
    with pytest.raises(ImportError):
        trainer.main([*SMALL, "--steps", "3", *option("uniform")])


@pytest.mark.parametrize("name", ["uniform", "log_normal+bell", "loss_rms", "gradient_norm", "adaptive"])
def test_with_the_option_losses_equal_those_of_the_explicit_form(trainer, name):
    common = import_module("common")
    torch.manual_seed(3)
    data = common.images(None, 8)
    network = common.Network(data.shape[1], 8, period=1)
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3)
    strategy = kairos_timesteps.Strategy(name, "flow", seed=3, sampler=QUICK.get(name))
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
        with strategy.observe(draw, network, optimizer):
            optimizer.step()
        losses.append(loss.item())
    assert trainer.main([*SMALL, "--steps", "6", "--seed", "3", *option(name)]) == losses


def test_options_reach_the_strategy(trainer):
    run = [*SMALL, "--steps", "2", "--timestep_strategy", "kairos:log_normal"]
    plain, other = (trainer.main([*run, *more]) for more in ([], ["--timestep_strategy_args", "sampler={'m': 2.0}"]))
    assert plain != other
    with pytest.raises(kairos_timesteps.errors.ConfigError, match="'mm'"):
        trainer.main([*run, "--timestep_strategy_args", "sampler={'mm': 2.0}"])


def test_only_declared_providers_are_imported(trainer):
    for name in ("os.system", "os:system", "kairos_timesteps.attach"):
        with pytest.raises(SystemExit, match="kairos:NAME"):
            trainer.main([*SMALL, "--steps", "1", "--timestep_strategy", name])


@pytest.mark.parametrize("more", [[], option("loss_rms"), option("adaptive")])
def test_a_resumed_run_equals_an_uninterrupted_one(trainer, tmp_path, more):
    expected = trainer.main([*SMALL, "--steps", "8", *more])
    run = [*SMALL, "--checkpoint", str(tmp_path / "state.pt"), *more]
    first, second = trainer.main([*run, "--steps", "4"]), trainer.main([*run, "--steps", "8"])
    assert first + second == expected


def test_the_option_accepts_strategies_of_any_package(trainer, monkeypatch, tmp_path):
    (tmp_path / "other_package.py").write_text(
        """import torch

class Middle:
    def __init__(self, name, scale, **context):
        self.scale = {"times": scale}[name]

    def sample(self, latents, **properties):
        return torch.full((len(latents),), 0.5)

    def record(self, errors, **arguments):
        return self.scale * errors.mean()

    def begin_step(self, network, optimizer):
        pass

    def refresh(self):
        pass
"""
    )
    metadata = tmp_path / "other_package-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other-package\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[timestep_strategies]\nother = other_package:Middle\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    run = [*SMALL, "--steps", "1", "--timestep_strategy", "other:times", "--timestep_strategy_args"]
    (one,), (three,) = trainer.main([*run, "scale=1.0"]), trainer.main([*run, "scale=3.0"])
    assert three == pytest.approx(3 * one)


@pytest.mark.parametrize("specification", [LOSS_RMS_EDM2, GRADIENT_NORM, ADAPTIVE_EDM2], ids=sampler_name)
def test_micro_batches_skipped_steps_masks_and_a_resume_equal_the_explicit_form(specification):
    """Steps of two micro-batches; the third is skipped, and the state is restored after the fourth."""
    results = []
    for explicit in (True, False):
        torch.manual_seed(0)
        network = TinyNetwork()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)

        def build(explicit=explicit, network=network):
            options = {"sampler": options_without_name(specification.sampler)}
            options["weighting"] = options_without_name(specification.weighting)
            name = specification.build().name
            if explicit:
                return kairos_timesteps.Strategy(name, specification.build().process, **options)
            return trainer_option.build(name, specification.build().process, predict=network, **options)

        strategy, times, losses = build(), [], []
        for step in range(6):
            draws = []
            for rows in (slice(0, 4), slice(4, 8)):
                x0, mask = IMAGES[rows], torch.tensor([True, step % 2 == 0, True, True])
                if explicit:
                    draws.append(draw := strategy.draw(x0))
                    t = draw.t
                else:
                    t = strategy.sample(x0)
                errors = (network(x0, t) - 1).square().mean((1, 2, 3))
                weights = torch.tensor([1.0, 0.5, 1.0, 2.0])
                if explicit:
                    loss = (strategy.weighted(draw, errors, mask) * weights).mean()
                else:
                    loss = strategy.record(errors, weights=weights, mask=mask)
                loss.backward()
                times.append(t)
                losses.append(loss.item())
            skipped = step == 2
            if explicit and not skipped:
                with strategy.observe(draws, network, optimizer):
                    optimizer.step()
            elif explicit:
                strategy.weighting.zero_grad()
            else:
                if step != 2 or specification is GRADIENT_NORM:
                    strategy.begin_step(network, optimizer)
                if not skipped:
                    optimizer.step()
                strategy.refresh(skipped)
            optimizer.zero_grad()
            if step == 3:
                state, strategy = strategy.state_dict(), build()
                strategy.load_state_dict(state)
        inner = strategy if explicit else strategy.strategy
        assert inner.step == 5
        results.append({"t": times, "losses": losses, "state": inner.state_dict(), "network": network.state_dict()})
    assert equal_bits(*results)


def test_tokens_reach_the_density_and_calls_in_another_order_are_rejected():
    strategy = trainer_option.build("shift", "flow", time="noise_is_one", sampler={"law": "exponential"})
    few, many = (strategy.sample(torch.zeros(512, 1), tokens=tokens).mean() for tokens in (256, 4096))
    assert few < many
    uniform = trainer_option.build("uniform", "flow", time="noise_is_one")
    with pytest.raises(kairos_timesteps.errors.ConfigError, match="sample"):
        uniform.record(torch.ones(4))
    with pytest.raises(kairos_timesteps.errors.ConfigError, match="record"):
        uniform.refresh()
    with pytest.raises(kairos_timesteps.errors.ConfigError, match="prediction"):
        trainer_option.build("uniform", "flow", time="noise_is_one", prediction="v")
    with pytest.raises(kairos_timesteps.errors.ConfigError, match="predict"):
        trainer_option.build("gradient_norm", "flow", time="data_is_one")
    measuring = trainer_option.build("gradient_norm", "flow", time="noise_is_one", predict=TinyNetwork())
    for conditions in ({"y": torch.zeros(8)}, None):
        measuring.sample(IMAGES, conditions=conditions)
        measuring.record(torch.ones(8))
    with pytest.raises(kairos_timesteps.errors.ConfigError, match=r"begin_step.*network"):
        measuring.begin_step()
    with pytest.raises(kairos_timesteps.errors.ConfigError, match=r"sample\(conditions=\).*\(none\) and \(y\)"):
        measuring.begin_step(TinyNetwork())
    with torch.no_grad():
        uniform.sample(IMAGES)
        uniform.record(torch.ones(8))
    with pytest.raises(kairos_timesteps.errors.ConfigError, match="no loss"):
        uniform.refresh()
    state = uniform.state_dict()
    with pytest.raises(kairos_timesteps.errors.ConfigError, match="state"):
        uniform.load_state_dict({"time": "noise_is_one"})
    with pytest.raises(kairos_timesteps.errors.ConfigError, match="time"):
        trainer_option.build("uniform", "flow", time="data_is_one").load_state_dict(state)
