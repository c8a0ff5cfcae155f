"""Stage autoencoder: train an autoencoder or load a pretrained one, and write it into the folder of the stage.

`codec.load_codec` reads the folder.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kairos import resource_usage
from kairos.array_shapes import ImageArray
from kairos.autoencoders.codec import FILES, AutoencoderCodec, downsampling, load_model, make_codec
from kairos.autoencoders.settings import AutoencoderConfig, check_image_size
from kairos.data.dataset import PreparedDataset
from kairos.data.image_grid import write_image_grid
from kairos.files import sha256_file, sha256_json, write_record, write_text, write_weights
from kairos.pretrained import find_network_folder
from kairos_timesteps.errors import ConfigError

_PSNR_IMAGES = 512  # most images to measure: held-out images, or training images if none are held out
_DEFAULT_SCALING = 0.18215  # default of diffusers' VQModel: the scaling factor of Stable Diffusion, wrong for VQModels
_PICTURE_IMAGES = 16  # most images in the picture of reconstructions
_PICTURE_COLUMNS = 8
_PICTURE_SIDE = 64  # least side in pixels of an image in the picture
_STATE = ".state.pt"  # checkpoint of an interrupted training run


def make_autoencoder(
    config: AutoencoderConfig, dataset: PreparedDataset, out: Path, device: torch.device, flips: bool = False
) -> dict[str, Any]:
    """Train or load the autoencoder, write its folder and return its record.

    The folder contains configuration, weights, a picture of reconstructions and the record; with kind ``none`` only
    the record, where ``psnr`` is None and ``psnr_of`` is missing. Shapes in the record are channels, height and
    width. A shift factor that is missing in the autoencoder's configuration is 0.

    An existing record is deleted first, so that it exists only in a complete folder. The checkpoint of the training
    run is deleted at the end. The end of start-up is marked, see `resource_usage.end_startup`.

    Args:
        config: section `autoencoder`.
        dataset: the prepared data set.
        out: folder to write.
        device: device of the computation.
        flips: train on horizontally flipped images too; other kinds than ``train`` ignore it.

    Raises:
        ConfigError: the autoencoder does not fit the images, or its path cannot be used.
        KairosError: a pretrained autoencoder cannot be downloaded or loaded.
        NotFiniteError: weights, latents or decoded pixels of the autoencoder are not finite, or its training diverges.
    """
    out.mkdir(parents=True, exist_ok=True)
    (out / "record.json").unlink(missing_ok=True)
    record: dict[str, Any] = {
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
    else:  # `_train` and `_load_pretrained` call end_startup after their imports
        if config.kind == "train":
            model = _train(config, dataset, out, device, flips)
        else:
            model = _load_pretrained(config, dataset)
        record["class"] = type(model).__name__
        record["scaling_factor"] = float(model.config.scaling_factor)
        record["shift_factor"] = float(model.config.get("shift_factor") or 0.0)
        _check_factors(record, config)
        codec = make_codec(model, record, device, source=config.path or str(out))
        record |= _measure_and_save(codec, dataset, out, config.encode_batch_size)
    write_record(out / "record.json", record)
    (out / _STATE).unlink(missing_ok=True)
    return record


def _train(config: AutoencoderConfig, dataset: PreparedDataset, out: Path, device: torch.device, flips: bool) -> Any:
    """Train an autoencoder on the data set, and return it with shift and scaling factor in its configuration.

    With these, x0 = (z - shift) · scale has mean 0 and standard deviation 1 over the training images. An interrupted
    training run resumes from its checkpoint in `out`. The end of start-up is marked after the imports.
    """
    from kairos.autoencoders.train import latent_statistics, train

    resource_usage.end_startup()
    model = train(config, dataset, out / _STATE, device, flips)
    shift, std = latent_statistics(model, dataset, config.encode_batch_size, device)
    model.register_to_config(scaling_factor=1 / std, shift_factor=shift)
    return model


def _load_pretrained(config: AutoencoderConfig, dataset: PreparedDataset) -> Any:
    """Load a pretrained autoencoder from a folder or the hub, with the configured scaling factor in its configuration.

    Without a configured factor, a VQModel that has diffusers' default gets factor 1, and others keep theirs. An
    autoencoder of three channels also accepts images with one. The end of start-up is marked after loading.

    Raises:
        ConfigError: the path is neither a folder nor a hub id, files are missing, or the folder contains another kind
            of network. Or the autoencoder does not accept the size or the channels of the images.
        KairosError: the autoencoder cannot be downloaded or loaded.
    """
    field = "autoencoder.path"
    path = str(config.path)  # never None: a pretrained autoencoder has a path
    folder = find_network_folder(path, field, FILES, needed=" and ".join(FILES))
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise ConfigError(f"{field}: {config.path!r} lacks {' and '.join(missing)} (a diffusers folder)")
    model = load_model(folder)
    resource_usage.end_startup()
    check_image_size(dataset.shape, downsampling(model), f"the autoencoder {config.path}")
    if model.config.in_channels not in (3, dataset.shape[0]):  # images have 1 or 3 channels, and 1 is repeated to 3
        raise ConfigError(
            f"{field}: {config.path!r} takes {model.config.in_channels} channels, the images have "
            f"{dataset.shape[0]}; set dataset.color"
        )
    has_wrong_default = type(model).__name__ == "VQModel" and model.config.scaling_factor == _DEFAULT_SCALING
    if config.scaling is not None:
        model.register_to_config(scaling_factor=config.scaling)
    elif has_wrong_default:
        model.register_to_config(scaling_factor=1.0)
    return model


def _check_factors(record: dict[str, Any], config: AutoencoderConfig) -> None:
    """Check that scaling and shift factor in a record can convert latents to x0 and back.

    Raises:
        ConfigError: a factor is not finite, or the scaling factor is 0.
    """
    scaling, shift = record["scaling_factor"], record["shift_factor"]
    if not (math.isfinite(scaling) and scaling != 0 and math.isfinite(shift)):
        raise ConfigError(
            f"autoencoder.path: config.json of {config.path!r} has scaling_factor {scaling} and shift_factor {shift}, "
            "allowed: finite numbers, and a scaling other than 0; set autoencoder.scaling, or correct the file"
        )


def _measure_and_save(codec: AutoencoderCodec, dataset: PreparedDataset, out: Path, batch_size: int) -> dict[str, Any]:
    """Measure the reconstruction error, save the autoencoder and a picture, and return their fields of the record.

    At most 512 held-out images are measured, or training images if none are held out; the picture shows the first 16.
    The fields are ``latent_shape``, ``psnr`` (dB), ``psnr_of`` (which images), ``files`` (hash of each file) and
    ``sha256`` (hash of configuration and weights). The path in the configuration of `codec` is emptied.
    """
    # reconstructions, and the shape of the latents of one image
    if len(dataset.heldout):
        measured_kind, indices = "held-out images", dataset.heldout[:_PSNR_IMAGES]
    else:
        measured_kind, indices = "training images", dataset.train[:_PSNR_IMAGES]
    images = dataset.images[indices]
    later_batch_starts = range(batch_size, len(indices), batch_size)  # of all batches but the first, where `split` cuts
    index_batches = np.split(indices, later_batch_starts)
    reconstructions = np.concatenate([codec.reconstruct(dataset.load_tensor(batch)) for batch in index_batches])
    mean, _ = codec.encode(dataset.load_tensor(indices[:1]))

    # files
    _write_picture(out / "reconstructions.png", images[:_PICTURE_IMAGES], reconstructions[:_PICTURE_IMAGES])
    # `save_pretrained` of diffusers writes this format too, but would hide the error of a full disk
    codec.model.register_to_config(_name_or_path="")  # the path differs between machines and must not change the hash
    write_text(out / FILES[0], codec.model.to_json_string())
    write_weights(out / FILES[1], codec.model.state_dict())
    files = {name: sha256_file(out / name) for name in (*FILES, "reconstructions.png")}
    return {
        "latent_shape": list(mean.shape[1:]),
        "sha256": sha256_json({name: files[name] for name in FILES}),
        "psnr": round(psnr(images, reconstructions), 3),
        "psnr_of": measured_kind,
        "files": files,
    }


def psnr(images: ImageArray, reconstructions: ImageArray) -> float:
    """Return the peak signal-to-noise ratio of uint8 images in dB, from the mean squared error over all images.

    An error below 1e-12 is treated as 1e-12, so that exact reconstructions have 168 dB.
    """
    mean_squared_error = np.mean((images.astype(np.float64) - reconstructions.astype(np.float64)) ** 2)
    return 10 * math.log10(255**2 / max(float(mean_squared_error), 1e-12))


def _write_picture(path: Path, images: ImageArray, reconstructions: ImageArray) -> None:
    """Write a PNG picture of uint8 images (n, h, w, channels), with each row of originals above its reconstructions.

    A row has 8 images, or all if there are fewer, and white images fill the last row. The caller ensures that there is
    at least one image.
    """
    shape = images.shape[1:]
    columns = min(_PICTURE_COLUMNS, len(images))
    rows = math.ceil(len(images) / columns)
    missing_in_last_row = rows * columns - len(images)
    white = np.full((missing_in_last_row, *shape), 255, np.uint8)
    original_rows = np.concatenate([images, white]).reshape(-1, columns, *shape)
    reconstruction_rows = np.concatenate([reconstructions, white]).reshape(-1, columns, *shape)
    alternating_rows = np.stack([original_rows, reconstruction_rows], axis=1)  # (rows, 2, columns, *shape)
    write_image_grid(path, alternating_rows.reshape(-1, *shape), columns, _PICTURE_SIDE)
