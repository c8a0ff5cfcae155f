"""Sources of images: scikit-learn's digits, a folder, a zip, parquet files, the Hugging Face hub.

A source reads single images by index, so that a random subset costs no other reads. Images are decoded by kairos, not
by the library that stores them, so that an error message contains the name of a broken image.
"""

import glob
import importlib.util
import os
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from kairos.data.archives import SUFFIXES, ZipArchive, select_listed_files
from kairos.data.captions import UnmatchedCaptions, add_captions, captions_from_column
from kairos.data.decode import read_image
from kairos.data.settings import DatasetConfig, MissingDataError, report_as_heldout
from kairos_timesteps.errors import ConfigError, KairosError

_MAPPED_BYTES = 64 << 20  # a memory-mapped table is opened again after reads have mapped about this many bytes
_FAULT_AROUND_BYTES = 64 << 10  # most bytes that Linux maps at one page fault, counted for reads of distant rows
_NEARBY_ROWS = 64  # a read within this many rows of the previous read is assumed to map the image's bytes alone


@dataclass(frozen=True)
class Source:
    """Images that are read by index, with their labels, conditions and captions.

    Attributes:
        count: number of images.
        read: function that reads the image with an index; it raises ValueError, with the reason, for a broken image.
            Several threads call it at a time.
        name: function that returns the file or row of the image with an index.
        labels: class of each image, int64 (count,), below len(classes); None without classes.
        classes: names of the classes; None without classes.
        other_conditions: conditions other than the class, by name: a description ``{"kind": ...}``, see
            `conditions.CONDITIONS`, and an array with a row per image.
        heldout_count: number of held-out images, which are the last ones; 0: prepare splits the images.
        captions: captions of each image; None without captions.
        unmatched_captions: captions that belong to no image.
    """

    count: int
    read: Callable[[int], Image.Image]
    name: Callable[[int], str]
    labels: np.ndarray | None = None
    classes: list[str] | None = None
    other_conditions: dict[str, tuple[dict[str, Any], np.ndarray]] = field(default_factory=dict)
    heldout_count: int = 0
    captions: list[list[str]] | None = None
    unmatched_captions: UnmatchedCaptions = frozenset()

    @property
    def conditions(self) -> dict[str, tuple[dict[str, Any], np.ndarray]]:
        """Description and values (a row per image) of each condition by name; with classes, ``class`` is the first.

        The description of ``class`` is ``{"kind": "class", "num_classes": 10}``, and its values are `labels`.
        """
        if self.labels is None or self.classes is None:
            return self.other_conditions
        description = {"kind": "class", "num_classes": len(self.classes)}
        return {"class": (description, self.labels), **self.other_conditions}


def open_source(config: DatasetConfig) -> Source:
    """Return a source with the images of section `dataset` and with their captions, if captions are configured.

    If `dataset.heldout` is another path, split or list, its images are the last ones of the source. If it is a share,
    the source does not split the images. `dataset.limit` is not applied. No image is decoded.

    Raises:
        ConfigError: the folder, file, data set or column does not exist, or contains no image. Also if the number of
            images, without held-out images from another path, is not `dataset.images`. Also if captions cannot be read,
            if held-out images have other conditions or unknown classes, or are training images too.
        KairosError: `datasets` cannot load the data set.
    """
    if config.source == "parquet":
        check_heldout(config)  # before the tables are opened, which takes long
    opener = OPENERS[config.source]
    source = add_captions(opener(config), config)
    config.check_count(source.count)
    if config.heldout_section is None:
        return source
    with report_as_heldout():
        heldout = add_captions(opener(config.heldout_section), config.heldout_section)
    if config.source in ("folder", "zip"):
        _check_disjoint(config, _list_files(config, source), _list_files(config.heldout_section, heldout))
    # without `dataset.heldout_captions`, the captions of both sources come from `dataset.captions`
    return _append_heldout(source, heldout, one_caption_file=config.heldout_captions is None)


def check_heldout(config: DatasetConfig) -> None:
    """Check that held-out images from another path can be listed, and that they are no training images.

    Images are not read. Splits of hub data sets are not checked here: section `dataset` rejects equal ones.

    Raises:
        MissingDataError: the training images or the held-out images are missing.
        ConfigError: they cannot be listed, or some images are both.
    """
    heldout_section = config.heldout_section
    if heldout_section is None or config.source == "hub":
        return
    if config.source == "parquet":
        train_files = map(os.path.realpath, parquet_files(config))
        with report_as_heldout():
            heldout_files = map(os.path.realpath, parquet_files(heldout_section))
        _check_disjoint(config, train_files, heldout_files)
        return
    opener = OPENERS[config.source]
    train = opener(config)
    with report_as_heldout():
        heldout = opener(heldout_section)
    _check_disjoint(config, _list_files(config, train), _list_files(heldout_section, heldout))


def _check_disjoint(config: DatasetConfig, train_files: Iterable[str], heldout_files: Iterable[str]) -> None:
    """Raise ConfigError if training images and held-out images have a file in common.

    Only the resolved paths are compared, so that copies of a file are not recognised.
    """
    all_heldout_files = set(heldout_files)
    common = sorted(file for file in train_files if file in all_heldout_files)
    if common:
        field = "files" if config.files else "path"
        raise ConfigError(
            f"dataset.heldout: got {config.heldout!r}, which shares {len(common)} files with dataset.{field}, such as "
            f"{common[0]!r}; allowed: images that are not trained on"
        )


def _list_files(config: DatasetConfig, source: Source) -> Iterator[str]:
    """Yield the path of the file of each image in a folder or zip, in which links to folders are resolved.

    The path of an image in a zip begins with the path of the zip.
    """
    root = os.path.realpath(str(config.path))
    resolved_folders: dict[str, str] = {}  # resolving each file would take long on a network file system
    for index in range(source.count):
        folder, file = os.path.split(source.name(index))
        if folder not in resolved_folders:
            resolved_folders[folder] = os.path.realpath(os.path.join(root, folder))
        yield os.path.join(resolved_folders[folder], file)


def _append_heldout(train: Source, heldout: Source, one_caption_file: bool) -> Source:
    """Return a source with the training images followed by the held-out images.

    The result has the classes of `train`; classes of held-out images are renumbered. Captions are dropped unless both
    sources have them.

    Args:
        train: the training images.
        heldout: the held-out images.
        one_caption_file: both have their captions from one file. A caption is then unmatched if neither source has its
            image; otherwise, if its source lacks it.

    Raises:
        ConfigError: the held-out images have classes that the training images do not have, only one of the sources has
            classes, or their conditions differ.
    """

    def read(index: int) -> Image.Image:
        return train.read(index) if index < train.count else heldout.read(index - train.count)

    def name(index: int) -> str:
        return train.name(index) if index < train.count else heldout.name(index - train.count)

    captions = None
    if train.captions is not None and heldout.captions is not None:
        captions = train.captions + heldout.captions
    if one_caption_file:
        unmatched = train.unmatched_captions & heldout.unmatched_captions
    else:
        unmatched = train.unmatched_captions | heldout.unmatched_captions
    return Source(
        count=train.count + heldout.count,
        read=read,
        name=name,
        labels=_concatenate_labels(train, heldout),
        classes=train.classes,
        other_conditions=_concatenate_conditions(train, heldout),
        heldout_count=heldout.count,
        captions=captions,
        unmatched_captions=unmatched,
    )


def _concatenate_labels(train: Source, heldout: Source) -> np.ndarray | None:
    """Return the labels of the training images and then of the held-out images, int64 (n,); None without classes.

    Labels of held-out images become the numbers that classes of equal name have among the training images.

    Raises:
        ConfigError: the held-out images have classes that the training images do not have, or only one of the sources
            has classes.
    """
    unknown = set(heldout.classes or ()) - set(train.classes or ())
    if unknown or (train.labels is None) != (heldout.labels is None):
        detail = f"; unknown: {', '.join(sorted(unknown))}" if unknown else ""
        raise ConfigError(
            f"dataset.heldout: its images have the classes {heldout.classes}, allowed: classes of the training images "
            f"({train.classes}){detail}"
        )
    # labels and classes of a source are both None or both set; the type checker needs all three tests
    if train.classes is None or heldout.classes is None or train.labels is None:
        return None
    # element i: number, among the training classes, of the class that has number i among the held-out classes
    train_numbers = np.array([train.classes.index(name) for name in heldout.classes], np.int64)
    return np.concatenate([train.labels, train_numbers[heldout.labels]])


def _concatenate_conditions(train: Source, heldout: Source) -> dict[str, tuple[dict[str, Any], np.ndarray]]:
    """Return description and values of each condition other than the class, by name.

    The values are those of the training images followed by those of the held-out images.

    Raises:
        ConfigError: the two sources have different conditions, or describe a condition differently.
    """
    train_descriptions = {name: description for name, (description, _) in train.other_conditions.items()}
    heldout_descriptions = {name: description for name, (description, _) in heldout.other_conditions.items()}
    if heldout_descriptions != train_descriptions:
        raise ConfigError(
            f"dataset.heldout: its images have the conditions {heldout_descriptions}, allowed: conditions of the "
            f"training images ({train_descriptions})"
        )
    conditions = {}
    for name, (description, values) in train.other_conditions.items():
        _, heldout_values = heldout.other_conditions[name]
        conditions[name] = (description, np.concatenate([values, heldout_values]))
    return conditions


def _open_digits(config: DatasetConfig) -> Source:
    """Open the 1,797 grey 8×8 images of digits in scikit-learn, with values from 0 to 255 and the digits as classes."""
    # scikit-learn's file is read directly: the import of sklearn.datasets takes 2 s of CPU time
    spec = importlib.util.find_spec("sklearn")
    assert spec is not None and spec.submodule_search_locations is not None
    path = Path(spec.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    rows = np.loadtxt(path, delimiter=",")  # 64 values 0..16 and the digit
    pixels = (rows[:, :-1].reshape(-1, 8, 8) * (255 / 16)).round().astype(np.uint8)
    labels = rows[:, -1].astype(np.int64)
    classes = [str(digit) for digit in range(10)]
    return Source(
        count=len(pixels),
        read=lambda index: Image.fromarray(pixels[index]),
        name=lambda index: f"digit {index}",
        labels=labels,
        classes=classes,
    )


def _open_folder(config: DatasetConfig) -> Source:
    """Open all images below a folder; if all are in two or more direct subfolders, the subfolders are the classes.

    There are no classes otherwise. An image is a file with one of `SUFFIXES`; hidden files and folders are skipped.
    Images are named by their relative paths and sorted by name. With `dataset.files`, only the listed images are used,
    in the order of the list, and a class without a listed image is left out.

    Raises:
        MissingDataError: the folder or the list of files does not exist.
        ConfigError: the folder contains no image, or the list of files cannot be used.
    """
    root = Path(str(config.path))
    if not root.is_dir():
        error_type = ConfigError if root.exists() else MissingDataError
        raise error_type(f"dataset.path: got {config.path!r}, allowed: a folder that exists")
    files = glob.iglob("**/*", root_dir=root, recursive=True)
    names = sorted(name for name in files if name.lower().endswith(SUFFIXES) and not (root / name).is_dir())
    if not names:
        raise ConfigError(f"dataset.path: folder {config.path!r} holds no image ({', '.join(SUFFIXES)})")
    subfolders = [name.split("/")[0] for name in names]
    all_in_subfolders = all("/" in name for name in names)
    has_classes = all_in_subfolders and len(set(subfolders)) >= 2
    # the class name of each image; empty without classes
    names, class_names = select_listed_files(config, names, labels=subfolders if has_classes else [])
    labels, classes = None, None
    if class_names:
        labels, classes = _number_classes(class_names)
    return Source(
        count=len(names),
        read=lambda index: read_image(root / names[index]),
        name=lambda index: names[index],
        labels=labels,
        classes=classes,
    )


def _open_zip(config: DatasetConfig) -> Source:
    """Open the images in a zip, which is not unpacked; their classes are the labels in its dataset.json, if it has any.

    Images are sorted by name. With `dataset.files`, only the listed images are used, in the order of the list. The
    names of the classes are the labels of these images.

    Raises:
        MissingDataError: the zip or the list of files is missing.
        ConfigError: the zip contains no image, or its labels or the list of files cannot be used.
    """
    archive = ZipArchive(config)
    names, class_numbers = select_listed_files(config, *archive.list_images())
    labels, classes = None, None
    if class_numbers:
        labels, classes = _number_classes(class_numbers)
    return Source(
        count=len(names),
        read=lambda index: read_image(archive.read(names[index])),
        name=lambda index: names[index],
        labels=labels,
        classes=classes,
    )


def _number_classes(names: list[Any]) -> tuple[np.ndarray, list[str]]:
    """Return the class number of each image, int64 (n,), and the sorted class names, from each image's class name.

    Names are texts or integers; integers become texts. A number without an image is no class: a class-conditional model
    would otherwise generate samples of a class on which it was never trained.
    """
    classes = sorted(set(names))  # not np.unique, which converts large integers to float64
    number_of = {name: number for number, name in enumerate(classes)}
    return np.array([number_of[name] for name in names], np.int64), [str(name) for name in classes]


def parquet_files(config: DatasetConfig) -> list[str]:
    """Return the paths of the parquet files of `dataset.path`: a file, a glob pattern or a folder with its subfolders.

    The paths are sorted. Files that a path or a pattern selects may have any suffix; in a folder it is ``.parquet``.

    Raises:
        MissingDataError: there is no such file or folder.
        ConfigError: the folder contains no such file, or a pattern matches a folder.
    """
    path = str(config.path)
    if os.path.isdir(path):
        files = sorted(str(file) for file in Path(path).rglob("*.parquet"))
    elif glob.has_magic(path) and not os.path.isfile(path):  # a name may contain characters of patterns
        files = sorted(glob.glob(path, recursive=True))
    else:
        files = [path]
    if files and all(os.path.isfile(file) for file in files):
        return files
    # `glob` also returns links whose target is missing
    all_exist = all(os.path.exists(file) for file in files or [path])
    error_type = ConfigError if all_exist else MissingDataError
    raise error_type(f"dataset.path: got {path!r}, allowed: parquet file(s) that exist, a glob or their folder")


def _open_parquet(config: DatasetConfig) -> Source:
    """Open the images in the rows of parquet files, in the order of the files.

    The name of an image is its row within its file, such as ``row 7 of train-00001.parquet``.

    Raises:
        ConfigError: a file is missing or is not parquet, or the table cannot be used, see `_open_table`.
        KairosError: `datasets` cannot read the files.
    """
    from datasets.exceptions import DatasetGenerationError

    path = str(config.path)
    files = parquet_files(config)
    row_counts = [open_parquet(file).metadata.num_rows for file in files]
    first_rows = np.cumsum([0, *row_counts])  # first row of each file in the joined table
    try:
        table = _load_dataset("parquet", data_files=files, split="train")
    except (DatasetGenerationError, OSError, ValueError) as error:
        # the message of DatasetGenerationError does not contain its cause
        raise KairosError(f"dataset.path: {path!r} cannot be read as parquet ({error.__cause__ or error})") from None

    def name(index: int) -> str:
        # the last file whose first row is `index` or smaller
        file_index = int(np.searchsorted(first_rows, index, side="right")) - 1
        return f"row {index - first_rows[file_index]} of {os.path.basename(files[file_index])}"

    return _open_table(table, config, name)


def open_parquet(file: str) -> Any:
    """Return the `ParquetFile` of pyarrow for a file; raise ConfigError if the file is not parquet."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(file)
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"dataset.path: {file!r} is not a parquet file ({' '.join(str(error).split())})") from None


def _open_hub(config: DatasetConfig) -> Source:
    """Open the images of `dataset.split` of a data set on the Hugging Face hub.

    The data set is downloaded if the cache on this machine lacks it. The name of an image is ``row ROW of ID (SPLIT)``.

    Raises:
        ConfigError: the table cannot be used, see `_open_table`.
        KairosError: the data set cannot be loaded.
    """
    from datasets.exceptions import DatasetGenerationError

    try:
        table = _load_dataset(str(config.path), split=config.split)
    except (DatasetGenerationError, OSError, ValueError, RuntimeError) as error:
        raise KairosError(
            f"dataset.path: hub data set {config.path!r} (split {config.split!r}) cannot be loaded: "
            f"{' '.join(str(error).split())}. Run `kairos fetch` where there is a network; or put a copy into the "
            "Hugging Face cache (HF_HOME), or download its parquet files and set dataset.source: parquet and "
            "dataset.path to them"
        ) from None
    return _open_table(table, config, lambda index: f"row {index} of {config.path} ({config.split})")


def _load_dataset(source: str, **options: Any) -> Any:
    """Load a `datasets.Dataset` from a hub id, or in a format such as ``parquet``.

    `datasets` writes the rows to its cache if they are not there yet. Its progress bars stay off in this process.
    """
    from datasets import disable_progress_bars, load_dataset

    disable_progress_bars()  # kairos shows its progress in images
    return load_dataset(source, **options)


def _open_table(table: Any, config: DatasetConfig, name: Callable[[int], str]) -> Source:
    """Return a source for the rows of a `datasets.Dataset`, with their labels and captions, if it has them.

    Function `name` returns the name of the row with an index. Images are read and decoded only by `Source.read`.

    Raises:
        ConfigError: the table is empty, or lacks a column of images, labels or captions; or values cannot be used.
    """
    from datasets import Image as ImageFeature

    column = _find_image_column(table.features, config)
    if isinstance(table.features[column], ImageFeature):
        table = table.cast_column(column, ImageFeature(decode=False))  # kairos decodes, see the module's docstring
    labels, classes = _read_labels(table, config)
    if len(table) == 0:
        raise ConfigError(f"dataset.path: {config.path!r} holds no rows")
    captions = None
    if config.captions is not None:
        captions = captions_from_column(config.captions, _read_column(table, config.captions, "captions"))
    return Source(
        count=len(table),
        read=_ImageColumn(table, column).read,
        name=name,
        labels=labels,
        classes=classes,
        captions=captions,
    )


class _ImageColumn:
    """Column of images in a `datasets.Dataset`, which is memory-mapped.

    Pages that reads have mapped count towards this process's memory. After about `_MAPPED_BYTES` of them the column is
    opened again, which releases the pages: unpickling a `datasets.Dataset` maps its files anew. Opening takes longer
    with more rows, so the limit is in bytes, not in reads. Small images read in order rarely cause an opening. In
    random order each read counts `_FAULT_AROUND_BYTES` more, so at most 1,024 reads fit.
    """

    def __init__(self, table: Any, column: str):
        self._column = column
        self._cells = table.select_columns(column)
        self._pickled_cells = pickle.dumps(self._cells)
        self._mapped_bytes = 0
        self._last_index = -1
        self._lock = threading.Lock()

    def read(self, index: int) -> Image.Image:
        """Read and decode the image in a row.

        Raises:
            ValueError: the cell is empty, or its image is broken; the message contains the reason.
        """
        with self._lock:  # while one thread opens the column again, others may still read the old one
            if self._mapped_bytes > _MAPPED_BYTES:
                self._cells = pickle.loads(self._pickled_cells)
                self._mapped_bytes = 0
            cells = self._cells
        cell = cells[index][self._column]
        if isinstance(cell, dict):  # Image(decode=False) gives the bytes of the image file, or its path
            content = cell.get("bytes")
            content_or_path = content if content is not None else cell.get("path")
        else:
            content_or_path = cell
        if not content_or_path:
            raise ValueError("the cell is empty")
        with self._lock:
            is_nearby = abs(index - self._last_index) <= _NEARBY_ROWS
            self._mapped_bytes += len(content_or_path) + (0 if is_nearby else _FAULT_AROUND_BYTES)
            self._last_index = index
        if isinstance(content_or_path, str):
            return read_image(Path(content_or_path))
        return read_image(bytes(content_or_path))


def _find_image_column(features: Any, config: DatasetConfig) -> str:
    """Return the name of the column of images: `dataset.image_column`, or else the only column of images or bytes.

    `features` are the features of a `datasets.Dataset` by column.

    Raises:
        ConfigError: the configured column contains no images; or none is configured, and there is no such column or
            several.
    """
    from datasets import Image as ImageFeature

    def holds_images(feature: Any) -> bool:
        is_binary = getattr(feature, "dtype", None) in ("binary", "large_binary")
        has_bytes = isinstance(feature, dict) and "bytes" in feature  # `datasets` stores an image as bytes and path
        return is_binary or has_bytes or isinstance(feature, ImageFeature)

    image_columns = [name for name, feature in features.items() if holds_images(feature)]
    all_columns = f"columns: {', '.join(features)}; of images: {', '.join(image_columns) or 'none'}"  # for messages
    configured = config.image_column
    if configured is not None and configured not in image_columns:
        raise ConfigError(f"dataset.image_column: got {configured!r}, allowed: a column of images ({all_columns})")
    if configured is None and len(image_columns) != 1:
        raise ConfigError(
            f"dataset.image_column: got null, but {config.path!r} has {len(image_columns)} image columns, name one "
            f"({all_columns})"
        )
    return configured or image_columns[0]


def _read_column(table: Any, name: str, field: str) -> list[Any]:
    """Return a column of a `datasets.Dataset` as Python values; `field` is the field that selects it, for the message.

    Raises:
        ConfigError: the column does not exist.
    """
    if name not in table.features:
        raise ConfigError(f"dataset.{field}: got {name!r}, allowed: one of {', '.join(table.features)}")
    values: list[Any] = table.select_columns(name).with_format("arrow")[:][name].to_pylist()
    return values


def _read_labels(table: Any, config: DatasetConfig) -> tuple[np.ndarray | None, list[str] | None]:
    """Return the class of each row, int64 (rows,), and the names of the classes; None, None without a label column.

    Classes that are texts are numbered in sorted order. Classes that are integers have the names that the table
    declares, or else the numbers that occur. A boolean is treated as 0 or 1.

    Raises:
        ConfigError: the column does not exist, or contains a value that is not a class, such as null, or a number for
            which the table declares no name.
    """
    column = config.find_label_column(table.features)
    if column is None:
        return None, None
    values = _read_column(table, column, "label_column")
    check_labels(column, values)
    if all(isinstance(value, str) for value in values):
        return _number_classes(values)
    class_names = getattr(table.features[column], "names", None)
    if not class_names:
        return _number_classes([int(value) for value in values])
    classes = list(class_names)
    if max(values) >= len(classes):
        raise ConfigError(f"dataset.label_column: {column!r} holds {max(values)}, allowed: below {len(classes)}")
    return np.array(values, dtype=np.int64), classes


def check_labels(column: str, values: list[Any]) -> None:
    """Raise ConfigError unless the values of a column of labels are all texts, or all integers from 0 or booleans."""
    if all(isinstance(value, str) for value in values):
        return
    invalid = [value for value in values if not isinstance(value, int) or value < 0]
    if invalid:
        raise ConfigError(f"dataset.label_column: {column!r} holds {invalid[0]!r}, allowed: integers from 0 or texts")


OPENERS = {
    "digits": _open_digits,
    "folder": _open_folder,
    "zip": _open_zip,
    "parquet": _open_parquet,
    "hub": _open_hub,
}
