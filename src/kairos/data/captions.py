"""Captions of images: how they are read, and how a prepared data set stores them.

A prepared data set contains three arrays. The first holds all texts one after another as UTF-8 bytes, in the order of
the images. The others hold the end of each text, and the index of each image's first caption.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Int, Integer

from kairos.array_shapes import IntegerArray
from kairos.data.arrays import ArrayFile, open_array
from kairos.files import open_record
from kairos.finite import demand_finite
from kairos.progress import log
from kairos_timesteps.errors import ConfigError, KairosError

if TYPE_CHECKING:
    from kairos.data.dataset import PreparedDataset
    from kairos.data.settings import DatasetConfig  # imports pydantic, which training on latents does not need
    from kairos.data.sources import Source

ARRAYS = ("captions", "caption_ends", "caption_firsts")  # names of the arrays, and of their files without .npy
UnmatchedCaptions = frozenset[tuple[str, int]]  # captions without an image: file, and position in the file

CaptionEnds = Int[np.ndarray, "captions"]  # byte after the end of each caption
CaptionFirsts = Int[np.ndarray, "images_and_end"]  # first caption of each image, then the number of captions
CaptionArray = Integer[np.ndarray, "_"]  # one of the arrays `ARRAYS`; their lengths differ
EmptyTextState = Float[np.ndarray, "*shape"]  # state of the empty caption


@dataclass(frozen=True)
class Captions:
    """Captions of a prepared data set. Each image has one or more, and they are numbered over all images.

    Args:
        content: UTF-8 bytes of all texts one after another, uint8 (bytes,).
        ends: byte after the end of each caption, int64 (captions,).
        firsts: index of each image's first caption, and the number of captions, int64 (images + 1,).
    """

    content: ArrayFile
    ends: CaptionEnds
    firsts: CaptionFirsts

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def longest_bytes(self) -> int:
        """Size of the longest caption in bytes."""
        return int(np.diff(self.ends, prepend=0).max())

    def caption_indices(self, images: IntegerArray, caption_numbers: IntegerArray | None = None) -> IntegerArray:
        """Return the index of one caption of each image, int64 (n,).

        Args:
            images: indices of the images, (n,).
            caption_numbers: which of an image's captions to select, modulo their number, (n,); None: the first.
        """
        firsts: IntegerArray = self.firsts[images]
        if caption_numbers is None:
            return firsts
        counts = self.firsts[images + 1] - firsts
        return np.asarray(firsts + caption_numbers % counts)

    def texts(self, indices: Any) -> list[str]:
        """Read the captions with these indices, a sequence (n,), from the file, as text."""
        texts = []
        for index in indices:
            start = int(self.ends[index - 1]) if index else 0
            end = int(self.ends[index])
            texts.append(self.content[start:end].tobytes().decode())
        return texts


def open_captions(folder: Path, command: str) -> Captions:
    """Open the captions in the folder of a prepared data set; the texts are read from their file on access.

    Args:
        folder: folder of the data set.
        command: kairos command that writes the folder, for error messages.

    Raises:
        KairosError: an array file is missing.
        DamagedError: an array file ends early, or is not an array.
    """
    content, ends, firsts = (open_array(folder / f"{name}.npy", command) for name in ARRAYS)
    return Captions(content, ends[:], firsts[:])  # [:] reads the two arrays of integers into memory


def pack_captions(captions: list[list[str]]) -> dict[str, CaptionArray]:
    """Convert the captions of each image to the three arrays that a prepared data set stores, by their names `ARRAYS`.

    ``captions`` contains the UTF-8 bytes of all texts, uint8 (bytes,). ``caption_ends`` is the end of each text there,
    int64 (captions,). ``caption_firsts`` is the index of each image's first caption and, last, the number of captions,
    int64 (images + 1,). A lone surrogate becomes a question mark.
    """
    texts: list[bytes] = []
    for image_captions in captions:
        # "replace": lone surrogates, which a JSON file may contain, have no UTF-8 bytes
        texts += [text.encode("utf-8", "replace") for text in image_captions]
    content = np.frombuffer(b"".join(texts), np.uint8)
    ends = np.cumsum([len(text) for text in texts]).astype(np.int64)
    firsts = np.cumsum([0, *(len(image_captions) for image_captions in captions)]).astype(np.int64)
    return dict(zip(ARRAYS, (content, ends, firsts)))


def add_captions(source: "Source", config: "DatasetConfig") -> "Source":
    """Return a copy of a source with the captions that `dataset.captions` selects.

    They come from a JSON file in COCO's format, or with ``sidecar`` from a text file with the name of each image. The
    source itself is returned if no captions are configured, or if it is a table, which has its captions already.
    An image without captions gets an empty list. `Source.unmatched_captions` contains captions of a JSON file that
    belong to no image; text files without an image are ignored.

    Raises:
        ConfigError: a file of captions cannot be read or has another format, or a name in it matches several images.
    """
    is_table_with_captions = source.captions is not None
    if config.captions is None or is_table_with_captions:
        return source
    names = [source.name(index) for index in range(source.count)]
    if config.captions == "sidecar":
        return replace(source, captions=[_read_sidecar(Path(str(config.path)) / name) for name in names])
    captions, unmatched = read_coco_captions(config.captions, names)
    return replace(source, captions=captions, unmatched_captions=unmatched)


def clean_texts(texts: list[Any]) -> list[str]:
    """Strip blanks around texts, and drop empty texts and values that are not texts."""
    return [text.strip() for text in texts if isinstance(text, str) and text.strip()]


def _read_sidecar(image: Path) -> list[str]:
    """Return the captions of an image: the lines of the .txt file with its name, stripped and without blank lines.

    The list is empty if there is no such file.

    Raises:
        ConfigError: the file is not UTF-8.
    """
    file = image.with_suffix(".txt")
    try:
        return clean_texts(file.read_text(encoding="utf-8").splitlines()) if file.is_file() else []
    except UnicodeDecodeError:
        raise ConfigError(f"dataset.captions: {file} is no text in UTF-8") from None


def read_coco_captions(path: str, names: list[str]) -> tuple[list[list[str]], UnmatchedCaptions]:
    """Read captions from a JSON file in COCO's format.

    Captions keep the order of the file. Blank texts and captions that are not texts are dropped; they are unmatched
    only if their image does not exist. A name in the file selects the image with this path, or else the one with this
    file name.

    Args:
        path: the JSON file.
        names: paths of the images.

    Returns:
        The captions of each image, an empty list for an image without any; and the captions that belong to no image, as
            `path` and position among the annotations.

    Raises:
        ConfigError: the file is missing or has another format, or a name in it matches several images.
    """
    captions: list[list[str]] = [[] for _ in names]
    indices_by_name: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        indices_by_name.setdefault(PurePosixPath(name).name, []).append(index)
    indices_by_name |= {name: [index] for index, name in enumerate(names)}  # full paths take precedence
    unmatched = set()
    for position, (name, text) in enumerate(_parse_coco(path)):
        indices = indices_by_name.get(name, [])
        if not indices:
            unmatched.add((path, position))
        elif len(indices) == 1:
            captions[indices[0]] += clean_texts([text])
        else:
            raise ConfigError(f"dataset.captions: {path!r} contains {name!r}, the name of {len(indices)} images")
    return captions, frozenset(unmatched)


def _parse_coco(path: str) -> list[tuple[str, Any]]:
    """Return file name and caption of each annotation, in the order of the file.

    The name is empty if the annotation's image is not listed. The type of the captions is not checked.

    Raises:
        ConfigError: the file is missing or has another format.
    """
    try:
        content = json.loads(Path(path).read_bytes())
        names = {item["id"]: str(item["file_name"]) for item in content["images"]}
        return [(names.get(item["image_id"], ""), item["caption"]) for item in content["annotations"]]
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        allowed = "JSON with `images` (id, file_name) and `annotations` (image_id, caption)"
        raise ConfigError(f"dataset.captions: {path!r} cannot be read ({error!r}), allowed: {allowed}") from None


def captions_from_column(name: str, cells: list[Any]) -> list[list[str]]:
    """Return the stripped captions of each row of a table, without blank texts and nulls; a row may have none.

    Args:
        name: name of the column, for the error message.
        cells: content of the column: a text or a list of texts per row.

    Raises:
        ConfigError: a cell contains something else.
    """
    captions = []
    for cell in cells:
        texts = cell if isinstance(cell, list) else [cell]
        for text in texts:
            if not isinstance(text, str | None):
                raise ConfigError(
                    f"dataset.captions: {name!r} holds {str(text)[:40]}, allowed: texts or lists of texts"
                )
        captions.append(clean_texts(texts))
    return captions


def select_captioned(source: "Source", config: "DatasetConfig") -> tuple[list[int], dict[str, int]]:
    """Return the indices of the images that have a caption, and the numbers of images and captions left out.

    All images are selected if the data set has no captions. If images or captions are left out, a message reports their
    numbers.

    Returns:
        Indices of the selected images, increasing, and the numbers ``images_without`` (captions) and
        ``captions_without`` (images); an empty dictionary instead if the data set has no captions.

    Raises:
        KairosError: no image has a caption; or some have none, or captions have no image, and `dataset.unmatched` is
            ``refuse``.
    """
    if source.captions is None:
        return list(range(source.count)), {}
    captioned = [index for index, image_captions in enumerate(source.captions) if image_captions]
    uncaptioned = [index for index, image_captions in enumerate(source.captions) if not image_captions]
    unmatched_count = len(source.unmatched_captions)
    example = f" (the first: {source.name(uncaptioned[0])})" if uncaptioned else ""
    facts = f"{len(uncaptioned)} of {source.count} images have no caption{example}, {unmatched_count} captions no image"
    if not captioned:
        raise KairosError(f"dataset.captions: {config.captions!r} has none of the images: {facts}")
    if uncaptioned or unmatched_count:
        if config.unmatched == "refuse":
            raise KairosError(
                f"dataset.unmatched: got {config.unmatched}, but {facts}; allowed: count, which leaves them out"
            )
        log(f"prepare: {facts}; they are left out")
    return captioned, {"images_without": len(uncaptioned), "captions_without": unmatched_count}


@dataclass(frozen=True)
class EncodedCaptions:
    """Captions of a data set as states of a text encoder, as stage text stores them.

    Attributes:
        record: record of stage text; ``condition`` describes the states.
        states: encoded captions, (captions, *shape), float32 or float16.
        empty: state of the empty caption "", float32 (*shape).
    """

    record: dict[str, Any]
    states: ArrayFile
    empty: EmptyTextState


def open_encoded_captions(folder: Path, dataset: "PreparedDataset") -> EncodedCaptions:
    """Open the folder that stage text wrote for a data set; the states are read from the file on access.

    Raises:
        KairosError: the folder is missing, not complete, or belongs to another data set.
        DamagedError: the record is damaged, or an array file ends early or is not an array.
        NotFiniteError: the state of the empty caption is not finite.
    """
    command = f"text --config F --dataset {dataset.folder} --out {folder}"
    record = open_record(folder, command)
    if record["dataset_sha256"] != dataset.record["content_sha256"]:
        raise KairosError(
            f"{folder}: was made from another version of {dataset.folder}; make it with: kairos {command}"
        )
    states = open_array(folder / "states.npy", command)
    empty = open_array(folder / "empty.npy", command)
    remedy = f"make it with: kairos {command}"
    demand_finite(empty[0], f"{folder}/empty.npy: state of the empty caption", remedy)
    return EncodedCaptions(record, states, empty=empty[0])  # the file has one row
