"""Copies of training data on a local disk: one copy per machine, kept while a training run there reads it.

In jobs of a scheduler many training runs read batches, in random order, from one shared file system. The copy is in a
folder named by the hash of its content. The first process that needs the copy makes it while the others wait, and the
copy appears whole or not at all. The last process to end deletes the copy, and also copies that killed jobs have left.
The folder also contains ``lock``, held while the copy is made or deleted, and ``used``, shared by all readers.
"""

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from kairos.files import DamagedError, atomic_folder, open_record, read_record, sha256_file, sha256_json, write_record
from kairos.progress import log

# by name of a folder in the copy: the original folder, and the hashes of the files to copy by name
Copied = dict[str, tuple[Path, dict[str, str]]]
_LOCAL_FOLDERS = ("KAIROS_LOCAL", "SLURM_TMPDIR", "TMPDIR")  # the first variable that is set; else the system's /tmp


@contextmanager
def staged(latents: Path) -> Iterator[Path]:
    """Copy latents to a local disk, and yield the folder to read them from, for the time of the context.

    Data are copied in SLURM jobs, and if KAIROS_LOCAL is set; otherwise `latents` itself is yielded, without a message.
    The copy includes the data set of the latents, and their encoded captions. Images, which training on latents does
    not read, are linked. At the end of the context the copy is deleted, unless another process reads it.

    `latents` is also yielded, and a message reports the reason, if the local disk has an error or the folder for copies
    belongs to another user. A reason of `_reason_not_to_copy` counts only if there is no complete copy yet.

    Raises:
        KairosError: the latents, their data set or their encoded captions are not complete.
        DamagedError: the original files do not match their records.
        FileNotFoundError: a file that a record contains is missing.
    """
    if "KAIROS_LOCAL" not in os.environ and "SLURM_JOB_ID" not in os.environ:
        yield latents
        return

    # the data to copy
    record = open_record(latents, f"encode --config F --out {latents}")
    dataset = latents / record["dataset"]
    dataset_record = open_record(dataset, f"prepare --config F --out {dataset}")
    copied = _files_to_copy(latents, record, dataset, dataset_record)
    size = 0  # bytes
    for folder, files in copied.values():
        size += sum((folder / name).stat().st_size for name in files)

    # make the copy, or determine the reason for reading the original
    local = _local_folder()
    user_folder = local / f"kairos-{os.getuid()}"
    copy_folder = user_folder / sha256_json([record, dataset_record])[:16]  # folder of the copy and its locks
    with ExitStack() as at_end:
        reason = None  # reason for reading the original; None: read the copy
        try:
            user_folder.mkdir(mode=0o700, exist_ok=True)
            if user_folder.stat().st_uid != os.getuid():
                reason = "it belongs to another user"
            elif not _is_complete(copy_folder, copied):  # a complete copy takes no further space
                reason = _reason_not_to_copy(local, latents, size)
            if reason is None:
                copy_folder.mkdir(exist_ok=True)
                # At the end of the context these run in reverse order: `used` is closed, and then the copy is deleted
                # if no other process reads it.
                at_end.callback(_remove_unused, user_folder, copy_folder)
                used = at_end.enter_context(open(copy_folder / "used", "w"))
                _copy(copy_folder, used, copied)
        except OSError as error:
            reason = str(error.strerror)

        if reason is None:
            log(f"data are read from {copy_folder}")
            yield copy_folder / "copy" / "latents"
        else:
            log(f"data are read from {latents}, not from {user_folder}: {reason}")
            yield latents


def _files_to_copy(latents: Path, record: dict[str, Any], dataset: Path, dataset_record: dict[str, Any]) -> Copied:
    """Return the files that training reads: original folder, and file hashes by name, for each folder of the copy.

    The folders of the copy are ``latents``, ``dataset`` and, if the latents have encoded captions, ``text``. The images
    of the data set are left out unless the model is trained on pixels.

    Raises:
        KairosError: the encoded captions are not complete.
    """
    dataset_files = dict(dataset_record["files"])
    reads_images = not record["files"]  # training on pixels
    if not reads_images:
        dataset_files.pop("images.npy", None)
    copied = {"latents": (latents, record["files"]), "dataset": (dataset, dataset_files)}
    if "text" in record:
        text = latents / record["text"]
        copied["text"] = (text, open_record(text, f"text --config F --out {text}")["files"])
    return copied


def _local_folder() -> Path:
    """Return the folder of the local disk: the first environment variable of `_LOCAL_FOLDERS` that is not empty.

    Without such a variable it is the system's temporary folder.
    """
    for name in _LOCAL_FOLDERS:
        folder = os.environ.get(name)
        if folder:
            return Path(folder)
    return Path(tempfile.gettempdir())


def _reason_not_to_copy(local: Path, latents: Path, size: int) -> str | None:
    """Return the reason not to copy data of `size` bytes to a local folder, as text; None if they should be copied.

    Free space of less than twice the size is a reason. If KAIROS_LOCAL is not set, a local folder on the same file
    system or in main memory is also a reason. A variable that is set to an empty text counts as set.
    """
    if "KAIROS_LOCAL" not in os.environ:
        if local.stat().st_dev == latents.stat().st_dev:
            return "it is on the same file system"
        file_system, _ = mount(local)
        if file_system in ("tmpfs", "ramfs"):
            return "it is in main memory"
    free = shutil.disk_usage(local).free
    if free < 2 * size:  # as much space as the copy takes stays free
        return f"{free / 1e9:.3g} GB are free, twice {size / 1e9:.3g} are needed"
    return None


def mount(path: Path) -> tuple[str, list[str]]:
    """Return the type of the file system that contains a folder, such as ext4, and its mount options.

    Both are empty if the folder is in no mounted file system. If several file systems are mounted at one folder, the
    last one is used.

    Raises:
        OSError: the system has no /proc/mounts.
    """
    lines = Path("/proc/mounts").read_text(encoding="utf-8").splitlines()
    mounts = {}
    for line in lines:
        _, mount_point, kind, options, *_ = line.split()
        # the kernel writes blanks, tabs, line breaks and backslashes of a path as octal numbers, such as \040
        mount_point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], base=8)), mount_point)
        mounts[mount_point] = (kind, options.split(","))
    path = path.resolve()
    for folder in (path, *path.parents):
        if str(folder) in mounts:
            return mounts[str(folder)]
    return "", []


def _remove_unused(user_folder: Path, current: Path) -> None:
    """Delete a user's copies that no process reads: the current one of this job, and copies of killed jobs.

    `current` is the folder of this job's copy. Copies that are in use or cannot be deleted stay, without an error. The
    folders of deleted copies stay, with their files ``lock`` and ``used``.
    """
    for copy_folder in user_folder.iterdir():
        with suppress(OSError), open(copy_folder / "lock", "w") as lock, open(copy_folder / "used", "w") as used:
            # Another process may hold the lock of the current copy for a moment, so this process waits for it. In all
            # other cases a lock of another process raises an OSError, and the copy is skipped.
            lock_options = fcntl.LOCK_EX if copy_folder == current else fcntl.LOCK_EX | fcntl.LOCK_NB
            fcntl.flock(lock, lock_options)
            fcntl.flock(used, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _clear(copy_folder)


def _clear(copy_folder: Path) -> None:
    """Delete the copy in folder `copy_folder`, complete or not, and what jobs left that were killed while copying."""
    for leftover in (*copy_folder.glob(".tmp-*"), *copy_folder.glob("copy")):
        shutil.rmtree(leftover)


def _copy(copy_folder: Path, used: IO[str], copied: Copied) -> None:
    """Copy files to folder ``copy`` in `copy_folder`, unless a complete copy is there; replace an incomplete one.

    If another process copies the files, wait for it. Further files of the original folders are linked. The function
    locks the open file ``used`` of `copy_folder`: no process deletes the copy until `used` is closed. The copied
    record of the latents contains the paths of the other folders in the copy.

    Raises:
        DamagedError: an original file does not match its record.
        OSError: a file cannot be read or written.
    """
    with open(copy_folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # waits for a process that makes or deletes the copy
        fcntl.flock(used, fcntl.LOCK_SH)  # until `used` is closed; taken while `lock` keeps `_remove_unused` out
        if _is_complete(copy_folder, copied):
            return
        _clear(copy_folder)
        with atomic_folder(copy_folder / "copy") as folder:
            for name, (source, files) in copied.items():
                for file in sorted(path for path in source.rglob("*") if path.is_file()):
                    relative = file.relative_to(source).as_posix()
                    _copy_or_link(file, folder / name / relative, digest=files.get(relative))
            # set the paths of the other folders, which are next to the latents in the copy
            record = folder / "latents" / "record.json"
            relative_paths = {name: f"../{name}" for name in copied if name != "latents"}
            write_record(record, {**read_record(record), **relative_paths})


def _is_complete(copy_folder: Path, copied: Copied) -> bool:
    """Return True if all copied files are in `copy_folder` with their original size, and each folder has its record.

    Linked files are not checked, and contents are not compared.
    """
    # a copy may lose files: many machines delete old files of /tmp and leave the folders
    copy = copy_folder / "copy"
    try:
        for name, (source, files) in copied.items():
            for file in files:
                if (copy / name / file).stat().st_size != (source / file).stat().st_size:
                    return False
        return all((copy / name / "record.json").is_file() for name in copied)
    except OSError:  # a file is missing
        return False


def _copy_or_link(file: Path, target: Path, digest: str | None) -> None:
    """Copy a file and check its SHA-256 hash, or link it if `digest` is None; folders above `target` are created.

    Raises:
        DamagedError: the copy differs from the hash.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    if digest is None:  # training does not read the file
        target.symlink_to(file.resolve())
        return
    shutil.copyfile(file, target)
    if sha256_file(target) != digest:
        raise DamagedError(f"{file}: differs from its record; make it again, or pull it with dvc")
