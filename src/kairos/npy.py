"""Arrays in .npy form that are written as their rows come and read a few rows at a time: none is held in memory."""

import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.lib import format as npy

from kairos.errors import DamagedError


def write_rows(file: Any, count: int, parts: Iterable[np.ndarray]) -> None:
    """Write an array of `count` rows to an open file, byte by byte as numpy writes it whole.

    Args:
        file: where it goes, from the position on where it stands.
        count: number of rows.
        parts: the rows in order, each part (n, ...) of the same dtype and shape of a row.

    Raises:
        ValueError: they are more or fewer rows, or no part comes at all.
    """
    written, header = 0, False
    for part in parts:
        if not header:
            described = {"descr": npy.dtype_to_descr(part.dtype), "fortran_order": False}
            npy.write_array_header_1_0(file, {**described, "shape": (count, *part.shape[1:])})
            header = True
        file.write(part.tobytes())
        written += len(part)
    if written != count or not header:
        raise ValueError(f"got {written} rows, allowed: {count}")


class Rows:
    """The rows of an array in a file: ``rows[slice or int array]`` reads them and gives a copy.

    Attributes:
        shape, dtype: of the whole array.
    """

    def __init__(self, file: Any):
        """Take over a file that is open for reading where a .npy begins.

        Raises:
            ValueError: there is none, or its rows do not lie one after the other.
        """
        version = npy.read_magic(file)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        self.shape, fortran, self.dtype = read(file)
        if fortran or self.dtype.hasobject or not self.shape:
            raise ValueError(f"got {self.dtype} {self.shape} in Fortran's order, of objects, or without rows")
        self._file, self._begins = file, file.tell()
        weakref.finalize(self, file.close)

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getitem__(self, which: Any) -> np.ndarray:
        wanted = np.arange(len(self))[which]
        rows = np.empty((*wanted.shape, *self.shape[1:]), self.dtype)
        numbers, size = wanted.ravel(), int(np.prod(self.shape[1:])) * self.dtype.itemsize
        into = rows.reshape(-1).view(np.uint8)
        ends = [*(np.flatnonzero(np.diff(numbers) != 1) + 1), len(numbers)]  # of runs that lie side by side
        for start, end in zip([0, *ends], ends):
            if start < end:
                self._file.seek(self._begins + int(numbers[start]) * size)
                if self._file.readinto(into[start * size : end * size]) < (end - start) * size:
                    raise DamagedError(f"{self._file.name}: ends before row {int(numbers[end - 1]) + 1}")
        return rows
