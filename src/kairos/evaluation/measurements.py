"""Measurements of a set of images, taken batch by batch: moments summed in float64, features and logits on disk.

Memory never holds all images or all features, so a set may have any size.
"""

import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int, Num
from torch import Tensor

from kairos.array_shapes import Gaussian, ImageBatch, IntegerArray, LayerGaussian
from kairos.data.arrays import ArrayFile, write_npy_header
from kairos.evaluation.settings import GAUSSIAN_MEASUREMENTS
from kairos.files import set_missing_filename
from kairos.shapes import Features

Multiplicities = Num[Tensor, "batch"]  # how often each feature vector counts
StoredIndices = Int[np.ndarray, "stored"]

BATCH = 64  # images whose features are computed at a time


class MomentSums:
    """Mean and covariance of vectors that are added in batches, summed in float64.

    The sums are of differences from the first batch's mean, so that a large mean costs no digits.

    Attributes:
        count: number of added vectors, each counted as often as its weight.
    """

    def __init__(self) -> None:
        self.count = 0.0  # a sum of weights

    def add(self, values: Features, weights: Multiplicities | None = None) -> None:
        """Add vectors (n, d), on the CPU; vector i counts `weights[i]` times, or once without weights (n,)."""
        values = values.double()
        if not self.count:  # the first batch
            self._shift = values.mean(0)
            self._sum = torch.zeros_like(self._shift)
            self._products = torch.zeros(values.shape[1], values.shape[1], dtype=torch.float64)
        values = values - self._shift
        weighted = values if weights is None else weights.double()[:, None] * values
        self._sum += weighted.sum(0)
        self._products += weighted.T @ values
        self.count += len(values) if weights is None else float(weights.sum())

    @property
    def mean_and_covariance(self) -> Gaussian:
        """Mean (d,) and unbiased covariance (d, d), as by numpy.cov, of all added vectors, two or more; float64."""
        shifted_mean = self._sum / self.count  # mean of the differences; their covariance is the one of the vectors
        covariance = (self._products - self.count * torch.outer(shifted_mean, shifted_mean)) / (self.count - 1)
        return (self._shift + shifted_mean).numpy(), covariance.numpy()


class FeatureBuffer:
    """On-disk buffer of feature vectors, filled batch by batch; `rows` reads them once all are added."""

    def __init__(self) -> None:
        self._file = tempfile.NamedTemporaryFile()  # noqa: SIM115  (deleted with this object)
        self._shape = (0, 0)

    def add(self, values: Features) -> None:
        """Append vectors on the CPU, float32 (n, d)."""
        self._shape = (self._shape[0] + len(values), values.shape[1])
        is_empty = self._file.tell() == 0
        with set_missing_filename(self._file.name):
            if is_empty:
                self._write_header()  # `rows` corrects its number of vectors
            self._file.write(values.numpy().tobytes())

    def rows(self) -> ArrayFile:
        """Return all added vectors, float32 (n, d), which are read from the file on access.

        At least one batch must have been added, and none can be added afterwards. The file is deleted with this object;
        the rows remain readable.
        """
        # only now the number of vectors is known; the header has the length of the first one, since both are padded
        with set_missing_filename(self._file.name):
            self._file.seek(0)
            self._write_header()
            self._file.flush()
        return ArrayFile(Path(self._file.name))

    def _write_header(self) -> None:
        """Write the .npy header for the current number of vectors at the position of the file."""
        write_npy_header(self._file, self._shape, np.dtype(np.float32))


@dataclass(frozen=True)
class ImageStatistics:
    """Measurements of a set of images.

    Attributes:
        count: number of images.
        gaussians: mean (d,) and covariance (d, d) by layer, for the requested layers.
        features: all feature vectors, or those selected for storage, float32 (n, d); None if they were not requested.
        logits: logits of the classes of these images, float32 (n, classes); None if they were not requested.
        captioned: the images again with their captions, in batches that can be iterated once; or None.
        pairs: the images again with the real images that their conditions come from, in batches that can be iterated
            once; or None.
        device: device of the networks that measure the images.
    """

    count: int
    gaussians: dict[str, LayerGaussian]
    features: ArrayFile | None = None
    logits: ArrayFile | None = None
    captioned: Iterable[tuple[ImageBatch, list[str]]] | None = None
    pairs: Iterable[tuple[ImageBatch, ImageBatch]] | None = None
    device: torch.device | str = torch.device("cpu")


def measure(
    extractor: Any,
    images: Iterable[ImageBatch],
    needs: set[str],
    stored_indices: StoredIndices | None = None,
) -> ImageStatistics:
    """Return mean and covariance of layers, features and logits of a set of images, as far as they are needed.

    The images are iterated once. Features and logits are read from temporary files, whose space is freed with the
    result; another process cannot open them.

    Args:
        extractor: an opened extractor. The caller ensures that it has the layers that `needs` are measured on.
        images: batches of uint8 (n, height, width, channels).
        needs: measurements to take, see `settings.MEASUREMENTS`. Captions, pairs and snapshots are ignored: stage
            evaluate adds them.
        stored_indices: positions among the measured images whose features and logits are stored; None: all. Mean and
            covariance are always of all images.
    """
    sums_by_layer = {}  # sums for mean and covariance
    for name, measurement in GAUSSIAN_MEASUREMENTS.items():
        if name in needs:
            sums_by_layer[measurement.layer] = MomentSums()
    # a buffer per layer; the layers have the names of the measurements
    buffers = {name: FeatureBuffer() for name in ("features", "logits") if name in needs}
    count = 0  # images so far
    for batch in images:
        layers = extractor.compute_layers(batch)
        for layer, sums in sums_by_layer.items():
            sums.add(layers[layer])
        stored_rows: Any = slice(None)  # all images of the batch
        if stored_indices is not None:
            stored_rows = np.isin(np.arange(count, count + len(batch)), stored_indices)
        for layer, buffer in buffers.items():
            buffer.add(layers[layer][stored_rows])
        count += len(batch)
    array_files = {layer: buffer.rows() for layer, buffer in buffers.items()}
    return ImageStatistics(
        count=count,
        gaussians={layer: sums.mean_and_covariance for layer, sums in sums_by_layer.items()},
        features=array_files.get("features"),
        logits=array_files.get("logits"),
        device=extractor.device,
    )


def iterate_rows(images: Any, indices: IntegerArray | range, size: int = BATCH) -> Iterator[Any]:
    """Yield rows of `images` (or another sequence) in the order of `indices`, in batches of at most `size`.

    A range, whose step must be 1, is read by slices, so that `images` may also be a list.
    """
    for start in range(0, len(indices), size):
        batch_indices = indices[start : start + size]
        if isinstance(batch_indices, range):
            yield images[batch_indices.start : batch_indices.stop]
        else:
            yield images[batch_indices]
