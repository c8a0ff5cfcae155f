"""Files of images and how they came about: npz, written as the images come and read a few at a time.

The members are ``images``, ``protocol`` (JSON) and ``condition_<name>``; of files from elsewhere, such as ADM's,
``arr_0`` stands for images and ``arr_1`` for classes.
"""

import json
import shutil
import struct
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kairos import resource_usage
from kairos.data.arrays import ArrayFile, iterate_blocks, write_npy_header
from kairos.files import atomic
from kairos.shards import AGAIN, in_order
from kairos_timesteps.errors import KairosError

_BLOCK = 1 << 20
_CONDITION = "condition_"
Parts = Iterable[np.ndarray]


@dataclass(frozen=True)
class SamplesFile:
    """An open file of images.

    Attributes:
        images: uint8 (N, height, width, channels); ``images[slice or int array]`` reads those.
        protocol: how they came about, empty where the file does not say.
        conditions: what the model was told of each, (N, ...) by name, read likewise; texts as bytes in UTF-8.
    """

    images: ArrayFile
    protocol: dict[str, Any]
    conditions: dict[str, ArrayFile]


def write_samples(
    path: Path,
    images: np.ndarray | Parts,
    protocol: dict[str, Any],
    conditions: dict[str, Parts] | None = None,
    num: int = 0,
) -> None:
    """Write images and how they came about, atomically; equal arguments give equal bytes.

    Args:
        path: the file.
        images: uint8 (num, height, width, channels), whole or in parts.
        protocol: JSON values.
        conditions: (num, ...) by name, in parts.
        num: number of images, needed for those in parts.
    """
    stated = np.array(json.dumps(protocol, sort_keys=True))
    told = {_CONDITION + name: parts for name, parts in (conditions or {}).items()}
    with atomic(path) as file, zipfile.ZipFile(file, "w") as archive:
        for name, content in {"images": images, "protocol": stated, **told}.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:  # without a date
                if isinstance(content, np.ndarray):
                    np.lib.format.write_array(member, content, allow_pickle=False)
                else:
                    _write_rows(member, num, content)


def open_samples(path: Path) -> SamplesFile:
    """Open a file of images; all of it is read once, against its checksums, and nothing is kept in memory.

    Raises:
        KairosError: no such file, a damaged one, or no images as `kairos sample` or ADM write them.
    """
    if not path.is_file():
        raise KairosError(f"{path}: no such file; allowed: an npz file with `images` or `arr_0`, uint8, N×H×W×C")
    try:
        with np.load(path, allow_pickle=False) as file:
            protocol = json.loads(str(file["protocol"])) if "protocol" in file else {}
            told = {name.removeprefix(_CONDITION): name for name in file.files if name.startswith(_CONDITION)}
            told |= {"class": "arr_1"} if {"arr_0", "arr_1"} <= set(file.files) else {}
            images = _rows(path, file.zip, "images" if "images" in file else "arr_0")
            conditions = {name: _rows(path, file.zip, member) for name, member in told.items()}
    except Exception as error:  # numpy and zipfile raise many kinds for a damaged file
        raise KairosError(f"{path}: cannot be read as npz with `images` or `arr_0` ({error})") from None
    if images.dtype != np.uint8 or len(images.shape) != 4 or images.shape[-1] not in (1, 3):
        raise KairosError(
            f"{path}: images: got {images.dtype} {images.shape}, allowed: uint8, N×H×W×C with 1 or 3 channels"
        )
    return SamplesFile(images, protocol, conditions)


def join_parts(paths: Sequence[Path], protocol: dict[str, Any], num: int, batch_size: int) -> Iterator[np.ndarray]:
    """The images of all parts of a job in their order, a batch at a time, after all parts have been looked at.

    Args:
        paths: files of the parts, in any order.
        protocol: of the whole.
        num: images of the whole.
        batch_size: images per batch.

    Raises:
        KairosError: a part is missing, damaged, of another job or there twice; the message names it.
    """
    opened = []
    resource_usage.end_startup()
    for path in paths:
        try:
            opened.append(open_samples(path))
        except KairosError as error:
            raise KairosError(f"{error}; {AGAIN}") from None
    said = [(path, one.protocol) for path, one in zip(paths, opened)]
    return iterate_blocks([opened[place].images for place in in_order(said, protocol, num, batch_size)], batch_size)


def _write_rows(file: Any, count: int, parts: Parts) -> None:
    """Write an array of `count` rows in .npy form from its parts, each (n, ...)."""
    written = 0
    for part in parts:
        if not written:
            write_npy_header(file, (count, *part.shape[1:]), part.dtype)
        file.write(part.tobytes())
        written += len(part)
    if written != count:
        raise ValueError(f"got {written} rows, allowed: {count}")


def _rows(path: Path, archive: zipfile.ZipFile, name: str) -> ArrayFile:
    """An array, where it lies in its file; a compressed one in a file of its own that goes with its rows."""
    info = archive.getinfo(f"{name}.npy")
    if info.compress_type != zipfile.ZIP_STORED:
        with archive.open(info) as member, tempfile.NamedTemporaryFile() as unpacked:
            shutil.copyfileobj(member, unpacked, _BLOCK)
            unpacked.flush()
            return ArrayFile(Path(unpacked.name))
    with archive.open(info) as member:
        while member.read(_BLOCK):  # compared with its checksum at the end
            pass
    with open(path, "rb") as file:
        file.seek(info.header_offset + 26)
        name_and_fields = struct.unpack("<HH", file.read(4))
    return ArrayFile(path, start=info.header_offset + 30 + sum(name_and_fields))
