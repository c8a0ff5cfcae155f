"""Rows of array files equal those that numpy reads, and the process's memory does not keep the file."""

import pickle
import subprocess
import sys

import numpy as np
import pytest

from kairos.data.arrays import ArrayFile, create_array, open_array, truncate_array
from kairos.files import DamagedError
from kairos_timesteps.errors import KairosError


@pytest.fixture
def array(tmp_path):
    """An array, also written to the file a.npy."""
    values = np.random.default_rng(0).integers(0, 256, (700, 5, 3), dtype=np.uint8)
    np.save(tmp_path / "a.npy", values)
    return values


@pytest.mark.parametrize(
    "index",
    [7, -1, np.int64(3), slice(None), slice(2, 600, 7), slice(5, 5), [3, 1, 1, -2], np.array([], np.int64), "mask"],
    ids=str,
)
def test_rows_equal_those_of_numpy(tmp_path, array, index):
    index = np.arange(700) % 3 == 0 if isinstance(index, str) else index
    rows = ArrayFile(tmp_path / "a.npy")[index]
    assert rows.dtype == np.uint8 and rows.shape == array[index].shape
    assert np.array_equal(rows, array[index])
    rows[...] = 0  # rows are a copy of the file
    assert np.array_equal(np.load(tmp_path / "a.npy"), array)


def test_a_missing_row_raises_an_index_error(tmp_path, array):
    with pytest.raises(IndexError):
        ArrayFile(tmp_path / "a.npy")[[3, 700]]


@pytest.mark.parametrize(
    "values", [np.arange(1000), np.array([b"one", b"three"]), np.empty((0, 3)), np.eye(9)], ids=len
)
def test_rows_of_other_types_and_shapes_equal_those_of_numpy(tmp_path, values):
    np.save(tmp_path / "values.npy", values)
    rows = ArrayFile(tmp_path / "values.npy")
    indices = np.random.default_rng(1).integers(0, len(values), min(len(values), 50))
    assert (
        len(rows) == len(values) and np.array_equal(rows[:], values) and np.array_equal(rows[indices], values[indices])
    )


def test_written_rows_form_a_file_of_numpy(tmp_path, array):
    rows = create_array(tmp_path / "new.npy", array.shape, np.uint8)
    rows.write(3, array[3])
    rows.write(100, array[100:300, ::-1].astype(np.int64)[:, ::-1])
    rows.flush()
    expected = np.zeros_like(array)
    expected[3], expected[100:300] = array[3], array[100:300]
    assert np.array_equal(rows[:], expected)
    np.save(tmp_path / "expected.npy", expected)
    assert (tmp_path / "new.npy").read_bytes() == (tmp_path / "expected.npy").read_bytes()
    truncate_array(tmp_path / "new.npy", 101)
    np.save(tmp_path / "expected.npy", expected[:101])
    assert (tmp_path / "new.npy").read_bytes() == (tmp_path / "expected.npy").read_bytes()


def test_another_process_opens_the_file_again(tmp_path, array):
    assert np.array_equal(pickle.loads(pickle.dumps(ArrayFile(tmp_path / "a.npy")))[:], array)


def test_missing_and_damaged_files_are_reported(tmp_path, array):
    with pytest.raises(KairosError, match=r"b\.npy: is missing; make it with: kairos prepare"):
        open_array(tmp_path / "b.npy", "prepare")
    (tmp_path / "a.npy").write_bytes((tmp_path / "a.npy").read_bytes()[:-1])
    with pytest.raises(DamagedError, match=r"a\.npy: damaged"):
        open_array(tmp_path / "a.npy", "prepare")
    np.save(tmp_path / "a.npy", array)
    rows = ArrayFile(tmp_path / "a.npy")
    with open(tmp_path / "a.npy", "r+b") as file:
        file.truncate(4000)
    assert np.array_equal(rows[:200], array[:200])
    with pytest.raises(DamagedError, match=r"a\.npy: ends early"):
        rows[600]


_PEAKS = """
import resource, sys
from pathlib import Path
import numpy as np
from kairos.data.arrays import ArrayFile, create_array

peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before, path = peak(), Path(sys.argv[1])
rows = create_array(path, (50_000, 3072), np.uint8)  # 150 MB
for start in range(0, len(rows), 500):
    rows.write(start, np.full((500, 3072), start % 256))
written = peak()
random = np.random.default_rng(0)
for _ in range(300):
    ArrayFile(path)[random.integers(0, 50_000, 128)]
for start in range(0, len(rows), 1000):
    ArrayFile(path)[start : start + 1000]
print(written - before, peak() - written)
"""


def test_memory_does_not_grow_with_the_file(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", _PEAKS, tmp_path / "large.npy"], capture_output=True, text=True, check=True
    )
    written, read = map(float, done.stdout.split())
    assert written < 40 and read < 40, (written, read)  # MiB, of a file of 146 and 2.3 times that read
