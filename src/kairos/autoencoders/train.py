"""A small KL autoencoder trained on the data set itself (diffusers AutoencoderKL, purely convolutional).

All randomness of step k is a function of (seed, k), so a killed training goes on from its checkpoint as if nothing had
happened.
"""

import io
import math
from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

from kairos.autoencoders.codec import check_size, downsampling
from kairos.autoencoders.settings import AutoencoderConfig
from kairos.data.dataset import PreparedDataset
from kairos.files import atomic, sha256_json
from kairos.fingerprint import fingerprint
from kairos.progress import Progress, say
from kairos_timesteps.randomness import Stream, derived_seed

_CHECKPOINT_EVERY = 200
_BETAS = (0.9, 0.99)


def build_model(config: AutoencoderConfig, shape: tuple[int, int, int]) -> AutoencoderKL:
    """An untrained autoencoder for images of `shape` (channels, height, width)."""
    levels = len(config.channels)
    check_size(shape, 2 ** (levels - 1), f"an autoencoder with {levels} levels (autoencoder.channels)")
    common = math.gcd(*config.channels)  # groups for normalisation divide it, of 4 channels or more where possible
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derived_seed(config.seed, "autoencoder/weights"))
        return AutoencoderKL(
            in_channels=shape[0],
            out_channels=shape[0],
            down_block_types=("DownEncoderBlock2D",) * levels,
            up_block_types=("UpDecoderBlock2D",) * levels,
            block_out_channels=tuple(config.channels),
            layers_per_block=config.layers,
            latent_channels=config.latent_channels,
            norm_num_groups=max(n for n in range(1, common + 1) if common % n == 0 and n <= max(1, common // 4)),
            sample_size=shape[1],
            mid_block_add_attention=False,  # at 128×128 latents attention would need gigabytes
        )


def train(
    config: AutoencoderConfig, dataset: PreparedDataset, state: Path, device: torch.device, flips: bool = False
) -> AutoencoderKL:
    """Train an autoencoder on the training images.

    The loss is the mean squared error per pixel and, weighted, the KL divergence from a standard normal per latent
    dimension. The learning rate has a short linear warm-up and a cosine decay to zero.

    Args:
        flips: half of the images, by chance, are flipped horizontally.
        state: file of the checkpoint that a killed training goes on from; the caller removes it when all is written.
    """
    model = build_model(config, dataset.shape).to(device).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=config.learning_rate, betas=_BETAS)
    decides = {
        "config": config.model_dump(mode="json", exclude={"path", "encode_batch_size"}),
        "dataset": dataset.manifest["content_sha256"],
        "code": fingerprint([__name__]),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "device": device.type,
        "flips": flips,
    }
    identity = sha256_json(decides)  # a checkpoint of anything else is not resumed
    first = _resume(state, identity, model, optimizer)
    latent_shape = (config.latent_channels, *(side // downsampling(model) for side in dataset.shape[1:]))
    index, seed = range(config.batch_size), config.seed
    progress = Progress(config.steps, "autoencoder", "step", start=first)
    for step in range(first, config.steps):
        chosen = Stream(seed, "autoencoder/order").integers(step, len(dataset.train), index)
        images = dataset.load_tensor(dataset.train[chosen.numpy()])
        if flips:
            flipped = Stream(seed, "autoencoder/flips").uniform(step, index) < 0.5
            images = torch.where(flipped.view(-1, 1, 1, 1), images.flip(3), images)
        images = images.to(device)
        noise = Stream(seed, "autoencoder/latent").normal(step, index, latent_shape).to(device)
        for group in optimizer.param_groups:
            decay = 0.5 * (1 + math.cos(math.pi * step / config.steps))
            group["lr"] = config.learning_rate * (min(1.0, (step + 1) / 20) * decay)

        posterior = model.encode(images).latent_dist
        reconstruction = model.decode(posterior.mean + posterior.std * noise).sample
        mse = (reconstruction - images).square().mean()
        kl = 0.5 * (posterior.mean**2 + posterior.var - 1 - posterior.logvar).mean()
        optimizer.zero_grad(set_to_none=True)
        (mse + config.kl_weight * kl).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        progress.advance(facts=f"mse {mse.item():.5f}, kl {kl.item():.3f}")
        if (step + 1) % _CHECKPOINT_EVERY == 0 or step + 1 == config.steps:
            content = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            buffer = io.BytesIO()  # torch.save itself hides a full disk's error
            torch.save({"identity": identity, "step": step + 1, **content}, buffer)
            with atomic(state) as file:
                file.write(buffer.getbuffer())
    progress.close()
    return model.eval()


def _resume(state: Path, identity: str, model: Any, optimizer: torch.optim.Optimizer) -> int:
    """Load the checkpoint if it belongs to this training; gives the number of steps done."""
    if not state.is_file():
        return 0
    try:
        content = torch.load(state, weights_only=True)
    except Exception as error:  # torch raises many kinds for a damaged file; starting over is right for all
        say(f"autoencoder: checkpoint {state} is damaged ({type(error).__name__}), starting over")
        return 0
    if content["identity"] != identity:
        return 0
    model.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])
    say(f"autoencoder: goes on after step {content['step']}")
    return content["step"]


def latent_statistics(
    model: Any, dataset: PreparedDataset, batch_size: int, device: torch.device
) -> tuple[float, float]:
    """Mean and standard deviation of the latents of the training images, the samples' variance included."""
    total = square = count = 0.0
    with torch.no_grad():
        for start in range(0, len(dataset.train), batch_size):
            posterior = model.encode(
                dataset.load_tensor(dataset.train[start : start + batch_size]).to(device)
            ).latent_dist
            mean = posterior.mean.double()
            total += float(mean.sum())
            square += float((mean**2 + posterior.var.double()).sum())
            count += mean.numel()
    center = total / count
    return center, math.sqrt(square / count - center**2)
