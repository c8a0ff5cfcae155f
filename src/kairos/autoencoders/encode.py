"""Stage encode: the latent moments of all images, so that trainings never run the autoencoder.

Moments are kept, never one frozen sample. A killed encode goes on where it was, see `resumable_arrays`.
"""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kairos.autoencoders.codec import Codec
from kairos.data.arrays import ArrayFile, iterate_blocks
from kairos.data.captions import open_encoded_captions
from kairos.data.dataset import PreparedDataset, reduce_resolution
from kairos.data.resumable_arrays import fill_arrays, prepare_folder, publish_arrays
from kairos.files import check_files, open_record, sha256_json, sync_folder, write_json
from kairos.fingerprint import fingerprint
from kairos.shards import AGAIN, Shard, in_order
from kairos_timesteps.errors import ConfigError, KairosError

_ARRAYS = [f"{name}{suffix}.npy" for suffix in ("", "_flipped") for name in ("mean", "logvar", "low_mean")]


def encode(
    dataset: PreparedDataset,
    codec: Codec,
    out: Path,
    flips: bool,
    batch_size: int,
    shard: Shard | None = None,
    parts: Sequence[Path] = (),
    factor: int | None = None,
    text: Path | None = None,
) -> dict[str, Any]:
    """Encode a data set, write the folder and return its manifest.

    Args:
        flips: the horizontally flipped images too.
        shard: the part that is encoded; None: all images.
        parts: folders of all shards, which are joined; none: the images are encoded.
        factor: of the images of low resolution that are a condition; None: none are.
        text: folder of stage text, whose states a training reads beside the latents; None: there is none.

    Raises:
        ConfigError: the factor does not divide the images' sides.
        KairosError: the autoencoder is for images of another shape, or a part cannot be used; the message names it.
    """
    if list(dataset.shape) != codec.manifest["image_shape"]:
        raise KairosError(
            f"the autoencoder is for images of shape {codec.manifest['image_shape']} (channels, height, width), the "
            f"data set has {list(dataset.shape)}; make it again with: kairos autoencoder"
        )
    if any(side % (factor or 1) for side in dataset.shape[1:]):
        raise ConfigError(
            f"dataset.low_resolution: got {factor}, allowed: a divisor of both sides of the images, "
            f"{dataset.shape[1]}×{dataset.shape[2]}"
        )
    identity = {
        "autoencoder": codec.manifest["sha256"],
        "dataset": dataset.manifest["content_sha256"],
        "flips": flips,
        "batch_size": batch_size,
        "low_resolution": factor,
        "threads": torch.get_num_threads(),
        "device": codec.device.type,
        "torch": torch.__version__,
        "code": fingerprint([__name__]),
    }
    if shard is not None:
        return _encode_shard(dataset, codec, out, identity, shard)
    told = open_encoded_captions(text, dataset).manifest if text else {}
    partial = prepare_folder(out, _ARRAYS)
    files: dict[str, str] = {}
    if codec.manifest["kind"] != "none":
        rows = range(len(dataset.images))
        if parts:
            files = _joined(parts, identity, partial, rows)
        else:
            files = _encode_moments(dataset, codec, partial, identity, rows)
    conditions = dict(dataset.manifest["conditions"])
    if factor:
        shape = codec.manifest["latent_shape"]
        conditions["low_resolution"] = {"kind": "image", "shape": shape, "factor": factor}
    if text:
        conditions["text"] = told["condition"]
    manifest = {
        "kind": "moments" if files else "pixels",
        "shape": codec.manifest["latent_shape"],
        "count": len(dataset.images),
        **{name: codec.manifest[name] for name in ("scaling_factor", "shift_factor")},
        "flips": flips,
        "conditions": conditions,
        **({"text_sha256": told["content_sha256"]} if text else {}),
        "autoencoder_sha256": codec.manifest["sha256"],
        "dataset_sha256": dataset.manifest["content_sha256"],
        "files": files,
    }
    manifest["content_sha256"] = sha256_json(manifest)  # everything above decides what a training reads
    for name, folder in {"dataset": dataset.folder, **({"text": text} if text else {})}.items():
        manifest[name] = Path(os.path.relpath(folder.resolve(), out.resolve())).as_posix()
    publish_arrays(out, manifest)
    return manifest


def _encode_shard(
    dataset: PreparedDataset, codec: Codec, out: Path, identity: dict[str, Any], shard: Shard
) -> dict[str, Any]:
    """Write a part's folder, whole or not at all, and return what it says of itself."""
    if codec.manifest["kind"] == "none":
        raise ConfigError("--shard: got one with autoencoder.kind none, allowed: none, since pixels are not encoded")
    partial, how = out.with_name(f".{out.name}"), (len(dataset.images), identity["batch_size"])
    out.parent.mkdir(parents=True, exist_ok=True)
    files = _encode_moments(dataset, codec, partial, identity, shard.rows(*how))
    manifest = {**identity, "shard": shard.record(*how), "files": files}
    write_json(partial / "manifest.json", manifest)
    shutil.rmtree(out, ignore_errors=True)
    os.rename(partial, out)
    sync_folder(out.parent)
    return manifest


def _joined(parts: Sequence[Path], identity: dict[str, Any], partial: Path, rows: range) -> dict[str, str]:
    """Fill the arrays from those of all parts and return the hash of each."""
    records, size = [open_record(part, "encode --shard KofN") for part in parts], identity["batch_size"]
    # joining computes nothing: it may run elsewhere than the parts, which must agree with each other
    identity = identity | {name: records[0].get(name) for name in ("device", "torch")}
    order = in_order(list(zip(parts, records)), identity, len(rows), size)
    for part, record in zip(parts, records):
        check_files(part, record["files"], AGAIN)
    opened = {Path(name).stem: [ArrayFile(parts[place] / name) for place in order] for name in records[0]["files"]}
    arrays = {name: (rows_of[0].shape[1:], rows_of[0].dtype) for name, rows_of in opened.items()}
    batches = {name: iterate_blocks(rows_of, size) for name, rows_of in opened.items()}
    shutil.rmtree(partial, ignore_errors=True)  # parts are read from the first image on

    def read(numbers: np.ndarray) -> dict[str, np.ndarray]:
        return {name: next(batch) for name, batch in batches.items()}

    return fill_arrays(partial, identity, arrays, rows, size, read, "join", "image")


def _encode_moments(
    dataset: PreparedDataset, codec: Codec, partial: Path, identity: dict[str, Any], rows: range
) -> dict[str, str]:
    """Fill the arrays of the images `rows` in a private folder and return the hash of each."""
    factor, suffixes = identity["low_resolution"], ("", "_flipped")[: 1 + identity["flips"]]

    def compute(numbers: np.ndarray) -> dict[str, np.ndarray]:
        images = dataset.load_tensor(numbers)
        found: dict[str, np.ndarray] = {}
        for suffix in suffixes:
            moments = _moments(codec, images.flip(3) if suffix else images, factor)
            found |= {name + suffix: values.float().cpu().numpy() for name, values in moments.items()}
        return found

    arrays = dict.fromkeys(compute(np.arange(1)), (tuple(codec.manifest["latent_shape"]), np.float32))
    return fill_arrays(partial, identity, arrays, rows, identity["batch_size"], compute, "encode", "image")


def _moments(codec: Codec, images: torch.Tensor, factor: int | None) -> dict[str, torch.Tensor]:
    """Return the arrays to store for images (n, C, H, W) by name, each (n, c, h, w).

    ``mean``; ``logvar`` if the autoencoder is stochastic; ``low_mean``, the mean of the images in low resolution, if a
    factor is given.
    """
    mean, logvar = codec.encode(images)
    found = {"mean": mean} | ({} if logvar is None else {"logvar": logvar})
    return found | ({"low_mean": codec.encode(reduce_resolution(images, factor))[0]} if factor else {})
