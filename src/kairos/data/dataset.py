"""Prepared data sets: images, their conditions and the split into training and held-out images."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kairos.data.arrays import ArrayFile, open_array
from kairos.data.captions import Captions, open_captions
from kairos.files import open_record

if TYPE_CHECKING:
    # imports pydantic and PIL, which training on latents does not need
    from kairos.data.linked_images import LinkedImages

    # imports torch, which functions import where they compute
    from kairos.shapes import ChannelsLastPixels, Images


@dataclass(frozen=True)
class PreparedDataset:
    """A data set in the folder that stage prepare wrote.

    Attributes:
        folder: the folder.
        images: all images, uint8 (count, height, width, channels), read from the disk by indexing.
        train: int64 indices of the training images.
        heldout: int64 indices of the held-out images.
        conditions: array file of each condition by name, with a row per image.
        manifest: record of stage prepare.
        captions: captions of the images; None without captions.
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
        """Class of each image, int64 (count,), read from the file on each access; None if there are no classes."""
        return self.conditions["class"][:] if "class" in self.conditions else None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        _, height, width, channels = self.images.shape
        return channels, height, width

    def load_tensor(self, indices: Any) -> "Images":
        """Read the images with these indices (n,), as float32 (n, channels, height, width) in [-1, 1] on the CPU."""
        import torch

        return to_float(torch.from_numpy(self.images[np.asarray(indices)]))


def to_float(images: "ChannelsLastPixels") -> "Images":
    """Convert uint8 images (n, height, width, channels) to float32 (n, channels, height, width) in [-1, 1].

    The result is contiguous and on the device of the images.
    """
    import torch

    channels_first = images.permute(0, 3, 1, 2)
    if channels_first.device.type == "cpu":
        # `contiguous` changes no strides of grey images; torch selects the convolution, and so the bits, by strides
        return channels_first.contiguous().float() / 127.5 - 1
    return channels_first.to(torch.float32, memory_format=torch.contiguous_format) / 127.5 - 1  # one kernel for both


def reduce_resolution(images: "Images", factor: int) -> "Images":
    """Downsample images (n, channels, height, width) by averaging, then upsample them bilinearly to their old size.

    ADM's SuperResModel computes its low-resolution condition in this way.

    Args:
        images: float images.
        factor: side in pixels of the averaged squares. If it does not divide height or width, the last rows or columns
            are left out, and the others are stretched over the image.
    """
    from torch.nn.functional import avg_pool2d, interpolate

    return interpolate(avg_pool2d(images, factor), size=images.shape[2:], mode="bilinear")


def to_uint8(images: "Images") -> np.ndarray:
    """Convert images (n, channels, height, width) in [-1, 1] to uint8 (n, height, width, channels) on the CPU.

    Values are rounded to the nearest level; values outside of [-1, 1] become 0 or 255.
    """
    pixels = ((images.float() + 1) * 127.5).round().clamp(0, 255).byte()
    return pixels.permute(0, 2, 3, 1).contiguous().cpu().numpy()


def open_dataset(folder: Path | str) -> PreparedDataset:
    """Open the folder that stage prepare wrote.

    The split is read into memory. Pixels, conditions and texts are read from their files on access. Hashes of files are
    not compared.

    Raises:
        KairosError: the folder is missing or not complete, or an array file is missing.
        DamagedError: the manifest is damaged, or an array file ends early.
    """
    folder = Path(folder)
    command = f"prepare --config F --out {folder}"
    manifest = open_record(folder, command)
    conditions = {name: open_array(folder / item["file"], command) for name, item in manifest["conditions"].items()}
    # [:] reads the indices of the images into memory; conditions stay on disk
    train = open_array(folder / "train.npy", command)[:]
    heldout = open_array(folder / "heldout.npy", command)[:]
    captions = open_captions(folder, command) if "captions" in manifest else None
    images = _open_images(folder, manifest, command)
    return PreparedDataset(
        folder=folder,
        images=images,
        train=train,
        heldout=heldout,
        conditions=conditions,
        manifest=manifest,
        captions=captions,
    )


def _open_images(folder: Path, manifest: dict[str, Any], command: str) -> "ArrayFile | LinkedImages":
    """Return the images of a prepared data set, which are read on access.

    They are in ``images.npy``, or still in their source if the manifest has ``refers``. The errors are those of
    `open_array` and `LinkedImages`.
    """
    if "refers" in manifest:  # section `dataset` that selects the source
        from kairos.data.linked_images import LinkedImages

        return LinkedImages(folder, manifest, command)
    return open_array(folder / "images.npy", command)
