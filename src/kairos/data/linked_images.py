"""Images that stay in their source: a prepared data set stores the index, name and checksum of each.

With a pretrained autoencoder the images are needed for encoding and for the reference only, and copying them would
double the disk space. Until the reference is complete, a temporary copy of the decoded images saves decoding them again
in each stage. No copy is created if it would exceed 32 GiB, or if the disk has little free space. The copy may be
deleted at any time.
"""

import hashlib
import math
import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from kairos.array_shapes import ImageArray, SingleImage
from kairos.data.arrays import ArrayFile, create_array, open_array, row_indices
from kairos.data.decode import to_pixels
from kairos.data.settings import DatasetConfig
from kairos.data.sources import Source, open_source
from kairos.data.values import measure_values
from kairos.files import DamagedError
from kairos.threads import count_job_threads, map_in_order
from kairos_timesteps.errors import KairosError

TEMPORARY_COPY = ".tmp-pixels.npy"  # file in the data set's folder, with a name that DVC ignores
_COPIES_IN_FREE_SPACE = 10  # a temporary copy is created if this many copies fit in the free space
_LARGEST_COPY = 32 * 2**30  # bytes of a temporary copy; file systems that many users share have quotas
# ends error messages about a changed source
_ADVICE = "bring it back as it was, or make the folder again with: kairos prepare"

Checksum = UInt8[np.ndarray, "16"]


def checksum(pixels: SingleImage) -> Checksum:
    """Return the 16 bytes of the BLAKE2 hash of an image's pixels, uint8 (16,); the shape is not included."""
    return np.frombuffer(hashlib.blake2b(pixels.data, digest_size=16).digest(), np.uint8)


def create_temporary_copy(folder: Path, shape: tuple[int, ...]) -> ArrayFile | None:
    """Create the array file for a temporary copy of decoded images, filled with zeros, and return it open for writing.

    Return None if the copy exceeds 32 GiB, if ten copies do not fit into the free space, or if the file cannot be
    created.

    Args:
        folder: folder of the prepared data set.
        shape: (count, height, width, channels) of the images.
    """
    size = math.prod(shape)  # bytes
    if size > _LARGEST_COPY or size * _COPIES_IN_FREE_SPACE > shutil.disk_usage(folder).free:
        return None
    try:
        return create_array(folder / TEMPORARY_COPY, shape, np.uint8)
    except OSError:  # such as a quota
        return None


def delete_temporary_copy(folder: Path) -> None:
    """Delete the temporary copy of images in a data set's folder, if there is one; processes can read open copies."""
    (folder / TEMPORARY_COPY).unlink(missing_ok=True)


class LinkedImages:
    """Images of a prepared data set that are in their source; they are verified on each access.

    Images are read from the temporary copy if there is one. Otherwise they are decoded again. The first image to decode
    opens the source; training on latents never does.

    Args:
        folder: folder of the prepared data set.
        record: record of stage prepare.
        command: kairos command that writes the folder, for error messages.

    Attributes:
        shape: (count, height, width, channels); the images are uint8.

    Raises:
        KairosError: an array file of the folder is missing.
        DamagedError: an array file ends early.
    """

    def __init__(self, folder: Path, record: dict[str, Any], command: str):
        self.shape = tuple(record[name] for name in ("count", "height", "width", "channels"))
        self._folder = folder
        self._config = DatasetConfig.model_validate(record["refers"])
        self._indices = open_array(folder / "numbers.npy", command)
        self._checksums = open_array(folder / "checksums.npy", command)
        self._names = open_array(folder / "names.npy", command)
        self._copy = self._open_copy()
        self._opened_source: Source | None = None
        self._source_lock = threading.Lock()

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getitem__(self, index: Any) -> ImageArray | SingleImage:
        """Read uint8 images (n, height, width, channels), selected by an integer, a slice, a mask, or indices (n,).

        An integer selects one image without the first axis. The threads of the job decode several images at a time.

        Raises:
            IndexError: an index is out of range.
            KairosError: the source cannot be opened on this machine, or an image no longer fits `dataset.crop`.
            DamagedError: an image differs from the one that stage prepare read, or any image of the data set is missing
                or has another name.
        """
        rows = row_indices(index, len(self))  # (n,), or () for an integer
        image_shape = self.shape[1:]
        image_dtype = np.dtype((np.uint8, image_shape))  # an element of this type is an image
        decoded = map_in_order(self._read, rows.ravel().tolist(), count_job_threads())
        images = np.fromiter(decoded, image_dtype, count=rows.size)  # stores each image as it arrives
        return images.reshape((*rows.shape, *image_shape))

    def _open_copy(self) -> ArrayFile | None:
        """Open the temporary copy; return None if it is missing or damaged, or has another shape or type of pixels."""
        try:
            copy = ArrayFile(self._folder / TEMPORARY_COPY)
        except (OSError, ValueError, EOFError):
            return None
        return copy if copy.shape == self.shape and copy.dtype == np.uint8 else None

    def _read(self, row: int) -> SingleImage:
        """Read and verify one image, uint8 (height, width, channels), from the temporary copy or else from the source.

        The source is used if there is no copy, or if the image cannot be read there or does not match its checksum. See
        `_decode` for the errors.
        """
        if self._copy is not None:
            with suppress(DamagedError, OSError):  # the copy has become shorter, or its disk fails
                pixels = self._copy[row]
                if (checksum(pixels) == self._checksums[row]).all():
                    return pixels
        return self._decode(row)

    def _decode(self, row: int) -> SingleImage:
        """Decode one image of the source, uint8 (height, width, channels), and compare it with its checksum.

        The first call opens the source and compares the names of all images.

        Raises:
            KairosError: the source cannot be opened on this machine, or the image no longer fits `dataset.crop`.
            DamagedError: the image differs from the one that stage prepare read, or any image of the data set is
                missing or has another name.
        """
        index = int(self._indices[row])  # index of the image in the source
        config = self._config
        image_description = f"{self._folder}: refers to {self._source.name(index)}, which"  # begins error messages
        try:
            image = self._source.read(index)
            measure_values(image)  # raises ValueError for NaN, which could become the pixels of before
        except ValueError as error:
            raise DamagedError(f"{image_description} cannot be read any more ({error}); {_ADVICE}") from None
        pixels = to_pixels(
            image,
            color=config.color,
            crop=config.crop,
            resolution=config.resolution,
            name=image_description,
            resample=config.resample,
            value_range=config.value_range,
        )
        if pixels.shape != self.shape[1:] or (checksum(pixels) != self._checksums[row]).any():
            raise DamagedError(f"{image_description} has changed since kairos prepare; {_ADVICE}")
        return pixels

    @property
    def _source(self) -> Source:
        """The source of the images, which the first access opens; see `_open_source` for the errors."""
        with self._source_lock:  # other threads wait while one opens the source
            if self._opened_source is None:
                self._opened_source = self._open_source()
            return self._opened_source

    def _open_source(self) -> Source:
        """Open the source of the images, and check that the names of all prepared images are unchanged.

        Raises:
            KairosError: the source cannot be opened on this machine.
            DamagedError: an image of the data set has another name, or is missing.
        """
        try:
            source = open_source(self._config)
        except KairosError as error:
            raise KairosError(
                f"{self._folder}: refers to images that cannot be read from here ({error}). Paths are relative to the "
                "folder that kairos prepare ran in; or copy the images: dataset.store: copy"
            ) from None
        for index, recorded_name in zip(self._indices[:].tolist(), self._names[:].tolist()):
            present_name = source.name(index) if index < source.count else "nothing"
            if os.fsencode(present_name) != recorded_name:
                raise DamagedError(
                    f"{self._folder}: image {index} of the source was {os.fsdecode(recorded_name)} at kairos prepare, "
                    f"and is {present_name} now; {_ADVICE}"
                )
        return source
