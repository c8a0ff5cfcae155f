"""Copies of training data on a local disk: one copy per machine, kept while a training run there reads it.

In jobs of a scheduler many training runs read batches, in random order, from one shared file system. The copy is in a
folder named by the hash of its content. The first process that needs the copy makes it while the others wait, and the
copy appears whole or not at all. The last process to end deletes the copy, and also copies that killed jobs have left.
The folder also contains ``lock``, held while the copy is made or deleted, and ``used``, shared by all readers.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from kairos.files import atomic_folder, open_record, read_json, sha256_file, sha256_json, write_json
from kairos.progress import log
from kairos_timesteps.errors import DamagedError

Copied = dict[str, tuple[Path, dict[str, str]]]  # folder of the copy: of the original, and its files with their hashes
_PLACES = ("KAIROS_LOCAL", "SLURM_TMPDIR", "TMPDIR")  # the first that is set; without one the system's /tmp


@contextmanager
def staged(latents: Path) -> Iterator[Path]:
    """The folder to read latents from: a copy on a local disk in a job of SLURM's or where KAIROS_LOCAL names a folder.

    The data set that the latents belong to lies beside the copy; of what a training on latents does not read, its
    images, there is a link. The original is read where less than twice the size is free, and where nobody has named
    the folder and it is on the same file system or in main memory; a line says so.

    Raises:
        DamagedError: the original is not what its records say.
    """
    if "KAIROS_LOCAL" not in os.environ and "SLURM_JOB_ID" not in os.environ:
        yield latents
        return
    manifest = open_record(latents, f"encode --config F --out {latents}")
    dataset = latents / manifest["dataset"]
    record = open_record(dataset, f"prepare --config F --out {dataset}")
    read = {name: digest for name, digest in record["files"].items() if name != "images.npy" or not manifest["files"]}
    copied = {"latents": (latents, manifest["files"]), "dataset": (dataset, read)}
    if "text" in manifest:
        text = latents / manifest["text"]
        copied["text"] = (text, open_record(text, f"text --config F --out {text}")["files"])
    size = sum((folder / name).stat().st_size for folder, files in copied.values() for name in files)

    local = Path(next(filter(None, map(os.environ.get, _PLACES)), tempfile.gettempdir()))
    own = local / f"kairos-{os.getuid()}"
    home = own / sha256_json([manifest, record])[:16]
    with ExitStack() as at_end:
        try:
            own.mkdir(mode=0o700, exist_ok=True)
            reason = "it is somebody else's" if own.stat().st_uid != os.getuid() else None
            if not reason and not _whole(home, copied):
                reason = _why_not(local, latents, size)
            if not reason:
                home.mkdir(exist_ok=True)
                at_end.callback(_remove_unused, own, home)
                _make(home, at_end.enter_context(open(home / "used", "w")), copied)
        except OSError as error:
            reason = str(error.strerror)
        log(f"data are read from {latents}, not from {own}: {reason}" if reason else f"data are read from {home}")
        yield latents if reason else home / "copy" / "latents"


def _why_not(local: Path, latents: Path, size: int) -> str | None:
    """Return the reason why the data are not copied; None if they are."""
    if "KAIROS_LOCAL" not in os.environ and local.stat().st_dev == latents.stat().st_dev:
        return "it is on the same file system"
    if "KAIROS_LOCAL" not in os.environ and mount(local)[0] in ("tmpfs", "ramfs"):
        return "it is in main memory"
    free = shutil.disk_usage(local).free
    return f"{free / 1e9:.3g} GB are free, twice {size / 1e9:.3g} are needed" if free < 2 * size else None


def mount(path: Path) -> tuple[str, list[str]]:
    """Kind of the file system that a folder is on, such as ext4, and the options of its mount."""
    lines = Path("/proc/mounts").read_text(encoding="utf-8").splitlines()
    mounts = {place: (kind, options.split(",")) for _, place, kind, options, *_ in map(str.split, lines)}
    path = path.resolve()
    return next((mounts[str(place)] for place in (path, *path.parents) if str(place) in mounts), ("", []))


def _remove_unused(own: Path, mine: Path) -> None:
    """Delete the copies that nobody reads: this job's, and those of jobs that were killed."""
    for home in own.iterdir():
        with suppress(OSError), open(home / "lock", "w") as lock, open(home / "used", "w") as used:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if home == mine else fcntl.LOCK_NB))
            fcntl.flock(used, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises where somebody reads
            _clear(home)


def _clear(home: Path) -> None:
    for left in (*home.glob(".tmp-*"), *home.glob("copy")):  # whole, damaged, or of a job that was killed as it copied
        shutil.rmtree(left)


def _make(home: Path, used: IO[str], copied: Copied) -> None:
    """Copy the files that are read as `home`/copy, or wait for who does it already.

    While `used` is open nobody deletes the copy.
    """
    with open(home / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        fcntl.flock(used, fcntl.LOCK_SH)
        if _whole(home, copied):
            return
        _clear(home)
        with atomic_folder(home / "copy") as folder:
            for name, (source, files) in copied.items():
                for file in sorted(path for path in source.rglob("*") if path.is_file()):
                    relative = file.relative_to(source).as_posix()
                    _place(file, folder / name / relative, files.get(relative))
            manifest = folder / "latents" / "manifest.json"
            beside = {name: f"../{name}" for name in copied if name != "latents"}
            write_json(manifest, {**read_json(manifest), **beside})


def _whole(home: Path, copied: Copied) -> bool:
    """Return True if the local copy is complete: all its files are there, each with the size of the original.

    Many machines delete old files of /tmp and leave the folders.
    """
    copy = home / "copy"
    pairs = [(copy / name / file, source / file) for name, (source, files) in copied.items() for file in files]
    try:
        sizes_agree = all(one.stat().st_size == other.stat().st_size for one, other in pairs)
        return sizes_agree and all((copy / name / "manifest.json").is_file() for name in copied)
    except OSError:
        return False


def _place(file: Path, target: Path, digest: str | None) -> None:
    """Copy a file that has this hash, or link one that is not read."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if digest is None:
        target.symlink_to(file.resolve())
        return
    shutil.copyfile(file, target)
    if sha256_file(target) != digest:
        raise DamagedError(f"{file}: differs from its record; make it again, or pull it with dvc")
