"""Atomic writing of files and folders, records in JSON, hashes, and locks.

Each file is written under a temporary name in its folder, flushed to the disk and renamed. A process that is killed at
any moment leaves the old file or the new one. Leftovers of killed processes start with ``.tmp-`` and are never read.
"""

import ctypes
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import time
import uuid
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from kairos.errors import TemporaryError
from kairos_timesteps.errors import KairosError, NotFiniteError

_CHECKSUM = "checksum"  # field of a record
_NO_CHECKSUM = "0" * 64  # in its place while it is computed
_CHECKSUM_LINE = re.compile(r'(?m)^ "checksum": "([0-9a-f]{64})",?$')  # at the top level, by its indentation
_REMEDY = "delete it and run the workflow again, which computes it again, or pull it with dvc"
# constants of Linux, for renameat2
_AT_FDCWD = -100  # relative paths start at the working directory
_RENAME_EXCHANGE = 2  # exchange the two paths


class DamagedError(KairosError):
    """A file that is truncated or whose content does not match its checksum."""


def sha256_bytes(data: bytes) -> str:
    """Return the SHA-256 hash of bytes, in hex digits."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path | str) -> str:
    """Return the SHA-256 hash of a file's content, in hex digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def canonical_json(value: Any) -> str:
    """Return a value as JSON text with sorted keys and no blanks; raise NotFiniteError for NaN or infinity."""
    _demand_finite_numbers(value, "JSON")
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _demand_finite_numbers(value: Any, what: str, field: str = "") -> None:
    """Raise NotFiniteError if a number of a nested JSON value is NaN or infinite; the message contains its field.

    Args:
        value: JSON value.
        what: the file, for the error message.
        field: name of the value in the file, such as ``validation.loss``; empty: the whole value.
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise NotFiniteError(
            f"{what}: {field or 'value'} is {value}, which is no result; find its cause: a network that has diverged, "
            "or damaged data"
        )
    if isinstance(value, dict):
        for name, item in value.items():
            _demand_finite_numbers(item, what, f"{field}.{name}" if field else str(name))
    elif isinstance(value, (list, tuple)):
        for position, item in enumerate(value):
            _demand_finite_numbers(item, what, f"{field}[{position}]")


def sha256_json(value: Any) -> str:
    """Return the SHA-256 hash of a value's `canonical_json`, in hex digits; the order of keys does not matter."""
    return sha256_bytes(canonical_json(value).encode())


@contextmanager
def atomic(path: Path | str, mode: str = "wb") -> Iterator[IO[Any]]:
    """Open a temporary file for writing that is renamed to `path` only if the context ends without an error.

    It replaces an existing file, which is unchanged after an error; the temporary file is then deleted. Folders above
    the path are created. The file is flushed to the disk before it appears.

    Args:
        path: path of the file.
        mode: ``wb`` for bytes, ``w`` for text in UTF-8.

    Raises:
        KairosError: a folder or a device is at the path.
        OSError: the file cannot be written, or the context raised an OSError. Its `filename` is `path`, unless another
            file caused an error in the context.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise KairosError(f"{path}: a folder or a device is there; allowed: a file")
    temporary = path.parent / f".tmp-{uuid.uuid4().hex}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        error.filename = str(path)  # the folder that cannot be created may be several levels above
        raise
    try:
        with set_missing_filename(path, temporary):
            with open(temporary, mode, encoding=None if "b" in mode else "utf-8") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            sync_to_disk(path.parent)
    finally:
        with suppress(OSError):
            temporary.unlink()


@contextmanager
def set_missing_filename(path: Path | str, temporary: Path | None = None) -> Iterator[None]:
    """Set `filename` of an OSError of the block to `path` if it is missing, as on a full disk, and raise the error.

    `path` also replaces the path of the temporary file of `path`, if one is passed. Other paths are kept.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None or error.filename == str(temporary):
            error.filename = str(path)
        raise


def list_names(folder: Path) -> list[str]:
    """Return the names of the files and folders in a folder, sorted; empty if the folder is missing or is a file."""
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


def list_by_step(folder: Path, suffix: str = "") -> list[Path]:
    """Return the paths in a folder whose name is a step and a suffix, such as ``0000400.npz``, by ascending step.

    Other names are left out, temporary ones for example. The list is empty if the folder is missing or is a file.
    """
    steps = [name.removesuffix(suffix) for name in list_names(folder) if name.endswith(suffix)]
    return [folder / f"{step}{suffix}" for step in sorted(filter(str.isdecimal, steps), key=int)]


def write_text(path: Path | str, text: str) -> None:
    """Write a text file in UTF-8 atomically."""
    with atomic(path, "w") as file:
        file.write(text)


def write_json(path: Path | str, value: Any) -> None:
    """Write a JSON file atomically, indented and with sorted keys; raise NotFiniteError for NaN or infinity."""
    write_text(path, _format_json(path, value))


def write_record(path: Path | str, fields: dict[str, Any]) -> None:
    """Write a record: a JSON file like `write_json`'s, with a field ``checksum`` by which readers notice damage.

    The checksum is the SHA-256 of the text in which it consists of zeros. An earlier checksum in `fields` is replaced.
    """
    text = _format_json(path, {**fields, _CHECKSUM: _NO_CHECKSUM})
    write_text(path, _CHECKSUM_LINE.sub(lambda line: line[0].replace(line[1], sha256_bytes(text.encode())), text))


def _format_json(path: Path | str, value: Any) -> str:
    _demand_finite_numbers(value, str(path))
    text = json.dumps(value, indent=1, sort_keys=True)
    return f"{text}\n"


def write_weights(path: Path | str, weights: dict[str, Any]) -> None:
    """Write tensors, by name, to a safetensors file atomically, with the metadata of diffusers and transformers.

    The tensors may be on any device, and may require gradients. The tensors themselves do not change.

    Raises:
        RuntimeError: tensors on the CPU share memory.
    """
    from safetensors.torch import save

    tensors = {name: value.detach().cpu().contiguous() for name, value in weights.items()}
    with atomic(path) as file:
        file.write(save(tensors, metadata={"format": "pt"}))


class _Record(dict[str, Any]):
    """Content of a JSON file; ``record[field]`` raises DamagedError for a missing field, `get` returns its default."""

    path: Path | str = ""
    has_checksum = False

    def __missing__(self, field: str) -> Any:
        raise DamagedError(f"{self.path}: holds no {field!r}: damaged, or the record of something else")


def read_json(path: Path | str) -> "_Record":
    """Return the object in a JSON file as a dictionary; a checksum is compared and left out, see `write_record`.

    Raises:
        DamagedError: the file contains something else, or does not match its checksum. Indexing the result with a
            missing field also raises it.
        OSError: the file is missing or cannot be read.
    """
    with _report_damage(path):
        text = Path(path).read_bytes().decode()
        has_checksum = _verify_checksum(text, path)
        return _create_record(json.loads(text), path, has_checksum)


def read_record(path: Path | str) -> dict[str, Any]:
    """Return the fields of a record, see `write_record` and `read_json`.

    Raises:
        DamagedError: as `read_json`; or the file has no checksum.
        OSError: the file is missing or cannot be read.
    """
    return _demand_checksum(read_json(path))


def _demand_checksum(record: "_Record") -> "_Record":
    if not record.has_checksum:
        raise DamagedError(f"{record.path}: damaged, or written by an earlier kairos: it has no checksum; {_REMEDY}")
    return record


def _verify_checksum(text: str, path: Path | str) -> bool:
    """Compare the text of a JSON file with its checksum; return False if it has none.

    Raises:
        DamagedError: they differ.
    """
    match = _CHECKSUM_LINE.search(text)
    if match is None:
        return False
    without = f"{text[: match.start(1)]}{_NO_CHECKSUM}{text[match.end(1) :]}"
    if sha256_bytes(without.encode()) != match[1]:
        raise DamagedError(f"{path}: damaged: does not match its checksum; {_REMEDY}")
    return True


class RecordReader:
    """Reader of JSON files that share a large field: the field is parsed only if it differs from the previous file's.

    The records of an experiment's snapshots, for example, all contain the settings of all methods. Records share the
    value of the field, which must not be changed.

    Args:
        field: name of the field.
    """

    def __init__(self, field: str):
        self._field = field
        self._key = f"{json.dumps(field)}: "
        self._text, self._value = "", None  # the field in the file that was parsed last

    def read(self, path: Path | str) -> dict[str, Any]:
        """Return the fields of a record; the module's function `read_record` documents the result and the errors."""
        return _demand_checksum(self._read(path))

    def _read(self, path: Path | str) -> "_Record":
        with _report_damage(path):
            text = Path(path).read_bytes().decode()
            has_checksum = _verify_checksum(text, path)
            key_start = text.find(self._key)
            value_start = key_start + len(self._key)
            # without the field, or if its value is not an object, parse the whole file
            if key_start == -1 or not text.startswith("{", value_start):
                return _create_record(json.loads(text), path, has_checksum)

            # parse the value unless it equals the value in the previous file
            # `_text` is a complete object, so that a value that begins with it is equal to it
            if not self._text or not text.startswith(self._text, value_start):
                self._value, value_end = json.JSONDecoder().raw_decode(text, value_start)
                self._text = text[value_start:value_end]

            # parse the other fields, with null as the value of the field
            text_before, text_after = text[:value_start], text[value_start + len(self._text) :]
            fields = json.loads(f"{text_before}null{text_after}")

            # the key that was replaced may be of a nested object, or in a text: then parse the whole file
            is_null_at_top = fields.get(self._field, "missing") is None
            if not is_null_at_top or text.count(self._key) > 1:
                return _create_record(json.loads(text), path, has_checksum)
            return _create_record({**fields, self._field: self._value}, path, has_checksum)

    def glance(self, path: Path | str) -> dict[str, Any]:
        """Return the content of a JSON file for display; empty if the file is missing or damaged."""
        with suppress(OSError, DamagedError):
            return self.read(path)
        return {}


@contextmanager
def _report_damage(path: Path | str) -> Iterator[None]:
    """Raise DamagedError in place of the errors with which parsing of a JSON file fails in the block.

    These are ValueError, TypeError, AttributeError and RecursionError. Other errors, such as OSError, pass unchanged.
    """
    try:
        yield
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise DamagedError(f"{path}: damaged: not JSON with fields; {_REMEDY}") from None


def _create_record(fields: Any, path: Path | str, has_checksum: bool) -> "_Record":
    """Return the fields of a JSON file as a dictionary; indexing it with a missing field raises DamagedError.

    The message of the error contains `path`.

    Raises:
        TypeError: `fields` is no dictionary.
    """
    if not isinstance(fields, dict):
        raise TypeError(f"got {type(fields).__name__}, allowed: a dictionary")
    record = _Record(fields)
    record.path = path
    record.has_checksum = has_checksum
    record.pop(_CHECKSUM, None)
    return record


def glance(path: Path | str) -> dict[str, Any]:
    """Return the content of a JSON file for display; empty if the file is missing or damaged."""
    with suppress(OSError, DamagedError):
        return read_json(path)
    return {}


def open_record(folder: Path | str, command: str, name: str = "record.json") -> dict[str, Any]:
    """Return the content of a folder's record, a JSON file that exists only if the folder is complete.

    Args:
        folder: the folder.
        command: kairos command that writes the folder, for the error message.
        name: file name of the record.

    Raises:
        KairosError: the record is missing; the message contains the command.
        DamagedError: the record is damaged. Indexing the result with a missing field also raises it.
    """
    path = Path(folder) / name
    if not path.is_file():
        problem = f"is not complete (no {name})" if path.parent.is_dir() else "does not exist"
        raise KairosError(f"{folder}: {problem}; make it with: kairos {command}")
    return read_record(path)


def check_files(folder: Path, files: dict[str, str], again: str) -> None:
    """Raise DamagedError if a file does not have its recorded hash; further files of the folder are not checked.

    Args:
        folder: the folder.
        files: SHA-256 hashes by path relative to the folder.
        again: how to compute the files again, for the error message.

    Raises:
        DamagedError: a file is missing or has changed; raised for the first such file.
    """
    for name, digest in files.items():
        file = folder / name
        if not file.is_file():
            raise DamagedError(f"{file}: is missing; {again}")
        if sha256_file(file) != digest:
            raise DamagedError(f"{file}: damaged: does not match its checksum; {again}")


def sync_to_disk(path: Path | str) -> None:
    """Make the content of a file, or the names of the files in a folder after a rename or link, durable on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_folder(path: Path | str) -> Iterator[Path]:
    """Create a temporary folder, yield its path, and move it to `path` if the context ends without an error.

    An old folder at `path` is replaced and deleted. If the context raises an error, the old folder is unchanged and the
    temporary folder is deleted. Folders above the path are created. The files are flushed to the disk before the folder
    appears. A link to a folder at `path` stays, and its folder is replaced.

    Raises:
        KairosError: a file is at the path.
        OSError: the folder cannot be written or replaced. If only the deletion of the old folder fails, the error is
            raised although the new folder is at `path` already.
    """
    path = Path(path).resolve()  # an exchange with a link would replace the link
    if path.exists() and not path.is_dir():
        raise KairosError(f"{path}: a file is there; allowed: a folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    new_folder = path.parent / f".tmp-{uuid.uuid4().hex}"
    new_folder.mkdir()
    # path to delete at the end, if it exists. `new_folder` is the unfinished folder after an error, and the old folder
    # after an exchange
    obsolete = new_folder
    try:
        yield new_folder
        for file in new_folder.rglob("*"):  # before the folder appears at `path`
            if file.is_file():
                sync_to_disk(file)
        if not path.exists():
            os.rename(new_folder, path)
        elif not _exchange(new_folder, path):
            obsolete = _replace(path, new_folder)
        sync_to_disk(path.parent)
    finally:
        if obsolete.exists():
            shutil.rmtree(obsolete)


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two folders atomically; return True on success, or False after any failure, which changes nothing."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)  # function of the C library; None if it has none
    if renameat2 is None:
        return False
    status: int = renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE)
    # causes of a failure: a file system that cannot exchange, a missing folder or permission. The caller then replaces
    # the folder in two steps, whose errors are raised.
    return status == 0


def _replace(path: Path, new: Path) -> Path:
    """Move the folder `new` to `path` in two steps, and return the temporary path of the old folder.

    `path` does not exist between the steps. If the second step fails, the old folder is put back and the error raised.
    A process that is killed between the steps leaves the old folder under its ``.tmp-`` name.
    """
    old_folder = path.parent / f".tmp-{uuid.uuid4().hex}"
    os.rename(path, old_folder)
    try:
        os.rename(new, path)
    except BaseException:
        os.rename(old_folder, path)
        raise
    return old_folder


def link_file(source: Path, target: Path) -> None:
    """Create or replace `target` atomically by a hard link to `source`, or by a copy if it cannot be linked.

    A link fails across file systems, for example; its error is ignored, and errors of the copy are raised. Folders
    above `target` are created. Unlike `atomic`, the function does not flush the file to the disk.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / f".tmp-{uuid.uuid4().hex}"
    try:
        try:
            os.link(source, temporary)
        except OSError:
            shutil.copy2(source, temporary)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)  # exists after an error, and if `target` was already a link to the file


def hash_npz(path: Path) -> str:
    """Return the hash of the arrays in an npz file; the hash of the file differs between versions of Python."""
    digests = {}
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            with archive.open(name) as member:
                digests[name] = hashlib.file_digest(member, "sha256").hexdigest()  # type: ignore[arg-type]
    return sha256_json(digests)


def hash_folder(path: Path) -> dict[str, str]:
    """Return the SHA-256 hash of each file below a folder, by its path relative to the folder, sorted by path.

    Files whose names start with ``.tmp-`` are left out; files in a folder of such a name are included. The result is
    empty if the folder does not exist.
    """
    files = [file for file in path.rglob("*") if file.is_file() and not file.name.startswith(".tmp-")]
    return {file.relative_to(path).as_posix(): sha256_file(file) for file in sorted(files)}


def try_lock(file: IO[Any], timeout: float, conflict: str, to_move: str) -> bool:
    """Try to lock an open file for `timeout` seconds; return True on success, False if another process holds it.

    The exclusive lock (flock) is tried every 0.1 s. The kernel releases it when the file is closed or the process ends.

    Args:
        file: the open file.
        timeout: seconds until the attempts end; 0: a single attempt.
        conflict: what the lock prevents, for the error message, such as "two jobs training here at once".
        to_move: what the user should put on another file system, for the error message, such as "results".

    Raises:
        KairosError: the file system has no locks; also raised for any other error of the lock.
    """
    # not filelock, which replaces the lock by a marker file on a file system without locks
    end = time.monotonic() + timeout
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > end:
                return False
            time.sleep(0.1)
        except OSError as error:
            fault = f"{file.name}: this file system has no locks ({error.strerror}); nothing would prevent {conflict}"
            advice = f"put {to_move} on another file system, or mount this one with locks (Lustre: flock)"
            raise TemporaryError(f"{fault}. To solve this, {advice}") from None


@contextmanager
def lock_folder(folder: Path, path: Path | None = None) -> Iterator[None]:
    """Hold the lock of a folder while the block writes into it, so that only one process writes there at a time.

    The file of the lock is deleted at the end. A killed process may leave the file, but not the lock.

    Args:
        folder: the folder that is written; it is created if `path` is None.
        path: file of the lock, in an existing folder; None: ``.tmp-lock`` in `folder`.

    Raises:
        KairosError: another process holds the lock, or the file system has no locks.
    """
    if path is None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / ".tmp-lock"
    while True:
        file = open(path, "a")  # noqa: SIM115  (closed below, after the file is deleted)
        try:
            if not try_lock(file, timeout=1.0, conflict="two processes writing this folder at once", to_move="results"):
                raise TemporaryError(f"{folder}: another process is writing this folder; wait for its end")
            # the process that held the lock may have deleted the file after this one had opened it
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    break
        except BaseException:
            file.close()
            raise
        file.close()
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # before the lock is released
        file.close()


def read_lines(path: Path) -> list[str]:
    """Return the lines of a text file, except a last line without a newline; empty if the file does not exist."""
    if not path.exists():
        return []
    *lines, _ = path.read_text(encoding="utf-8").split("\n")  # the last text is empty, or a line that is being written
    return lines


def read_times(path: Path, identity: str | None) -> list[dict[str, Any]]:
    """Return the entries of a timing.jsonl that the training run with this identity wrote; empty without a file.

    Clock times are outputs of no stage. If results were pulled or restored, the file may be of another run.
    """
    return [entry for entry in read_entries(path) if entry.get("identity") == identity]


def read_entries(path: Path) -> list[dict[str, Any]]:
    """Return the entries of a metrics.jsonl or timing.jsonl, one for each step in it; an empty list without a file.

    See ``training.run_folder.TIMING_FIELDS`` for those of timing.jsonl. Damaged lines, and a last line without a
    newline, are left out: training does not synchronise the files with the disk, so a power loss may damage their end.
    """
    *lines, _ = path.read_bytes().split(b"\n") if path.exists() else [b""]
    entries = []
    for line in lines:
        with suppress(ValueError):  # not JSON, or not UTF-8
            entry = json.loads(line)
            if isinstance(entry, dict) and "step" in entry:
                entries.append(entry)
    return entries
