"""Array files, read and written through memory maps."""

import os
from pathlib import Path
from typing import Any

import numpy as np

from kairos.errors import DamagedError, KairosError


def create_array(path: Path, shape: tuple[int, ...], dtype: Any) -> np.memmap:
    """A new .npy file of zeros, open for writing.

    Its room on the disk is taken at once: writing through a memory map to a full disk would kill the process.

    Raises:
        OSError: the disk has no room (ENOSPC); the message names the file.
    """
    array = np.lib.format.open_memmap(path, "w+", dtype, shape)
    with open(path, "r+b") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
        except OSError as error:
            path.unlink()
            raise OSError(error.errno, error.strerror, str(path)) from None
    return array


def read_array(path: Path, command: str) -> np.ndarray:
    """A .npy file, mapped into memory.

    Raises:
        KairosError: it is missing; the message names the `command` of kairos that makes it.
        DamagedError: it ends early, or is no array.
    """
    if not path.is_file():
        raise KairosError(f"{path}: is missing; make it with: kairos {command}")
    try:
        return np.load(path, mmap_mode="r")
    except (ValueError, EOFError) as error:
        raise DamagedError(f"{path}: damaged ({error}); make it again, or pull it with dvc") from None
