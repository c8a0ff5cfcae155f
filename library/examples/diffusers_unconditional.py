"""Diffusers' unconditional training script (U-Net, DDPM scheduler, EMA, pipeline) with a strategy for its timesteps.

    python examples/diffusers_unconditional.py --strategy speed+change_aware --output digits-pipeline
    python examples/diffusers_unconditional.py --strategy adaptive+min_snr --prediction v_prediction

The loop is that script's, for one process. With accelerate nothing else changes: each process passes its part of the
batch to `strategy.draw`, and `strategy.observe` takes the model as `accelerator.prepare` returned it.
"""

from pathlib import Path

import torch
from common import batch, images, parser, progress
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from diffusers.utils import make_image_grid

import kairos_timesteps


def main(argv: list[str] | None = None) -> list[float]:
    """Train, save a pipeline and a grid of samples, and return the loss of every step."""
    options = parser(__doc__.splitlines()[0], strategy="speed+change_aware")
    options.add_argument("--prediction", default="epsilon", choices=("epsilon", "sample", "v_prediction"))
    options.add_argument("--output", type=Path, default=Path("ddpm-pipeline"), help="folder of the pipeline")
    options.add_argument("--sampling-steps", type=int, default=100, help="steps of the sampler, for the grid")
    arguments = options.parse_args(argv)
    device, width = arguments.device, arguments.width
    torch.manual_seed(arguments.seed)

    data = images(arguments.images, arguments.size)
    model = UNet2DModel(
        sample_size=data.shape[-1],
        in_channels=data.shape[1],
        out_channels=data.shape[1],
        block_out_channels=(width, 2 * width),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
        attention_head_dim=8,
    ).to(device)
    ema = EMAModel(model.parameters(), decay=0.9999, use_ema_warmup=True, inv_gamma=1.0, power=0.75)
    noise_scheduler = DDPMScheduler(num_train_timesteps=1000, prediction_type=arguments.prediction)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, betas=(0.95, 0.999), weight_decay=1e-6)
    steps = {"num_warmup_steps": arguments.steps // 10, "num_training_steps": arguments.steps}
    lr_scheduler = get_scheduler("cosine", optimizer, **steps)

    strategy = kairos_timesteps.Strategy(arguments.strategy, noise_scheduler, seed=arguments.seed)

    losses = []
    for step in range(arguments.steps):
        clean, noise = batch(data, arguments.batch, arguments.seed, step, device)
        draw = strategy.draw(clean)
        noisy = noise_scheduler.add_noise(clean, noise, draw.t)
        output = model(noisy, draw.t).sample
        velocity = noise_scheduler.get_velocity(clean, noise, draw.t)
        target = {"epsilon": noise, "sample": clean, "v_prediction": velocity}[arguments.prediction]
        error = (output - target).square().mean((1, 2, 3))  # (batch,)
        loss = strategy.loss(draw, error)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with strategy.observe(draw, model, optimizer):
            optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
        ema.step(model.parameters())
        losses.append(loss.item())
        progress(step + 1, arguments.steps, losses)

    ema.copy_to(model.parameters())
    pipeline = DDPMPipeline(unet=model, scheduler=noise_scheduler)
    pipeline.save_pretrained(arguments.output)
    pipeline.set_progress_bar_config(disable=True)
    random = torch.Generator().manual_seed(arguments.seed)
    samples = pipeline(batch_size=8, generator=random, num_inference_steps=arguments.sampling_steps).images
    make_image_grid(samples, rows=2, cols=4).save(arguments.output / "samples.png")
    return losses


if __name__ == "__main__":
    main()
