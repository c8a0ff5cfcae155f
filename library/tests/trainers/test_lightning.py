"""Lightning's Trainer with the module and the callback of the page."""

import copy
import functools
import logging

import pytest
import torch
from training_runs import (
    LOSSES,
    STEPS,
    STRATEGIES,
    Run,
    blocks,
    differences,
    digits,
    explicit,
    measures,
    quicken,
    released,
    with_strategy,
)

from kairos_timesteps.errors import ConfigError
from kairos_timesteps.randomness import Stream
from small_loop import TinyNetwork, equal_bits

lightning = released("lightning")

pytestmark = [pytest.mark.trainers, pytest.mark.filterwarnings("ignore")]
ACCUMULATE, BATCH = 2, 4
IMAGES = digits(20 * BATCH)  # 20 micro-batches an epoch
HELD_OUT = digits(20 * BATCH + 16)[-16:]
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def network():
    torch.manual_seed(0)
    return TinyNetwork()


class Recorded:
    """Mixin of the page's module that records times and losses; the noise is a function of the micro-batch."""

    def __init__(self, network, held_out):
        super().__init__(network, held_out)
        self.results, self.first, self.recording = Run(), 0, False
        network.register_forward_pre_hook(self.record)

    def record(self, _, arguments):
        if self.recording:
            self.results.t.append(arguments[1])
            self.recording = False  # the strategy may measure the network within the training step

    def training_step(self, x0, number):
        if not self.training:
            return super().training_step(x0, number)
        if not self.results.t:
            sampler = quicken(self.strategy.strategy).sampler
            if self.first:
                sampler.restored()  # the density with these options
        torch.manual_seed(self.first + len(self.results.t))
        self.recording = True
        loss = super().training_step(x0, number)
        self.results.losses.append(loss.detach())
        return loss


def train(name, steps=STEPS, resume=None, changes=(), checkpoints=None, **more):
    """Run the page, or resume from a checkpoint; `changes` replace code, `more` are options of the Trainer."""
    code = with_strategy(blocks("lightning")[0], name).replace("= Flow(", '= type("Flow", (Recorded, Flow), {})(')
    for old, new in changes:
        assert old in code
        code = code.replace(old, new)
    code, fit = code.rstrip().rsplit("\n", 1)
    names = {
        "__name__": "page", "Recorded": Recorded, "network": network(), "held_out": HELD_OUT,
        "checkpoints": checkpoints,
        "loader": torch.utils.data.DataLoader(IMAGES, batch_size=BATCH),
        "validation_loader": torch.utils.data.DataLoader(HELD_OUT, batch_size=BATCH),
        "options": {
            "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
            "accumulate_grad_batches": ACCUMULATE, "max_steps": steps, "val_check_interval": 7,
            "gradient_clip_val": 0.5, "enable_model_summary": False, **more,
        },
    }  # fmt: skip
    exec(code, names)
    model = names["model"]
    if resume:
        model.first = 20
        fit = fit.replace(")", f", ckpt_path={str(resume)!r})")
    exec(fit, names)
    model.results.strategy = model.strategy.state_dict()["strategy"]
    model.results.network = copy.deepcopy(model.network.state_dict())
    return model.results, names


def plain_loop(name, steps=STEPS, accumulate=ACCUMULATE, clip=0.5):
    model = network()

    def errors(number, x0, t):
        torch.manual_seed(number)
        noise = torch.randn_like(x0)
        at = t.view(-1, 1, 1, 1)
        return (model((1 - at) * x0 + at * noise, t) - (noise - x0)).square().flatten(1).mean(1)

    batches = [IMAGES[number * BATCH % len(IMAGES) :][:BATCH] for number in range(steps * accumulate)]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    predict = model if measures(name) else None
    return explicit(name, "flow", "noise_is_one", model, optimizer, batches, errors, accumulate, predict, clip=clip)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """Return a function that trains once with each strategy, with Lightning's checkpoint callback at step 10."""

    @functools.cache
    def run(name):
        folder = tmp_path_factory.mktemp("checkpoints")
        checkpoints = lightning.pytorch.callbacks.ModelCheckpoint(folder, every_n_train_steps=10, save_top_k=-1)
        changes = [("callbacks=[callback]", "callbacks=[callback, checkpoints]")]
        results, names = train(name, changes=changes, checkpoints=checkpoints, enable_checkpointing=True)
        return results, names, folder / "epoch=0-step=10.ckpt"

    return run


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_trainer_trains_as_a_plain_loop_and_validation_changes_nothing(name, whole_run):
    results, names, _ = whole_run(name)
    assert differences(results, plain_loop(name)) == []
    assert {"even", "mlperf8", "middle8"} <= names["trainer"].callback_metrics.keys()


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_trainers_checkpoint_contains_the_state(name, whole_run):
    """10 steps are an epoch, so that batches after the resume are equal."""
    whole, _, checkpoint = whole_run(name)
    resumed, _ = train(name, resume=checkpoint)
    assert len(resumed.t) == 28 and len(whole.t) == 48
    resumed.t, resumed.losses = whole.t[:20] + resumed.t, whole.losses[:20] + resumed.losses
    assert differences(resumed, whole) == []


def test_a_second_fit_continues_the_strategy():
    _, names = train(LOSSES)
    callback, before = names["callback"], names["model"].strategy.strategy.step
    trainer = lightning.Trainer(callbacks=[callback], **{**names["options"], "max_steps": 4})
    trainer.fit(names["model"], names["loader"])
    assert callback.strategy.strategy.step == before + 4


@pytest.mark.parametrize("name", [LOSSES, "adaptive"])
def test_manual_optimization(name):
    by_hand = """loss = self.strategy.loss(errors)
        if self.training:
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
        return loss"""
    changes = [("super().__init__()", "super().__init__(); self.automatic_optimization = False")]
    changes.append(("return self.strategy.loss(errors)  # instead of errors.mean()", by_hand))
    results, _ = train(name, changes=changes, accumulate_grad_batches=1, gradient_clip_val=None)
    assert differences(results, plain_loop(name, accumulate=1, clip=None)) == []


def test_uniform_alone_changes_no_loss():
    """A module that draws the same times itself and returns the mean of its errors has equal losses."""
    results, _ = train("uniform+none", steps=4)
    Recorded.times = iter(results.t)
    draws = ("self.strategy(x0)", "next(self.times) if self.training else torch.rand(len(x0))")
    mean = ("self.strategy.loss(errors)", "errors.flatten(1).mean(1).mean()")
    plain, _ = train("uniform+none", steps=4, changes=(draws, mean, ("self.strategy.check", "pass  # ")))
    assert equal_bits(plain.losses, results.losses) and equal_bits(plain.network, results.network)


def test_an_optimizer_that_lightning_builds_again_is_an_error():
    """A strategy that the user attached to the result of `configure_optimizers`, which `fit` calls again."""
    callback = 'callback = StrategyCallback("loss_rms", "flow", time="noise_is_one", predict=network)'
    by_hand = (
        "from kairos_timesteps import attach\n"
        'model.strategy = attach("loss_rms", "flow", model.configure_optimizers(), model, time="noise_is_one")'
    )
    with pytest.raises(ConfigError, match=r"another Adam took steps of its parameters.*builds its optimizer again"):
        train(LOSSES, changes=[(callback, by_hand), ("callbacks=[callback]", "callbacks=[]")])


def test_another_convention_is_caught():
    with pytest.raises(ConfigError, match="with time='data_is_one'; time='noise_is_one' fits"):
        train(LOSSES, 1, changes=[('time="noise_is_one"', 'time="data_is_one"')])


def test_several_optimizers_are_rejected():
    two = "return [torch.optim.Adam(self.parameters()), torch.optim.SGD(self.parameters(), lr=0.1)]"
    manual = ("return torch.optim.Adam(self.parameters(), lr=1e-2)", "self.automatic_optimization = False; " + two)
    with pytest.raises(ConfigError, match=r"got 2 optimizers, allowed: one torch.optim.Optimizer"):
        train(LOSSES, 1, changes=[manual], accumulate_grad_batches=1, gradient_clip_val=None)


def test_validation_is_that_of_a_plain_loop():
    results, names = train(LOSSES, steps=7)  # validates after 14 micro-batches, which are 7 steps
    metrics = names["trainer"].callback_metrics
    for kind, offset in (("mlperf8", 0.0), ("middle8", 0.5)):
        t = ((torch.arange(16) % 8 + offset) / 8).clip(1e-5)
        noise = Stream(0, "validation noise").normal(0, range(16), (1, 8, 8))
        x_t = HELD_OUT.lerp(noise, t.view(-1, 1, 1, 1))
        with torch.no_grad():
            errors = (names["network"](x_t, t) - (noise - HELD_OUT)).square().mean((1, 2, 3))
        assert float(metrics[kind]) == pytest.approx(float(errors.mean()), rel=1e-4)
    assert results.strategy["step"] == 7
