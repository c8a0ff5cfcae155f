"""Stage prepare: a data set becomes one uniform, memory-mappable folder with a manifest and a fixed split.

Images are written one by one into a memory-mapped file, so memory does not grow with the data set. Arrays get their
names when they are whole and the manifest comes last; a folder without a manifest is no data set.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np

from kairos.data.arrays import create_array
from kairos.data.decode import to_pixels
from kairos.data.settings import DatasetConfig
from kairos.data.sources import Source, open_source
from kairos.errors import ConfigError, KairosError
from kairos.files import sha256_file, sha256_json, sync_folder, write_json
from kairos.progress import Progress, say
from kairos.randomness import derived_seed

_CHUNK = 1024  # images per step of a pass over the whole array


def prepare(config: DatasetConfig, out: Path) -> dict[str, Any]:
    """Write the data set's folder and return its manifest.

    Raises:
        ConfigError: the source cannot be used as configured.
        KairosError: a broken image where those are refused, or images of different sizes without a resolution.
    """
    return write_dataset(config, open_source(config), out)


def write_dataset(config: DatasetConfig, source: Source, out: Path) -> dict[str, Any]:
    """Write the images of an opened source; see `prepare`."""
    (out / "conditions").mkdir(parents=True, exist_ok=True)
    (out / "manifest.json").unlink(missing_ok=True)
    for old in (*(out / f"{name}.npy" for name in ("images", "train", "heldout")), *out.glob("conditions/*.npy")):
        old.unlink(missing_ok=True)

    chosen = _lowest(range(source.count), config.limit or source.count, config.split_seed, "limit")
    kept, skipped, temporary = _write_images(config, source, chosen, out)
    if len(kept) < 2:
        raise KairosError(f"dataset: {len(kept)} usable image, allowed: at least 2 (one to train on, one held out)")
    heldout_count = min(max(round(config.heldout * len(kept)), 1), len(kept) - 1)
    heldout_numbers = set(_lowest(kept, heldout_count, config.split_seed, "heldout"))
    is_heldout = np.array([number in heldout_numbers for number in kept])
    split = {"train": np.flatnonzero(~is_heldout), "heldout": np.flatnonzero(is_heldout)}
    if config.train_images not in (None, len(split["train"])):
        raise ConfigError(f"dataset.train_images: got {config.train_images}, allowed: {len(split['train'])} (or null)")

    os.replace(temporary, out / "images.npy")
    for name, indices in split.items():
        np.save(out / f"{name}.npy", indices.astype(np.int64))
    conditions: dict[str, dict[str, Any]] = {}
    for name, (description, values) in source.conditions.items():
        conditions[name] = {**description, "file": f"conditions/{name}.npy"}
        np.save(out / conditions[name]["file"], values[kept])
    names = ["images.npy", "train.npy", "heldout.npy", *(item["file"] for item in conditions.values())]
    for name in (*names, "."):
        sync_folder(out / name)

    images = np.load(out / "images.npy", mmap_mode="r")
    mean, std = channel_statistics(images, split["train"])
    files = {name: sha256_file(out / name) for name in names}
    manifest = {
        "source": config.source,
        "count": len(kept),
        **dict(zip(("height", "width", "channels"), images.shape[1:])),
        "classes": source.classes,
        "train_count": len(split["train"]),
        "heldout_count": len(split["heldout"]),
        "channel_mean": mean,
        "channel_std": std,
        "conditions": conditions,
        "skipped": skipped,
        "content_sha256": sha256_json({"files": files, "conditions": conditions}),
        "files": files,
    }
    write_json(out / "manifest.json", manifest)
    return manifest


def _lowest(numbers: Any, count: int, seed: int, stream: str) -> list[int]:
    """`count` of `numbers` in their order, chosen by a hash of each: more images change few choices."""
    if count >= len(numbers):
        return list(numbers)
    return sorted(sorted(numbers, key=lambda number: derived_seed(seed, stream, number))[:count])


def _write_images(
    config: DatasetConfig, source: Source, chosen: list[int], out: Path
) -> tuple[list[int], list[str], Path]:
    """Write the usable images among `chosen`; gives their numbers, the names of those skipped and the file."""
    kept: list[int] = []
    skipped: list[str] = []
    temporary = out / ".tmp-images.npy"
    images: Any = None
    progress = Progress(len(chosen), f"prepare {config.source}", "image")
    for number in chosen:
        name = source.name(number)
        try:
            image = source.read(number)
        except ValueError as error:
            if config.broken == "refuse":
                raise KairosError(
                    f"dataset: {name} is broken ({error}); repair or remove it, or set dataset.broken: skip"
                ) from None
            skipped.append(name)
            say(f"prepare: skipped {name} ({error})")
            progress.advance()
            continue
        pixels = to_pixels(image, config.color, config.crop, config.resolution, name)
        if images is None:
            images = create_array(temporary, (len(chosen), *pixels.shape), np.uint8)
        elif pixels.shape != images.shape[1:]:
            raise ConfigError(
                f"dataset.resolution: got null, but {name} has {pixels.shape[1]}×{pixels.shape[0]} pixels and those "
                f"before it {images.shape[2]}×{images.shape[1]}; allowed: a resolution for all"
            )
        images[len(kept)] = pixels
        kept.append(number)
        progress.advance()
    progress.close()
    if images is None:
        raise KairosError(f"dataset: none of the {len(chosen)} images is usable; the first is {skipped[0]}")
    images.flush()
    if skipped:
        shorter = create_array(out / ".tmp-shorter.npy", (len(kept), *images.shape[1:]), np.uint8)
        shorter[:] = images[: len(kept)]
        shorter.flush()
        os.replace(out / ".tmp-shorter.npy", temporary)
    return kept, skipped, temporary


def channel_statistics(images: np.ndarray, indices: np.ndarray) -> tuple[list[float], list[float]]:
    """Mean and standard deviation per channel of the images at `indices`, pixels as 0..1; sums are exact integers."""
    total, squares = np.zeros((2, images.shape[3]), np.int64)
    for start in range(0, len(indices), _CHUNK):
        pixels = images[indices[start : start + _CHUNK]].astype(np.int64)
        total += pixels.sum(axis=(0, 1, 2))
        squares += (pixels**2).sum(axis=(0, 1, 2))
    count = len(indices) * images.shape[1] * images.shape[2]
    mean = total / count
    std = np.sqrt(np.maximum(squares / count - mean**2, 0.0))
    return (mean / 255).tolist(), (std / 255).tolist()
