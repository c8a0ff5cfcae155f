"""Hashes of the files outside of the results, such as a folder of images; a project reads each folder once.

``.kairos/outside_files.json`` contains the hash of each folder's content, with a hash of names, sizes and modification
times. If these are unchanged, the folder is not read again.
"""

import errno
import os
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kairos.files import glance, sha256_file, sha256_json, write_json
from kairos.progress import ProgressBar

_INDEX = Path(".kairos/outside_files.json")
_NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)  # errors of links to nothing
_SAVE_SECONDS = 30.0  # between two writes of the index, so that a killed process loses little


def hash_contents(paths: Iterable[str], reads_files: bool = True) -> str | None:
    """Return the hash of files and of all files below folders, by names and contents; paths to them do not count.

    Hidden files and folders are left out, and links are followed, each folder once. A missing path counts as empty. A
    progress bar shows the files that are read. In a read-only project the index is not saved, and the
    files are read each time. With `reads_files` False no file is read, and the result is None if one would be.
    """
    index, saved = dict(glance(_INDEX)), time.monotonic()
    groups = [group for path in paths for group in _list_files(Path(path))]
    unread = [group for group in groups if index.get(group.key, [""])[0] != group.listing_hash]
    if unread and not reads_files:
        return None
    progress = ProgressBar(sum(len(group.listing) for group in unread), "outside files", "file") if unread else None
    for group in unread:
        hashes = []
        for name, _, _ in group.listing:
            hashes.append([name, sha256_file(group.folder / str(name))])
            if progress is not None:
                progress.advance()
        index[group.key] = [group.listing_hash, sha256_json(hashes)]
        if time.monotonic() - saved > _SAVE_SECONDS:
            _save(index)
            saved = time.monotonic()
    if progress is not None:
        progress.close()
        _save(index)
    return sha256_json([[group.relative, index[group.key][1]] for group in groups])


@dataclass(frozen=True)
class _Group:
    """Files that are hashed together: those of a folder, without its subfolders, or a single file.

    Attributes:
        key: key in the index.
        folder: the folder.
        relative: path of the group relative to the path that is hashed.
        listing: name, size in bytes and modification time in ns of each file, sorted.
    """

    key: str
    folder: Path
    relative: str
    listing: list[list[Any]]

    @cached_property
    def listing_hash(self) -> str:
        return sha256_json(self.listing)


def _save(index: dict[str, list[str]]) -> None:
    try:
        write_json(_INDEX, index)
    except OSError:  # a read-only project: the files are read again next time
        return


def _list_files(root: Path) -> Iterator[_Group]:
    """Yield a group for each folder with files below a path, in the order of the names; a file is its own group."""
    if root.is_file():
        yield _Group(
            key=f"{os.path.realpath(root)}:{root.name}",
            folder=root.parent,
            relative=root.name,
            listing=[[root.name, *_describe(root)]],
        )
        return
    seen: set[str] = set()
    for folder, subfolders, names in os.walk(root, followlinks=True):
        resolved = os.path.realpath(folder)
        if resolved in seen:  # a link to a folder above
            subfolders.clear()
            continue
        seen.add(resolved)
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        listing = []
        for name in sorted(names):
            description = [] if name.startswith(".") else _describe(os.path.join(folder, name))
            if description:
                listing.append([name, *description])
        if listing:
            yield _Group(key=resolved, folder=Path(folder), relative=os.path.relpath(folder, root), listing=listing)


def _describe(path: Path | str) -> list[int]:
    """Return size and time of a file; empty for a link to nothing, a pipe or a device."""
    try:
        status = os.stat(path)  # one call for a file, since there may be millions
    except OSError as error:
        if error.errno in _NO_FILE:
            return []
        raise
    return [status.st_size, status.st_mtime_ns] if stat.S_ISREG(status.st_mode) else []
