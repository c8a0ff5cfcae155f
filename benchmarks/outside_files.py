"""Measure what hashes of the files outside of the results cost, for a folder of many images and for large files.

    python benchmarks/outside_files.py --drop-caches --out benchmarks/results/outside_files.csv

The small files have random contents and are in class folders. The large ones have the mean size of ImageNet's images;
``single`` is one file, as a zip or a parquet file is. All are deleted at the end. Each case is one call of
`kairos.outside_files.hash_contents` in a fresh process; its imports are not included. The files are in the page cache,
because they have just been written. Cases with ``cold`` come after a write to /proc/sys/vm/drop_caches, which needs
root; a virtual machine's disk may still be in the cache of its host.

Cases:
    first: no index exists, all files are read.
    unchanged: the index exists, and no file has changed. A run does this twice at most: to plan, and in stage prepare.
    not reading: the same with ``reads_files=False``. `kairos status` and `report` do this only if the path of the
        images has changed since stage prepare; otherwise they take the recorded hash.
    one changed: one file has another content of equal size.
    large, single: as first, for large files.
    computed: first, for all small files if they had the size of the large ones: files × time of a file + bytes ÷ rate.
        Time and rate are those for which this formula gives the times of both ``first`` and ``large``.

Columns:
    case, files, bytes: the case, the number of files and their total size.
    seconds, cpu_seconds: wall time and CPU time of the call.
    mib: peak resident memory of the process, MiB; about 19 are Python and the imports.
    index_kib: size of the index in .kairos after the call, KiB.
    mb_per_s: bytes over wall time, MB/s.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from result_file import write_rows

INDEX = Path(".kairos/outside_files.json")
DROP_CACHES = Path("/proc/sys/vm/drop_caches")
BLOCK = 2**24  # bytes that a large file is written in
# peak memory is VmHWM: the peak of getrusage would include that of the parent
CALL = """
import json, re, resource, sys, time
from pathlib import Path
from kairos.outside_files import hash_contents
start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
digest = hash_contents([sys.argv[1]], reads_files=sys.argv[2] == "True")
seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
cpu_seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
kib = int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
print(json.dumps({"digest": digest, "seconds": seconds, "cpu_seconds": cpu_seconds, "mib": kib / 2**10}))
"""


def write_files(root: Path, files: int, size: int, folders: int) -> None:
    """Write files of random contents of `size` bytes below `root`, in `folders` folders of about equally many."""
    randomness = random.Random(0)
    for folder in range(folders):
        path = root / f"n{folder:08d}"
        path.mkdir(parents=True)
        for index in range(folder, files, folders):
            (path / f"n{folder:08d}_{index}.JPEG").write_bytes(randomness.randbytes(size))


@contextmanager
def temporary_folder(parent: Path | None) -> Iterator[Path]:
    """Create a folder, and delete it at the end of the block.

    Many threads delete its files, because a file system with the option ``discard`` waits for the disk at each file.
    """
    folder = Path(tempfile.mkdtemp(dir=parent))
    try:
        yield folder
    finally:
        with ThreadPoolExecutor(16) as threads:
            list(threads.map(shutil.rmtree, [path for path in folder.glob("*/*") if path.is_dir()]))
        shutil.rmtree(folder)


def write_single(path: Path, size: int) -> None:
    """Write one file of `size` random bytes."""
    randomness = random.Random(0)
    with open(path, "wb") as file:
        for start in range(0, size, BLOCK):
            file.write(randomness.randbytes(min(BLOCK, size - start)))


def hash_in_process(project: Path, path: Path, reads_files: bool = True) -> dict[str, Any]:
    """Call `hash_contents` for a path in a fresh process in the folder `project`; return its hash, times and memory."""
    command = [sys.executable, "-c", CALL, str(path), str(reads_files)]
    output = subprocess.run(command, cwd=project, check=True, stdout=subprocess.PIPE, text=True).stdout
    measured: dict[str, Any] = json.loads(output)
    return measured


def drop_caches() -> None:
    """Empty the page cache, and the caches of names and inodes, of this machine."""
    os.sync()
    DROP_CACHES.write_text("3")


def measure_small(project: Path, root: Path, is_cold: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield case and measurements of each case with small files in folders below `root`.

    Raises:
        RuntimeError: a hash differs from the first one where nothing has changed, or is equal after a change.
    """
    index = project / INDEX
    changed = next(path for path in root.rglob("*") if path.is_file())
    first = hash_in_process(project, root)
    yield "first", first
    cases = {"unchanged": hash_in_process(project, root), "not reading": hash_in_process(project, root, False)}
    if is_cold:
        drop_caches()
        cases["unchanged, cold"] = hash_in_process(project, root)
        index.unlink()
        drop_caches()
        cases["first, cold"] = hash_in_process(project, root)
    if any(measured["digest"] != first["digest"] for measured in cases.values()):
        raise RuntimeError("the hash of unchanged files differs")
    yield from cases.items()
    changed.write_bytes(changed.read_bytes()[::-1])
    one_changed = hash_in_process(project, root)
    if one_changed["digest"] == first["digest"]:
        raise RuntimeError("the hash of changed files is equal")
    yield "one changed", one_changed


def measure_large(project: Path, path: Path, is_cold: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a suffix of the case and the measurements of a first hash of a path: warm and, if `is_cold`, cold."""
    yield "", hash_in_process(project, path)
    if is_cold:
        (project / INDEX).unlink()
        drop_caches()
        yield ", cold", hash_in_process(project, path)


def compute_seconds(small: dict[str, Any], large: dict[str, Any], files: int, size: int, column: str) -> float:
    """Return the time for many large files from the times of many small and of few large files.

    Args:
        small, large: rows with ``files``, ``bytes`` and `column`.
        files: number of files.
        size: their total size in bytes.
        column: the time that is computed.
    """
    determinant = small["files"] * large["bytes"] - large["files"] * small["bytes"]
    of_file = (small[column] * large["bytes"] - large[column] * small["bytes"]) / determinant
    of_byte = (small["files"] * large[column] - large["files"] * small[column]) / determinant
    return float(files * of_file + size * of_byte)


def main() -> None:
    """Measure all cases, print each row and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--files", type=int, default=1_280_000, help="number of small files")
    parser.add_argument("--size", type=int, default=200, help="bytes of a small file")
    parser.add_argument("--folders", type=int, default=1000, help="folders of the small files")
    parser.add_argument("--large-size", type=int, default=110_000, help="bytes of a large file")
    parser.add_argument("--large-total", type=int, default=2_000_000_000, help="bytes of all large files")
    parser.add_argument("--temporary", type=Path, help="folder in which the files are written for a time")
    parser.add_argument("--drop-caches", action="store_true", help="measure cases with empty caches, too (root)")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    is_cold = arguments.drop_caches and os.access(DROP_CACHES, os.W_OK)
    setting = f"python {' '.join(sys.argv)}; {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f} at the start"
    if not is_cold:
        setting += ", caches not dropped"

    def add(case: str, files: int, size: int, values: dict[str, Any]) -> None:
        row: dict[str, Any] = {"case": case, "files": files, "bytes": size}
        row |= {name: value for name, value in values.items() if name != "digest"}
        row["mb_per_s"] = size / row["seconds"] / 1e6
        rows.append(row)
        print({name: round(value, 1) if isinstance(value, float) else value for name, value in row.items()}, flush=True)

    def add_measured(case: str, files: int, size: int, measured: dict[str, Any]) -> None:
        add(case, files, size, {**measured, "index_kib": (project / INDEX).stat().st_size / 2**10})

    with temporary_folder(arguments.temporary) as folder:
        small, large, single = (folder / name for name in ("small", "large", "single.zip"))
        project = folder / "project"
        project.mkdir()
        write_files(small, arguments.files, arguments.size, arguments.folders)
        os.sync()  # else the disk is busy with writing during the first measurements
        for case, measured in measure_small(project, small, is_cold):
            add_measured(case, arguments.files, arguments.files * arguments.size, measured)
        (project / INDEX).unlink()
        large_files = arguments.large_total // arguments.large_size
        write_files(
            large, large_files, arguments.large_size, max(large_files * arguments.folders // arguments.files, 1)
        )
        os.sync()
        for suffix, measured in measure_large(project, large, is_cold):
            add_measured(f"large{suffix}", large_files, large_files * arguments.large_size, measured)
        (project / INDEX).unlink()
        write_single(single, arguments.large_total)
        os.sync()
        for suffix, measured in measure_large(project, single, is_cold):
            add_measured(f"single{suffix}", 1, arguments.large_total, measured)
    by_case = {row["case"]: row for row in rows}
    total = arguments.files * arguments.large_size
    for suffix in ("", ", cold") if is_cold else ("",):
        measured_rows = by_case[f"first{suffix}"], by_case[f"large{suffix}"]
        times = {
            column: compute_seconds(*measured_rows, arguments.files, total, column)
            for column in ("seconds", "cpu_seconds")
        }
        add(f"computed{suffix}", arguments.files, total, times)
    if arguments.out:
        digits = {"seconds": 2, "cpu_seconds": 2, "mib": 0, "index_kib": 0, "mb_per_s": 1}
        texts = [{**row, **{name: f"{row[name]:.{digits[name]}f}" for name in digits if name in row}} for row in rows]
        write_rows(arguments.out, texts, setting)


if __name__ == "__main__":
    main()
