"""The prepared data set: memory-mapped images, their conditions and the split, as stage prepare wrote them."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kairos.data.arrays import read_array
from kairos.errors import KairosError
from kairos.files import read_json

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class PreparedDataset:
    """A prepared data set.

    Attributes:
        images: uint8 (count, height, width, channels), memory-mapped.
        train: int64 indices of the training images.
        heldout: int64 indices of the held-out images.
        conditions: one memory-mapped array per condition, row i for image i.
        manifest: the record of stage prepare.
    """

    folder: Path
    images: np.ndarray
    train: np.ndarray
    heldout: np.ndarray
    conditions: dict[str, np.ndarray]
    manifest: dict[str, Any]

    @property
    def labels(self) -> np.ndarray | None:
        """Class of each image, int64 (count,), or None where the data set has no classes."""
        return self.conditions.get("class")

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        return self.images.shape[3], self.images.shape[1], self.images.shape[2]

    def tensor(self, indices: Any) -> "torch.Tensor":
        """Images as float32 (n, channels, height, width) in [-1, 1]."""
        return scaled(self.images[np.asarray(indices)])


def scaled(images: np.ndarray) -> "torch.Tensor":
    """uint8 (n, height, width, channels) to float32 (n, channels, height, width) in [-1, 1]."""
    import torch

    pixels = torch.from_numpy(np.array(images)).permute(0, 3, 1, 2).contiguous()  # a copy: memory maps are read-only
    return pixels.float() / 127.5 - 1


def to_uint8(images: "torch.Tensor") -> np.ndarray:
    """Float (n, channels, height, width) in [-1, 1], clipped, to uint8 (n, height, width, channels)."""
    pixels = ((images.float() + 1) * 127.5).round().clamp(0, 255).byte()
    return pixels.permute(0, 2, 3, 1).contiguous().cpu().numpy()


def open_record(folder: Path | str, command: str) -> dict[str, Any]:
    """The manifest of a folder.

    Raises:
        KairosError: there is none; the message names the command that makes it.
    """
    path = Path(folder) / "manifest.json"
    if not path.is_file():
        what = "is not complete (no manifest.json)" if Path(folder).is_dir() else "does not exist"
        raise KairosError(f"{folder}: {what}; make it with: kairos {command}")
    return read_json(path)


def open_dataset(folder: Path | str) -> PreparedDataset:
    """Open the folder that stage prepare wrote.

    Raises:
        KairosError: the folder is missing or not complete.
    """
    folder = Path(folder)
    manifest = open_record(folder, f"prepare --config F --out {folder}")

    def array(name: str) -> np.ndarray:
        if not (folder / name).is_file():
            raise KairosError(f"{folder / name}: is missing; make it with: kairos prepare --config F --out {folder}")
        return read_array(folder / name)

    conditions = {name: array(item["file"]) for name, item in manifest["conditions"].items()}
    train, heldout = np.array(array("train.npy")), np.array(array("heldout.npy"))
    return PreparedDataset(folder, array("images.npy"), train, heldout, conditions, manifest)
