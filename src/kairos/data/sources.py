"""Where images come from: scikit-learn's digits, a folder, a zip, parquet files, the Hugging Face hub.

A source knows how many images it has and reads one by its number, so that a random subset reads no other. Images are
decoded by us, not by the library that stores them, so that a broken one can be named.
"""

import glob
import os
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from kairos.data.archives import SUFFIXES, ZipArchive, select_listed_files
from kairos.data.captions import UnmatchedCaptions, add_captions, captions_from_column
from kairos.data.decode import read_image
from kairos.data.settings import DatasetConfig
from kairos_timesteps.errors import ConfigError, KairosError

_REOPENED = 512  # images that are read before a table is opened anew


@dataclass(frozen=True)
class Source:
    """Images by number.

    `read` raises ValueError with the reason where an image is broken; `name` says which file or row it is; `labels` is
    int64 (count,) with values below len(classes), or None. `further` holds conditions of other kinds by name: what
    `conditions.CONDITIONS` needs to know of each, ``{"kind": ...}``, and an array with a row per image. The last
    `heldout` images are held out, whatever the share. `captions` are those of each image; `missing` have no image.
    """

    count: int
    read: Callable[[int], Image.Image]
    name: Callable[[int], str]
    labels: np.ndarray | None = None
    classes: list[str] | None = None
    further: dict[str, tuple[dict[str, Any], np.ndarray]] = field(default_factory=dict)
    heldout: int = 0
    captions: list[list[str]] | None = None
    missing: UnmatchedCaptions = frozenset()

    @property
    def conditions(self) -> dict[str, tuple[dict[str, Any], np.ndarray]]:
        """All conditions of the images, the class among them where there are classes."""
        if self.labels is None or self.classes is None:
            return self.further
        return {"class": ({"kind": "class", "num_classes": len(self.classes)}, self.labels), **self.further}


def open_source(config: DatasetConfig) -> Source:
    """The source that an experiment's section `dataset` names.

    Raises:
        ConfigError: the folder, file, data set or column does not exist, or holds no image, or another number of them
            than `dataset.images`; or the classes of held-out images with a place of their own are no classes of the
            others; or a list names images that are trained on.
    """
    opener = OPENERS[config.source]
    source, *heldout = config.parts
    opened = add_captions(opener(source), source)
    config.check_count(opened.count)
    try:
        held = add_captions(opener(heldout[0]), heldout[0]) if heldout else None
    except KairosError as error:
        said = re.sub(r"dataset\.(path|files)", "dataset.heldout", str(error), count=1)
        raise type(error)(said.replace("dataset.captions", "dataset.heldout_captions", 1)) from None
    if held is None:
        return opened
    if config.files:  # names in one folder or zip
        names = [set(map(part.name, range(part.count))) for part in (opened, held)]
        if both := sorted(names[0] & names[1]):
            raise ConfigError(
                f"dataset.heldout: {config.heldout} and dataset.files both name {both[0]!r} ({len(both)} such files), "
                "allowed: images that are not trained on"
            )
    return _with_heldout(opened, held, config.heldout_captions is None)


def _with_heldout(one: Source, other: Source, same: bool) -> Source:
    """The images of one source, and those of another one that are all held out; `same`: with captions in one file."""
    if (unknown := set(other.classes or ()) - set(one.classes or ())) or (one.labels is None) != (other.labels is None):
        raise ConfigError(
            f"dataset.heldout: its images have the classes {other.classes}, allowed: classes of the training images "
            f"({one.classes})" + (f"; theirs are not: {', '.join(sorted(unknown))}" if unknown else "")
        )
    labels = one.labels
    if one.classes is not None and other.classes is not None and labels is not None:
        numbers = np.array([one.classes.index(name) for name in other.classes], np.int64)
        labels = np.concatenate([labels, numbers[other.labels]])

    def either(first: Callable[[int], Any], second: Callable[[int], Any]) -> Callable[[int], Any]:
        return lambda index: first(index) if index < one.count else second(index - one.count)

    read, name = either(one.read, other.read), either(one.name, other.name)
    captions = None if one.captions is None or other.captions is None else one.captions + other.captions
    missing = one.missing & other.missing if same else one.missing | other.missing
    count = one.count + other.count
    return Source(count, read, name, labels, one.classes, {}, other.count, captions, missing)


def _digits(config: DatasetConfig) -> Source:
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = (digits.images * (255 / 16)).round().astype(np.uint8)  # the scans have values 0..16
    labels, classes = digits.target.astype(np.int64), [str(name) for name in digits.target_names]
    return Source(len(pixels), lambda index: Image.fromarray(pixels[index]), "digit {}".format, labels, classes)


def _folder(config: DatasetConfig) -> Source:
    """All images below a folder; where all lie in two or more subfolders, those are the classes."""
    root = Path(str(config.path))
    if not root.is_dir():
        raise ConfigError(f"dataset.path: got {config.path!r}, allowed: a folder that exists")
    found = glob.iglob("**/*", root_dir=root, recursive=True)
    names = sorted(name for name in found if name.lower().endswith(SUFFIXES) and not (root / name).is_dir())
    if not names:
        raise ConfigError(f"dataset.path: folder {config.path!r} holds no image ({', '.join(SUFFIXES)})")
    kinds = [name.split("/")[0] for name in names]
    kinds = kinds if all("/" in name for name in names) and len(set(kinds)) > 1 else []
    names, kinds = select_listed_files(config, names, kinds)
    labels, classes = _numbered(kinds) if kinds else (None, None)
    return Source(len(names), lambda index: read_image(root / names[index]), names.__getitem__, labels, classes)


def _zip(config: DatasetConfig) -> Source:
    """The images in a zip, read where they lie in it; their classes are those of its dataset.json."""
    archive = ZipArchive(config)
    names, labels = select_listed_files(config, *archive.list_images())
    classes = list(map(str, range(max(labels) + 1))) if labels else None
    numbers = np.array(labels, np.int64) if labels else None
    return Source(len(names), lambda index: read_image(archive.read(names[index])), names.__getitem__, numbers, classes)


def _numbered(names: list[str]) -> tuple[np.ndarray, list[str]]:
    """The class of each, int64, and the classes' names in their order."""
    classes, labels = np.unique(names, return_inverse=True)
    return labels.astype(np.int64), classes.tolist()


def parquet_files(config: DatasetConfig) -> list[str]:
    """The files that `dataset.path` names: one, a glob or a folder.

    Raises:
        ConfigError: there are none.
    """
    path = str(config.path)
    files = sorted(glob.glob(path, recursive=True)) if glob.has_magic(path) else [path]
    if os.path.isdir(path):
        files = sorted(str(file) for file in Path(path).rglob("*.parquet"))
    if not files or not all(os.path.isfile(file) for file in files):
        raise ConfigError(f"dataset.path: got {path!r}, allowed: parquet file(s) that exist, a glob or their folder")
    return files


def _parquet(config: DatasetConfig) -> Source:
    path, files = str(config.path), parquet_files(config)
    from datasets.exceptions import DatasetGenerationError

    starts = np.cumsum([0, *(_rows(file) for file in files)])
    try:
        table = _loaded("parquet", data_files=files, split="train")
    except (DatasetGenerationError, OSError, ValueError) as error:
        raise KairosError(f"dataset.path: {path!r} cannot be read as parquet ({error.__cause__ or error})") from None

    def name(index: int) -> str:
        file = int(np.searchsorted(starts, index, side="right")) - 1
        return f"row {index - starts[file]} of {os.path.basename(files[file])}"

    return _table(table, config, name)


def _rows(file: str) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(file).metadata.num_rows
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"dataset.path: {file!r} is not a parquet file ({' '.join(str(error).split())})") from None


def _hub(config: DatasetConfig) -> Source:
    from datasets.exceptions import DatasetGenerationError

    try:
        table = _loaded(str(config.path), split=config.split)
    except (DatasetGenerationError, OSError, ValueError, RuntimeError) as error:
        raise KairosError(
            f"dataset.path: hub data set {config.path!r} (split {config.split!r}) cannot be loaded: "
            f"{' '.join(str(error).split())}. `kairos fetch` brings it where there is a network; or put a copy into "
            "the Hugging Face cache (HF_HOME), or fetch its parquet files and set dataset.source: parquet and "
            "dataset.path to them"
        ) from None
    return _table(table, config, lambda index: f"row {index} of {config.path} ({config.split})")


def _loaded(source: str, **named: Any) -> Any:
    from datasets import disable_progress_bars, load_dataset

    disable_progress_bars()  # our own progress counts images
    return load_dataset(source, **named)


def _table(table: Any, config: DatasetConfig, name: Callable[[int], str]) -> Source:
    """A source from a `datasets.Dataset`."""
    from datasets import Image as ImageFeature

    column = _image_column(table.features, config)
    if isinstance(table.features[column], ImageFeature):
        table = table.cast_column(column, ImageFeature(decode=False))
    labels, classes = _labels(table, config)
    cells = table.select_columns(column)
    closed, reads = pickle.dumps(cells), 0
    if len(table) == 0:
        raise ConfigError(f"dataset.path: {config.path!r} holds no rows")

    def read(index: int) -> Image.Image:
        nonlocal cells, reads
        reads += 1
        if reads % _REOPENED == 0:  # it is mapped: what was read of it would stay in this process's memory
            cells = pickle.loads(closed)
        cell = cells[index][column]
        if isinstance(cell, dict):  # Image(decode=False): the file's bytes, or where it lies
            cell = cell["bytes"] if cell.get("bytes") is not None else cell.get("path")
        if not cell:
            raise ValueError("the cell is empty")
        return read_image(Path(cell) if isinstance(cell, str) else bytes(cell))

    told = config.captions
    captions = None if told is None else captions_from_column(told, _column(table, told, "captions"))
    return Source(len(table), read, name, labels, classes, captions=captions)


def _image_column(features: Any, config: DatasetConfig) -> str:
    from datasets import Image as ImageFeature

    def holds_images(feature: Any) -> bool:
        in_bytes = getattr(feature, "dtype", None) in ("binary", "large_binary")
        return in_bytes or isinstance(feature, ImageFeature) or (isinstance(feature, dict) and "bytes" in feature)

    found = [name for name, feature in features.items() if holds_images(feature)]
    columns = f"columns: {', '.join(features)}; of images: {', '.join(found) or 'none'}"
    wanted = config.image_column
    if wanted is not None and wanted not in found:
        raise ConfigError(f"dataset.image_column: got {wanted!r}, allowed: a column of images ({columns})")
    if wanted is None and len(found) != 1:
        raise ConfigError(f"dataset.image_column: {config.path!r} has {len(found)} image columns, name one ({columns})")
    return wanted or found[0]


def _column(table: Any, name: str, field: str) -> list[Any]:
    if name not in table.features:
        raise ConfigError(f"dataset.{field}: got {name!r}, allowed: one of {', '.join(table.features)}")
    values: list[Any] = table.select_columns(name).with_format("arrow")[:][name].to_pylist()
    return values


def _labels(table: Any, config: DatasetConfig) -> tuple[np.ndarray | None, list[str] | None]:
    column = config.find_label_column(table.features)
    if column is None:
        return None, None
    values = _column(table, column, "label_column")
    if all(isinstance(value, str) for value in values):
        return _numbered(values)
    odd = [value for value in values if not isinstance(value, int) or value < 0]
    if odd:
        raise ConfigError(f"dataset.label_column: {column!r} holds {odd[0]!r}, allowed: integers from 0 or texts")
    named = getattr(table.features[column], "names", None)
    classes = list(named or map(str, range(max(values) + 1)))
    if max(values) >= len(classes):
        raise ConfigError(f"dataset.label_column: {column!r} holds {max(values)}, allowed: below {len(classes)}")
    return np.array(values, dtype=np.int64), classes


OPENERS = {"digits": _digits, "folder": _folder, "zip": _zip, "parquet": _parquet, "hub": _hub}
