"""Images in a zip file, as the tools of EDM and StyleGAN pack them, and lists that select files of a data set."""

import json
import os
import zipfile
import zlib
from pathlib import Path
from typing import TypeVar

from kairos.data.settings import DatasetConfig, MissingDataError
from kairos_timesteps.errors import ConfigError

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
_LABELS_FILE = "dataset.json"  # {"labels": [["00000/img00000000.png", 6], ...]}, or null
# zipfile raises RuntimeError for a file with a password and for an unknown compression
_READ_ERRORS = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, OSError)

Label = TypeVar("Label")


class ZipArchive:
    """The zip file at `dataset.path`.

    Each process opens the file for itself: after a fork, parent and child would share one read position.

    Raises:
        MissingDataError: the file is missing.
        ConfigError: the file is not a zip file.
    """

    def __init__(self, config: DatasetConfig):
        self._path = str(config.path)
        self._process = -1  # id of the process that opened `_file`
        try:
            self._names = self._open().namelist()
        except (OSError, zipfile.BadZipFile) as error:
            error_type = MissingDataError if isinstance(error, FileNotFoundError) else ConfigError
            raise error_type(f"dataset.path: got {self._path!r}, allowed: a zip of images ({error})") from None

    def list_images(self) -> tuple[list[str], list[int]]:
        """Return the sorted names of all images in the zip, and the class number of each image in this order.

        An image is a file with one of `SUFFIXES`, in upper or lower case, outside of folder ``__MACOSX``. The second
        list is empty if the zip has no labels.

        Raises:
            ConfigError: the zip contains no image, or its dataset.json cannot be used, see `_read_labels`.
        """
        names = []
        for name in sorted(self._names):
            is_resource_fork = name.startswith("__MACOSX/")  # macOS adds files there that have the names of images
            if name.lower().endswith(SUFFIXES) and not is_resource_fork:
                names.append(name)
        if not names:
            raise ConfigError(f"dataset.path: zip {self._path!r} holds no image ({', '.join(SUFFIXES)})")
        label_by_name = self._read_labels(names)
        if not label_by_name:
            return names, []
        return names, [label_by_name[name] for name in names]

    def _read_labels(self, image_names: list[str]) -> dict[str, int]:
        """Return the class number of each image by name, from dataset.json; empty without the file or its ``labels``.

        ``labels`` that are null or empty are treated as missing. A name that occurs several times has its last class.

        Raises:
            ConfigError: the file cannot be read or has another form, a class is not an integer from 0, or the names are
                not exactly those in the zip.
        """
        where = f"dataset.path: {_LABELS_FILE} in {self._path!r}"  # start of each error message
        try:
            content = json.loads(self.read(_LABELS_FILE)) if _LABELS_FILE in self._names else {}
            labels = {str(name): label for name, label in content.get("labels") or []}
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigError(f'{where} is not {{"labels": [[name, class], ...]}} or null ({error})') from None
        if not labels:
            return {}
        # `type`, not `isinstance`: true and false are integers in Python
        invalid = [label for label in labels.values() if type(label) is not int or label < 0]
        if invalid:
            raise ConfigError(f"{where} holds the class {invalid[0]!r}, allowed: integers from 0")
        unmatched = sorted(set(labels).symmetric_difference(image_names))  # only in dataset.json, or only in the zip
        if unmatched:
            raise ConfigError(
                f"{where} holds {len(labels)} names and the zip {len(image_names)} images, allowed: equal names; "
                f"only one of them has {unmatched[0]!r}"
            )
        return labels

    def read(self, name: str) -> bytes:
        """Return the content of a file in the zip; the caller ensures that the zip contains this name.

        Raises:
            ValueError: the file cannot be read; the message contains the reason.
        """
        try:
            return self._open().read(name)
        except _READ_ERRORS as error:
            # in one line; some errors have no text
            raise ValueError(" ".join(str(error).split()) or type(error).__name__) from None

    def _open(self) -> zipfile.ZipFile:
        """Return the open zip file; the first call in each process opens it, and it is never closed."""
        if self._process != os.getpid():
            self._file = zipfile.ZipFile(self._path)
            self._process = os.getpid()
        return self._file


def select_listed_files(config: DatasetConfig, names: list[str], labels: list[Label]) -> tuple[list[str], list[Label]]:
    """Return the names and labels of the files that `dataset.files` lists, in its order. Without a list, return all.

    A listed name selects the file with this name, or else one with this name and another suffix. If several have other
    suffixes, the last one in `names` is selected. A file that is selected several times is returned once.

    Args:
        config: section `dataset`.
        names: names of all files below `dataset.path`, relative to it.
        labels: label of each file; empty if the data set has none. The returned labels are then empty, too.

    Raises:
        MissingDataError: the list is missing.
        ConfigError: the list cannot be read, is empty, or contains a file that does not exist.
    """
    if config.files is None:
        return names, labels
    path, line_value = _split_list_option(config.files)
    # Find files by complete name or by name without suffix: Taming's lists of CelebA-HQ contain .npy names of images
    # that have another suffix. Complete names are added last and take precedence.
    index_by_name = {os.path.splitext(name)[0]: index for index, name in enumerate(names)}
    index_by_name |= {name: index for index, name in enumerate(names)}
    listed = list(dict.fromkeys(_read_list(path, line_value)))  # each name once
    selected, missing = [], []
    for name in listed:
        without_suffix = os.path.splitext(name)[0]
        if name in index_by_name:
            selected.append(index_by_name[name])
        elif without_suffix in index_by_name:
            selected.append(index_by_name[without_suffix])
        else:
            missing.append(name)
    if missing:
        raise ConfigError(
            f"dataset.files: {path} lists {len(missing)} of {len(listed)} files that {config.path!r} does not hold, "
            f"such as {missing[0]!r}; allowed: names relative to it (LIST:N where lines are `name N`)"
        )
    selected = list(dict.fromkeys(selected))  # the list may name a file with and without its suffix
    selected_names = [names[index] for index in selected]
    selected_labels = [labels[index] for index in selected] if labels else []
    return selected_names, selected_labels


def _split_list_option(files: str) -> tuple[str, str]:
    """Split ``LIST:N``, where N consists of digits, into ("LIST", "N"); return any other text and "" as the value."""
    path, _, line_value = files.rpartition(":")
    if not line_value.isdigit():  # `files` is a path, which may contain a colon
        return files, ""
    return path, line_value


def _read_list(path: str, line_value: str) -> list[str]:
    """Return the names in a text file that lists files, one per line, in its order and with repetitions.

    Names are stripped, and blank lines skipped. If `line_value` is not empty, lines are ``name value``, and only lines
    with this value are used (CelebA's partition).

    Raises:
        MissingDataError: the list is missing.
        ConfigError: the list cannot be read, or selects nothing.
    """
    where = f"dataset.files: {path}"
    try:
        lines = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        error_type = MissingDataError if isinstance(error, FileNotFoundError) else ConfigError
        raise error_type(f"{where} cannot be read ({error}), allowed: a text file with a name in each line") from None
    names = lines
    if line_value:
        names = [line.rsplit(maxsplit=1)[0] for line in lines if line.split()[-1] == line_value]
    if not names:
        condition = f" that ends in {line_value}" if line_value else ""
        raise ConfigError(f"{where} has no line{condition}, allowed: a name in each line")
    return names
