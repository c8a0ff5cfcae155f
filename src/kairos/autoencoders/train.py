"""A small KL autoencoder trained on the data set itself (diffusers AutoencoderKL, purely convolutional).

All random numbers of step k are functions of (seed, k). A training run that resumes from its checkpoint therefore has
the result of an uninterrupted one.
"""

import io
import math
from pathlib import Path
from typing import Any

import torch

from kairos.autoencoders.codec import REMEDY, downsampling
from kairos.autoencoders.settings import AutoencoderConfig
from kairos.data.dataset import PreparedDataset
from kairos.files import atomic, sha256_json
from kairos.finite import demand_finite
from kairos.progress import ProgressBar, log
from kairos.quick_imports import without_pipeline_packages
from kairos.shapes import Images
from kairos.stage_keys import hash_modules
from kairos_timesteps.errors import DivergedError, KairosError
from kairos_timesteps.optimizers import Adam
from kairos_timesteps.randomness import Stream, derived_seed

with without_pipeline_packages():
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

_CHECKPOINT_EVERY = 200  # steps
_WARM_UP_STEPS = 20
_BETAS = (0.9, 0.99)  # decay rates of Adam's averages
_MAX_GRADIENT_NORM = 1.0
_REMEDY = "training stopped, and the last checkpoint is kept. Try a lower autoencoder.learning_rate"


def build_model(config: AutoencoderConfig, shape: tuple[int, int, int]) -> AutoencoderKL:
    """Return an untrained autoencoder for images of `shape` (channels, height, width).

    The autoencoder is on the CPU, in training mode. Its random initial weights are a function of the configured seed.
    The state of torch's CPU generator is restored; generators of GPUs keep the new seed.

    Raises:
        ConfigError: the sides of the images cannot be halved at every level except the last.
    """
    config.check_trainable_on(shape)
    levels = len(config.channels)
    # The number of groups of the normalisation must divide the channels of every level. Select the largest
    # such number up to a quarter of the channels' common divisor, or else 1.
    common_divisor = math.gcd(*config.channels)
    most_groups = max(1, common_divisor // 4)
    possible_groups = [count for count in range(1, most_groups + 1) if common_divisor % count == 0]
    groups = max(possible_groups)
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
            norm_num_groups=groups,
            sample_size=shape[1],
            mid_block_add_attention=False,  # at 128×128 latents attention would need gigabytes
        )


def train(
    config: AutoencoderConfig, dataset: PreparedDataset, state: Path, device: torch.device, flips: bool = False
) -> AutoencoderKL:
    """Train an autoencoder on the training images, and return it on the device, in evaluation mode.

    The loss is the mean squared error per pixel and, weighted, the KL divergence from a standard normal per latent
    dimension. The learning rate has a short linear warm-up and a cosine decay to zero. A checkpoint is written every
    200 steps and at the end; with one of the last step, no step is computed. Messages report the progress. The scaling
    factor of the autoencoder stays diffusers' default.

    Args:
        config: section `autoencoder`.
        dataset: the prepared data set.
        state: file of the checkpoint, from which an interrupted training run resumes. A checkpoint of other settings,
            data, code, torch version, number of threads or kind of device is ignored and replaced. The caller deletes
            the file after the results are written.
        device: device of the training run.
        flips: flip each image horizontally with probability 1/2.

    Raises:
        ConfigError: the sides of the images cannot be halved at every level except the last.
        NotFiniteError: the loss or the gradient of a step, or the trained weights, are not finite.
    """
    # model and optimizer, with their state in the checkpoint if it is of this training run
    model = build_model(config, dataset.shape).to(device).train()
    optimizer = Adam(model.parameters(), lr=config.learning_rate, betas=_BETAS)
    settings = {
        # the excluded fields do not change the steps
        "config": config.model_dump(mode="json", exclude={"path", "encode_batch_size", "dtype", "shards"}),
        "dataset": dataset.record["content_sha256"],
        "code": hash_modules([__name__]),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "device": device.type,
        "flips": flips,
    }
    identity = sha256_json(settings)  # a checkpoint with another identity is ignored
    first_step = _resume(state, identity, model, optimizer)

    # steps
    factor = downsampling(model)
    _, height, width = dataset.shape
    latent_shape = (config.latent_channels, height // factor, width // factor)
    sample_indices = range(config.batch_size)
    progress = ProgressBar(config.steps, "autoencoder", "step", start=first_step)
    for step in range(first_step, config.steps):
        # images, noise and learning rate of the step
        images = _load_batch(config, dataset, step, flips).to(device)
        noise = Stream(config.seed, "autoencoder/latent").normal(step, sample_indices, latent_shape).to(device)
        for group in optimizer.param_groups:
            group["lr"] = _learning_rate(config, step)

        # loss; the latents are samples from the posterior
        posterior = model.encode(images).latent_dist
        reconstruction = model.decode(posterior.mean + posterior.std * noise).sample
        mse = (reconstruction - images).square().mean()
        kl = 0.5 * (posterior.mean**2 + posterior.var - 1 - posterior.logvar).mean()

        # update, progress and checkpoint
        optimizer.zero_grad(set_to_none=True)
        (mse + config.kl_weight * kl).backward()
        gradient_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), _MAX_GRADIENT_NORM)
        measured = torch.stack([mse, kl, gradient_norm]).tolist()  # synchronises once
        if not all(map(math.isfinite, measured)):
            facts = "mse {}, kl {}, gradient norm {}".format(*measured)
            raise DivergedError(f"autoencoder: step {step + 1}: {facts}: not finite; {_REMEDY}")
        optimizer.step()
        progress.advance(facts="mse {:.5f}, kl {:.3f}".format(*measured[:2]))
        if (step + 1) % _CHECKPOINT_EVERY == 0 or step + 1 == config.steps:
            demand_finite(model.state_dict(), f"autoencoder: step {step + 1}: weights", _REMEDY)
            _save_checkpoint(state, identity, step + 1, model, optimizer)
    progress.close()
    return model.eval()


def _load_batch(config: AutoencoderConfig, dataset: PreparedDataset, step: int, flips: bool) -> Images:
    """Load the random training images of a step on the CPU, (batch, C, H, W) in [-1, 1].

    The images are drawn with replacement, as a function of seed and step. With `flips`, each is flipped horizontally
    with probability 1/2.
    """
    sample_indices = range(config.batch_size)
    positions = Stream(config.seed, "autoencoder/order").integers(step, len(dataset.train), sample_indices)
    images = dataset.load_tensor(dataset.train[positions.numpy()])
    if flips:
        is_flipped = Stream(config.seed, "autoencoder/flips").uniform(step, sample_indices) < 0.5  # (batch,)
        images = torch.where(is_flipped.view(-1, 1, 1, 1), images.flip(3), images)
    return images


def _learning_rate(config: AutoencoderConfig, step: int) -> float:
    """Return the learning rate of a step, from 0: a linear warm-up times a cosine decay to 0 at `config.steps`."""
    warm_up = min(1.0, (step + 1) / _WARM_UP_STEPS)
    decay = 0.5 * (1 + math.cos(math.pi * step / config.steps))
    return config.learning_rate * (warm_up * decay)


def _save_checkpoint(state: Path, identity: str, step: int, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Write the states of model and optimizer, and the number of finished steps, to file `state`, atomically.

    The file also contains the identity, which `_resume` compares.
    """
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    buffer = io.BytesIO()  # torch.save to a file would hide the error of a full disk
    torch.save({"identity": identity, "step": step, **content}, buffer)
    with atomic(state) as file:
        file.write(buffer.getbuffer())


def _resume(state: Path, identity: str, model: Any, optimizer: torch.optim.Optimizer) -> int:
    """Load model and optimizer from the checkpoint if its identity is equal, and return its number of finished steps.

    If the checkpoint is missing or damaged, or has another identity, the result is 0, and model and optimizer are
    unchanged. A damaged checkpoint and a resumed training run are logged. The file itself is not changed.
    """
    if not state.is_file():
        return 0
    try:
        # on the CPU, because the GPU that wrote the file may be missing; `load_state_dict` moves the tensors
        content = torch.load(state, map_location="cpu", weights_only=True)
        has_equal_identity = content["identity"] == identity
    except Exception as error:  # for a damaged file, or one of other content, errors have many types
        log(f"autoencoder: checkpoint {state} is damaged ({type(error).__name__}), starting over")
        return 0
    if not has_equal_identity:
        return 0
    model.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])
    log(f"autoencoder: resumes after step {content['step']}")
    return int(content["step"])


def latent_statistics(
    model: Any, dataset: PreparedDataset, batch_size: int, device: torch.device
) -> tuple[float, float]:
    """Return mean and standard deviation of the latents of the training images, over images and all dimensions.

    They include the variance of each latent's distribution, and are computed from its mean and variance in float64,
    without samples. Flipped images are not included.

    Args:
        model: autoencoder of diffusers with a distribution of latents (AutoencoderKL).
        dataset: the prepared data set.
        batch_size: images per step.
        device: device of the model; the caller has moved the model there.

    Raises:
        NotFiniteError: the encoder returns values that are not finite.
        KairosError: all latents are equal up to rounding.
    """
    total = total_square = count = 0.0
    with torch.no_grad():
        for start in range(0, len(dataset.train), batch_size):
            images = dataset.load_tensor(dataset.train[start : start + batch_size]).to(device)
            posterior = model.encode(images).latent_dist
            moments = {"mean": posterior.mean, "variance": posterior.var}
            demand_finite(moments, f"autoencoder: latents of {len(images)} training images", REMEDY)
            mean = posterior.mean.double()
            expected_square = mean**2 + posterior.var.double()
            total += float(mean.sum())
            total_square += float(expected_square.sum())
            count += mean.numel()
    # the overall variance is the mean of the expected squares minus the square of the overall mean
    overall_mean = total / count
    variance = total_square / count - overall_mean**2
    if variance <= 0:
        raise KairosError(
            f"autoencoder: all latents are {overall_mean:.4g} up to rounding, so that they contain no image. Try a "
            "lower autoencoder.learning_rate or autoencoder.kl_weight, or more autoencoder.steps"
        )
    return overall_mean, math.sqrt(variance)
