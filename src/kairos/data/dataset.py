"""The prepared data set: images, their conditions and the split, as stage prepare wrote them."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kairos.data.arrays import ArrayFile, open_array
from kairos.data.captions import Captions, open_captions
from kairos.files import open_record

if TYPE_CHECKING:
    import torch

    from kairos.data.linked_images import LinkedImages  # decodes images, which a training on latents needs not


@dataclass(frozen=True)
class PreparedDataset:
    """A prepared data set.

    Attributes:
        images: uint8 (count, height, width, channels), read when they are asked for.
        train: int64 indices of the training images.
        heldout: int64 indices of the held-out images.
        conditions: an array file per condition, row i for image i.
        manifest: the record of stage prepare.
        captions: those of the images, where there are any.
    """

    folder: Path
    images: "ArrayFile | LinkedImages"
    train: np.ndarray
    heldout: np.ndarray
    conditions: dict[str, ArrayFile]
    manifest: dict[str, Any]
    captions: Captions | None = None

    @property
    def labels(self) -> np.ndarray | None:
        """Class of each image, int64 (count,), or None where the data set has no classes."""
        return self.conditions["class"][:] if "class" in self.conditions else None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        _, height, width, channels = self.images.shape
        return channels, height, width

    def load_tensor(self, indices: Any) -> "torch.Tensor":
        """Images as float32 (n, channels, height, width) in [-1, 1]."""
        import torch

        return to_float(torch.from_numpy(self.images[np.asarray(indices)]))


def to_float(images: "torch.Tensor") -> "torch.Tensor":
    """uint8 (n, height, width, channels) to float32 (n, channels, height, width) in [-1, 1]."""
    return images.permute(0, 3, 1, 2).contiguous().float() / 127.5 - 1


def reduce_resolution(images: "torch.Tensor", factor: int) -> "torch.Tensor":
    """Images (n, channels, height, width) made smaller by area and enlarged again, bilinearly (ADM's SuperResModel)."""
    from torch.nn.functional import avg_pool2d, interpolate

    return interpolate(avg_pool2d(images, factor), size=images.shape[2:], mode="bilinear")


def to_uint8(images: "torch.Tensor") -> np.ndarray:
    """Float (n, channels, height, width) in [-1, 1], clipped, to uint8 (n, height, width, channels)."""
    pixels = ((images.float() + 1) * 127.5).round().clamp(0, 255).byte()
    return pixels.permute(0, 2, 3, 1).contiguous().cpu().numpy()


def open_dataset(folder: Path | str) -> PreparedDataset:
    """Open the folder that stage prepare wrote.

    Raises:
        KairosError: the folder is missing or not complete.
    """
    folder = Path(folder)
    command = f"prepare --config F --out {folder}"
    manifest = open_record(folder, command)
    conditions = {name: open_array(folder / item["file"], command) for name, item in manifest["conditions"].items()}
    train, heldout = (open_array(folder / f"{name}.npy", command)[:] for name in ("train", "heldout"))
    captions = open_captions(folder, command) if "captions" in manifest else None
    images: Any
    if "refers" in manifest:
        from kairos.data.linked_images import LinkedImages

        images = LinkedImages(folder, manifest, command)
    else:
        images = open_array(folder / "images.npy", command)
    return PreparedDataset(folder, images, train, heldout, conditions, manifest, captions)
