"""NeMo Automodel's flow-matching pipeline, in a loop in the shape of its recipe."""

import copy

import pytest
import torch
from torch import nn
from training_runs import (
    FIXED,
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
from small_loop import equal_bits

flow_matching = released("nemo_automodel.components.flow_matching.pipeline")

pytestmark = pytest.mark.trainers
ACCUMULATE, BATCH = 2, 4
IMAGES = digits(64)
TEXT = torch.randn(64, 3, 5, generator=torch.Generator().manual_seed(1))


class Transformer(nn.Module):
    """A network with the arguments of Wan's transformer, for images and videos."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.time = nn.Linear(1, 1), nn.Parameter(torch.tensor(0.5))

    def forward(self, hidden_states, timestep, encoder_hidden_states, attention_kwargs=None, return_dict=False):
        shift = self.time * (timestep / 1000 + encoder_hidden_states.mean((1, 2)))
        output = self.layer(hidden_states[..., None])[..., 0]
        return (output + shift.view(-1, *[1] * (output.ndim - 1)),)


def rows(number):
    first = number * BATCH % len(IMAGES)
    return slice(first, first + BATCH)


def batch_of(number, latents="image_latents", images=IMAGES):
    return {latents: images[rows(number)], "text_embeddings": TEXT[rows(number)], "data_type": "image"}


def plain_pipeline(**options):
    adapter = flow_matching.SimpleAdapter()
    return flow_matching.FlowMatchingPipeline(adapter, device=torch.device("cpu"), **options)


class Loop:
    """Model, optimizer and pipeline with the lines of the page; the times that the model is given are recorded."""

    def __init__(self, name, model=None):
        model = model or Transformer()
        self.names = {
            "model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2), "pipeline": plain_pipeline(),
            "held_out": IMAGES[:16], "held_out_text": TEXT[:16],
        }  # fmt: skip
        self.attach, self.recipe, self.validation = blocks("nemo")
        exec(with_strategy(self.attach, name), self.names)
        self.timesteps = self.names["timesteps"]
        quicken(self.timesteps.strategy)
        self.sigma = []
        draw = self.names["pipeline"].sample_timesteps
        self.names["pipeline"].sample_timesteps = lambda *a: self.sigma.append(draw(*a)) or self.sigma[-1]

    def step(self, number, **options):
        """Return the loss of a batch, from the pipeline's step."""
        torch.manual_seed(number)
        batch = batch_of(number, **options)
        arguments = {"device": torch.device("cpu"), "dtype": torch.float32, "collect_metrics": False}
        return self.names["pipeline"].step(self.names["model"], batch, **arguments)

    def train(self, results, steps=range(STEPS), evaluate=False, **options):
        model, optimizer = self.names["model"], self.names["optimizer"]
        for step in steps:
            optimizer.zero_grad(set_to_none=True)
            for number in range(step * ACCUMULATE, (step + 1) * ACCUMULATE):
                _, loss, _, _ = self.step(number, **options)
                results.t.append(self.sigma[-1][0])
                results.losses.append(loss.detach())
                (loss / ACCUMULATE).backward()
                if evaluate and number % 7 == 2:
                    self.evaluate()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        results.strategy = self.timesteps.state_dict()["strategy"]
        results.network = copy.deepcopy(model.state_dict())
        return results

    def evaluate(self):
        """Validate as the recipe does, and with the lines of the page."""
        self.names["model"].eval()
        with torch.no_grad():
            self.step(5)
        exec(self.validation, self.names)
        self.names["model"].train()
        return self.names["mlperf"], self.names["middle"]


def plain_loop(name, steps=STEPS, images=IMAGES):
    model = Transformer()

    def errors(number, x0, sigma):
        torch.manual_seed(number)
        noise = torch.randn_like(x0)
        at = sigma.view(-1, *[1] * (x0.ndim - 1))
        output = model((1.0 - at) * x0 + at * noise, 1000 * sigma, TEXT[rows(number)])[0]
        return (output - (noise - x0)).square().flatten(1).mean(1)

    def predict(x_t, sigma, text_embeddings):
        return model(x_t, 1000 * sigma, text_embeddings)[0]

    batches = [images[rows(number)] for number in range(steps * ACCUMULATE)]
    return explicit(
        name, "flow", "noise_is_one", model, torch.optim.AdamW(model.parameters(), lr=1e-2), batches, errors,
        ACCUMULATE, predict if measures(name) else None, lambda number: {"text_embeddings": TEXT[rows(number)]}, 0.5,
    )  # fmt: skip


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_pipeline_trains_as_a_plain_loop_and_validation_changes_nothing(name):
    assert differences(Loop(name).train(Run(), evaluate=True), plain_loop(name)) == []


def test_video_latents():
    videos = torch.randn(64, 2, 3, 4, 4, generator=torch.Generator().manual_seed(2))
    results = Loop("auto").train(Run(), range(9), latents="video_latents", images=videos)
    assert differences(results, plain_loop("auto", 9, videos)) == []


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_resume_equals_an_uninterrupted_run(name, tmp_path):
    whole, stopped = Loop(name).train(Run()), Loop(name)
    results = stopped.train(Run(), range(9))
    parts = {key: stopped.names[key].state_dict() for key in ("model", "optimizer", "timesteps")}
    torch.save(parts, tmp_path / "state.pt")
    resumed = Loop(name)
    for key, state in torch.load(tmp_path / "state.pt", weights_only=True).items():
        resumed.names[key].load_state_dict(state)
    assert differences(resumed.train(results, range(9, STEPS)), whole) == []


def test_uniform_alone_changes_no_loss_but_the_order_of_its_sum():
    """The pipeline's own loss at the strategy's sigma; it averages over elements, the strategy first over samples."""
    loop, plain = Loop("uniform+none"), plain_pipeline(use_loss_weighting=False)
    for number in range(6):
        _, loss, _, _ = loop.step(number)
        plain.sample_timesteps = lambda *_: loop.sigma[-1]
        torch.manual_seed(number)
        arguments = {"device": torch.device("cpu"), "dtype": torch.float32}
        _, expected, _, _ = plain.step(loop.names["model"], batch_of(number), **arguments)
        torch.testing.assert_close(loss, expected, rtol=2e-7, atol=0)


def test_the_results_of_a_step_have_the_shapes_of_the_pipeline():
    loop, plain = Loop(FIXED), plain_pipeline()
    one, other = loop.step(0), plain.step(loop.names["model"], batch_of(0), torch.device("cpu"), torch.float32)
    assert one[0].shape == other[0].shape and one[1].shape == other[1].shape == ()
    torch.testing.assert_close(one[0].mean(), one[1])
    pipelines, zeros = (loop.names["pipeline"], plain), torch.zeros(BATCH, 1, 8, 8)
    results = [pipeline.compute_loss(zeros, zeros, torch.rand(BATCH), {"loss_mask": 1}) for pipeline in pipelines]
    shapes = [[getattr(value, "shape", value) for value in result] for result in results]
    assert shapes[0] == shapes[1]


def test_x_t_agrees_with_the_process_and_another_convention_is_caught():
    loop, x0, noise = Loop("uniform"), IMAGES[:BATCH], torch.randn(BATCH, 1, 8, 8)
    loop.step(0)
    sigma = loop.sigma[-1][0]
    x_t = flow_matching.LinearInterpolationSchedule().forward(x0, noise, sigma)
    loop.timesteps.check(x0, noise, x_t, sigma)
    exec(loop.attach.replace("noise_is_one", "data_is_one"), loop.names)
    with pytest.raises(ConfigError, match="with time='data_is_one'; time='noise_is_one' fits"):
        loop.names["timesteps"].check(x0, noise, x_t, sigma)


def test_a_recipe_attaches_before_it_loads_and_replaces_its_pipeline():
    """The recipe needs a GPU; its order of calls is that of nemo_automodel.recipes.diffusion.train."""
    events = []

    class Recipe:
        def __init__(self):
            self.model = Transformer()
            self.optimizer = [torch.optim.AdamW(self.model.parameters())]

        def load_checkpoint(self, restore_from):
            events.append(self.timesteps.strategy.name)

        def setup(self):
            self.load_checkpoint(None)
            self.flow_matching_pipeline = plain_pipeline()

    loop = Loop(LOSSES)
    exec(loop.recipe, loop.names)
    recipe = type("WithRecipe", (loop.names["WithStrategy"], Recipe), {})()
    recipe.setup()
    assert events == ["loss_rms"] and recipe.flow_matching_pipeline.strategy is recipe.timesteps


def test_validation_is_that_of_a_plain_loop():
    loop = Loop(LOSSES)
    loop.train(Run(), range(2))
    for loss, offset in zip(loop.evaluate(), (0.0, 0.5)):
        sigma = ((torch.arange(16) % 8 + offset) / 8).clip(1e-5)
        noise = Stream(0, "validation noise").normal(0, range(16), (1, 8, 8))
        with torch.no_grad():
            x_t = IMAGES[:16].lerp(noise, sigma.view(-1, 1, 1, 1))
            errors = (loop.names["predict"](x_t, sigma, TEXT[:16]) - (noise - IMAGES[:16])).square().mean((1, 2, 3))
        assert loss == pytest.approx(float(errors.mean()), rel=1e-5)
    assert equal_bits(loop.timesteps.strategy.step, 2)
