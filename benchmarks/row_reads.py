"""Time to read a training batch of 256 rows, from memory and from a disk that takes a millisecond per read.

    python benchmarks/row_reads.py --out benchmarks/results/row_reads.csv

The rows are latents of 4 × 32 × 32 values. A wrapper of `os.preadv` delays every read. One thread and several are
measured in turn, batch by batch; the benchmark checks that the rows are equal.

Columns:
    delay_ms: delay of each read.
    arrays: mean alone, or mean and logvar with and without flips, which are four reads.
    one_ms, several_ms: median milliseconds of a batch, with one thread and with the threads that kairos starts.
    ratio: several_ms over one_ms.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from result_file import write_rows

from kairos import threads
from kairos.data import arrays
from kairos.data.arrays import ArrayFile

COUNT, BATCH, SHAPE = 20_000, 256, (4, 32, 32)
FIELDS = ["delay_ms", "arrays", "one_ms", "several_ms", "ratio"]
ONE_THREAD = float("inf")  # no read is slow enough for several threads
SLOW_READ = threads._SLOW_READ


def read_batch(files: list[ArrayFile], indices: np.ndarray) -> list[np.ndarray]:
    """Read the rows of a batch as `Latents.read_rows` does; return an array per file.

    With one file, all rows are read from it. With several, files 0, 2, … give the rows with even indices and files
    1, 3, … the rows with odd indices, which are treated as flipped.
    """
    if len(files) == 1:
        return [files[0][indices]]
    is_flipped = indices % 2 == 1
    plain, flipped = indices[~is_flipped], indices[is_flipped]
    return [file[plain if index % 2 == 0 else flipped] for index, file in enumerate(files)]


def measure(files: list[ArrayFile], rounds: int) -> tuple[float, float]:
    """Return the median milliseconds of a batch with one thread and with several.

    Raises:
        AssertionError: the rows differ.
    """
    random = np.random.default_rng(0)
    milliseconds: dict[float, list[float]] = {ONE_THREAD: [], SLOW_READ: []}  # by the limit of a slow read
    for _ in range(rounds):
        indices = random.permutation(COUNT)[:BATCH]
        batches = []
        for slow_read, milliseconds_of_rounds in milliseconds.items():
            threads._SLOW_READ = slow_read
            start = time.perf_counter()
            batches.append(read_batch(files, indices))
            milliseconds_of_rounds.append((time.perf_counter() - start) * 1000)
        assert all(np.array_equal(one, several) for one, several in zip(*batches))
    return statistics.median(milliseconds[ONE_THREAD]), statistics.median(milliseconds[SLOW_READ])


def main() -> None:
    """Measure all cases, print them and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.npy")
        np.save(path, np.random.default_rng(0).normal(size=(COUNT, *SHAPE)).astype(np.float32))
        read = os.preadv
        for delay in (0.0, 1.0):
            for name, count in (("mean", 1), ("mean, logvar, flips", 4)):

                def read_slowly(*values, delay=delay):
                    if delay:
                        time.sleep(delay / 1000)
                    return read(*values)

                arrays.os.preadv = read_slowly
                one, several = measure([ArrayFile(path)] * count, arguments.rounds)
                rows.append([delay, name, f"{one:.2f}", f"{several:.2f}", f"{several / one:.3f}"])
                print(dict(zip(FIELDS, rows[-1])), flush=True)
    setting = f"python {' '.join(sys.argv)}; {os.cpu_count()} CPUs, {COUNT} rows of {SHAPE} float32"
    write_rows(arguments.out, [dict(zip(FIELDS, row)) for row in rows], setting)


if __name__ == "__main__":
    main()
