"""Prepared data sets: images, their conditions and the split into training and held-out images."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int

from kairos.array_shapes import ImageArray, RowArray
from kairos.data.arrays import ArrayFile, open_array
from kairos.data.captions import Captions, open_captions
from kairos.files import open_record

if TYPE_CHECKING:
    # imports pydantic and PIL, which training on latents does not need
    from kairos.data.linked_images import LinkedImages

    # imports torch, which `load_tensor` imports on its first call
    from kairos.shapes import Images

TrainIndices = Int[np.ndarray, "train_images"]
HeldoutIndices = Int[np.ndarray, "heldout_images"]
Labels = Int[np.ndarray, "images"]


@dataclass(frozen=True)
class PreparedDataset:
    """A data set in the folder that stage prepare wrote.

    Attributes:
        folder: the folder.
        images: all images, uint8 (count, height, width, channels), in memory or read from the disk by indexing.
        train: int64 indices of the training images.
        heldout: int64 indices of the held-out images.
        conditions: array of each condition by name, in memory or in a file, with a row per image.
        record: record of stage prepare.
        captions: captions of the images; None without captions.
    """

    folder: Path
    images: "ArrayFile | LinkedImages | ImageArray"
    train: TrainIndices
    heldout: HeldoutIndices
    conditions: Mapping[str, ArrayFile | RowArray]
    record: dict[str, Any]
    captions: Captions | None = None

    @property
    def labels(self) -> Labels | None:
        """Class of each image, int64 (count,); None if there are no classes. A file is read on each access."""
        return self.conditions["class"][:] if "class" in self.conditions else None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        _, height, width, channels = self.images.shape
        return channels, height, width

    def load_tensor(self, indices: Any) -> "Images":
        """Read the images with these indices (n,), as float32 (n, channels, height, width) in [-1, 1] on the CPU."""
        import torch

        from kairos.data.pixels import to_float

        return to_float(torch.from_numpy(self.images[np.asarray(indices)]))


def open_dataset(folder: Path | str) -> PreparedDataset:
    """Open the folder that stage prepare wrote.

    The split is read into memory. Pixels, conditions and texts are read from their files on access. Hashes of files are
    not compared.

    Raises:
        KairosError: the folder is missing or not complete, or an array file is missing.
        DamagedError: the record is damaged, or an array file ends early.
    """
    folder = Path(folder)
    command = f"prepare --config F --out {folder}"
    record = open_record(folder, command)
    conditions = {name: open_array(folder / item["file"], command) for name, item in record["conditions"].items()}
    # [:] reads the indices of the images into memory; conditions stay on disk
    train = open_array(folder / "train.npy", command)[:]
    heldout = open_array(folder / "heldout.npy", command)[:]
    captions = open_captions(folder, command) if "captions" in record else None
    images = _open_images(folder, record, command)
    return PreparedDataset(
        folder=folder,
        images=images,
        train=train,
        heldout=heldout,
        conditions=conditions,
        record=record,
        captions=captions,
    )


def _open_images(folder: Path, record: dict[str, Any], command: str) -> "ArrayFile | LinkedImages":
    """Return the images of a prepared data set, which are read on access.

    They are in ``images.npy``, or still in their source if the record has ``refers``. The errors are those of
    `open_array` and `LinkedImages`.
    """
    if "refers" in record:  # section `dataset` that selects the source
        from kairos.data.linked_images import LinkedImages

        return LinkedImages(folder, record, command)
    return open_array(folder / "images.npy", command)
