"""Array files, read and written row by row; nothing of them stays in this process's memory."""

import math
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

from kairos_timesteps.errors import DamagedError, KairosError


class ArrayFile:
    """The rows of a .npy file.

    They are read and not mapped: what is read of a map counts as this process's memory, which would grow with the file,
    and a file that ends early would kill the process.

    Attributes:
        shape, dtype: of the whole array.

    Raises:
        ValueError, EOFError: the file is no array, or ends early.
    """

    def __init__(self, path: Path, writable: bool = False, start: int = 0):
        with open(path, "rb") as file:
            file.seek(start)  # where the array begins in a file of several
            version = npy.read_magic(file)
            read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
            self.shape, fortran, self.dtype = read(file)
            self._start, end = file.tell(), file.seek(0, os.SEEK_END)
        self._size = self.dtype.itemsize * math.prod(self.shape[1:])  # bytes of a row
        if fortran or self.dtype.hasobject or not self.shape:
            raise ValueError(f"got {self.dtype} {self.shape} in Fortran's order, of objects, or without rows")
        if end < self._start + self.shape[0] * self._size:
            raise ValueError(f"ends after {end} bytes")
        self._file = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        self._opened = path, writable, start

    def __reduce__(self) -> Any:
        return ArrayFile, self._opened  # for another process

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> np.ndarray:
        """A copy of some rows: of one by its number, of a slice, or of numbers (n,) in their order.

        Raises:
            DamagedError: the file has become shorter.
        """
        numbers = row_numbers(index, len(self))
        rows = np.empty((*numbers.shape, *self.shape[1:]), self.dtype)
        content, numbers = rows.reshape(-1).view(np.uint8), numbers.reshape(-1)
        firsts = np.flatnonzero(np.diff(numbers, prepend=-2) != 1)  # of each run of rows that lie side by side
        for first, end, number in zip(firsts.tolist(), [*firsts[1:].tolist(), numbers.size], numbers[firsts].tolist()):
            self._moved(os.preadv, content[first * self._size : end * self._size], number)
        return rows

    def write(self, first: int, rows: np.ndarray) -> None:
        """Write rows from number `first` on straight into the file, where it was opened for that."""
        self._moved(os.pwritev, np.ascontiguousarray(rows, self.dtype).reshape(-1).view(np.uint8), first)

    def flush(self) -> None:
        """Make what was written durable."""
        os.fsync(self._file)

    def _moved(self, move: Callable[[int, list[Any], int], int], content: np.ndarray, first: int) -> None:
        place = self._start + first * self._size
        while content.size:
            count = move(self._file, [content.data], place)
            if not count:
                raise DamagedError(f"{self._opened[0]}: ends early; make it again, or pull it with dvc")
            content, place = content[count:], place + count


def row_numbers(index: Any, count: int) -> np.ndarray:
    """The numbers, () or (n,), from 0 of the rows that an index (or a mask) of an array with `count` rows means."""
    if isinstance(index, slice):
        return np.arange(*index.indices(count))
    index = np.asarray(index)
    index = np.flatnonzero(index) if index.dtype == bool else index.astype(np.int64)
    if ((index < -count) | (index >= count)).any():
        raise IndexError(f"row {index} of {count}")
    return index % count


def iterate_blocks(arrays: Iterable[ArrayFile], size: int) -> Iterator[np.ndarray]:
    """The rows of some arrays in turn, at most `size` at a time."""
    return (array[start : start + size] for array in arrays for start in range(0, len(array), size))


def create_array(path: Path, shape: tuple[int, ...], dtype: Any) -> ArrayFile:
    """A new .npy file of zeros, open for writing.

    Its room on the disk is taken at once, so that a disk with too little is found before the work.

    Raises:
        OSError: the disk has no room (ENOSPC); the message names the file.
    """
    with open(path, "wb") as file:
        write_npy_header(file, shape, np.dtype(dtype))
        try:
            os.posix_fallocate(file.fileno(), 0, file.tell() + np.dtype(dtype).itemsize * math.prod(shape))
        except OSError as error:
            path.unlink()
            raise OSError(error.errno, error.strerror, str(path)) from None
    return ArrayFile(path, writable=True)


def truncate_array(path: Path, count: int) -> None:
    """Cut a .npy file off after `count` rows."""
    opened = ArrayFile(path)
    shape = (count, *opened.shape[1:])
    with open(path, "r+b") as file:
        write_npy_header(file, shape, opened.dtype)  # as long as that of any other number of rows
        file.truncate(file.tell() + opened.dtype.itemsize * math.prod(shape))


def write_npy_header(file: Any, shape: tuple[int, ...], dtype: np.dtype) -> None:
    """Write what a .npy file begins with."""
    described = npy.dtype_to_descr(dtype)
    npy.write_array_header_1_0(file, {"descr": described, "fortran_order": False, "shape": shape})


def open_array(path: Path, command: str) -> ArrayFile:
    """The rows of a .npy file.

    Raises:
        KairosError: it is missing; the message names the `command` of kairos that makes it.
        DamagedError: it ends early, or is no array.
    """
    if not path.is_file():
        raise KairosError(f"{path}: is missing; make it with: kairos {command}")
    try:
        return ArrayFile(path)
    except (ValueError, EOFError) as error:
        raise DamagedError(f"{path}: damaged ({error}); make it again, or pull it with dvc") from None
