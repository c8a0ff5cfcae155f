"""Stage prepare: a data set becomes one uniform folder with a manifest and a fixed split.

Images are decoded one by one and written into a file, or only looked at where they stay where they are (`linked_images`), so
memory does not grow with the data set. Arrays get their names when they are whole and the manifest comes last; a folder
without a manifest is no data set.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np

from kairos.data import captions as captioning
from kairos.data.arrays import create_array, truncate_array
from kairos.data.decode import to_pixels
from kairos.data.linked_images import checksum
from kairos.data.settings import DatasetConfig
from kairos.data.sources import Source, open_source
from kairos.files import sha256_file, sha256_json, sync_folder, write_json
from kairos.progress import Progress, say
from kairos_timesteps.errors import ConfigError, KairosError
from kairos_timesteps.randomness import derived_seed

_ARRAYS = ("images", "train", "heldout", "numbers", "checksums", "names", *captioning.ARRAYS)
_TEMPORARY = ".tmp-images.npy"


def prepare(config: DatasetConfig, out: Path) -> dict[str, Any]:
    """Write the data set's folder and return its manifest.

    Raises:
        ConfigError: the source cannot be used as configured.
        KairosError: a broken image where those are refused, or images of different sizes without a resolution.
    """
    return write_dataset(config, open_source(config), out)


def write_dataset(config: DatasetConfig, source: Source, out: Path) -> dict[str, Any]:
    """Write the images of an opened source, or what refers to them; see `prepare`."""
    (out / "conditions").mkdir(parents=True, exist_ok=True)
    (out / "manifest.json").unlink(missing_ok=True)
    for old in (*(out / f"{name}.npy" for name in _ARRAYS), *out.glob("conditions/*.npy")):
        old.unlink(missing_ok=True)

    first_heldout = source.count - source.heldout
    usable, unmatched = captioning.select_captioned(source, config)
    ours, theirs = ([n for n in usable if n < first_heldout], [n for n in usable if n >= first_heldout])
    if source.heldout and not theirs:
        named = config.heldout_captions or config.captions
        raise KairosError(f"dataset.heldout_captions: {named!r} has none of the {source.heldout} held-out images")
    chosen = [*_lowest(ours, config.limit or first_heldout, config.split_seed, "limit"), *theirs]
    kept, skipped, checksums, sums, shape = _look_at(config, source, chosen, out)
    is_heldout = kept >= first_heldout
    if not source.heldout:
        is_heldout = np.isin(
            kept, _lowest(kept.tolist(), config.heldout_count(len(kept)), config.split_seed, "heldout")
        )
    train, heldout = np.flatnonzero(~is_heldout), np.flatnonzero(is_heldout)
    if len(kept) < 2 or not len(train):
        found = f"{len(kept)} usable image, {len(heldout)} held out"
        raise KairosError(f"dataset: {found}, allowed: at least 2, one to train on")
    if config.train_images not in (None, len(train)):
        raise ConfigError(f"dataset.train_images: got {config.train_images}, allowed: {len(train)} (or null)")

    arrays = {"train": train, "heldout": heldout}
    if config.store == "refer":
        arrays |= {"numbers": kept, "checksums": checksums}
        arrays["names"] = np.array([os.fsencode(source.name(number)) for number in kept.tolist()])
    else:
        os.replace(out / _TEMPORARY, out / "images.npy")
    conditions: dict[str, dict[str, Any]] = {}
    for name, (description, values) in source.conditions.items():
        conditions[name] = {**description, "file": f"conditions/{name}.npy"}
        arrays[f"conditions/{name}"] = values[kept]
    if source.captions is not None:
        arrays |= captioning.pack_captions([source.captions[number] for number in kept.tolist()])
    for name, values in arrays.items():
        np.save(out / f"{name}.npy", values)
    names = [*(["images.npy"] if config.store != "refer" else []), *(f"{name}.npy" for name in arrays)]
    for name in (*names, "."):
        sync_folder(out / name)

    mean, square = sums[train].sum(axis=0) / (len(train) * shape[0] * shape[1])
    std = np.sqrt(np.maximum(square - mean**2, 0.0))
    files = {name: sha256_file(out / name) for name in names}
    manifest = {
        "source": config.source,
        "count": len(kept),
        **dict(zip(("height", "width", "channels"), shape)),
        "classes": source.classes,
        "train_count": len(train),
        "heldout_count": len(heldout),
        "channel_mean": (mean / 255).tolist(),
        "channel_std": (std / 255).tolist(),
        "conditions": conditions,
        "skipped": skipped,
        "content_sha256": sha256_json({"files": files, "conditions": conditions}),
        "files": files,
    }
    if source.captions is not None:
        manifest["captions"] = {"count": len(arrays["caption_ends"]), **unmatched}
    if config.store == "refer":  # captions are in the folder
        manifest["refers"] = {**config.model_dump(mode="json"), "captions": None, "heldout_captions": None}
    write_json(out / "manifest.json", manifest)
    return manifest


def _lowest(numbers: Any, count: int, seed: int, stream: str) -> list[int]:
    """`count` of `numbers` in their order, chosen by a hash of each: more images change few choices."""
    if count >= len(numbers):
        return list(numbers)
    return sorted(sorted(numbers, key=lambda number: derived_seed(seed, stream, number))[:count])


def _look_at(
    config: DatasetConfig, source: Source, chosen: list[int], out: Path
) -> tuple[np.ndarray, list[str], np.ndarray, np.ndarray, tuple[int, ...]]:
    """Decode the images `chosen`, and write the usable ones where they are to be copied.

    Returns:
        Numbers of the n usable images and names of the others; checksums (n, 16) where the images are not copied; sums
        of each one's pixels and of their squares by channel, int64 (n, 2, channels); height, width and channels.
    """
    kept, checksums = np.empty(len(chosen), np.int64), np.empty((len(chosen), 16), np.uint8)
    skipped: list[str] = []
    images: Any = None
    sums: Any = None
    count = 0
    progress = Progress(len(chosen), f"prepare {config.source}", "image")
    for number in chosen:
        name = source.name(number)
        progress.advance()
        try:
            image = source.read(number)
        except ValueError as error:
            if config.broken == "refuse":
                raise KairosError(
                    f"dataset: {name} is broken ({error}); repair or remove it, or set dataset.broken: skip"
                ) from None
            skipped.append(name)
            say(f"prepare: skipped {name} ({error})")
            continue
        pixels = to_pixels(image, config.color, config.crop, config.resolution, name, config.resample)
        if sums is None:
            shape, sums = pixels.shape, np.empty((len(chosen), 2, pixels.shape[2]), np.int64)
            if config.store != "refer":
                images = create_array(out / _TEMPORARY, (len(chosen), *shape), np.uint8)
        elif pixels.shape != shape:
            raise ConfigError(
                f"dataset.resolution: got null, but {name} has {pixels.shape[1]}×{pixels.shape[0]} pixels and those "
                f"before it {shape[1]}×{shape[0]}; allowed: a resolution for all"
            )
        if images is None:
            checksums[count] = checksum(pixels)
        else:
            images.write(count, pixels)
        wide = pixels.astype(np.int64)
        kept[count], sums[count] = number, (wide.sum(axis=(0, 1)), (wide**2).sum(axis=(0, 1)))
        count += 1
    progress.close()
    if not count:
        raise KairosError(f"dataset: none of the {len(chosen)} images is usable; the first is {skipped[0]}")
    if images is not None:
        images.flush()
        if skipped:
            truncate_array(out / _TEMPORARY, count)
    return kept[:count], skipped, checksums[:count], sums[:count], shape
