"""Stage encode: the latent moments of all images, so that trainings never run the autoencoder.

Moments are kept, never one frozen sample. Arrays grow in a private folder; every few seconds a record says how far they
are whole, and a killed encode goes on there. Batches are cut at the same places, so the result has the same bits.
"""

import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kairos.autoencoders.codec import Codec
from kairos.data.arrays import Rows, create_array
from kairos.data.dataset import PreparedDataset
from kairos.errors import DamagedError, KairosError
from kairos.files import read_json, sha256_file, sha256_json, sync_folder, write_json
from kairos.fingerprint import fingerprint
from kairos.progress import Progress, say

_PARTIAL = ".partial"
_SAVE_SECONDS = 2.0
_ARRAYS = ("mean", "logvar", "mean_flipped", "logvar_flipped")


def encode(dataset: PreparedDataset, codec: Codec, out: Path, flips: bool, batch_size: int) -> dict[str, Any]:
    """Encode a data set, write the folder and return its manifest.

    Args:
        flips: the horizontally flipped images too.

    Raises:
        KairosError: the autoencoder is for images of another shape.
    """
    if list(dataset.shape) != codec.manifest["image_shape"]:
        raise KairosError(
            f"the autoencoder is for images of shape {codec.manifest['image_shape']} (channels, height, width), the "
            f"data set has {list(dataset.shape)}; make it again with: kairos autoencoder"
        )
    out.mkdir(parents=True, exist_ok=True)
    if (out / "manifest.json").exists():  # complete and asked for again: computed again
        shutil.rmtree(out / _PARTIAL, ignore_errors=True)
        (out / "manifest.json").unlink()
    for name in _ARRAYS:
        (out / f"{name}.npy").unlink(missing_ok=True)
    latent = codec.manifest["kind"] != "none"
    files = _encode_moments(dataset, codec, out, flips, batch_size) if latent else {}
    manifest = {
        "kind": "moments" if files else "pixels",
        "shape": codec.manifest["latent_shape"],
        "count": len(dataset.images),
        **{name: codec.manifest[name] for name in ("scaling_factor", "shift_factor")},
        "flips": flips,
        "conditions": dataset.manifest["conditions"],
        "autoencoder_sha256": codec.manifest["sha256"],
        "dataset_sha256": dataset.manifest["content_sha256"],
        "files": files,
    }
    manifest["content_sha256"] = sha256_json(manifest)  # everything above decides what a training reads
    manifest["dataset"] = Path(os.path.relpath(dataset.folder.resolve(), out.resolve())).as_posix()
    write_json(out / "manifest.json", manifest)
    shutil.rmtree(out / _PARTIAL, ignore_errors=True)
    return manifest


def _encode_moments(dataset: PreparedDataset, codec: Codec, out: Path, flips: bool, batch_size: int) -> dict[str, str]:
    """Fill the arrays, give them their names and return the hash of each."""
    partial = out / _PARTIAL
    key = sha256_json(
        {
            "autoencoder": codec.manifest["sha256"],
            "dataset": dataset.manifest["content_sha256"],
            "flips": flips,
            "batch_size": batch_size,
            "threads": torch.get_num_threads(),
            "code": fingerprint([__name__]),
        }
    )
    first = zip(("mean", "logvar"), codec.encode(dataset.tensor([0])))
    moments = [name for name, values in first if values is not None]
    names = [name + suffix for suffix in ("", "_flipped")[: 1 + flips] for name in moments]
    shape = (len(dataset.images), *codec.manifest["latent_shape"])
    done = _done(partial, key, names, shape)
    if done:
        say(f"encode: goes on after image {done}")
        arrays = {name: Rows(partial / f"{name}.npy", writable=True) for name in names}
    else:
        shutil.rmtree(partial, ignore_errors=True)  # with it the record, so that no other encode trusts our arrays
        partial.mkdir()
        arrays = {name: create_array(partial / f"{name}.npy", shape, np.float32) for name in names}

    progress = Progress(shape[0], "encode", "image", start=done)
    saved = time.monotonic()
    for start in range(done, shape[0], batch_size):
        indices = np.arange(start, min(start + batch_size, shape[0]))
        images = dataset.tensor(indices)
        for suffix, batch in (("", images), ("_flipped", images.flip(3)))[: 1 + flips]:
            for name, values in zip(("mean", "logvar"), codec.encode(batch)):
                if values is not None:
                    arrays[name + suffix].write(start, values.float().cpu().numpy())
        progress.advance(len(indices))
        if time.monotonic() - saved > _SAVE_SECONDS:
            _save(partial, arrays, {"key": key, "done": int(indices[-1]) + 1})
            saved = time.monotonic()
    _save(partial, arrays, {"key": key, "done": shape[0]})
    progress.close()

    files = {f"{name}.npy": sha256_file(partial / f"{name}.npy") for name in names}
    for name in files:
        os.replace(partial / name, out / name)
    sync_folder(out)
    return files


def _save(partial: Path, arrays: dict[str, Any], record: dict[str, Any]) -> None:
    """Make what is in the arrays durable, then say so."""
    for array in arrays.values():
        array.flush()
    write_json(partial / "progress.json", record)


def _done(partial: Path, key: str, names: list[str], shape: tuple[int, ...]) -> int:
    """How many images a killed encode of exactly this has left whole."""
    try:
        record = read_json(partial / "progress.json")
        shapes = {Rows(partial / f"{name}.npy").shape for name in names}
    except (OSError, ValueError, EOFError, DamagedError):
        return 0
    return record["done"] if record["key"] == key and shapes == {shape} else 0
