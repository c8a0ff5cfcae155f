"""Stage autoencoder: the space the diffusion model works in becomes a folder; see `codec.load_codec`."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kairos import resource_usage
from kairos.autoencoders.codec import FILES, AutoencoderCodec, check_size, downsampling, load_model, wrap
from kairos.autoencoders.settings import AutoencoderConfig
from kairos.data.dataset import PreparedDataset
from kairos.data.image_grid import write_image_grid
from kairos.files import sha256_file, sha256_json, write_json, write_text, write_weights
from kairos.pretrained import find_network_folder
from kairos_timesteps.errors import ConfigError

_PSNR_IMAGES = 512  # of the held-out ones, at most; of the training images where none are held out
_UNSET = 0.18215  # VQModel's scaling factor where nobody chose one: it is SD's, and no VQModel's
_PICTURED, _SIDE = 16, 64  # images on the picture, and the least side of one
_STATE = ".state.pt"  # checkpoint of a training that was killed


def make_autoencoder(
    config: AutoencoderConfig, dataset: PreparedDataset, out: Path, device: torch.device, flips: bool = False
) -> dict[str, Any]:
    """Train or fetch the autoencoder, write its folder and return its manifest.

    The manifest holds kind, class, scaling and shift factor, image_shape and latent_shape (channels, height, width),
    the hash of weights and configuration, and the PSNR in dB with what it is of.

    Raises:
        ConfigError: the autoencoder does not fit the images, or its path cannot be used.
    """
    out.mkdir(parents=True, exist_ok=True)
    (out / "manifest.json").unlink(missing_ok=True)
    manifest: dict[str, Any] = {
        "kind": config.kind,
        "class": None,
        "scaling_factor": 1.0,
        "shift_factor": 0.0,
        "image_shape": list(dataset.shape),
        "latent_shape": list(dataset.shape),
        "sha256": "pixels",
        "psnr": None,
        "files": {},
    }
    if config.kind == "none":
        resource_usage.end_startup()
    else:
        trains = config.kind == "train"
        model = _trained(config, dataset, out, device, flips) if trains else _pretrained(config, dataset)
        manifest["class"] = type(model).__name__
        manifest["scaling_factor"] = float(model.config.scaling_factor)
        manifest["shift_factor"] = float(model.config.get("shift_factor") or 0.0)
        manifest |= _saved(wrap(model, manifest, device), dataset, out, config.encode_batch_size)
    write_json(out / "manifest.json", manifest)
    (out / _STATE).unlink(missing_ok=True)
    return manifest


def _trained(config: AutoencoderConfig, dataset: PreparedDataset, out: Path, device: torch.device, flips: bool) -> Any:
    from kairos.autoencoders.train import latent_statistics, train

    resource_usage.end_startup()
    model = train(config, dataset, out / _STATE, device, flips)
    shift, std = latent_statistics(model, dataset, config.encode_batch_size, device)
    model.register_to_config(scaling_factor=1 / std, shift_factor=shift)
    return model


def _pretrained(config: AutoencoderConfig, dataset: PreparedDataset) -> Any:
    field, needed = "autoencoder.path", " and ".join(FILES)
    folder = find_network_folder(str(config.path), field, FILES, needed)
    if missing := [name for name in FILES if not (folder / name).is_file()]:
        raise ConfigError(f"{field}: {config.path!r} lacks {' and '.join(missing)} (a diffusers folder)")
    model = load_model(folder)
    resource_usage.end_startup()
    check_size(dataset.shape, downsampling(model), f"the autoencoder {config.path}")
    if model.config.in_channels not in (3, dataset.shape[0]):
        raise ConfigError(
            f"{field}: {config.path!r} takes {model.config.in_channels} channels, the images have "
            f"{dataset.shape[0]}; set dataset.color"
        )
    unset = type(model).__name__ == "VQModel" and model.config.scaling_factor == _UNSET
    if config.scaling or unset:
        model.register_to_config(scaling_factor=config.scaling or 1.0)
    return model


def _saved(codec: AutoencoderCodec, dataset: PreparedDataset, out: Path, batch_size: int) -> dict[str, Any]:
    """Measure the autoencoder and save it; what the manifest says of that."""
    indices = (dataset.heldout if len(dataset.heldout) else dataset.train)[:_PSNR_IMAGES]
    batches = np.split(indices, range(batch_size, len(indices), batch_size))
    images, others = (
        dataset.images[indices],
        np.concatenate([codec.reconstructed(dataset.load_tensor(b)) for b in batches]),
    )
    mean, _ = codec.encode(dataset.load_tensor(indices[:1]))
    _write_picture(out / "reconstructions.png", images[:_PICTURED], others[:_PICTURED])
    # the folder that diffusers' `from_pretrained` reads; its own `save_pretrained` hides a full disk's error
    codec.model.register_to_config(_name_or_path="")  # where it came from is this machine's matter
    write_text(out / FILES[0], codec.model.to_json_string())
    write_weights(out / FILES[1], codec.model.state_dict())
    files = {name: sha256_file(out / name) for name in (*FILES, "reconstructions.png")}
    return {
        "latent_shape": list(mean.shape[1:]),
        "sha256": sha256_json({name: files[name] for name in FILES}),
        "psnr": round(psnr(images, others), 3),
        "psnr_of": "held-out images" if len(dataset.heldout) else "training images",
        "files": files,
    }


def psnr(images: np.ndarray, others: np.ndarray) -> float:
    """Peak signal-to-noise ratio in dB of uint8 images, from the mean squared error over all of them."""
    error = np.mean((images.astype(np.float64) - others.astype(np.float64)) ** 2)
    return 10 * math.log10(255**2 / max(float(error), 1e-12))


def _write_picture(path: Path, images: np.ndarray, others: np.ndarray) -> None:
    """Rows of originals, each above the row of their reconstructions, enlarged so that people can see them."""
    shape = images.shape[1:]
    columns = min(8, len(images))
    white = np.full((-len(images) % columns, *shape), 255, np.uint8)
    rows = [np.concatenate([part, white]).reshape(-1, columns, *shape) for part in (images, others)]
    write_image_grid(path, np.stack(rows, axis=1).reshape(-1, *shape), columns, _SIDE)
