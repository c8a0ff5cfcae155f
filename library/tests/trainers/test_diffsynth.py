"""DiffSynth-Studio: its runner, which trains a small pipeline by its own loss and scheduler."""

import copy
import sys
import types

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
    new_process,
    quicken,
    released,
    with_strategy,
)

from kairos_timesteps import Strategy
from kairos_timesteps.errors import ConfigError
from kairos_timesteps.integrations.diffsynth import StrategyLoss, _Scheduler
from kairos_timesteps.randomness import Stream
from small_loop import equal_bits

accelerate = released("accelerate")
losses, runner = released("diffsynth.diffusion.loss"), released("diffsynth.diffusion.runner")
base, flow_match = released("diffsynth.diffusion.base_pipeline"), released("diffsynth.diffusion.flow_match")
training_module = released("diffsynth.diffusion.training_module")

pytestmark = [pytest.mark.trainers, pytest.mark.filterwarnings("ignore")]
ACCUMULATE = 2
IMAGES = digits(64)
CONTEXT = torch.randn(64, 5, generator=torch.Generator().manual_seed(1))


class Transformer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.time = torch.nn.Linear(1, 1), torch.nn.Parameter(torch.tensor(0.5))

    def forward(self, latents, timestep, context):
        shift = self.time * (timestep / 1000 + context.mean(1))
        return self.layer(latents[..., None])[..., 0] + shift.view(-1, 1, 1, 1)


class Pipeline(base.BasePipeline):
    """A pipeline of the package with one small model, in float32."""

    in_iteration_models = ("dit",)

    def __init__(self, template="Wan"):
        super().__init__(device="cpu", torch_dtype=torch.float32)
        self.scheduler, self.dit = flow_match.FlowMatchScheduler(template), Transformer()
        self.scheduler.set_timesteps(1000, training=True)

    def model_fn(self, dit, latents, timestep, context, **_):
        return dit(latents, timestep, context)


class Module(training_module.DiffusionTrainingModule):
    """The training module of a script; it records batches, timesteps and losses."""

    def __init__(self, template="Wan"):
        super().__init__()
        self.pipe, self.loss = Pipeline(template), losses.FlowMatchSFTLoss
        self.images, self.results, self.first = [], Run(), 0
        self.pipe.model_fn, call = self.record, self.pipe.model_fn
        self.call, self.recording = call, False

    def record(self, dit, latents, timestep, context, **options):
        if self.recording:
            self.results.t.append(timestep)
        return self.call(dit, latents, timestep, context, **options)

    def forward(self, number):
        self.images.append(number)
        torch.manual_seed(self.first + len(self.images))
        self.recording = True
        inputs = {"input_latents": IMAGES[number][None], "context": CONTEXT[number][None]}
        loss = self.loss(self.pipe, **inputs)
        self.recording = False
        self.results.losses.append(loss.detach()[()])
        return loss


class Numbers(torch.utils.data.Dataset):
    load_from_cache = False

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        return number


def script(name, template="Wan", change=()):
    """Return the variables of a training script with the lines of the page, as module `page`."""
    new_process()
    names = types.ModuleType("page").__dict__
    model = names["model"] = Module(template)
    code = with_strategy(blocks("diffsynth")[0], name)
    for old, new in change:
        assert old in code
        code = code.replace(old, new)
    names.update(held_out=IMAGES[:16], held_out_context=CONTEXT[:16])
    exec(code, names)
    return names, model


class Logger:
    """Evaluate every few steps, as a logger of the runner may."""

    def __init__(self, names=None):
        self.names, self.calls = names, 0

    def on_step_end(self, accelerator, model, save_steps, loss):
        self.calls += 1
        if self.names and self.calls % 9 == 4:
            evaluate(self.names)

    def on_training_end(self, *_):
        pass

    on_epoch_end = on_training_end


def evaluate(names):
    model = names["model"]
    model.eval()
    with torch.no_grad():
        model.loss(model.pipe, input_latents=IMAGES[:1], context=CONTEXT[:1])
    exec(blocks("diffsynth")[1], names)
    model.train()


def launch(name, monkeypatch, evaluated=False, **options):
    """Train by DiffSynth-Studio's runner."""
    names, model = script(name, **options)
    monkeypatch.setitem(sys.modules, "page", types.SimpleNamespace(Optimizer=optimizer_of(names)))
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    logger = Logger(names if evaluated else None)
    runner.launch_training_task(
        accelerator, Numbers(STEPS * ACCUMULATE), model, logger, 1e-2, num_workers=0,
        customized_optimizer="page.Optimizer",
    )  # fmt: skip
    return finished(names)


def optimizer_of(names):
    """The page's optimizer with a strategy that learns within a short run."""

    class Optimizer(names["Optimizer"]):
        def __init__(self, parameters, **options):
            super().__init__(parameters, **options)
            names["strategy"] = self.strategy
            quicken(self.strategy.strategy)

    return Optimizer


def finished(names):
    results = names["model"].results
    results.strategy = names["strategy"].state_dict()["strategy"]
    results.network = copy.deepcopy(names["model"].pipe.dit.state_dict())
    return results, names["model"]


def plain_loop(name, images, template="Wan"):
    """The training as a plain loop, with draws rounded to the scheduler's timesteps."""
    network, scheduler = Transformer(), flow_match.FlowMatchScheduler(template)
    scheduler.set_timesteps(1000, training=True)
    rounded = []

    def errors(number, x0, sigma):
        torch.manual_seed(number + 1)
        torch.randint(0, 1000, (1,))  # the loss's own timestep
        noise, nearest = torch.randn_like(x0), (scheduler.timesteps - 1000 * sigma).abs().argmin()
        at, timestep = scheduler.sigmas[nearest], scheduler.timesteps[nearest].view(1)
        rounded.append(timestep)
        output = network((1 - at) * x0 + at * noise, timestep, CONTEXT[images[number]][None])
        return torch.nn.functional.mse_loss(output, noise - x0).view(1)

    def predict(x_t, sigma, context):
        return network(x_t, 1000 * sigma, context)

    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)  # the runner's: a third of the rate for five steps
    run = explicit(
        name, "flow", "noise_is_one", network, optimizer,
        [IMAGES[number][None] for number in images], errors, ACCUMULATE, predict if measures(name) else None,
        lambda number: {"context": CONTEXT[images[number]][None]}, after_step=schedule.step,
    )  # fmt: skip
    for exact_t, rounded_t in zip(run.t, rounded):
        assert abs(1000 * float(exact_t) - float(rounded_t)) <= 2.6  # half a cell
    run.t = rounded
    return run


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_runner_trains_as_a_plain_loop_and_validation_changes_nothing(name, monkeypatch):
    results, model = launch(name, monkeypatch, evaluated=True)
    assert len(results.t) == STEPS * ACCUMULATE
    assert differences(results, plain_loop(name, model.images)) == []


@pytest.mark.parametrize("template", ["FLUX.1", "Qwen-Image"])
def test_other_templates(template, monkeypatch):
    results, model = launch("uniform", monkeypatch, template=template)
    timesteps, strategy = torch.cat(results.t), Strategy("uniform", "flow")
    assert bool((timesteps[:, None] == model.pipe.scheduler.timesteps).any(1).all())
    for step in range(STEPS):
        draws = [strategy.draw(IMAGES[:1]) for _ in range(ACCUMULATE)]
        for draw, timestep in zip(draws, timesteps[step * ACCUMULATE :]):
            assert float(timestep) == pytest.approx(1000 * float(draw.t), abs=10)  # sigma is at least 0.009 or 0.02
        with strategy.observe(draws):
            pass


def training_loop(name, numbers, state=None, template="Wan"):
    """Run a training loop of the test, because the runner saves weights alone; returns the variables of the script."""
    names, model = script(name, template)
    optimizer = optimizer_of(names)(model.trainable_modules(), lr=1e-2)
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        names["strategy"].load_state_dict(state["strategy"])
        model.first = state["first"]
    for number in numbers:
        (model(number) / ACCUMULATE).backward()
        if len(model.images) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
    return names, optimizer


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_resume_equals_an_uninterrupted_run(name, tmp_path):
    numbers = list(range(36))
    whole, _ = finished(training_loop(name, numbers)[0])
    names, optimizer = training_loop(name, numbers[:18])
    state = {
        "model": names["model"].state_dict(), "optimizer": optimizer.state_dict(),
        "strategy": names["strategy"].state_dict(), "first": 18,
    }  # fmt: skip
    torch.save(state, tmp_path / "state.pt")
    resumed, _ = finished(training_loop(name, numbers[18:], torch.load(tmp_path / "state.pt", weights_only=True))[0])
    stopped, _ = finished(names)
    resumed.t, resumed.losses = stopped.t + resumed.t, stopped.losses + resumed.losses
    assert differences(resumed, whole) == []


def test_uniform_alone_changes_no_loss():
    """The loss function alone, at the strategy's timesteps and with the weight 1, has equal losses to the last bit."""
    names, _ = training_loop("uniform+none", range(8))
    model = Module()
    scheduler = model.pipe.scheduler
    scheduler.linear_timesteps_weights = torch.ones(1000)
    results, optimizer = finished(names)[0], torch.optim.AdamW(model.trainable_modules(), lr=1e-2)
    for number, (timestep, expected) in enumerate(zip(results.t, results.losses)):
        model.pipe.scheduler = _Scheduler(scheduler, timestep / 1000)
        model.pipe.scheduler.training_weight = scheduler.training_weight
        loss = model(number)
        assert equal_bits(loss.detach()[()], expected)
        (loss / ACCUMULATE).backward()
        if number % ACCUMULATE:
            optimizer.step()
            optimizer.zero_grad()
    assert equal_bits(model.results.t, results.t) and equal_bits(model.pipe.dit.state_dict(), results.network)


def test_x_t_agrees_with_the_process_and_another_convention_is_caught():
    names, _ = training_loop("uniform", [])
    x0, noise, scheduler = IMAGES[:1], torch.randn(1, 1, 8, 8), names["model"].pipe.scheduler
    for sigma in (0.1, 0.3, 0.9):
        sigma = torch.tensor([sigma])
        x_t = scheduler.add_noise(x0, noise, 1000 * sigma)
        names["strategy"].check(x0, noise, x_t, sigma)
        with pytest.raises(ConfigError, match="check: x_t: got ln SNR"):
            names["strategy"].check(x0, noise, x_t, 1 - sigma)


def test_the_scheduler_is_that_of_the_pipeline_again_after_an_error():
    names, _ = training_loop("uniform", [])
    model, scheduler = names["model"], names["model"].pipe.scheduler

    def fails(pipe, **inputs):
        assert pipe.scheduler.num_train_timesteps == 1000 and len(pipe.scheduler.timesteps) == 1000
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        StrategyLoss(fails, names["strategy"])(model.pipe, input_latents=IMAGES[:1])
    assert model.pipe.scheduler is scheduler


def test_validation_is_that_of_a_plain_loop():
    names, _ = training_loop(LOSSES, range(4))
    evaluate(names)
    for loss, offset in ((names["mlperf"], 0.0), (names["middle"], 0.5)):
        sigma = ((torch.arange(16) % 8 + offset) / 8).clip(1e-5)
        noise = Stream(0, "validation noise").normal(0, range(16), (1, 8, 8))
        with torch.no_grad():
            x_t = IMAGES[:16].lerp(noise, sigma.view(-1, 1, 1, 1))
            errors = (names["predict"](x_t, sigma, CONTEXT[:16]) - (noise - IMAGES[:16])).square().mean((1, 2, 3))
        assert loss == pytest.approx(float(errors.mean()), rel=1e-5)
    assert names["strategy"].strategy.step == 2
