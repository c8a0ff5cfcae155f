"""What a training reads: latent moments in model space, or pixels where there is no autoencoder.

Model space is x0 = (z − shift) · scale, of mean 0 and standard deviation 1 over the training images.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kairos.data.arrays import read_array
from kairos.data.dataset import PreparedDataset, open_dataset, open_record, scaled
from kairos.errors import KairosError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Latents:
    """Moments or pixels of all images of a data set, with its split and conditions.

    Attributes:
        manifest: the record of stage encode.
        dataset: the data set that was encoded.
        moments: memory-mapped float32 (count, c, h, w) by name (mean, logvar, mean_flipped, logvar_flipped); empty for
            pixels.
    """

    manifest: dict[str, Any]
    dataset: PreparedDataset
    moments: dict[str, np.ndarray]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of x0."""
        channels, height, width = self.manifest["shape"]
        return channels, height, width

    @property
    def count(self) -> int:
        """Number of images, training and held out."""
        return self.manifest["count"]

    @property
    def train(self) -> np.ndarray:
        """int64 indices of the training images."""
        return self.dataset.train

    @property
    def heldout(self) -> np.ndarray:
        """int64 indices of the held-out images."""
        return self.dataset.heldout

    @property
    def can_flip(self) -> bool:
        """Whether the flipped images may be asked for."""
        return self.manifest["flips"]

    @property
    def stochastic(self) -> bool:
        """Whether x0 is a sample from a distribution per image, so that `batch` uses noise."""
        return "logvar" in self.moments

    @property
    def condition_kinds(self) -> dict[str, dict[str, Any]]:
        """Descriptions of the conditions by name, as in the manifests."""
        return self.manifest["conditions"]

    def batch(
        self, indices: Any, flips: "torch.Tensor | None" = None, noise: "torch.Tensor | None" = None
    ) -> "torch.Tensor":
        """x0 of some images, float32 (n, c, h, w), a sample from their moments.

        Args:
            indices: which images, (n,).
            flips: bool (n,), which of them flipped; None: none.
            noise: standard normal (n, c, h, w) for the sample; None: the mean. Moments without a variance and pixels
                do not use it.

        Raises:
            KairosError: flips are asked for that were not encoded.
        """
        indices = np.asarray(indices)
        if flips is not None and not self.can_flip and bool(flips.any()):
            raise KairosError("dataset.flips: is false, so there are no flipped images to train on")
        if not self.moments:
            pixels = scaled(self.dataset.images[indices])
            return self._model_space(_where(flips, pixels.flip(3) if flips is not None else None, pixels))
        z = self._read("mean", indices, flips)
        if noise is not None and self.stochastic:
            z = z + (0.5 * self._read("logvar", indices, flips)).exp() * noise
        return self._model_space(z)

    def means(self, indices: Any) -> "torch.Tensor":
        """x0 of some images without sampling, float32 (n, c, h, w)."""
        return self.batch(indices)

    def conditions(self, indices: Any) -> "dict[str, torch.Tensor]":
        """The conditions of some images by name, row i for indices[i]."""
        import torch

        return {name: torch.from_numpy(values[np.asarray(indices)]) for name, values in self.dataset.conditions.items()}

    def _read(self, name: str, indices: np.ndarray, flips: "torch.Tensor | None") -> "torch.Tensor":
        import torch

        plain = torch.from_numpy(self.moments[name][indices])
        if flips is None or not bool(flips.any()):
            return plain
        return _where(flips, torch.from_numpy(self.moments[f"{name}_flipped"][indices]), plain)

    def _model_space(self, z: "torch.Tensor") -> "torch.Tensor":
        return (z - self.manifest["shift_factor"]) * self.manifest["scaling_factor"]


def _where(flips: "torch.Tensor | None", flipped: Any, plain: "torch.Tensor") -> "torch.Tensor":
    import torch

    return plain if flips is None else torch.where(flips.view(-1, 1, 1, 1), flipped, plain)


def open_latents(folder: Path | str) -> Latents:
    """Open the folder that stage encode wrote.

    Raises:
        KairosError: the folder or the data set beside it is missing, not complete, or they do not belong together.
    """
    folder = Path(folder)
    command = f"encode --config F --out {folder}"
    manifest = open_record(folder, command)
    dataset = open_dataset(folder / manifest["dataset"])
    if dataset.manifest["content_sha256"] != manifest["dataset_sha256"]:
        raise KairosError(
            f"{folder}: was made from another version of {dataset.folder}; make it with: kairos {command}"
        )
    moments = {}
    for name in manifest["files"]:
        if not (folder / name).is_file():
            raise KairosError(f"{folder / name}: is missing; make it with: kairos {command}")
        moments[Path(name).stem] = read_array(folder / name)
    return Latents(manifest, dataset, moments)
