"""Counts of a data set's images and classes, and sizes and colours of its images, before the data set is prepared.

Checks that run before any job use these functions. `count_images` reads no image and does not import `datasets`: names
of files, or the number of rows and the column of labels, are enough.
"""

import glob
import math
import os
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kairos.data.settings import DatasetConfig, MissingDataError
from kairos.data.values import DatasetValues, ImageValues, Kind, find_kind, measure_values
from kairos_timesteps.errors import ConfigError, KairosError

_MOST_INSPECTED = 20_000  # images
_MOST_MEASURED = 500  # images of more than 8 bits whose values are read if the others are not decoded
_DIGIT_COUNT = 1797  # images of digits in scikit-learn
_RAREST_DIGIT_COUNT = 174  # images of the rarest digit


@dataclass(frozen=True)
class ImageCounts:
    """Numbers of images and classes of a data set.

    Attributes:
        train: number of training images; None if unknown.
        smallest: number of images of the smallest class, training and held out; None without labels.
        unknown: why the source could not be counted, such as a missing folder; empty if the counts are known.
        count: number of images within the limit, training and held out, without held-out images from another path; None
            if unknown.
        classes: number of classes that have an image; None without labels.
    """

    train: int | None = None
    smallest: int | None = None
    unknown: str = ""
    count: int | None = field(default=None, compare=False)
    classes: int | None = field(default=None, compare=False)


def count_images(config: DatasetConfig) -> ImageCounts:
    """Return the numbers of images and classes of a data set that may not be prepared yet.

    The counts follow `dataset.limit` and `dataset.heldout`. With a limit, the size of the smallest class is the one
    expected in a random subset, rounded down. Broken images and images without captions are counted. If the source
    is missing, all counts are None, and `ImageCounts.unknown` contains the reason.

    Raises:
        ConfigError: the source is present but cannot be used, or the number of images is not `dataset.images`.
    """
    counting_functions = {"digits": _count_digits, "parquet": _count_parquet, "hub": _count_hub}
    count_source = counting_functions.get(config.source, _count_files)
    try:
        count, class_sizes = count_source(config)
    except MissingDataError as error:
        return ImageCounts(unknown=" ".join(str(error).split()))
    except KairosError:
        raise
    except (OSError, ValueError, LookupError, TypeError, NotImplementedError) as error:  # arrow raises subclasses
        problem = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"dataset.path: {config.path!r} cannot be read ({problem})") from None
    config.check_count(count)
    used_count = count if config.limit is None else min(count, config.limit)
    heldout_count = 0 if isinstance(config.heldout, str) else config.heldout_count(used_count)
    if not class_sizes:
        return ImageCounts(train=used_count - heldout_count, count=used_count)
    smallest = min(class_sizes.values()) * used_count // count  # smaller by the share of the images that are used
    return ImageCounts(train=used_count - heldout_count, smallest=smallest, count=used_count, classes=len(class_sizes))


# Each of the following functions returns the number of images, and the number of images by class, a dictionary that is
# empty without classes. Held-out images of another path are not included, and the limit is not applied.


def _count_digits(config: DatasetConfig) -> tuple[int, dict[Any, int]]:
    """Return the counts of scikit-learn's digits from constants; each class gets the count of the rarest digit."""
    return _DIGIT_COUNT, dict.fromkeys(range(10), _RAREST_DIGIT_COUNT)


def _count_files(config: DatasetConfig) -> tuple[int, dict[Any, int]]:
    """Return the number of images of a folder or a zip, and the number of each class, without reading images.

    Raises:
        MissingDataError: the folder, zip or list is missing.
        ConfigError: the folder, zip or list cannot be used, for example since it contains no image.
    """
    from kairos.data.sources import OPENERS

    source = OPENERS[config.source](config)
    labels = [] if source.labels is None else source.labels.tolist()
    return source.count, Counter(labels)


def _count_parquet(config: DatasetConfig) -> tuple[int, dict[Any, int]]:
    """Return the number of rows of parquet files, and the number of each class; only the column of labels is read.

    Raises:
        MissingDataError: there are no such files.
        ConfigError: a file is not parquet, the configured column of labels does not exist, or a label is no class.
        LookupError, OSError, ValueError: a file is damaged, or lacks the column of labels of the first file.
    """
    from kairos.data.sources import open_parquet, parquet_files

    files = [open_parquet(file) for file in parquet_files(config)]
    label_column = config.find_label_column(files[0].schema_arrow.names)
    columns = [label_column] if label_column else []  # a table without columns still has its number of rows
    return _count_rows([file.read(columns) for file in files], label_column)


def _count_hub(config: DatasetConfig) -> tuple[int, dict[Any, int]]:
    """Return the number of images of a hub data set, and the number of each class, from the cache on this machine.

    Nothing is downloaded. If the cache has several versions of the data set, the first folder by name is used.

    Raises:
        MissingDataError: the split is not in the cache.
        ConfigError: the configured column of labels does not exist, or a label is no class.
        LookupError, OSError, ValueError: a file is damaged.
    """
    import pyarrow as pa

    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    cache = Path(os.environ.get("HF_DATASETS_CACHE", f"{home}/datasets")).expanduser()
    # the cache contains each split as one Arrow file or several:
    # OWNER___my_images/<configuration>/<version>/<hash>/my_images-train-00000-of-00002.arrow
    folder_pattern = f"{glob.escape(_cache_folder_name(str(config.path)))}/*/*/*"
    split = glob.escape(config.split)
    files = sorted(
        [
            *cache.glob(f"{folder_pattern}/*-{split}.arrow"),
            *cache.glob(f"{folder_pattern}/*-{split}-[0-9]*-of-[0-9]*.arrow"),
        ]
    )
    if not files:
        raise MissingDataError(f"hub data set {config.path!r} is not in the Hugging Face cache yet; run kairos fetch")
    files_of_one_version = [str(file) for file in files if file.parent == files[0].parent]
    tables = [pa.ipc.open_stream(pa.memory_map(file)).read_all() for file in files_of_one_version]
    return _count_rows(tables, config.find_label_column(tables[0].column_names))


def _cache_folder_name(hub_id: str) -> str:
    """Return the name of the folder in the cache of `datasets`: ``OWNER___my_images`` for ``OWNER/MyImages``."""
    owner, _, name = hub_id.rpartition("/")
    snake_case = re.sub(r"(?<=[a-z\d])(?=[A-Z])", "_", name).lower()
    return f"{owner}___{snake_case}" if owner else snake_case


def _count_rows(tables: list[Any], label_column: str | None) -> tuple[int, dict[Any, int]]:
    """Return the number of rows of several tables of arrow, and the number of each class.

    Without a label column the dictionary of classes is empty.

    Raises:
        ConfigError: a label is no class, such as a list.
    """
    from kairos.data.sources import check_labels

    labels: list[Any] = []
    if label_column:
        for table in tables:
            labels += table[label_column].to_pylist()
        check_labels(label_column, labels)
    return sum(map(len, tables)), Counter(labels)


@dataclass(frozen=True)
class ImageProperties:
    """Sizes, colours and stored values of a folder's images.

    Attributes:
        sizes: number of images of each size (width, height).
        grey: number of images without colour; 0 if the images were not decoded.
        unread: names of the images that cannot be read, with the reason.
        values: stored values of the images by type.
        all_measured: True if the values of all images of more than 8 bits have been read.
    """

    sizes: Counter[tuple[int, int]]
    grey: int
    unread: list[str]
    values: DatasetValues
    all_measured: bool

    @property
    def cropping(self) -> tuple[int, float]:
        """Number of images that are not square, and the fraction of their total area that a square crop removes.

        Both are 0 if all images are square.
        """
        not_square = {(width, height): count for (width, height), count in self.sizes.items() if width != height}
        area = sum(width * height * count for (width, height), count in not_square.items())
        cropped_area = sum(min(size) ** 2 * count for size, count in not_square.items())
        removed_share = 1 - cropped_area / area if area else 0.0
        return sum(not_square.values()), removed_share


def inspect_images(config: DatasetConfig, decode: bool = False) -> ImageProperties:
    """Return properties of a folder's images, or of at most 20,000 evenly spaced ones if there are more.

    Images that cannot be read are listed in the result, and raise no error. Sizes include the rotation by the EXIF
    orientation, except that of a PNG file without `decode`.

    Args:
        config: section `dataset`, of source ``folder``.
        decode: decode the images completely, to find damaged and grey ones; False: read the headers, and of images of
            more than 8 bits the values of at most 500.

    Raises:
        ConfigError: the folder does not exist, or contains no image.
    """
    from kairos.data.sources import OPENERS

    source = OPENERS["folder"](config)
    sizes: Counter[tuple[int, int]] = Counter()
    values = DatasetValues(config.value_range)
    grey = 0
    unread = []
    stride = math.ceil(source.count / _MOST_INSPECTED)
    all_measured = stride == 1
    inspected = range(0, source.count, stride)
    measured_stride = 1 if decode else math.ceil(len(inspected) / _MOST_MEASURED)
    for position, index in enumerate(inspected):
        name = source.name(index)
        try:
            if decode:
                image = source.read(index)
                values.add(name, measure_values(image))
                grey += _is_grey(image)
                sizes[image.size] += 1
            else:
                size, kind = _read_header(Path(str(config.path), name))
                if kind == "8-bit":
                    values.add(name, ImageValues(kind, 0, 255))
                elif position % measured_stride == 0:
                    values.add(name, measure_values(source.read(index)))
                else:
                    values.add_unread(kind)
                    all_measured = False
                sizes[size] += 1
        except MemoryError:  # a property of the machine, not of the image
            raise
        except Exception as error:  # PIL raises errors of many types for damaged files
            unread.append(f"{name} ({' '.join(str(error).split()) or type(error).__name__})")
    return ImageProperties(sizes, grey, unread, values, all_measured)


def _is_grey(image: Any) -> bool:
    """Return True if the red, green and blue channels of a PIL image of any mode are equal."""
    from PIL import ImageChops

    red, *others = image.convert("RGB").split()
    # `getbbox` returns None if the difference is 0 everywhere
    return not any(ImageChops.difference(red, other).getbbox() for other in others)


def _read_header(path: Path) -> tuple[tuple[int, int], Kind]:
    """Return size and type of values of an image file: width and height after the rotation by its EXIF orientation.

    The orientation of a PNG file is ignored.
    """
    from PIL import Image

    from kairos.data.decode import find_transposition, mark_sixteen_bit_colour

    with Image.open(path) as image:
        mark_sixteen_bit_colour(image)
        kind = find_kind(image)
        # PIL would decode a PNG to look for EXIF, and has swapped the sides of a TIFF already
        if image.format in ("PNG", "TIFF"):
            return image.size, kind
        width, height = image.size
        sides_are_swapped = find_transposition(image) in (
            Image.Transpose.TRANSPOSE,
            Image.Transpose.ROTATE_270,
            Image.Transpose.TRANSVERSE,
            Image.Transpose.ROTATE_90,
        )
        return ((height, width) if sides_are_swapped else (width, height)), kind
