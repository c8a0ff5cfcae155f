"""Array files, read and written row by row; nothing of them stays in this process's memory."""

import mmap
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from kairos.errors import DamagedError, KairosError

_AT_ONCE = 2**24  # bytes that a map may bring into memory
_AROUND = 2**16  # bytes that the kernel maps around each that is read


class Rows:
    """The rows of a .npy file.

    Pages of a map that is kept count as this process's memory once they are read, so that it would grow with the file.
    Each access has a map of its own, which is gone when it ends; and unlike a read per row it gives up the interpreter
    once, not once a row, to a training that is short of it.

    Attributes:
        shape, dtype: of the whole array.

    Raises:
        ValueError, EOFError: the file is no array, or ends early.
    """

    def __init__(self, path: Path, writable: bool = False):
        opened = np.load(path, mmap_mode="r")
        self.shape, self.dtype, self._start = opened.shape, opened.dtype, opened.offset
        self._file = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
        self._access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        weakref.finalize(self, os.close, self._file)
        self._opened = path, writable

    def __reduce__(self) -> Any:
        return Rows, self._opened  # for another process

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> np.ndarray:
        """A copy of some rows: of one by its number, of a slice, or of numbers (n,) in their order."""
        numbers = numbered(index, len(self))
        rows = np.empty((numbers.size, *self.shape[1:]), self.dtype)
        count = max(1, _AT_ONCE // max(_AROUND, rows.itemsize * rows[:1].size))
        for start in range(0, len(rows), count):
            rows[start : start + count] = self._map().take(numbers.flat[start : start + count], axis=0)
        return rows.reshape((*numbers.shape, *self.shape[1:]))

    def __setitem__(self, index: Any, rows: Any) -> None:
        """Write rows straight into the file, where it was opened for that."""
        self._map()[index] = rows

    def flush(self) -> None:
        """Make what was written durable."""
        os.fsync(self._file)

    def _map(self) -> np.ndarray:
        return np.ndarray(self.shape, self.dtype, mmap.mmap(self._file, 0, prot=self._access), self._start)


def numbered(index: Any, count: int) -> np.ndarray:
    """The numbers, () or (n,), of the rows that an index (or a mask) of an array with `count` rows means."""
    if isinstance(index, slice):
        return np.arange(*index.indices(count))
    index = np.asarray(index)
    return np.flatnonzero(index) if index.dtype == bool else index.astype(np.int64)


def create_array(path: Path, shape: tuple[int, ...], dtype: Any) -> Rows:
    """A new .npy file of zeros, open for writing.

    Its room on the disk is taken at once: writing through a memory map to a full disk would kill the process.

    Raises:
        OSError: the disk has no room (ENOSPC); the message names the file.
    """
    with open(path, "wb") as file:
        size = _write_header(file, shape, np.dtype(dtype))
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            path.unlink()
            raise OSError(error.errno, error.strerror, str(path)) from None
    return Rows(path, writable=True)


def shorten(path: Path, count: int) -> None:
    """Cut a .npy file off after `count` rows."""
    opened = Rows(path)
    with open(path, "r+b") as file:
        file.truncate(_write_header(file, (count, *opened.shape[1:]), opened.dtype))


def _write_header(file: Any, shape: tuple[int, ...], dtype: np.dtype) -> int:
    """Write a header, as long as that of any other number of rows; gives the size of the whole file in bytes."""
    described = np.lib.format.dtype_to_descr(dtype)
    np.lib.format.write_array_header_1_0(file, {"descr": described, "fortran_order": False, "shape": shape})
    return file.tell() + dtype.itemsize * int(np.prod(shape, dtype=np.int64))


def read_array(path: Path, command: str) -> Rows:
    """The rows of a .npy file.

    Raises:
        KairosError: it is missing; the message names the `command` of kairos that makes it.
        DamagedError: it ends early, or is no array.
    """
    if not path.is_file():
        raise KairosError(f"{path}: is missing; make it with: kairos {command}")
    try:
        return Rows(path)
    except (ValueError, EOFError) as error:
        raise DamagedError(f"{path}: damaged ({error}); make it again, or pull it with dvc") from None
