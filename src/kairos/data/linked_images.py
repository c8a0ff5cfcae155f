"""Images that stay in their source: a prepared data set stores the index, name and checksum of each.

With a pretrained autoencoder the images are needed for encoding only, and copying them would double the disk space.
"""

import functools
import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np

from kairos.data.arrays import open_array, row_indices
from kairos.data.decode import to_pixels
from kairos.data.settings import DatasetConfig
from kairos.data.sources import Source, open_source
from kairos.threads import count_job_threads, map_in_order
from kairos_timesteps.errors import DamagedError, KairosError

_ADVICE = "bring it back as it was, or make the folder again with: kairos prepare"


def checksum(pixels: np.ndarray) -> np.ndarray:
    """Return the BLAKE2 hash of an image's pixels, uint8 (16,)."""
    return np.frombuffer(hashlib.blake2b(pixels.data, digest_size=16).digest(), np.uint8)


class LinkedImages:
    """Images of a prepared data set that are read from their source, decoded and verified on each access.

    The first access opens the source; training on latents never does.

    Args:
        folder: folder of the prepared data set.
        manifest: record of stage prepare.
        command: kairos command that writes the folder, for error messages.

    Attributes:
        shape: (count, height, width, channels); the images are uint8.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any], command: str):
        self.shape = tuple(manifest[name] for name in ("count", "height", "width", "channels"))
        self._folder = folder
        self._config = DatasetConfig.model_validate(manifest["refers"])
        self._indices = open_array(folder / "numbers.npy", command)
        self._checksums = open_array(folder / "checksums.npy", command)
        self._names = open_array(folder / "names.npy", command)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> np.ndarray:
        """Read some images, selected by an integer, a slice, a mask, or an array of indices (n,).

        Raises:
            KairosError: the source cannot be opened on this machine.
            DamagedError: an image is missing or differs from the one that stage prepare read.
        """
        rows = row_indices(index, len(self))
        image_dtype = np.dtype((np.uint8, self.shape[1:]))
        decoded = map_in_order(self._read, rows.flat, count_job_threads())
        images = np.fromiter(decoded, image_dtype, count=rows.size)
        return images.reshape((*rows.shape, *self.shape[1:]))

    def _read(self, row: int) -> np.ndarray:
        """Read and verify one image, uint8 (height, width, channels)."""
        index = int(self._indices[row])  # of the image in the source
        config = self._config
        name = f"{self._folder}: refers to {self._source.name(index)}, which"  # start of an error message
        try:
            image = self._source.read(index)
        except ValueError as error:
            raise DamagedError(f"{name} cannot be read any more ({error}); {_ADVICE}") from None
        pixels = to_pixels(
            image,
            color=config.color,
            crop=config.crop,
            resolution=config.resolution,
            name=name,
            resample=config.resample,
        )
        if pixels.shape != self.shape[1:] or (checksum(pixels) != self._checksums[row]).any():
            raise DamagedError(f"{name} has changed since kairos prepare; {_ADVICE}")
        return pixels

    @functools.cached_property
    def _source(self) -> Source:
        """The source of the images, after a check that all their names are unchanged."""
        try:
            source = open_source(self._config)
        except KairosError as error:
            raise KairosError(
                f"{self._folder}: refers to images that cannot be read from here ({error}). Paths are relative to the "
                "folder that kairos prepare ran in; or copy the images: dataset.store: copy"
            ) from None
        for index, recorded_name in zip(self._indices[:].tolist(), self._names[:].tolist()):
            name = source.name(index) if index < source.count else "nothing"
            if os.fsencode(name) != recorded_name:
                raise DamagedError(
                    f"{self._folder}: image {index} of the source was {os.fsdecode(recorded_name)} at kairos prepare, "
                    f"and is {name} now; {_ADVICE}"
                )
        return source
