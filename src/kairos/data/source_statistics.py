"""Number of images of a data set and size of its smallest class, without reading an image or importing `datasets`.

Checks before any job use both. Names of files, or the number of rows and the column of labels, are enough.
"""

import os
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kairos.data.settings import DatasetConfig
from kairos_timesteps.errors import ConfigError

_LOOKED_AT = 20_000
_DIGITS, _RAREST = 1797, 174  # scikit-learn's images, and those of the rarest digit


@dataclass(frozen=True)
class ImageCounts:
    """Known properties of a data set before it is prepared.

    Attributes:
        train: number of training images; None where that is not known.
        smallest: number of images of the smallest class, training and held out; None without labels.
        unknown: why nothing is known; else empty.
        count: number of images, training and held out (with a place of their own not counted).
        classes: number of classes; None without labels.
    """

    train: int | None = None
    smallest: int | None = None
    unknown: str = ""
    count: int | None = field(default=None, compare=False)
    classes: int | None = field(default=None, compare=False)


def count_images(config: DatasetConfig) -> ImageCounts:
    """Count the images and classes of a data set, without preparing it.

    With `dataset.limit`, the size of the smallest class is the average over random subsets. Broken images are counted.

    Raises:
        ConfigError: the number of images is known, and is not `dataset.images`.
    """
    try:
        looks = {"digits": lambda _: (_DIGITS, dict.fromkeys(range(10), _RAREST)), "parquet": _parquet, "hub": _hub}
        count, labels = looks.get(config.source, _files)(config)
    except (ConfigError, OSError, ValueError, LookupError) as error:  # arrow's own errors are of the latter kinds
        return ImageCounts(unknown=" ".join(str(error).split()))
    config.check_count(count)
    kept = min(count, config.limit or count)
    heldout = 0 if isinstance(config.heldout, str) else config.heldout_count(kept)
    smallest = min(labels.values()) * kept // count if labels else None
    return ImageCounts(kept - heldout, smallest, count=kept, classes=len(labels) or None)


def _files(config: DatasetConfig) -> tuple[int, dict[Any, int]]:
    """Count the images of a folder or a zip, and the images of each class; only names of files are read."""
    from kairos.data.sources import OPENERS

    source = OPENERS[config.source](config)
    return source.count, Counter([] if source.labels is None else source.labels.tolist())


def _parquet(config: DatasetConfig) -> tuple[int, dict[Any, int]]:
    import pyarrow.parquet as pq

    from kairos.data.sources import parquet_files

    files = [pq.ParquetFile(file) for file in parquet_files(config)]
    column = config.find_label_column(files[0].schema_arrow.names)
    return _counted([file.read([column] if column else []) for file in files], column)


def _hub(config: DatasetConfig) -> tuple[int, dict[Any, int]]:
    """Count images and classes in the hub's cache, which contains each split as Arrow files of `datasets`."""
    import pyarrow as pa

    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    cache = Path(os.environ.get("HF_DATASETS_CACHE", f"{home}/datasets")).expanduser()
    space, _, name = str(config.path).rpartition("/")
    folder = "___".join(filter(None, (space, re.sub(r"(?<=[a-z\d])(?=[A-Z])", "_", name).lower())))
    found = sorted(cache.glob(f"{folder}/*/*/*/*-{config.split}*.arrow"))
    if not found:
        raise ConfigError(f"hub data set {config.path!r} is not in the Hugging Face cache yet; kairos fetch brings it")
    files = (str(file) for file in found if file.parent == found[0].parent)
    tables = [pa.ipc.open_stream(pa.memory_map(file)).read_all() for file in files]
    return _counted(tables, config.find_label_column(tables[0].column_names))


def _counted(tables: list[Any], column: str | None) -> tuple[int, dict[Any, int]]:
    """Rows of some tables of arrow, and those of each class in the column of labels."""
    labels = Counter(value for table in tables for value in table[column].to_pylist()) if column else Counter()
    return sum(map(len, tables)), labels


@dataclass(frozen=True)
class Look:
    """Sizes and colours of a folder's images.

    Attributes:
        sizes: number of images of each size (width, height).
        grey: number of images without colour.
        unread: images that cannot be read, with the reason.
    """

    sizes: Counter[tuple[int, int]]
    grey: int
    unread: list[str]

    @property
    def cut(self) -> tuple[int, float]:
        """Number of images that are not square, and the share of their area that a centre crop removes."""
        oblong = {size: count for size, count in self.sizes.items() if size[0] != size[1]}
        whole = sum(width * height * count for (width, height), count in oblong.items())
        kept = sum(min(size) ** 2 * count for size, count in oblong.items())
        return sum(oblong.values()), 1 - kept / whole if whole else 0.0


def inspect_images(config: DatasetConfig, whole: bool = False) -> Look:
    """Look at a folder's images, 20,000 evenly spread ones of more: at their heads, or at them as a `whole`.

    Raises:
        ConfigError: there is no such folder, or no image in it.
    """
    from PIL import Image, ImageChops

    from kairos.data.sources import OPENERS

    source, seen, grey = OPENERS["folder"](config), Look(Counter(), 0, []), 0
    for number in range(0, source.count, -(-source.count // _LOOKED_AT)):
        try:
            if whole:
                image = source.read(number)
                red, *others = image.convert("RGB").split()
                grey += not any(ImageChops.difference(red, other).getbbox() for other in others)
                size = image.size
            else:
                with Image.open(Path(str(config.path), source.name(number))) as image:
                    turned = image.format != "PNG" and image.getexif().get(0x0112, 1) > 4
                    size = image.size[::-1] if turned else image.size
            seen.sizes[size] += 1
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            seen.unread.append(f"{source.name(number)} ({' '.join(str(error).split())})")
    return replace(seen, grey=grey)
