"""Arrays that grow in a private folder, batch by batch: a killed job goes on where the last record says they are whole.

Batches are cut at the same places, so that the result has the same bits.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from kairos.data.arrays import ArrayFile, create_array
from kairos.files import read_json, sha256_file, sha256_json, sync_folder, write_json
from kairos.progress import Progress, say
from kairos_timesteps.errors import DamagedError

PARTIAL = ".partial"
_SAVE_SECONDS = 2.0


def prepare_folder(out: Path, names: Iterable[str]) -> Path:
    """Make room for the files of a stage; gives the private folder, in which a killed job's arrays may still be."""
    out.mkdir(parents=True, exist_ok=True)
    if (out / "manifest.json").exists():  # complete and asked for again: computed again
        shutil.rmtree(out / PARTIAL, ignore_errors=True)
        (out / "manifest.json").unlink()
    for name in names:
        (out / name).unlink(missing_ok=True)
    return out / PARTIAL


def publish_arrays(out: Path, manifest: dict[str, Any]) -> None:
    """Give the files of a manifest, which are whole, their names; the manifest comes last."""
    for name in manifest["files"]:
        os.replace(out / PARTIAL / name, out / name)
    sync_folder(out)
    write_json(out / "manifest.json", manifest)
    shutil.rmtree(out / PARTIAL, ignore_errors=True)


def fill_arrays(
    partial: Path,
    identity: dict[str, Any],
    arrays: dict[str, tuple[tuple[int, ...], Any]],
    rows: range,
    batch_size: int,
    compute: Callable[[np.ndarray], dict[str, np.ndarray]],
    label: str,
    unit: str,
) -> dict[str, str]:
    """Fill arrays in a private folder and return the hash of each file.

    Args:
        partial: the folder.
        identity: what decides the content, beside the rows.
        arrays: shape of a row and dtype by name.
        rows: numbers of the rows that are computed.
        batch_size: rows per call of `compute`.
        compute: the arrays' rows with some numbers (n,).
        label: of the job, for what is said.
        unit: what a row is of, likewise.
    """
    key, count = sha256_json({**identity, "rows": [rows.start, rows.stop]}), len(rows)
    shapes = {partial / f"{name}.npy": (count, *shape) for name, (shape, _) in arrays.items()}
    try:
        record = read_json(partial / "progress.json")
        whole = record["key"] == key and {path: ArrayFile(path).shape for path in shapes} == shapes
        done = record["done"] if whole else 0
    except (OSError, ValueError, EOFError, DamagedError):
        done = 0
    if done:
        say(f"{label}: goes on after {unit} {rows.start + done}")
    else:
        shutil.rmtree(partial, ignore_errors=True)  # with it the record, so that no other job trusts our arrays
        partial.mkdir()
        for path, shape in shapes.items():
            create_array(path, shape, arrays[path.stem][1])
    opened = {path.stem: ArrayFile(path, writable=True) for path in shapes}
    progress, saved = Progress(count, label, unit, start=done), time.monotonic()
    for start in range(done, count, batch_size):
        end = min(start + batch_size, count)
        for name, values in compute(np.arange(rows.start + start, rows.start + end)).items():
            opened[name].write(start, values)
        progress.advance(end - start)
        if time.monotonic() - saved > _SAVE_SECONDS or end == count:
            for array in opened.values():
                array.flush()  # durable before it is said
            write_json(partial / "progress.json", {"key": key, "done": end})
            saved = time.monotonic()
    progress.close()
    return {path.name: sha256_file(path) for path in shapes}
