"""Files of generated images with their sampling protocol: npz, written and read in batches.

The arrays of a file are ``images``, ``protocol`` (JSON) and ``condition_<name>``. In files of other projects, such as
ADM's, ``arr_0`` contains the images and ``arr_1`` the classes. numpy itself reads and writes each array of an npz as a
whole.
"""

import itertools
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
from jaxtyping import Shaped
from PIL import Image

from kairos import resource_usage
from kairos.array_shapes import ImageArray, ImageBatch
from kairos.data.arrays import ArrayFile, iterate_blocks, write_npy_header
from kairos.files import atomic, hash_npz, sha256_bytes, sha256_json
from kairos.shards import AGAIN, order_shards
from kairos_timesteps.errors import KairosError

_BLOCK = 1 << 20  # bytes read at a time
# A member of a zip file begins with a local file header: 30 bytes, then its name, then its extra field. The lengths of
# name and extra field are little-endian 16-bit numbers at byte 26 of the header (PKWARE's APPNOTE, section 4.3.7).
_LOCAL_HEADER_BYTES = 30
_LENGTHS_OFFSET = 26
_CONDITION = "condition_"  # prefix of the names of arrays with conditions
RowBatch = Shaped[np.ndarray, "_ ..."]  # sizes of batches differ
Batches = Iterable[RowBatch]


@dataclass(frozen=True)
class SamplesFile:
    """An open file of generated images.

    Attributes:
        images: uint8 (N, height, width, channels); ``images[slice or int array]`` reads rows from the file.
        protocol: settings that the images were generated with; empty if the file has none.
        conditions: conditions of the model by name, (N, ...), read in the way of `images`; texts as bytes in UTF-8.
    """

    images: ArrayFile
    protocol: dict[str, Any]
    conditions: dict[str, ArrayFile]


def write_samples(
    path: Path,
    images: ImageArray | Batches,
    protocol: dict[str, Any],
    conditions: dict[str, Batches] | None = None,
    num: int = 0,
) -> None:
    """Write images with their sampling protocol and conditions, atomically; equal arguments give equal bytes.

    The arrays are not compressed. Missing parent folders are created.

    Args:
        path: the file.
        images: uint8 (num, height, width, channels), in one array or in batches.
        protocol: JSON values.
        conditions: conditions by name, each (num, ...), in batches.
        num: number of images; required for images in batches and for conditions. The length of images in one array is
            not compared with it.

    Raises:
        ValueError: there is no batch, or the batches have another number of rows than `num`.
    """
    protocol_text = json.dumps(protocol, sort_keys=True)
    arrays: dict[str, np.ndarray | Batches] = {"images": images, "protocol": np.array(protocol_text)}
    for name, batches in (conditions or {}).items():
        arrays[_CONDITION + name] = batches
    with atomic(path) as file, zipfile.ZipFile(file, "w") as archive:
        for name, content in arrays.items():
            # `open` writes a constant date; the size, which may be above 2 GiB, is not known yet
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                if isinstance(content, np.ndarray):
                    np.lib.format.write_array(member, content, allow_pickle=False)
                else:
                    _write_rows(member, num, content)


def open_samples(path: Path) -> SamplesFile:
    """Open a file of generated images after checking the checksums of its arrays.

    The rows of an array are read from the file on access. A compressed array is unpacked into a temporary file. In a
    file with ``arr_0``, the classes in ``arr_1`` become the condition ``class``, as ADM writes them. Further arrays are
    ignored. If a file contains both ``images`` and ``arr_0``, the result has ``images``. The protocol of a file without
    one is empty.

    Raises:
        KairosError: the file is missing or damaged, or lacks images in the form of `kairos sample` or ADM.
    """
    if not path.is_file():
        raise KairosError(f"{path}: no such file; allowed: an npz file with `images` or `arr_0`, uint8, N×H×W×C")
    try:
        with np.load(path, allow_pickle=False) as file:
            protocol = json.loads(str(file["protocol"])) if "protocol" in file else {}
            # `_open_array` compares checksums; numpy compares the protocol's
            images = _open_array(path, file.zip, "images" if "images" in file else "arr_0")
            conditions = {}
            for array_name in file.files:
                if array_name.startswith(_CONDITION):
                    conditions[array_name.removeprefix(_CONDITION)] = _open_array(path, file.zip, array_name)
            if {"arr_0", "arr_1"} <= set(file.files):
                conditions["class"] = _open_array(path, file.zip, "arr_1")
    except Exception as error:  # numpy and zipfile raise many kinds for a damaged file
        raise KairosError(f"{path}: cannot be read as npz with `images` or `arr_0` ({error})") from None
    has_image_shape = len(images.shape) == 4 and images.shape[-1] in (1, 3)
    if images.dtype != np.uint8 or not has_image_shape:
        raise KairosError(
            f"{path}: images: got {images.dtype} {images.shape}, allowed: uint8, N×H×W×C with 1 or 3 channels"
        )
    return SamplesFile(images, protocol, conditions)


def hash_samples(samples: Path, picture: Path) -> str:
    """Return the hash of the arrays in a file of samples and of the pixels of their picture."""
    with Image.open(picture) as image:
        return sha256_json({"arrays": hash_npz(samples), "picture": sha256_bytes(image.tobytes())})


def merge_shards(paths: Sequence[Path], protocol: dict[str, Any], num: int, batch_size: int) -> Iterator[ImageBatch]:
    """Return the images of all shards of a job in their order, in batches; every file is checked before the return.

    Marks the end of start-up, see `resource_usage.end_startup`. The batches are read only when the result is iterated.

    Args:
        paths: files of the shards, in any order.
        protocol: sampling protocol of the whole job.
        num: number of images of the whole job.
        batch_size: images per batch, as in the jobs of the shards.

    Raises:
        KairosError: a shard is missing, damaged, duplicate or of another job; the message contains its file.
    """
    shards: list[SamplesFile] = []
    resource_usage.end_startup()
    for path in paths:
        try:
            shards.append(open_samples(path))
        except KairosError as error:
            raise KairosError(f"{error}; {AGAIN}") from None
    shard_protocols = [(path, shard.protocol) for path, shard in zip(paths, shards)]
    order = order_shards(shard_protocols, protocol, count=num, batch_size=batch_size)
    return iterate_blocks([shards[index].images for index in order], batch_size)


def _write_rows(file: Any, count: int, batches: Batches) -> None:
    """Write an array of `count` rows in .npy form to a file, from batches (n, ...).

    The first batch, which may be empty, sets data type and shape of a row.

    Raises:
        ValueError: there is no batch, or the batches have another number of rows.
    """
    later_batches = iter(batches)
    first_batch = next(later_batches, None)
    if first_batch is None:
        raise ValueError(f"got no batch, allowed: batches of {count} rows")
    write_npy_header(file, (count, *first_batch.shape[1:]), first_batch.dtype)
    written_rows = 0
    for batch in itertools.chain([first_batch], later_batches):
        file.write(batch.tobytes())
        written_rows += len(batch)
    if written_rows != count:
        raise ValueError(f"got {written_rows} rows, allowed: {count}")


def _open_array(path: Path, archive: zipfile.ZipFile, name: str) -> ArrayFile:
    """Open an array of the npz file at `path`, opened as `archive`, after checking its checksum.

    Rows are read from the file on access. A compressed array is first unpacked into a temporary file.

    Raises:
        KeyError: the file has no such array.
        zipfile.BadZipFile: the content does not match its checksum.
        ValueError, EOFError: the content is not an array, or ends early.
    """
    member_info = archive.getinfo(f"{name}.npy")
    if member_info.compress_type != zipfile.ZIP_STORED:
        return _unpack_array(archive, member_info)
    with archive.open(member_info) as member:
        while member.read(_BLOCK):  # zipfile compares the checksum in the last read
            pass
    return ArrayFile(path, start=_content_offset(path, member_info))


def _unpack_array(archive: zipfile.ZipFile, member_info: zipfile.ZipInfo) -> ArrayFile:
    """Unpack a compressed array into a temporary file and open it; zipfile compares the checksum."""
    with archive.open(member_info) as member, tempfile.NamedTemporaryFile() as unpacked:
        shutil.copyfileobj(member, unpacked, _BLOCK)
        unpacked.flush()  # the next line opens the file again by its name
        return ArrayFile(Path(unpacked.name))  # open before the file is deleted; the kernel keeps it until it is closed


def _content_offset(path: Path, member_info: zipfile.ZipInfo) -> int:
    """Return the byte of a zip file at which the content of a member begins."""
    with open(path, "rb") as file:
        # the extra field here may be longer than in `member_info`, which comes from the directory at the file's end
        file.seek(member_info.header_offset + _LENGTHS_OFFSET)
        name_length, extra_length = struct.unpack("<HH", file.read(4))  # bytes
    offset: int = member_info.header_offset + _LOCAL_HEADER_BYTES + name_length + extra_length
    return offset
