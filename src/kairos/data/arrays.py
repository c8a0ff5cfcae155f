"""Array files (.npy) that are read and written row by row, so that memory does not grow with the file."""

import math
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

from kairos.files import DamagedError
from kairos.threads import read_all
from kairos_timesteps.errors import KairosError


class ArrayFile:
    """A .npy file whose rows are read by indexing, ``array_file[3:5]``, as numpy arrays.

    The file is not memory-mapped: mapped pages would be included in this process's memory, and a file that ends early
    would kill the process.

    Args:
        path: the file.
        writable: open the file for `write` too.
        start: byte at which the array begins, for a file that contains several arrays.

    Attributes:
        shape: shape of the whole array.
        dtype: data type of the array.

    Raises:
        ValueError, EOFError: the file is not an array, or ends early.
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, writable: bool = False, start: int = 0):
        with open(path, "rb") as file:
            file.seek(start)
            version = npy.read_magic(file)
            read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
            self.shape, is_fortran_order, self.dtype = read_header(file)
            self._first_byte = file.tell()
            file_size = file.seek(0, os.SEEK_END)
        self._row_size = self.dtype.itemsize * math.prod(self.shape[1:])  # bytes
        if is_fortran_order or self.dtype.hasobject or not self.shape:
            raise ValueError(f"got {self.dtype} {self.shape} in Fortran's order, of objects, or without rows")
        if file_size < self._first_byte + self.shape[0] * self._row_size:
            raise ValueError(f"ends after {file_size} bytes")
        self._file = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)  # closes the file when this object is deleted
        self._arguments = path, writable, start

    def __reduce__(self) -> Any:
        return ArrayFile, self._arguments  # another process opens the file again

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> np.ndarray:
        """Read rows from the file, selected by an integer, a slice, a mask, or an array of indices (n,), in this order.

        The result is a new array. An integer selects one row, without the first axis.

        Raises:
            IndexError: an index is out of range.
            DamagedError: the file has become shorter.
        """
        indices = row_indices(index, len(self))
        rows = np.empty((*indices.shape, *self.shape[1:]), self.dtype)
        rows_as_bytes = rows.reshape(-1).view(np.uint8)  # shares memory with `rows`
        indices = indices.reshape(-1)  # a single index becomes (1,)

        def read_run(run: tuple[int, int]) -> None:
            start, end = run  # positions in `indices`, and so in `rows`
            run_bytes = rows_as_bytes[start * self._row_size : end * self._row_size]
            self._transfer(os.preadv, run_bytes, first_row=int(indices[start]))

        read_all(read_run, _find_runs(indices))  # consecutive rows of the file are read at once
        return rows

    def write(self, first: int, rows: np.ndarray) -> None:
        """Write rows (n, ...), converted to the file's data type, to rows `first` ... `first` + n - 1 of the file.

        The caller ensures that the file is writable and has these rows: rows beyond its end would make it longer.
        """
        content = np.ascontiguousarray(rows, self.dtype).reshape(-1).view(np.uint8)
        self._transfer(os.pwritev, content, first_row=first)

    def flush(self) -> None:
        """Make all written rows durable on the disk."""
        os.fsync(self._file)

    def _transfer(self, operation: Callable[[int, list[Any], int], int], content: np.ndarray, first_row: int) -> None:
        """Fill `content` with bytes of the file, or write its bytes to the file, from row `first_row` on.

        Args:
            operation: `os.preadv` to read, `os.pwritev` to write.
            content: bytes of the rows, uint8 (bytes,).
            first_row: row of the file.

        Raises:
            DamagedError: the file ends early.
        """
        offset = self._first_byte + first_row * self._row_size
        while content.size:  # one call may transfer less
            transferred = operation(self._file, [content.data], offset)  # bytes
            if not transferred:
                path, *_ = self._arguments
                raise DamagedError(f"{path}: ends early; make it again, or pull it with dvc")
            content = content[transferred:]
            offset += transferred


def row_indices(index: Any, count: int) -> np.ndarray:
    """Convert an integer, slice, mask or array of indices to row indices from 0, int64: () for an integer, else (n,).

    Args:
        index: index of an array with `count` rows. Negative indices count from the end. The length of a mask is not
            checked.
        count: number of rows.

    Raises:
        IndexError: an index is out of range.
    """
    if isinstance(index, slice):
        start, stop, step = index.indices(count)
        return np.arange(start, stop, step)
    indices = np.asarray(index)
    if indices.dtype == bool:
        indices = np.flatnonzero(indices)
    indices = indices.astype(np.int64)  # also an empty list, which numpy makes an array of floats
    if ((indices < -count) | (indices >= count)).any():
        raise IndexError(f"row {indices} of {count}")
    return indices % count  # negative indices become indices from the start


def _find_runs(indices: np.ndarray) -> list[tuple[int, int]]:
    """Return start and end positions of the runs of consecutive indices: (0, 3) and (3, 5) for indices 5, 6, 7, 2, 3.

    Args:
        indices: indices from 0, int64 (n,).
    """
    # A run starts where an index is not its predecessor + 1. The first index gets predecessor -2, so that a run always
    # starts there.
    starts = np.flatnonzero(np.diff(indices, prepend=-2) != 1).tolist()
    ends = [*starts[1:], indices.size]
    return list(zip(starts, ends))


def iterate_blocks(arrays: Iterable[ArrayFile], size: int) -> Iterator[np.ndarray]:
    """Yield the rows of several array files one after another, in blocks of one file and of at most `size` rows."""
    for array in arrays:
        for start in range(0, len(array), size):
            yield array[start : start + size]


def create_array(path: Path, shape: tuple[int, ...], dtype: Any) -> ArrayFile:
    """Create a .npy file of zeros, and return it open for reading and writing.

    An existing file is overwritten. The space on the disk is allocated at once, so that a full disk is noticed before
    the computation.

    Raises:
        OSError: the file cannot be created, or the disk has too little space (ENOSPC). In the second case the message
            contains the path, and no file remains, not even an earlier one.
    """
    with open(path, "wb") as file:
        write_npy_header(file, shape, np.dtype(dtype))
        file_size = file.tell() + np.dtype(dtype).itemsize * math.prod(shape)  # bytes, of header and rows
        try:
            os.posix_fallocate(file.fileno(), 0, file_size)
        except OSError as error:
            path.unlink()
            raise OSError(error.errno, error.strerror, str(path)) from None
    return ArrayFile(path, writable=True)


def truncate_array(path: Path, count: int) -> None:
    """Cut a .npy file off after `count` rows, and write the new number of rows into its header.

    The caller ensures that `create_array` wrote the file, and that it has `count` rows or more.
    """
    array = ArrayFile(path)
    shape = (count, *array.shape[1:])
    with open(path, "r+b") as file:
        write_npy_header(file, shape, array.dtype)  # numpy pads headers: their size does not depend on the row count
        file.truncate(file.tell() + array.dtype.itemsize * math.prod(shape))


def write_npy_header(file: Any, shape: tuple[int, ...], dtype: np.dtype) -> None:
    """Write the header of a .npy file, for rows in C order, at the current position of a file that is open for bytes.

    The position is then that of the first row.
    """
    description = npy.dtype_to_descr(dtype)
    npy.write_array_header_1_0(file, {"descr": description, "fortran_order": False, "shape": shape})


def open_array(path: Path, command: str) -> ArrayFile:
    """Open a .npy file for reading.

    Args:
        path: the file.
        command: kairos command that writes the file, for the error message.

    Raises:
        KairosError: the file is missing.
        DamagedError: the file ends early, or is not an array.
    """
    if not path.is_file():
        raise KairosError(f"{path}: is missing; make it with: kairos {command}")
    try:
        return ArrayFile(path)
    except (ValueError, EOFError) as error:
        raise DamagedError(f"{path}: damaged ({error}); make it again, or pull it with dvc") from None
