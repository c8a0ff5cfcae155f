"""Computation of array files in batches, in a private folder; a killed job resumes after the last recorded batch.

A resumed job cuts the batches at the same rows, so that its result is equal bit for bit.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from kairos.array_shapes import IntegerArray, RowArray
from kairos.data.arrays import ArrayFile, create_array
from kairos.files import DamagedError, read_json, sha256_file, sha256_json, sync_to_disk, write_json, write_record
from kairos.progress import ProgressBar, log

PARTIAL = ".partial"  # name of the private folder
_SAVE_SECONDS = 2.0  # least time between two records of the progress


def prepare_folder(out: Path, names: Iterable[str]) -> Path:
    """Create the folder of a stage if necessary, delete old results in it, and return the path of its private folder.

    The private folder ``.partial`` is not created. A killed job may have left arrays in it, which are kept if `out` has
    no record. A record shows that the stage was complete, and the private folder is then deleted too. The caller
    holds the lock of `out` until the arrays are published, see `lock_folder`.

    Args:
        out: folder of the stage.
        names: files that the stage may write there, which are deleted.
    """
    out.mkdir(parents=True, exist_ok=True)
    if (out / "record.json").exists():  # the stage was complete and is repeated from the beginning
        shutil.rmtree(out / PARTIAL, ignore_errors=True)
        (out / "record.json").unlink()  # before the files that it lists
    for name in names:
        (out / name).unlink(missing_ok=True)
    return out / PARTIAL


def publish_arrays(out: Path, record: dict[str, Any]) -> None:
    """Move the files that `record["files"]` lists from the private folder to `out`, and write the record last.

    The caller ensures that all listed files are in the private folder and complete. The private folder is then deleted
    with its other files.
    """
    for name in record["files"]:
        os.replace(out / PARTIAL / name, out / name)
    sync_to_disk(out)  # the files must be durable before the record records them
    write_record(out / "record.json", record)
    shutil.rmtree(out / PARTIAL, ignore_errors=True)


def fill_arrays(
    partial: Path,
    identity: dict[str, Any],
    arrays: dict[str, tuple[tuple[int, ...], Any]],
    rows: range,
    batch_size: int,
    compute: Callable[[IntegerArray], dict[str, RowArray]],
    label: str,
    unit: str,
) -> dict[str, str]:
    """Compute arrays in batches, write them into a private folder, and return the hash of each file by name.

    The file of an array is ``<name>.npy``, which is also its key in the result. Its first row has the first index of
    `rows`. Finished rows are made durable and recorded after the last batch, and after each batch that ends more than
    two seconds after the previous record. An interrupted computation resumes after the recorded rows. Messages report
    the progress.

    Args:
        partial: the private folder; content of a computation with another identity or other rows is deleted. The caller
            ensures that the folder above it exists.
        identity: settings that, together with the rows, determine the content of the arrays.
        arrays: shape of a row, and dtype, of each array by name.
        rows: consecutive indices of the rows to compute.
        batch_size: rows per call of `compute`.
        compute: function that returns the arrays' rows for some indices of `rows`, int64 (n,), by name of the array.
        label: name of the job in progress messages.
        unit: name of a row in progress messages, such as ``image``.
    """
    key = sha256_json({**identity, "rows": [rows.start, rows.stop]})
    count = len(rows)
    paths = {name: partial / f"{name}.npy" for name in arrays}
    shapes = {paths[name]: (count, *row_shape) for name, (row_shape, _) in arrays.items()}
    done = _rows_done(partial, key, shapes)
    # open the arrays of an interrupted computation, or create arrays
    if done:
        log(f"{label}: resumes after {unit} {rows.start + done}")
    else:
        shutil.rmtree(partial, ignore_errors=True)  # with its record, which would mark rows of the new files as done
        partial.mkdir()
        for name, (_, dtype) in arrays.items():
            create_array(paths[name], shapes[paths[name]], dtype)
    files = {name: ArrayFile(path, writable=True) for name, path in paths.items()}
    # compute the other rows; `start` and `end` are rows of the files
    progress = ProgressBar(count, label, unit, start=done)
    last_save = time.monotonic()
    for start in range(done, count, batch_size):
        end = min(start + batch_size, count)
        computed = compute(np.arange(rows.start + start, rows.start + end))
        for name, values in computed.items():
            files[name].write(start, values)
        progress.advance(end - start)
        if time.monotonic() - last_save > _SAVE_SECONDS or end == count:
            for file in files.values():
                file.flush()  # rows must be durable before the record includes them
            write_json(partial / "progress.json", {"key": key, "done": end})
            last_save = time.monotonic()
    progress.close()
    return {path.name: sha256_file(path) for path in paths.values()}


def _rows_done(partial: Path, key: str, shapes: dict[Path, tuple[int, ...]]) -> int:
    """Return the number of rows that an interrupted computation in folder `partial` has recorded as finished.

    The result is 0 without such a computation, or if its record or an array is damaged or missing. It is also 0 if the
    computation has another key, or an array has another shape.

    Args:
        partial: the private folder, with the record ``progress.json``.
        key: hash of identity and rows of the computation.
        shapes: expected shape of each array by its path.
    """
    try:
        record = read_json(partial / "progress.json")
        if record["key"] != key:
            return 0
        existing_shapes = {path: ArrayFile(path).shape for path in shapes}
        return record["done"] if existing_shapes == shapes else 0
    except (OSError, ValueError, EOFError, DamagedError):
        return 0
