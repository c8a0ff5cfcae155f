"""lucidrains' trainers, unmodified: denoising-diffusion-pytorch on a folder of images, and rectified-flow-pytorch."""

import copy

import pytest
import torch
from PIL import Image
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

from kairos_timesteps.diffusion.adapters import as_process

released("accelerate")
denoising, rectified = released("denoising_diffusion_pytorch"), released("rectified_flow_pytorch")

pytestmark = [pytest.mark.trainers, pytest.mark.filterwarnings("ignore::UserWarning")]
ACCUMULATE, BATCH = 2, 8
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
        if torch.is_grad_enabled() and times.ndim > 1:  # a call of the trainer: times have the dimensions of images
            self.results.t.append(times.flatten())
        return super().predict_flow(model, noised, times=times, **options)


def unet(package):
    torch.manual_seed(0)
    return package.Unet(dim=8, dim_mults=(1,), channels=1, attn_heads=1, attn_dim_head=8)


def run_page(number, name, recorded, **variables):
    """Run a block of the page up to the training, with another strategy and a mixin that records."""
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
    variables = {"unet": unet(denoising), "folder": folder, "options": options, "held_out": IMAGES[:16]}
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
    diffusion = denoising.GaussianDiffusion(unet(denoising), image_size=8, timesteps=100)
    diffusion.loss_weight.fill_(1.0)

    def errors(number, x0, t):
        torch.manual_seed(number + 1)
        return diffusion.p_losses(x0, t, torch.randn_like(x0), loss_reduction="none")

    network = diffusion.model
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2, betas=(0.9, 0.99))
    batches = [diffusion.normalize(each) for each in images]
    predict = (lambda x_t, t: network(x_t, t)) if measures(name) else None
    process = as_process(diffusion.alphas_cumprod, prediction="v")
    return explicit(name, process, None, network, optimizer, batches, errors, ACCUMULATE, predict, clip=1.0)


@pytest.mark.parametrize("name", NAMES)
def test_the_unmodified_trainer_trains_as_a_plain_loop(name, folder, tmp_path):
    run, diffusion = diffusion_run(name, folder, tmp_path, evaluate=name == LOSSES)
    assert len(run.t) == STEPS * ACCUMULATE
    assert differences(run, plain_diffusion_run(name, diffusion.images)) == []


@pytest.mark.parametrize("name", NAMES[:3])
def test_the_trainers_checkpoint_contains_the_state(name, folder, tmp_path):
    whole, diffusion = diffusion_run(name, folder, tmp_path / "whole", train_num_steps=20)
    stopped, _ = diffusion_run(name, folder, tmp_path / "stopped", batches=diffusion.images, train_num_steps=10)
    batches, first = diffusion.images[10 * ACCUMULATE :], 10 * ACCUMULATE
    resumed, module = diffusion_run(
        name, folder, tmp_path / "stopped", first=first, batches=batches, train_num_steps=20
    )
    assert module.strategy.strategy.step == 20
    resumed.t, resumed.losses = stopped.t + resumed.t, stopped.losses + resumed.losses
    assert differences(resumed, whole) == []
