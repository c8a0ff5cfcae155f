"""Captions of images: where they come from, and how a prepared data set holds them.

All texts lie in one array of UTF-8 bytes, in the order of the images; a second array says where each text ends, a third
which is the first of each image.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np

from kairos.data.arrays import ArrayFile, open_array
from kairos.files import open_record
from kairos.progress import say
from kairos_timesteps.errors import ConfigError, KairosError

if TYPE_CHECKING:
    from kairos.data.dataset import PreparedDataset
    from kairos.data.settings import DatasetConfig  # pydantic, which a training on latents needs not
    from kairos.data.sources import Source

ARRAYS = ("captions", "caption_ends", "caption_firsts")
UnmatchedCaptions = frozenset[tuple[str, int]]  # captions without an image: their file, and their place in it


@dataclass(frozen=True)
class Captions:
    """The captions of a prepared data set.

    Args:
        content: uint8 (bytes,), all texts one after another.
        ends: int64 (captions,), the byte after each.
        firsts: int64 (images + 1,), number of each image's first caption.
    """

    content: ArrayFile
    ends: np.ndarray
    firsts: np.ndarray

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def longest_bytes(self) -> int:
        """Bytes of the longest one."""
        return int(np.diff(self.ends, prepend=0).max())

    def caption_indices(self, images: np.ndarray, which: np.ndarray | None = None) -> np.ndarray:
        """Numbers of one caption of each image, int64 (n,): number `which` of its own, going round; None: the first."""
        firsts, counts = self.firsts[images], self.firsts[images + 1] - self.firsts[images]
        return firsts if which is None else firsts + which % counts

    def texts(self, numbers: Any) -> list[str]:
        """The texts with these numbers."""
        starts = (self.ends[number - 1] if number else 0 for number in numbers)
        pairs = zip(starts, self.ends[np.asarray(numbers)])
        return [self.content[int(start) : int(end)].tobytes().decode() for start, end in pairs]


def open_captions(folder: Path, command: str) -> Captions:
    """The captions in a prepared data set's folder."""
    content, ends, firsts = (open_array(folder / f"{name}.npy", command) for name in ARRAYS)
    return Captions(content, ends[:], firsts[:])


def pack_captions(captions: list[list[str]]) -> dict[str, np.ndarray]:
    """The arrays that hold the captions of some images."""
    texts = [text.encode("utf-8", "replace") for own in captions for text in own]
    content = np.frombuffer(b"".join(texts), np.uint8)
    ends, firsts = np.cumsum([len(text) for text in texts]), np.cumsum([0, *map(len, captions)])
    return dict(zip(ARRAYS, (content, ends.astype(np.int64), firsts.astype(np.int64))))


def add_captions(source: "Source", config: "DatasetConfig") -> "Source":
    """A source with what `dataset.captions` names: COCO's JSON, or files beside the images; tables bring their own.

    Raises:
        ConfigError: the file cannot be read, or is none of COCO's captions.
    """
    if config.captions is None or source.captions is not None:
        return source
    names = [source.name(number) for number in range(source.count)]
    if config.captions == "sidecar":
        return replace(source, captions=[_beside(Path(str(config.path)) / name) for name in names])
    captions, missing = read_coco_captions(config.captions, names)
    return replace(source, captions=captions, missing=missing)


def clean_texts(texts: list[Any]) -> list[str]:
    """Texts without blanks around them, and none that is empty."""
    return [text.strip() for text in texts if isinstance(text, str) and text.strip()]


def _beside(image: Path) -> list[str]:
    file = image.with_suffix(".txt")
    try:
        return clean_texts(file.read_text(encoding="utf-8").splitlines()) if file.is_file() else []
    except UnicodeDecodeError:
        raise ConfigError(f"dataset.captions: {file} is no text in UTF-8") from None


def read_coco_captions(path: str, names: list[str]) -> tuple[list[list[str]], UnmatchedCaptions]:
    """The captions of images from a JSON file in COCO's form, and those of no image.

    Args:
        path: of the file.
        names: of the images; the file may name them by the last part alone.

    Raises:
        ConfigError: there is no such file, it has another form, or one of its names means several images.
    """
    try:
        content = json.loads(Path(path).read_bytes())
        files = {item["id"]: str(item["file_name"]) for item in content["images"]}
        texts = [(files.get(item["image_id"], ""), item["caption"]) for item in content["annotations"]]
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        form = "JSON with `images` (id, file_name) and `annotations` (image_id, caption)"
        raise ConfigError(f"dataset.captions: {path!r} cannot be read ({error!r}), allowed: {form}") from None
    places: dict[str, list[int]] = {}
    for number, name in enumerate(names):
        places.setdefault(PurePosixPath(name).name, []).append(number)
    places |= {name: [number] for number, name in enumerate(names)}
    found: list[list[str]] = [[] for _ in names]
    missing = set()
    for place, (name, text) in enumerate(texts):
        numbers = places.get(name, [])
        if len(numbers) > 1:
            raise ConfigError(f"dataset.captions: {path!r} says {name!r}, which {len(numbers)} images are named")
        if numbers:
            found[numbers[0]] += clean_texts([text])
        else:
            missing.add((path, place))
    return found, frozenset(missing)


def captions_from_column(name: str, cells: list[Any]) -> list[list[str]]:
    """The captions in a table's column of texts or of lists of texts.

    Raises:
        ConfigError: it holds something else.
    """
    lists = [cell if isinstance(cell, list) else [cell] for cell in cells]
    odd = [text for cell in lists for text in cell if not isinstance(text, str | None)]
    if odd:
        raise ConfigError(f"dataset.captions: {name!r} holds {str(odd[0])[:40]}, allowed: texts or lists of texts")
    return [clean_texts(cell) for cell in lists]


def select_captioned(source: "Source", config: "DatasetConfig") -> tuple[list[int], dict[str, int]]:
    """Numbers of the images that can be used, which are all where there are no captions; and how many cannot.

    Raises:
        KairosError: no image has a caption; or some have none, or captions no image, where that is refused.
    """
    if source.captions is None:
        return list(range(source.count)), {}
    have = [number for number, own in enumerate(source.captions) if own]
    without = [source.name(number) for number, own in enumerate(source.captions) if not own]
    missing, named = len(source.missing), f" (the first: {without[0]})" if without else ""
    facts = f"{len(without)} of {source.count} images have no caption{named}, {missing} captions no image"
    if not have:
        raise KairosError(f"dataset.captions: {config.captions!r} has none of the images: {facts}")
    if without or missing:
        if config.unmatched == "refuse":
            raise KairosError(f"dataset.unmatched: got refuse, but {facts}; allowed: count, which leaves them out")
        say(f"prepare: {facts}; they are left out")
    return have, {"images_without": len(without), "captions_without": missing}


@dataclass(frozen=True)
class EncodedCaptions:
    """Captions of a data set, encoded by stage text.

    Attributes:
        manifest: record of stage text; ``condition`` describes the states.
        states: encoded captions, (captions, *shape), float32 or float16.
        empty: the state of the caption "", float32 (*shape).
    """

    manifest: dict[str, Any]
    states: ArrayFile
    empty: np.ndarray


def open_encoded_captions(folder: Path, dataset: "PreparedDataset") -> EncodedCaptions:
    """Open the folder that stage text wrote.

    Raises:
        KairosError: it is missing, not complete, or of another data set.
    """
    command = f"text --config F --dataset {dataset.folder} --out {folder}"
    manifest = open_record(folder, command)
    if manifest["dataset_sha256"] != dataset.manifest["content_sha256"]:
        raise KairosError(
            f"{folder}: was made from another version of {dataset.folder}; make it with: kairos {command}"
        )
    states, empty = (open_array(folder / f"{name}.npy", command) for name in ("states", "empty"))
    return EncodedCaptions(manifest, states, empty[0])
