"""Stage encode: the latent moments of all images, so that trainings never run the autoencoder.

Moments are kept, never one frozen sample. Arrays grow in a private folder; every few seconds a record says how far they
are whole, and a killed encode goes on there. Batches are cut at the same places, so the result has the same bits.
"""

import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kairos.autoencoders.codec import Codec
from kairos.data.arrays import Rows, blocks, create_array
from kairos.data.dataset import PreparedDataset, low_resolution
from kairos.errors import ConfigError, DamagedError, KairosError
from kairos.files import check_files, open_record, read_json, sha256_file, sha256_json, sync_folder, write_json
from kairos.fingerprint import fingerprint
from kairos.progress import Progress, say
from kairos.shards import AGAIN, Shard, in_order

_PARTIAL = ".partial"
_SAVE_SECONDS = 2.0
_ARRAYS = [name + suffix for suffix in ("", "_flipped") for name in ("mean", "logvar", "low_mean")]


def encode(
    dataset: PreparedDataset,
    codec: Codec,
    out: Path,
    flips: bool,
    batch_size: int,
    shard: Shard | None = None,
    parts: Sequence[Path] = (),
    factor: int | None = None,
) -> dict[str, Any]:
    """Encode a data set, write the folder and return its manifest.

    Args:
        flips: the horizontally flipped images too.
        shard: the part that is encoded; None: all images.
        parts: folders of all shards, which are joined; none: the images are encoded.
        factor: of the images of low resolution that are a condition; None: none are.

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
        "code": fingerprint([__name__]),
    }
    if shard is not None:
        return _encode_shard(dataset, codec, out, identity, shard)
    out.mkdir(parents=True, exist_ok=True)
    if (out / "manifest.json").exists():  # complete and asked for again: computed again
        shutil.rmtree(out / _PARTIAL, ignore_errors=True)
        (out / "manifest.json").unlink()
    for name in _ARRAYS:
        (out / f"{name}.npy").unlink(missing_ok=True)
    files: dict[str, str] = {}
    if codec.manifest["kind"] != "none":
        rows, partial = range(len(dataset.images)), out / _PARTIAL
        if parts:
            files = _joined(parts, identity, partial, rows)
        else:
            files = _encode_moments(dataset, codec, partial, identity, rows)
        for name in files:
            os.replace(partial / name, out / name)
        sync_folder(out)
    conditions = dict(dataset.manifest["conditions"])
    if factor:
        shape = codec.manifest["latent_shape"]
        conditions["low_resolution"] = {"kind": "image", "shape": shape, "factor": factor}
    manifest = {
        "kind": "moments" if files else "pixels",
        "shape": codec.manifest["latent_shape"],
        "count": len(dataset.images),
        **{name: codec.manifest[name] for name in ("scaling_factor", "shift_factor")},
        "flips": flips,
        "conditions": conditions,
        "autoencoder_sha256": codec.manifest["sha256"],
        "dataset_sha256": dataset.manifest["content_sha256"],
        "files": files,
    }
    manifest["content_sha256"] = sha256_json(manifest)  # everything above decides what a training reads
    manifest["dataset"] = Path(os.path.relpath(dataset.folder.resolve(), out.resolve())).as_posix()
    write_json(out / "manifest.json", manifest)
    shutil.rmtree(out / _PARTIAL, ignore_errors=True)
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
    order = in_order(list(zip(parts, records)), identity, len(rows), size)
    for part, record in zip(parts, records):
        check_files(part, record["files"], AGAIN)
    partial.mkdir(exist_ok=True)
    for name in records[0]["files"]:
        read = [Rows(parts[place] / name) for place in order]
        whole, first = create_array(partial / name, (len(rows), *read[0].shape[1:]), read[0].dtype), 0
        for block in blocks(read, size):
            whole.write(first, block)
            first += len(block)
        whole.flush()
    return {name: sha256_file(partial / name) for name in records[0]["files"]}


def _encode_moments(
    dataset: PreparedDataset, codec: Codec, partial: Path, identity: dict[str, Any], rows: range
) -> dict[str, str]:
    """Fill the arrays of the images `rows` in a private folder and return the hash of each."""
    key = sha256_json({**identity, "rows": [rows.start, rows.stop]})
    flips, batch_size, factor = identity["flips"], identity["batch_size"], identity["low_resolution"]
    moments = list(_moments(codec, dataset.tensor([0]), factor))
    names = [name + suffix for suffix in ("", "_flipped")[: 1 + flips] for name in moments]
    shape = (len(rows), *codec.manifest["latent_shape"])
    done = _done(partial, key, names, shape)
    if done:
        say(f"encode: goes on after image {rows.start + done}")
        arrays = {name: Rows(partial / f"{name}.npy", writable=True) for name in names}
    else:
        shutil.rmtree(partial, ignore_errors=True)  # with it the record, so that no other encode trusts our arrays
        partial.mkdir()
        arrays = {name: create_array(partial / f"{name}.npy", shape, np.float32) for name in names}

    progress = Progress(shape[0], "encode", "image", start=done)
    saved = time.monotonic()
    for start in range(done, shape[0], batch_size):
        places = np.arange(start, min(start + batch_size, shape[0]))
        images = dataset.tensor(rows.start + places)
        for suffix, batch in (("", images), ("_flipped", images.flip(3)))[: 1 + flips]:
            for name, values in _moments(codec, batch, factor).items():
                arrays[name + suffix].write(start, values.float().cpu().numpy())
        progress.advance(len(places))
        whole = int(places[-1]) + 1
        if time.monotonic() - saved > _SAVE_SECONDS or whole == shape[0]:
            for array in arrays.values():
                array.flush()  # durable before it is said
            write_json(partial / "progress.json", {"key": key, "done": whole})
            saved = time.monotonic()
    progress.close()
    return {f"{name}.npy": sha256_file(partial / f"{name}.npy") for name in names}


def _moments(codec: Codec, images: torch.Tensor, factor: int | None) -> dict[str, torch.Tensor]:
    """What is kept of images (n, C, H, W), each (n, c, h, w), by the names of the arrays."""
    mean, logvar = codec.encode(images)
    found = {"mean": mean} | ({} if logvar is None else {"logvar": logvar})
    return found | ({"low_mean": codec.encode(low_resolution(images, factor))[0]} if factor else {})


def _done(partial: Path, key: str, names: list[str], shape: tuple[int, ...]) -> int:
    """How many images a killed encode of exactly this has left whole."""
    try:
        record = read_json(partial / "progress.json")
        shapes = {Rows(partial / f"{name}.npy").shape for name in names}
    except (OSError, ValueError, EOFError, DamagedError):
        return 0
    return record["done"] if record["key"] == key and shapes == {shape} else 0
