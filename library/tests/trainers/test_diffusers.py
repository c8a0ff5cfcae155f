"""diffusers, peft and accelerate: LoRA training in the shape of diffusers' scripts, with the lines of the page."""

import copy
import inspect
import re
import types

import pytest
import torch
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
    new_process,
    quicken,
    released,
    with_strategy,
)

from kairos_timesteps.errors import ConfigError
from kairos_timesteps.integrations.diffusers import flow_functions
from kairos_timesteps.randomness import Stream
from small_loop import equal_bits

accelerate, peft = released("accelerate"), released("peft")
diffusers = released("diffusers")
training_utils = released("diffusers.training_utils")

pytestmark = pytest.mark.trainers
ACCUMULATE, BATCH = 2, 4
IMAGES = digits(64)
TEXT = {
    "encoder_hidden_states": torch.randn(64, 3, 8, generator=torch.Generator().manual_seed(1)),
    "pooled_projections": torch.randn(64, 8, generator=torch.Generator().manual_seed(2)),
}
TEXT_OF_HELD_OUT = {key: values[:16] for key, values in TEXT.items()}


def rows(number):
    """Samples of a micro-batch."""
    first = number * BATCH % len(IMAGES)
    return slice(first, first + BATCH)


def conditions(number):
    return {name: values[rows(number)] for name, values in TEXT.items()}


def transformer_with_lora():
    """A Stable Diffusion 3 transformer with one block, of which peft trains a few matrices."""
    torch.manual_seed(0)
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=1, out_channels=1, num_layers=1, attention_head_dim=8,
        num_attention_heads=2, joint_attention_dim=8, caption_projection_dim=16, pooled_projection_dim=8,
        pos_embed_max_size=8,
    )  # fmt: skip
    transformer.requires_grad_(False)
    transformer.add_adapter(
        peft.LoraConfig(r=4, lora_alpha=4, init_lora_weights="gaussian", target_modules=["to_k", "to_q", "to_v"])
    )
    return transformer


def call(transformer, x_t, timestep, conditions):
    return transformer(hidden_states=x_t, timestep=timestep, **conditions, return_dict=False)[0]


class Script:
    """A script's variables and its loop.

    Args:
        name: strategy, attached by the lines of the page; None: the script's own timesteps.
        u: numbers that the script draws without a strategy.
        shift: shift of the noise scheduler.
    """

    def __init__(self, name, u=(), shift=3.0):
        self.name, self.u = name, list(u)
        new_process()
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
        transformer = transformer_with_lora()
        trained = [parameter for parameter in transformer.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        transformer, optimizer = accelerator.prepare(transformer, optimizer)
        self.names = {
            "torch": torch, "accelerator": accelerator, "transformer": transformer, "optimizer": optimizer,
            "noise_scheduler_copy": diffusers.FlowMatchEulerDiscreteScheduler(shift=shift), "held_out": IMAGES[:16],
            "compute_density_for_timestep_sampling": lambda batch_size, **_: self.u.pop(0),
            "compute_loss_weighting_for_sd3": training_utils.compute_loss_weighting_for_sd3,
            "held_out_conditions": TEXT_OF_HELD_OUT, "args": types.SimpleNamespace(seed=None, prior_loss_weight=0.3),
        }  # fmt: skip
        self.fixed, losses, measured, *_, self.validation = blocks("diffusers")
        self.from_losses, _, self.from_losses_with_prior = losses.partition("# with prior preservation")
        functions, _, attached = measured.partition("strategy = attach(")
        attached, _, self.draw = attached.partition("# in the loop")
        if name:
            code = self.fixed
            if measures(name):
                code = self.fixed.partition("strategy = attach(")[0] + functions + "strategy = attach(" + attached
            self.run(with_strategy(code, name))
            self.run(functions)  # for the validation
            quicken(self.names["strategy"].strategy)

    def run(self, code):
        exec(code, self.names)

    def train(self, results, start=0, stop=STEPS * ACCUMULATE, evaluate=False):
        for number in range(start, stop):
            self.micro_batch(number, results)
            if evaluate and number % 9 == 4:
                self.evaluate()
        if self.name:
            results.strategy = self.names["strategy"].state_dict()["strategy"]
        results.network = copy.deepcopy(self.names["transformer"].state_dict())
        return results

    def micro_batch(self, number, results):
        at = self.names
        accelerator, scheduler, transformer = at["accelerator"], at["noise_scheduler_copy"], at["transformer"]
        with accelerator.accumulate(transformer):
            model_input = at["model_input"] = IMAGES[rows(number)]
            noise = torch.randn(model_input.shape, generator=torch.Generator().manual_seed(number))
            at["conditions"] = conditions(number)
            if self.name and measures(self.name):
                self.run("#" + self.draw)
                indices = at["indices"]
            else:
                u = at["compute_density_for_timestep_sampling"](weighting_scheme="none", batch_size=BATCH)
                results.u = [*getattr(results, "u", []), u]
                indices = (u * scheduler.config.num_train_timesteps).long()
            timesteps = scheduler.timesteps[indices]
            sigmas = scheduler.sigmas[indices].view(-1, 1, 1, 1)
            noisy = (1.0 - sigmas) * model_input + sigmas * noise
            at["model_pred"] = call(transformer, noisy, timesteps, at["conditions"])
            at["target"] = noise - model_input
            if self.name == FIXED or self.name in ("uniform+none", None):
                weighting = at["compute_loss_weighting_for_sd3"](weighting_scheme="none", sigmas=sigmas)
                terms = (weighting.float() * (at["model_pred"].float() - at["target"].float()) ** 2).reshape(BATCH, -1)
                at["loss"] = torch.mean(terms, 1).mean()
            else:
                self.run(self.from_losses)
            if self.name:
                at["strategy"].check(model_input, noise, noisy, indices)
            results.t.append(indices)
            results.losses.append(at["loss"].detach())
            accelerator.backward(at["loss"])
            at["optimizer"].step()
            at["optimizer"].zero_grad()

    def evaluate(self):
        """Evaluate as a user would: with the strategy in evaluation mode, and by the validation of the page."""
        transformer = self.names["transformer"]
        transformer.eval()
        self.names["strategy"](IMAGES[:8])
        self.run(self.validation)
        transformer.train()
        return self.names["mlperf"], self.names["middle"]


def plain_loop(name, steps=STEPS):
    """Train in a plain loop, without the integration."""
    network, scheduler = transformer_with_lora(), diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)

    def errors(number, x0, indices):
        noise = torch.randn(x0.shape, generator=torch.Generator().manual_seed(number))
        sigmas = scheduler.sigmas[indices].view(-1, 1, 1, 1)
        output = call(network, (1.0 - sigmas) * x0 + sigmas * noise, scheduler.timesteps[indices], conditions(number))
        return ((output.float() - (noise - x0).float()) ** 2).flatten(1).mean(1)

    def predict(x_t, indices, **step_conditions):
        return call(network, x_t, scheduler.timesteps[indices], step_conditions)

    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    batches = [IMAGES[rows(number)] for number in range(steps * ACCUMULATE)]
    return explicit(
        name, scheduler, "index", network, torch.optim.AdamW(trained, lr=1e-2), batches, errors, ACCUMULATE,
        predict if measures(name) else None, conditions,
    )  # fmt: skip


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_script_trains_as_a_plain_loop_and_evaluation_changes_nothing(name):
    results, expected = Script(name).train(Run(), evaluate=True), plain_loop(name)
    if name == FIXED:  # the script weights elements, the plain loop samples: sums in another order
        assert all(map(torch.equal, results.t, expected.t))
        torch.testing.assert_close(results.losses, expected.losses)
        assert equal_bits(results.strategy, expected.strategy)
    else:
        assert differences(results, expected) == []
    if name in (LOSSES, "auto"):
        assert not torch.equal(torch.cat(results.t), torch.cat(plain_loop("uniform").t))


def test_uniform_alone_changes_no_loss():
    """The script with its own functions and the strategy's u has the losses of the strategy, to the last bit."""
    attached = Script("uniform+none").train(Run(), stop=8)
    script = Script(None, attached.u).train(Run(), stop=8)
    assert equal_bits(attached.losses, script.losses) and equal_bits(attached.network, script.network)


def test_the_functions_have_the_signatures_of_diffusers():
    strategy = Script(FIXED).names["strategy"]
    names = ("compute_density_for_timestep_sampling", "compute_loss_weighting_for_sd3")
    for name, function in zip(names, flow_functions(strategy)):
        released = inspect.signature(getattr(training_utils, name)).parameters
        assert function.__name__ == name and list(inspect.signature(function).parameters) == list(released)


def test_losses_are_weighted_by_the_strategy():
    """The script's loss is the mean of weight x error, with diffusers' own cosmap at the sigmas that it trains on."""
    script = Script("log_normal+cosmap_weight", shift=1.0)
    results = script.train(Run(), stop=1)
    at = script.names
    sigmas = at["noise_scheduler_copy"].sigmas[results.t[0]]
    expected = training_utils.compute_loss_weighting_for_sd3("cosmap", sigmas)
    weights = at["compute_loss_weighting_for_sd3"]("none", sigmas.view(-1, 1, 1, 1))
    torch.testing.assert_close(weights.flatten(), expected, rtol=0.005, atol=0)  # a cell of 1/1000
    errors = (at["model_pred"] - at["target"]).square().mean((1, 2, 3))
    torch.testing.assert_close(results.losses[0], (weights.flatten() * errors).mean())


def test_another_convention_is_caught():
    script = Script(None)
    at = script.names
    script.run(with_strategy(script.fixed.replace('"index"', '"noise_is_one"'), FIXED))
    u = at["compute_density_for_timestep_sampling"]("none", BATCH)
    sigmas = at["noise_scheduler_copy"].sigmas[(1000 * u).long()].view(-1, 1, 1, 1)
    x0, noise = IMAGES[:BATCH], torch.randn(BATCH, 1, 8, 8)
    with pytest.raises(ConfigError, match=r"check: x_t: got ln SNR .*time='noise_is_one'"):
        at["strategy"].check(x0, noise, (1 - sigmas) * x0 + sigmas * noise, u)


def test_a_script_whose_u_is_sigma():
    """Ideogram 4's."""
    script = Script(None)
    script.run(with_strategy(script.fixed.replace('"index"', '"noise_is_one"'), "uniform"))
    sigma = script.names["compute_density_for_timestep_sampling"]("none", BATCH)
    x0, noise = IMAGES[:BATCH], torch.randn(BATCH, 1, 8, 8)
    x_t = (1 - sigma.view(-1, 1, 1, 1)) * x0 + sigma.view(-1, 1, 1, 1) * noise
    script.names["strategy"].check(x0, noise, x_t, sigma)


@pytest.mark.parametrize("name", [FIXED, LOSSES, "adaptive"])
def test_a_resume_equals_an_uninterrupted_run(name, tmp_path):
    whole = Script(name).train(Run(), stop=20)
    stopped = Script(name)
    results = stopped.train(Run(), stop=10)
    stopped.names["accelerator"].save_state(tmp_path / "state")
    resumed = Script(name)
    resumed.names["accelerator"].load_state(tmp_path / "state")
    assert resumed.names["strategy"].strategy.step == 5
    assert differences(resumed.train(results, start=10, stop=20), whole) == []


@pytest.mark.parametrize("name", ["adaptive", "auto"])
def test_strategies_that_need_latents_are_rejected(name):
    script = Script(name)
    with pytest.raises(ConfigError, match=rf"flow_functions: strategy: got {name}, allowed: .*strategy\(latents\)"):
        flow_functions(script.names["strategy"])


def test_prior_preservation_weighs_and_masks_the_prior():
    script = Script("loss_rms")
    at = script.names
    indices = at["strategy"](IMAGES[:BATCH])
    at.update(model_pred=torch.rand(BATCH, 1, 8, 8, requires_grad=True), target=torch.zeros(BATCH, 1, 8, 8))
    script.run("#" + script.from_losses_with_prior)
    errors = at["model_pred"].square().flatten(1).mean(1)
    torch.testing.assert_close(at["loss"], errors[:2].mean() + 0.3 * errors[2:].mean())
    at["loss"].backward()
    assert at["strategy"]._micro_batches[0][0].t.numel() == len(indices) == BATCH
    (micro_batch,) = at["strategy"].strategy._micro_batches
    assert micro_batch.mask.tolist() == [True, True, False, False]


class TextToNoise(torch.nn.Module):
    """A small network that is called as UNet2DConditionModel is."""

    def __init__(self):
        super().__init__()
        self.convolution = torch.nn.Conv2d(1, 1, 3, padding=1)

    def forward(self, x_t, timestep, encoder_hidden_states=None, return_dict=True):
        text = 0 if encoder_hidden_states is None else encoder_hidden_states.mean((1, 2)).view(-1, 1, 1, 1)
        return (self.convolution(x_t) + text,)


@pytest.mark.parametrize("name", ["loss_rms+min_snr", "auto"])
@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_scripts_with_randint(prediction, name):
    """Stable Diffusion's scheduler: draws, the scheduler's x_t and the loss's target agree with the process."""
    new_process()
    accelerator, network = accelerate.Accelerator(cpu=True), TextToNoise()
    network, optimizer = accelerator.prepare(network, torch.optim.SGD(network.parameters(), lr=0.1))
    scheduler = diffusers.DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    names = {
        "noise_scheduler": scheduler, "unet": network, "optimizer": optimizer, "accelerator": accelerator,
        "args": types.SimpleNamespace(seed=None, prediction_type=prediction), "latents": IMAGES[:BATCH],
        "encoder_hidden_states": TEXT["encoder_hidden_states"][:BATCH],
    }  # fmt: skip
    *_, attached, loop, _ = blocks("diffusers")
    exec(with_strategy(attached, name), names)
    strategy = names["strategy"]
    draw, with_conditions, loss = re.findall("^(?:# )?((?:timesteps|loss) = .*)$", loop, re.MULTILINE)
    for _ in range(3):
        exec(with_conditions if measures(name) else draw, names)
        noise = torch.randn(BATCH, 1, 8, 8)
        noisy = scheduler.add_noise(IMAGES[:BATCH], noise, names["timesteps"])
        strategy.check(IMAGES[:BATCH], noise, noisy, names["timesteps"])
        process, target = strategy.time.process, noise
        if prediction == "v_prediction":
            target = scheduler.get_velocity(IMAGES[:BATCH], noise, names["timesteps"])
        torch.testing.assert_close(process.target(IMAGES[:BATCH], noise, names["timesteps"]), target)
        if not measures(name):  # loss_rms draws uniformly in its first steps
            snr = training_utils.compute_snr(scheduler, names["timesteps"])
            expected = snr.clip(max=5) / (snr + 1 if prediction == "v_prediction" else snr)
            torch.testing.assert_close(strategy.weights, expected, rtol=0.002, atol=0)
        names["model_pred"], names["target"] = network(noisy, names["timesteps"])[0], target
        exec(loss, names)
        accelerator.backward(names["loss"])
        optimizer.step()
        optimizer.zero_grad()
    assert strategy.strategy.step == 3


def test_validation_is_that_of_a_plain_loop():
    """Validation averages the losses of all images, each at one of eight times, whatever was accumulated."""
    script = Script(LOSSES)
    before = script.evaluate()
    script.train(Run(), stop=3)  # the second step is half accumulated
    half = script.evaluate()
    script.train(Run(), start=3, stop=4)
    assert before[0] != before[1] and half != before  # after one step
    assert script.names["strategy"].strategy.step == 2
    network, validation = script.names["network"], script.names["ValidationLoss"]
    middle = validation(IMAGES[:16], script.names["noise_scheduler_copy"], kind="middle8", conditions=TEXT_OF_HELD_OUT)
    u = (torch.arange(16) % 8 + 0.5) / 8
    sigmas = 3 * u / (1 + 2 * u)
    noise = Stream(0, "validation noise").normal(0, range(16), (1, 8, 8))
    x_t = (1 - sigmas.view(-1, 1, 1, 1)) * IMAGES[:16] + sigmas.view(-1, 1, 1, 1) * noise
    with torch.no_grad():
        errors = (network(x_t, 1000 * sigmas, TEXT_OF_HELD_OUT) - (noise - IMAGES[:16])).square().mean((1, 2, 3))
    assert middle(network)["loss"] == pytest.approx(float(errors.mean()), rel=1e-5)
