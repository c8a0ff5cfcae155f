"""Files that are written whole or not at all, and their hashes.

Everything is written under a temporary name in the same folder, flushed to disk and renamed: a kill at any instant
leaves the old file or the new one. Leftovers of killed writers start with ``.tmp-`` and are never read.
"""

import ctypes
import fcntl
import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from kairos_timesteps.errors import DamagedError, KairosError

_HERE, _EXCHANGE = -100, 2  # AT_FDCWD, RENAME_EXCHANGE


def sha256_bytes(data: bytes) -> str:
    """Hex SHA-256 of bytes."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path | str) -> str:
    """Hex SHA-256 of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def canonical_json(value: Any) -> str:
    """Serialise a value as canonical JSON, with sorted keys and no blanks, for identity hashes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def sha256_json(value: Any) -> str:
    """Hex SHA-256 of a JSON value, independent of key order."""
    return sha256_bytes(canonical_json(value).encode())


@contextmanager
def atomic(path: Path | str, mode: str = "wb") -> Iterator[IO[Any]]:
    """Open a file for writing that appears under `path` only when the block ends without an error."""
    path = Path(path)
    if path.exists() and not path.is_file():
        raise KairosError(f"{path}: a folder or a device is there; allowed: a file")
    temporary = path.parent / f".tmp-{uuid.uuid4().hex}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:  # a full disk says so without a name, others name the temporary file
        error.filename = str(path)
        raise
    finally:
        with suppress(OSError):
            temporary.unlink()


def write_text(path: Path | str, text: str) -> None:
    """Write a text file atomically."""
    with atomic(path, "w") as file:
        file.write(text)


def write_json(path: Path | str, value: Any) -> None:
    """Write a JSON file atomically, readable and with sorted keys."""
    write_text(path, json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n")


def write_weights(path: Path | str, weights: dict[str, Any]) -> None:
    """Write tensors as safetensors, as diffusers and transformers do but atomically."""
    from safetensors.torch import save

    content = {name: value.detach().cpu().contiguous() for name, value in weights.items()}
    with atomic(path) as file:
        file.write(save(content, metadata={"format": "pt"}))


class _Record(dict[str, Any]):
    """Content of a JSON file; raises DamagedError on access to a missing field."""

    path: Path | str = ""

    def __missing__(self, field: str) -> Any:
        raise DamagedError(f"{self.path}: holds no {field!r}: damaged, or the record of something else")


def read_json(path: Path | str) -> dict[str, Any]:
    """Read a JSON file that holds a mapping.

    Raises:
        DamagedError: it is not one, or a field is asked for that it does not hold.
    """
    try:
        record = _Record(json.loads(Path(path).read_bytes()))
    except (ValueError, TypeError, RecursionError):
        raise DamagedError(f"{path}: damaged: not JSON with fields; make it again, or pull it with dvc") from None
    record.path = path
    return record


def glance(path: Path | str) -> dict[str, Any]:
    """Return the content of a JSON file for display; empty if the file is missing or damaged."""
    with suppress(OSError, DamagedError):
        return read_json(path)
    return {}


def open_record(folder: Path | str, command: str, name: str = "manifest.json") -> dict[str, Any]:
    """The record of a folder that ``kairos <command>`` makes.

    Raises:
        KairosError: there is none; the message names the command.
    """
    path = Path(folder) / name
    if not path.is_file():
        what = f"is not complete (no {name})" if path.parent.is_dir() else "does not exist"
        raise KairosError(f"{folder}: {what}; make it with: kairos {command}")
    return read_json(path)


def check_files(folder: Path, files: dict[str, str], again: str) -> None:
    """Compare files with the hashes that their folder's record has.

    Raises:
        DamagedError: one is missing or has changed; the message ends with `again`, what to do.
    """
    for name, digest in files.items():
        file = folder / name
        if not file.is_file():
            raise DamagedError(f"{file}: is missing; {again}")
        if sha256_file(file) != digest:
            raise DamagedError(f"{file}: damaged: does not match its checksum; {again}")


def sync_folder(path: Path | str) -> None:
    """Make renames and links in a folder, or a file's content, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_folder(path: Path | str) -> Iterator[Path]:
    """Fill a folder under a temporary name; it takes the place of `path` when the block ends without an error."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".tmp-{uuid.uuid4().hex}"
    temporary.mkdir()
    try:
        yield temporary
        for file in temporary.rglob("*"):
            if file.is_file():
                sync_folder(file)
        if not path.exists():
            os.rename(temporary, path)
        elif not _exchanged(temporary, path):
            temporary = _replaced(path, temporary)
        sync_folder(path.parent)
    finally:
        if temporary.exists():
            shutil.rmtree(temporary)


def _exchanged(one: Path, other: Path) -> bool:
    """Let two folders change places at one instant, where the system (renameat2 of Linux) and the file system can."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    return rename is not None and rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0


def _replaced(path: Path, new: Path) -> Path:
    """Put a folder in the place of another, which comes back where that fails; gives the old one's new place."""
    aside = path.parent / f".tmp-{uuid.uuid4().hex}"
    os.rename(path, aside)
    try:
        os.rename(new, path)
    except BaseException:
        os.rename(aside, path)
        raise
    return aside


def link_tree(source: Path, target: Path) -> None:
    """Publish a folder: hard links where the file system allows, copies elsewhere; whole or not at all."""
    with atomic_folder(target) as folder:
        for file in sorted(source.rglob("*")):
            if file.is_file():
                link_file(file, folder / file.relative_to(source))


def link_file(source: Path, target: Path) -> None:
    """Publish a file by hard link, or by copy across file systems; replaces `target` atomically."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / f".tmp-{uuid.uuid4().hex}"
    try:
        try:
            os.link(source, temporary)
        except OSError:
            shutil.copy2(source, temporary)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def hash_folder(path: Path) -> dict[str, str]:
    """SHA-256 of every file below a folder by relative name, temporary files left out."""
    files = (file for file in path.rglob("*") if file.is_file() and not file.name.startswith(".tmp-"))
    return {file.relative_to(path).as_posix(): sha256_file(file) for file in sorted(files)}


def locked(file: IO[Any], patience: float, two: str) -> bool:
    """Try to lock an open file for `patience` seconds; return True on success.

    The kernel releases the lock when the process that holds it ends.

    Args:
        file: the open file.
        patience: seconds until the attempts end.
        two: for the error message: which two processes the missing lock could not separate.

    Raises:
        KairosError: the file system has no locks; the message contains `two`.
    """
    end = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > end:
                return False
            time.sleep(0.1)
        except OSError as error:
            fault = f"{file.name}: this file system has no locks ({error.strerror}), so nothing would keep two {two}"
            raise KairosError(f"{fault} another one, or mount it with locks (Lustre: flock)") from None


def read_lines(path: Path) -> list[str]:
    """The complete lines of a text file; a last line without its newline was being written and does not count."""
    if not path.exists():
        return []
    return path.read_text(encoding="utf-8").split("\n")[:-1]
