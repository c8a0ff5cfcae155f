"""Images that are only encoded stay where they are: a prepared data set refers to them by number, name and checksum."""

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
from kairos_timesteps.errors import DamagedError, KairosError

_AGAIN = "bring it back as it was, or make the folder again with: kairos prepare"


def checksum(pixels: np.ndarray) -> np.ndarray:
    """BLAKE2 of an image's pixels, uint8 (16,)."""
    return np.frombuffer(hashlib.blake2b(pixels.data, digest_size=16).digest(), np.uint8)


class LinkedImages:
    """Images that are decoded when they are asked for, each compared with what stage prepare saw.

    The source is opened by the first that is asked for: a training on latents asks for none.

    Attributes:
        shape: (count, height, width, channels); they are uint8.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any], command: str):
        self.shape = tuple(manifest[name] for name in ("count", "height", "width", "channels"))
        self._folder, self._config = folder, DatasetConfig.model_validate(manifest["refers"])
        names = ("numbers", "checksums", "names")
        self._numbers, self._checksums, self._names = (open_array(folder / f"{name}.npy", command) for name in names)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> np.ndarray:
        """Some images, as of `ArrayFile`.

        Raises:
            KairosError: their source cannot be opened where this runs.
            DamagedError: an image has changed since stage prepare, or has gone; it is named.
        """
        chosen = row_indices(index, len(self))
        images = np.fromiter(map(self._pixels, chosen.flat), np.dtype((np.uint8, self.shape[1:])), chosen.size)
        return images.reshape((*chosen.shape, *self.shape[1:]))

    def _pixels(self, row: int) -> np.ndarray:
        number, config = int(self._numbers[row]), self._config
        name = f"{self._folder}: refers to {self._source.name(number)}, which"
        try:
            image = self._source.read(number)
        except ValueError as error:
            raise DamagedError(f"{name} cannot be read any more ({error}); {_AGAIN}") from None
        pixels = to_pixels(image, config.color, config.crop, config.resolution, name, config.resample)
        if pixels.shape != self.shape[1:] or (checksum(pixels) != self._checksums[row]).any():
            raise DamagedError(f"{name} has changed since kairos prepare; {_AGAIN}")
        return pixels

    @functools.cached_property
    def _source(self) -> Source:
        try:
            source = open_source(self._config)
        except KairosError as error:
            fault = f"refers to images that cannot be read from here ({error}). Paths are relative to the folder that"
            advice = "kairos prepare ran in; or copy the images: dataset.store: copy"
            raise KairosError(f"{self._folder}: {fault} {advice}") from None
        for number, known in zip(self._numbers[:].tolist(), self._names[:].tolist()):
            found = source.name(number) if number < source.count else "nothing"
            if os.fsencode(found) != known:
                fault = f"refers to {os.fsdecode(known)}, which is not where kairos prepare found it ({found} is there)"
                raise DamagedError(f"{self._folder}: {fault}; {_AGAIN}")
        return source
