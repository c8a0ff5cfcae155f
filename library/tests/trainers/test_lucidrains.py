"""lucidrains' trainers, unmodified: denoising-diffusion-pytorch on a folder of images, and rectified-flow-pytorch."""

import copy
import functools

import pytest
import torch
from PIL import Image
from training_runs import (
    FIXED,
    LOSSES,
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

from kairos_timesteps.diffusion.adapters import as_process
from kairos_timesteps.errors import ConfigError
from kairos_timesteps.integrations.lucidrains import StrategyDiffusion, StrategyFlow
from kairos_timesteps.randomness import Stream
from small_loop import TinyNetwork, equal_bits

released("accelerate")
denoising, rectified = released("denoising_diffusion_pytorch"), released("rectified_flow_pytorch")

pytestmark = [pytest.mark.trainers, pytest.mark.filterwarnings("ignore::UserWarning")]
ACCUMULATE, BATCH, STEPS = 2, 8, 20
IMAGES = digits(STEPS * ACCUMULATE * BATCH)  # one epoch
NAMES = [name if name != FIXED else "speed+min_snr" for name in STRATEGIES]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("digits")
    for number, image in enumerate(IMAGES):
        Image.fromarray(((image[0] + 1) * 127.5).byte().numpy()).save(path / f"{number}.png")
    return path


class Recorded:
    """Mixin that records images, times and losses; the noise is a function of the number of the micro-batch."""

    def forward(self, img, *args, **options):
        self.images.append(img)
        torch.manual_seed(self.first + len(self.images))
        output = super().forward(img, *args, **options)
        loss = output[0] if isinstance(output, tuple) else output
        self.results.losses.append(loss.detach())
        return output


class RecordedDiffusion(Recorded):
    def p_losses(self, x_start, t, noise=None, **options):
        noise = torch.randn_like(x_start)
        self.results.t.append(t)
        if self.strategy:
            self.strategy.check(x_start, noise, self.q_sample(x_start, t, noise), t)
        return super().p_losses(x_start, t, noise, **options)


class RecordedFlow(Recorded):
    def predict_flow(self, model, noised, *, times, **options):
        if times.ndim > 1:  # a call of the trainer: times have the dimensions of images
            torch.manual_seed(self.first + len(self.images))
            x0 = self.data_normalize_fn(self.images[-1])
            self.results.t.append(times.flatten())
            self.strategy.check(x0, torch.randn_like(x0), noised, times.flatten())
        return super().predict_flow(model, noised, times=times, **options)


def unet():
    torch.manual_seed(0)
    return denoising.Unet(dim=8, dim_mults=(1,), channels=1, attn_heads=1, attn_dim_head=8)


class FlowNetwork(TinyNetwork):
    """A small network that is called as rectified-flow-pytorch's Unet is."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__()

    def forward(self, x_t, times):
        return super().forward(x_t, 100 * times)


def run_page(number, name, recorded, **variables):
    """Run a block of the page up to the training, with another strategy and a mixin that records."""
    new_process()
    code = with_strategy(blocks("lucidrains")[number], name)
    code, train = code.rstrip().rsplit("\n", 1)
    code = code.replace("(Strategy", f"({recorded.__name__}, Strategy")
    names = {recorded.__name__: recorded, **variables}
    exec(code, names)
    module = names["diffusion" if number == 0 else "flow"]
    module.images, module.results, module.first = [], Run(), 0
    quicken(module.strategy.strategy)
    return names, module, train


def diffusion_run(name, folder, results, first=0, batches=None, evaluate=False, **options):
    """Train by the page, with the images of the folder or with batches; `first` micro-batches are in a checkpoint."""
    options = {
        "train_batch_size": BATCH, "gradient_accumulate_every": ACCUMULATE, "train_num_steps": STEPS, "num_samples": 1,
        "save_and_sample_every": 10, "results_folder": results, "calculate_fid": False, "train_lr": 1e-2, **options,
    }  # fmt: skip
    variables = {"unet": unet(), "folder": folder, "options": options, "held_out": IMAGES[:16]}
    names, diffusion, train = run_page(0, name, RecordedDiffusion, **variables)
    trainer = names["trainer"]
    if batches is not None:
        trainer.dl = iter(batches)
    if first:
        diffusion.first = first
        trainer.load(1)

    def evaluation(*_):
        diffusion.eval()
        diffusion.strategy(IMAGES[:8])
        exec(blocks("lucidrains")[2], names)
        diffusion.train()

    if evaluate:
        trainer.opt.optimizer.register_step_post_hook(evaluation)
    exec(train, names)
    run = diffusion.results
    run.strategy = diffusion.strategy.state_dict()["strategy"]
    run.network = copy.deepcopy(diffusion.model.state_dict())
    return run, diffusion


def plain_diffusion_run(name, images):
    diffusion = denoising.GaussianDiffusion(unet(), image_size=8, timesteps=100)
    diffusion.loss_weight.fill_(1.0)

    def errors(number, x0, t):
        torch.manual_seed(number + 1)
        return diffusion.p_losses(x0, t, torch.randn_like(x0), loss_reduction="none")

    network = diffusion.model
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2, betas=(0.9, 0.99))
    batches = [diffusion.normalize(batch) for batch in images]
    predict = (lambda x_t, t: network(x_t, t)) if measures(name) else None
    process = as_process(diffusion.alphas_cumprod, prediction="v")
    return explicit(name, process, None, network, optimizer, batches, errors, ACCUMULATE, predict, clip=1.0)


@pytest.fixture(scope="module")
def whole_run(folder, tmp_path_factory):
    """Return a function that trains once with each strategy, and writes a checkpoint at step 10 into a folder."""

    @functools.cache
    def run(name):
        results = tmp_path_factory.mktemp("results")
        return *diffusion_run(name, folder, results, evaluate=name == LOSSES), results

    return run


@pytest.mark.parametrize("name", NAMES)
def test_the_unmodified_trainer_trains_as_a_plain_loop(name, whole_run):
    run, diffusion, _ = whole_run(name)
    assert len(run.t) == STEPS * ACCUMULATE
    assert differences(run, plain_diffusion_run(name, diffusion.images)) == []


@pytest.mark.parametrize("name", [LOSSES, "auto"])
def test_the_trainers_checkpoint_contains_the_state(name, folder, whole_run):
    whole, diffusion, results = whole_run(name)
    first = 10 * ACCUMULATE
    resumed, module = diffusion_run(name, folder, results, first=first, batches=diffusion.images[first:])
    assert len(resumed.t) == STEPS * ACCUMULATE - first and module.strategy.strategy.step == STEPS
    resumed.t, resumed.losses = whole.t[:first] + resumed.t, whole.losses[:first] + resumed.losses
    assert differences(resumed, whole) == []


def test_uniform_alone_changes_no_loss(folder, tmp_path):
    """The trainer's own diffusion at the strategy's times has the losses of the strategy, to the last bit."""
    run, diffusion = diffusion_run("uniform+none", folder, tmp_path, train_num_steps=4)
    plain = denoising.GaussianDiffusion(unet(), image_size=8, timesteps=100)
    plain.loss_weight.fill_(1.0)
    optimizer = torch.optim.Adam(plain.parameters(), lr=1e-2, betas=(0.9, 0.99))
    for number, (img, t, expected) in enumerate(zip(diffusion.images, run.t, run.losses)):
        torch.manual_seed(number + 1)
        loss = plain(img, noise=torch.randn_like(img), times=t)
        assert equal_bits(loss.detach(), expected)
        (loss / ACCUMULATE).backward()
        if number % ACCUMULATE:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert equal_bits(plain.model.state_dict(), run.network)


@pytest.mark.parametrize("objective", ["pred_noise", "pred_x0", "pred_v"])
@pytest.mark.parametrize(
    ("strategy", "options"), [("uniform+p2", {"weighting": {"gamma": 0}}), ("uniform+min_snr", {})]
)
def test_weightings_with_the_weights_of_the_trainer(strategy, options, objective):
    class Diffusion(StrategyDiffusion, denoising.GaussianDiffusion):
        pass

    clipped = strategy == "uniform+min_snr"
    diffusion = Diffusion(unet(), image_size=8, objective=objective, min_snr_loss_weight=clipped)
    expected = diffusion.loss_weight.clone()
    attached = diffusion.attach(strategy, torch.optim.SGD(diffusion.parameters(), lr=0.1), **options)
    weights = torch.from_numpy(attached.strategy.table()["w"]).float()
    torch.testing.assert_close(weights, expected, rtol=1e-3, atol=1e-9)


def test_times_that_are_given_are_used_with_the_loss_of_the_trainer():
    class Diffusion(StrategyDiffusion, denoising.GaussianDiffusion):
        pass

    diffusion, plain = (cls(unet(), image_size=8) for cls in (Diffusion, denoising.GaussianDiffusion))
    plain.loss_weight.fill_(1.0)
    diffusion.attach("loss_rms", torch.optim.SGD(diffusion.parameters(), lr=0.1))
    times, losses = torch.tensor([1, 500, 999]), []
    for trained in (diffusion, plain):
        torch.manual_seed(0)
        losses.append(trained(IMAGES[:3], times=times))
    assert equal_bits(*losses) and diffusion.strategy.strategy.state_dict()["drawn"] == [0, 0]


def test_another_schedule_is_caught():
    class Diffusion(StrategyDiffusion, denoising.GaussianDiffusion):
        pass

    diffusion = Diffusion(unet(), image_size=8, beta_schedule="cosine")
    strategy = diffusion.attach("uniform", torch.optim.SGD(diffusion.parameters(), lr=0.1))
    other = denoising.GaussianDiffusion(unet(), image_size=8, beta_schedule="sigmoid")
    noise, t = torch.randn(8, 1, 8, 8), strategy(IMAGES[:8])
    strategy.check(IMAGES[:8], noise, diffusion.q_sample(IMAGES[:8], t, noise), t)
    with pytest.raises(ConfigError, match="check: x_t: got ln SNR"):
        strategy.check(IMAGES[:8], noise, other.q_sample(IMAGES[:8], t, noise), t)


def test_a_checkpoint_is_loaded_after_the_strategy_is_attached():
    class Diffusion(StrategyDiffusion, denoising.GaussianDiffusion):
        pass

    diffusion, other = (Diffusion(unet(), image_size=8) for _ in range(2))
    other.load_state_dict(diffusion.state_dict())
    diffusion.attach("loss_rms", torch.optim.SGD(diffusion.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match="load: strategy: got none, allowed: a strategy, attached before"):
        other.load_state_dict(diffusion.state_dict())


def test_validation_of_the_diffusion(folder, tmp_path):
    variables = {"unet": unet(), "folder": folder, "held_out": IMAGES[:16]}
    variables["options"] = {"calculate_fid": False, "results_folder": tmp_path}
    names, diffusion, _ = run_page(0, LOSSES, RecordedDiffusion, **variables)
    exec(blocks("lucidrains")[2], names)
    schedule = diffusion.alphas_cumprod
    for number, loss in ((0, names["mlperf"]), (1, names["middle"])):
        t = ((torch.arange(16) % 8 + number / 2) / 8 * 100).long()
        noise = Stream(0, "validation noise").normal(0, range(16), (1, 8, 8))
        signal = schedule[t].view(-1, 1, 1, 1).sqrt()
        rest = (1 - schedule)[t].view(-1, 1, 1, 1).sqrt()
        with torch.no_grad():
            output = diffusion.model(signal * IMAGES[:16] + rest * noise, t)
        errors = (output - (signal * noise - rest * IMAGES[:16])).square().mean((1, 2, 3))
        assert loss == pytest.approx(float(errors.mean()), rel=1e-4)


# Rectified flow


def flow_run(name, folder, first=0, images=IMAGES, steps=STEPS, evaluate=False):
    """Train by the page; the data loader shuffles, so images are recorded."""
    options = {
        "num_train_steps": steps * ACCUMULATE, "batch_size": BATCH, "grad_accum_every": ACCUMULATE, "num_samples": 1,
        "learning_rate": 1e-2, "save_results_every": 1000, "checkpoint_every": 10 * ACCUMULATE,
        "checkpoints_folder": str(folder / "checkpoints"), "results_folder": str(folder / "results"),
    }  # fmt: skip
    variables = {
        "unet": FlowNetwork(), "options": options, "dataset": images / 2 + 0.5,
        "held_out": IMAGES[:16],
    }  # fmt: skip
    names, flow, train = run_page(1, name, RecordedFlow, **variables)
    if first:
        flow.first = first
        names["trainer"].load(f"checkpoint.{first}.pt")
        loader = torch.utils.data.DataLoader(images / 2 + 0.5, batch_size=BATCH)
        names["trainer"].dl = names["trainer"].accelerator.prepare(loader)

    def evaluation(*_):
        flow.eval()
        flow.strategy(IMAGES[:8])
        exec(blocks("lucidrains")[3], names)
        flow.train()

    if evaluate:
        names["trainer"].optimizer.optimizer.register_step_post_hook(evaluation)
    exec(train, names)
    flow.results.strategy = flow.strategy.state_dict()["strategy"]
    flow.results.network = copy.deepcopy(flow.model.state_dict())
    return flow.results, flow, names


def plain_flow_run(name, images):
    flow = rectified.RectifiedFlow(FlowNetwork())
    network = flow.model

    def errors(number, x0, t):
        torch.manual_seed(number + 1)
        noise = torch.randn_like(x0)
        output = network(noise.lerp(x0, t.view(-1, 1, 1, 1)), times=t)
        return (output - (x0 - noise)).square().flatten(1).mean(1)

    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    batches = [flow.data_normalize_fn(batch) for batch in images]
    predict = (lambda x_t, t: -network(x_t, times=t)) if measures(name) else None
    return explicit(
        name, "flow", "data_is_one", network, optimizer, batches, errors, ACCUMULATE, predict, clip=0.5
    )  # fmt: skip


@pytest.mark.parametrize("name", STRATEGIES)
def test_rectified_flow_trains_as_a_plain_loop(name, tmp_path):
    run, flow, _ = flow_run(name, tmp_path, evaluate=name == LOSSES)
    assert len(run.t) == STEPS * ACCUMULATE
    assert differences(run, plain_flow_run(name, flow.images)) == []


def test_the_checkpoint_of_rectified_flow_contains_the_state(tmp_path):
    whole, flow, _ = flow_run(LOSSES, tmp_path)
    images = torch.cat(flow.images[20:]) * 2 - 1
    resumed, _, _ = flow_run(LOSSES, tmp_path, first=20, images=images, steps=10)
    assert equal_bits(resumed.t, whole.t[20:]) and equal_bits(resumed.losses, whole.losses[20:])
    assert equal_bits(resumed.strategy, whole.strategy) and equal_bits(resumed.network, whole.network)


def test_uniform_alone_changes_no_loss_of_rectified_flow_but_the_order_of_its_sum(tmp_path):
    run, flow, _ = flow_run("uniform+none", tmp_path, steps=1)
    plain = rectified.RectifiedFlow(FlowNetwork())
    for number, (img, t, expected) in enumerate(zip(flow.images, run.t, run.losses)):
        torch.manual_seed(number + 1)
        torch.testing.assert_close(plain(img, times=t).detach(), expected, rtol=3e-7, atol=0)


def test_another_convention_of_rectified_flow_is_caught():
    class Flow(StrategyFlow, rectified.RectifiedFlow):
        pass

    flow = Flow(FlowNetwork())
    strategy = flow.attach("uniform", torch.optim.SGD(flow.parameters(), lr=0.1))
    noise, t = torch.randn(8, 1, 8, 8), strategy(IMAGES[:8])
    with pytest.raises(ConfigError, match="time='data_is_one'; time='noise_is_one' fits"):
        strategy.check(IMAGES[:8], noise, IMAGES[:8].lerp(noise, t.view(-1, 1, 1, 1)), t)


def test_rectified_flow_that_predicts_something_else_is_rejected():
    class Flow(StrategyFlow, rectified.RectifiedFlow):
        pass

    flow = Flow(FlowNetwork(), predict="noise")
    with pytest.raises(ConfigError, match=r"RectifiedFlow.predict: got 'noise', allowed: 'flow'"):
        flow.attach("uniform", torch.optim.SGD(flow.parameters(), lr=0.1))


def test_times_given_to_rectified_flow_are_rejected():
    class Flow(StrategyFlow, rectified.RectifiedFlow):
        pass

    flow = Flow(FlowNetwork())
    flow.attach("uniform", torch.optim.SGD(flow.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match="times"):
        flow(IMAGES[:8], times=torch.rand(8))


def test_validation_of_rectified_flow(tmp_path):
    _, flow, names = flow_run(LOSSES, tmp_path, steps=1)
    exec(blocks("lucidrains")[3], names)
    for number, loss in ((0, names["mlperf"]), (1, names["middle"])):
        u = ((torch.arange(16) % 8 + number / 2) / 8).clip(1e-5)
        noise = Stream(0, "validation noise").normal(0, range(16), (1, 8, 8))
        with torch.no_grad():
            output = flow.model(IMAGES[:16].lerp(noise, u.view(-1, 1, 1, 1)), times=1 - u)
        errors = (output - (IMAGES[:16] - noise)).square().mean((1, 2, 3))
        assert loss == pytest.approx(float(errors.mean()), rel=1e-4)
