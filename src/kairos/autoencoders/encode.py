"""Stage encode: compute the latent moments of all images, so that training runs never run the autoencoder.

Moments are stored, not one sample per image. An interrupted job resumes, see `resumable_arrays`.
"""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kairos.array_shapes import IntegerArray, RowArray
from kairos.autoencoders.codec import Codec
from kairos.data.arrays import ArrayFile, iterate_blocks
from kairos.data.captions import open_encoded_captions
from kairos.data.dataset import PreparedDataset
from kairos.data.pixels import reduce_resolution
from kairos.data.resumable_arrays import fill_arrays, prepare_folder, publish_arrays
from kairos.files import check_files, lock_folder, open_record, sha256_json, sync_to_disk, write_record
from kairos.shapes import EncodedImages, Images
from kairos.shards import AGAIN, Shard, order_shards
from kairos.stage_keys import hash_modules
from kairos_timesteps.errors import ConfigError, KairosError

# files of arrays that the stage may write: moments of the images and of the flipped images
_ARRAYS = [f"{name}{suffix}.npy" for suffix in ("", "_flipped") for name in ("mean", "logvar", "low_mean")]


def encode(
    dataset: PreparedDataset,
    codec: Codec,
    out: Path,
    flips: bool,
    batch_size: int,
    shard: Shard | None = None,
    shard_folders: Sequence[Path] = (),
    factor: int | None = None,
    text: Path | None = None,
    dtype: str = "float32",
) -> dict[str, Any]:
    """Encode the images of a data set as latent moments, write the folder and return its record.

    With `shard`, only a slice of the images is encoded, and a later call with `shard_folders` merges the shards.
    Without an autoencoder no array is written, since training reads the pixels of the data set. An earlier result in
    `out` is deleted first; an earlier shard is replaced at the end. An interrupted call resumes, except that merging
    starts over.

    Args:
        dataset: the prepared data set.
        codec: the autoencoder.
        out: the folder to write.
        flips: encode horizontally flipped images too.
        batch_size: images per encoding step; with `shard_folders`, the number that the shards were encoded with.
        shard: the shard of the images to encode, without captions; None: all images.
        shard_folders: folders of all shards, which are merged instead of encoding images; empty: encode. Ignored with
            `shard`, and without an autoencoder.
        factor: downsampling factor of condition ``low_resolution``; None: no such condition.
        text: folder of stage text, whose states are a condition of the training runs; None: no captions. Ignored with
            a shard.
        dtype: data type of the latents on disk, ``float32`` or ``float16``.

    Raises:
        ConfigError: the factor does not divide the sides of the images, or a shard is requested without an autoencoder.
        KairosError: the autoencoder is for images of another shape, or the folder of a shard or of stage text cannot be
            used. Also if a latent is too large for `dtype`, or another process is writing the folder.
    """
    _check_shapes(dataset, codec, factor)
    identity = {
        "autoencoder": codec.record["sha256"],
        "dataset": dataset.record["content_sha256"],
        "flips": flips,
        "batch_size": batch_size,
        "low_resolution": factor,
        "threads": torch.get_num_threads(),
        "device": codec.device.type,
        "torch": torch.__version__,
        "code": hash_modules([__name__]),
        "dtype": dtype,
    }
    if shard is not None:
        return _encode_shard(dataset, codec, out, identity, shard)

    # arrays, in the private folder; the captions are opened first, because `prepare_folder` deletes the old result
    text_record = open_encoded_captions(text, dataset).record if text else None
    with lock_folder(out):
        partial = prepare_folder(out, _ARRAYS)
        all_rows = range(len(dataset.images))
        if codec.record["kind"] == "none":
            files: dict[str, str] = {}  # training reads the pixels of the data set
        elif shard_folders:
            files = _merge_shards(shard_folders, identity, partial, all_rows)
        else:
            files = _encode_moments(dataset, codec, partial, identity, all_rows)

        # record
        record = _describe_content(dataset, codec, files, flips, factor, text_record, dtype)
        record["dataset"] = _relative_path(dataset.folder, out)
        if text:
            record["text"] = _relative_path(text, out)
        publish_arrays(out, record)
    return record


def _describe_content(
    dataset: PreparedDataset,
    codec: Codec,
    files: dict[str, str],
    flips: bool,
    factor: int | None,
    text_record: dict[str, Any] | None,
    dtype: str,
) -> dict[str, Any]:
    """Return the fields of the record that determine the training data, and their hash ``content_sha256``.

    `encode` adds the paths of the data set and of stage text later, so that the hash does not depend on them.

    Args:
        dataset: the prepared data set, whose conditions are included.
        codec: the autoencoder.
        files: hash of each array file by name; empty for pixels.
        flips: flipped images were encoded too.
        factor: downsampling factor of condition ``low_resolution``; None: no such condition.
        text_record: record of stage text, for condition ``text``; None: no captions.
        dtype: data type of the latents on disk.
    """
    record: dict[str, Any] = {
        "kind": "moments" if files else "pixels",
        "shape": codec.record["latent_shape"],
        "count": len(dataset.images),
        "scaling_factor": codec.record["scaling_factor"],
        "shift_factor": codec.record["shift_factor"],
        "flips": flips,
        "autoencoder_sha256": codec.record["sha256"],
        "dataset_sha256": dataset.record["content_sha256"],
        "files": files,
        "dtype": dtype,
    }
    conditions = dict(dataset.record["conditions"])
    if factor:
        shape = codec.record["latent_shape"]
        conditions["low_resolution"] = {"kind": "image", "shape": shape, "factor": factor}
    if text_record is not None:
        conditions["text"] = text_record["condition"]
        record["text_sha256"] = text_record["content_sha256"]
    record["conditions"] = conditions
    return {**record, "content_sha256": sha256_json(record)}


def _relative_path(folder: Path, start: Path) -> str:
    """Return the path of a folder relative to the folder `start`, with slashes, after resolving symbolic links."""
    return Path(os.path.relpath(folder.resolve(), start.resolve())).as_posix()


def _check_shapes(dataset: PreparedDataset, codec: Codec, factor: int | None) -> None:
    """Check that the autoencoder accepts the images, and that `factor`, if it is not None, divides their sides.

    Raises:
        ConfigError: the factor does not divide the height or the width of the images.
        KairosError: the autoencoder is for images of another shape.
    """
    if list(dataset.shape) != codec.record["image_shape"]:
        raise KairosError(
            f"the autoencoder is for images of shape {codec.record['image_shape']} (channels, height, width), the "
            f"data set has {list(dataset.shape)}; make it again with: kairos autoencoder"
        )
    _, height, width = dataset.shape
    if factor and (height % factor or width % factor):
        raise ConfigError(
            f"dataset.low_resolution: got {factor}, allowed: a divisor of both sides of the images, {height}×{width}"
        )


def _encode_shard(
    dataset: PreparedDataset, codec: Codec, out: Path, identity: dict[str, Any], shard: Shard
) -> dict[str, Any]:
    """Encode one shard of the images, write its folder, and return its record.

    The record contains `identity`, `Shard.record` under ``shard``, and ``files``. The arrays are computed in the
    hidden folder ``.<name of out>`` next to `out`, from which an interrupted job resumes. It replaces `out` at the end:
    a killed job leaves there the old folder, nothing or the complete new folder.

    Raises:
        ConfigError: there is no autoencoder, so nothing is encoded.
        KairosError: a latent is too large for the data type on disk, or another process is writing the folder.
    """
    if codec.record["kind"] == "none":
        raise ConfigError("--shard: got one with autoencoder.kind none, allowed: none, since pixels are not encoded")
    count = len(dataset.images)
    batch_size = identity["batch_size"]
    partial = out.with_name(f".{out.name}")
    out.parent.mkdir(parents=True, exist_ok=True)
    with lock_folder(out, path=out.with_name(f".tmp-{out.name}.lock")):  # `out` itself is replaced
        files = _encode_moments(dataset, codec, partial, identity, shard.rows(count, batch_size))
        record = {**identity, "shard": shard.record(count, batch_size), "files": files}
        write_record(partial / "record.json", record)
        shutil.rmtree(out, ignore_errors=True)
        os.rename(partial, out)
        sync_to_disk(out.parent)
    return record


def _merge_shards(folders: Sequence[Path], identity: dict[str, Any], partial: Path, rows: range) -> dict[str, str]:
    """Concatenate the arrays of all shards into a private folder, and return the hash of each file by name.

    The files of the shards are first compared with their hashes.

    Args:
        folders: folders of the shards, at least one, in any order.
        identity: settings that the shards must have been encoded with. Device and version of torch may differ from
            these, but must be equal for all shards.
        partial: the private folder; it is deleted first.
        rows: indices of all images.

    Raises:
        KairosError: a shard is missing, or belongs to another job.
        DamagedError: a file of a shard is missing or has changed.
    """
    records = [open_record(folder, "encode --shard KofN") for folder in folders]
    batch_size = identity["batch_size"]

    # Check the shards. Merging computes nothing, so this process may have another device or version of torch than they:
    # the expected values are those of the first shard.
    shard_identity = identity | {name: records[0].get(name) for name in ("device", "torch")}
    shard_identity["dtype"] = identity["dtype"]
    ordered_positions = order_shards(list(zip(folders, records)), shard_identity, len(rows), batch_size)
    for folder, record in zip(folders, records):
        check_files(folder, record["files"], AGAIN)

    # open the arrays of the shards, in the order of their images
    arrays = {}  # shape of a row, and data type, by name
    batches = {}  # iterator over the rows of all shards by name
    for file in records[0]["files"]:
        shard_arrays = [ArrayFile(folders[position] / file) for position in ordered_positions]
        name = Path(file).stem
        row_shape = shard_arrays[0].shape[1:]
        arrays[name] = (row_shape, shard_arrays[0].dtype)
        batches[name] = iterate_blocks(shard_arrays, batch_size)
    shutil.rmtree(partial, ignore_errors=True)  # merging cannot resume: `batches` start at the first image

    # `fill_arrays` requests the batches in order, and each shard except the last ends at the end of a batch. The next
    # blocks of the iterators are therefore the rows `indices`.
    def read_batch(indices: IntegerArray) -> dict[str, RowArray]:
        return {name: next(blocks) for name, blocks in batches.items()}

    return fill_arrays(
        partial, shard_identity, arrays, rows, batch_size, compute=read_batch, label="merge", unit="image"
    )


def _encode_moments(
    dataset: PreparedDataset, codec: Codec, partial: Path, identity: dict[str, Any], rows: range
) -> dict[str, str]:
    """Encode the images with indices `rows` into arrays in a private folder, and return the hash of each file by name.

    The files are ``mean.npy`` and the other arrays of `_moments`. With flips there are also arrays of flipped images,
    such as ``mean_flipped.npy``. An interrupted computation resumes. ``dtype`` is missing in `identity` for float32.

    Raises:
        KairosError: a latent is not finite, or too large for the data type on disk.
    """
    factor = identity["low_resolution"]
    dtype = np.dtype(identity["dtype"])
    suffixes = ("", "_flipped") if identity["flips"] else ("",)

    def compute(indices: IntegerArray) -> dict[str, RowArray]:
        images = dataset.load_tensor(indices)
        arrays: dict[str, RowArray] = {}
        for suffix in suffixes:
            oriented_images = images.flip(3) if suffix == "_flipped" else images  # dimension 3 is the width
            for name, values in _moments(codec, oriented_images, factor).items():
                arrays[name + suffix] = _convert(values.float().cpu().numpy(), dtype)
        return arrays

    names = list(compute(np.arange(1)))  # the first image shows which arrays the autoencoder has
    arrays = dict.fromkeys(names, (tuple(codec.record["latent_shape"]), dtype))
    batch_size = identity["batch_size"]
    return fill_arrays(partial, identity, arrays, rows, batch_size, compute=compute, label="encode", unit="image")


def _convert(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return latents with the data type on disk; the array itself if it has this type already.

    The codec has checked that the values are finite.

    Raises:
        KairosError: a value is too large for the data type.
    """
    largest = np.finfo(dtype).max
    if (np.abs(values) > largest).any():
        raise KairosError(
            f"autoencoder.dtype: {dtype} holds values up to {largest:g}, and the latents have larger ones; set float32"
        )
    return values.astype(dtype, copy=False)


def _moments(codec: Codec, images: Images, factor: int | None) -> dict[str, EncodedImages]:
    """Return the arrays to store for images (n, C, H, W) by name, each (n, c, h, w), on the codec's device.

    They are ``mean``, and ``logvar`` if the autoencoder is stochastic. With a downsampling factor, ``low_mean`` is the
    mean of the images in low resolution.
    """
    mean, logvar = codec.encode(images)
    moments = {"mean": mean}
    if logvar is not None:
        moments["logvar"] = logvar
    if factor:
        moments["low_mean"], _ = codec.encode(reduce_resolution(images, factor))
    return moments
