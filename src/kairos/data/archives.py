"""Images in a zip, as EDM's and StyleGAN's tools pack them, and lists of the files of a data set that are used."""

import json
import os
import zipfile
import zlib
from pathlib import Path
from typing import TypeVar

from kairos.data.settings import DatasetConfig
from kairos_timesteps.errors import ConfigError

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
_LABELS = "dataset.json"  # {"labels": [["00000/img00000000.png", 6], ...]}, or null
# of what zipfile raises RuntimeError is a password, or a compression that it does not know
_BROKEN = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, OSError)

T = TypeVar("T")


class ZipArchive:
    """The zip that `dataset.path` names. A forked process opens it anew: a shared file would share its position.

    Raises:
        ConfigError: it is no zip.
    """

    def __init__(self, config: DatasetConfig):
        self._path, self._process = str(config.path), -1
        try:
            self._names = self._opened().namelist()
        except (OSError, zipfile.BadZipFile) as error:
            raise ConfigError(f"dataset.path: got {self._path!r}, allowed: a zip of images ({error})") from None

    def images(self) -> tuple[list[str], list[int]]:
        """The names of all images in it, in their order, and the class of each; no classes where it has none.

        Raises:
            ConfigError: it holds no image, or its labels are not those of its images.
        """
        found = (name for name in self._names if name.lower().endswith(SUFFIXES))
        names = sorted(name for name in found if not name.startswith("__MACOSX/"))  # no images, by the same names
        if not names:
            raise ConfigError(f"dataset.path: zip {self._path!r} holds no image ({', '.join(SUFFIXES)})")
        where = f"dataset.path: {_LABELS} in {self._path!r}"
        try:
            pairs = json.loads(self.read(_LABELS) if _LABELS in self._names else "{}").get("labels") or []
            labels = {str(name): label for name, label in pairs}
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigError(f'{where} is not {{"labels": [[name, class], ...]}} or null ({error})') from None
        if not labels:
            return names, []
        if odd := [label for label in labels.values() if type(label) is not int or label < 0]:
            raise ConfigError(f"{where} holds the class {odd[0]!r}, allowed: integers from 0")
        if differ := sorted(labels.keys() ^ set(names)):
            raise ConfigError(
                f"{where} holds {len(labels)} names and the zip {len(names)} images, allowed: the same names; only one "
                f"of them has {differ[0]!r}"
            )
        return names, [labels[name] for name in names]

    def read(self, name: str) -> bytes:
        """The content of a file in it.

        Raises:
            ValueError: it cannot be read; the text says why.
        """
        try:
            return self._opened().read(name)
        except _BROKEN as error:
            raise ValueError(" ".join(str(error).split()) or type(error).__name__) from None

    def _opened(self) -> zipfile.ZipFile:
        if self._process != os.getpid():
            self._file, self._process = zipfile.ZipFile(self._path), os.getpid()
        return self._file


def select_listed_files(config: DatasetConfig, names: list[str], kinds: list[T]) -> tuple[list[str], list[T]]:
    """Select the files that `dataset.files` lists, in its order, and return their names and classes.

    `names` are all files below `dataset.path`; `kinds` are their classes, or empty. Without a list, all are returned. A
    name's ending counts only where two files differ in it alone: taming's lists of CelebA-HQ name arrays (.npy).

    Raises:
        ConfigError: the list cannot be read, is empty, or contains a file that does not exist.
    """
    if config.files is None:
        return names, kinds
    path, _, chosen = config.files.rpartition(":")
    if not chosen.isdigit():
        path, chosen = config.files, ""
    where = f"dataset.files: {path}"
    try:
        lines = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where} cannot be read ({error}), allowed: a text file with a name in each line") from None
    if chosen:
        lines = [line.rsplit(maxsplit=1)[0] for line in lines if line.split()[-1] == chosen]
    if not lines:
        raise ConfigError(f"{where} has no line{chosen and f' that ends in {chosen}'}, allowed: a name in each")
    places = {os.path.splitext(name)[0]: place for place, name in enumerate(names)}
    places |= {name: place for place, name in enumerate(names)}
    found = {line: places.get(line, places.get(os.path.splitext(line)[0], -1)) for line in lines}
    if missing := [line for line, place in found.items() if place < 0]:
        raise ConfigError(
            f"{where} names {len(missing)} of {len(found)} files that {config.path!r} does not hold, such as "
            f"{missing[0]!r}; allowed: names as they are below it (LIST:N where lines are `name N`)"
        )
    return [names[place] for place in found.values()], [kinds[place] for place in found.values()] if kinds else []
