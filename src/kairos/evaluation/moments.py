"""Measurements of a set of images, taken batch by batch: moments summed in float64, features and logits on disk.

No set of images and no set of features is ever held in memory, so a set may be of any size.
"""

import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kairos.data.arrays import ArrayFile, write_npy_header

BATCH = 64  # images whose features are computed at a time
LAYERS = {"moments": "features", "spatial": "spatial"}  # what a metric needs, and the layer whose moments that is


class Moments:
    """Mean and covariance of vectors that come in batches, summed up in float64.

    What is summed are differences from the first batch's mean, so that a large mean costs no digits.
    """

    def __init__(self) -> None:
        self.count = 0.0

    def add(self, values: Tensor, weights: Tensor | None = None) -> None:
        """Add vectors (n, d), each as often as its weight (n,) says."""
        values = values.double()
        if not self.count:
            self._shift = values.mean(0)
            self._sum = torch.zeros_like(self._shift)
            self._products = torch.zeros(values.shape[1], values.shape[1], dtype=torch.float64)
        values = values - self._shift
        weighted = values if weights is None else weights.double()[:, None] * values
        self._sum += weighted.sum(0)
        self._products += weighted.T @ values
        self.count += len(values) if weights is None else float(weights.sum())

    @property
    def mean_and_covariance(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Mean (d,) and unbiased covariance (d, d), as numpy.cov has it."""
        mean = self._sum / self.count
        covariance = (self._products - self.count * torch.outer(mean, mean)) / (self.count - 1)
        return (self._shift + mean).numpy(), covariance.numpy()


class Spool:
    """Vectors that come in batches, in a file without a name; read when all are there."""

    def __init__(self) -> None:
        self._file, self._shape = tempfile.NamedTemporaryFile(), (0, 0)  # noqa: SIM115  (lives as long as its rows)

    def add(self, values: Tensor) -> None:
        """Append vectors, float32 (n, d)."""
        self._shape = (self._shape[0] + len(values), values.shape[1])
        if not self._file.tell():
            self._write_header()
        self._file.write(values.numpy().tobytes())

    def rows(self) -> ArrayFile:
        """All of them, float32 (n, d)."""
        self._file.seek(0)
        self._write_header()  # as long as that of the first vectors alone
        self._file.flush()
        return ArrayFile(Path(self._file.name))

    def _write_header(self) -> None:
        write_npy_header(self._file, self._shape, np.dtype(np.float32))


@dataclass(frozen=True)
class ImageStatistics:
    """Measurements of a set of images.

    Attributes:
        count: number of images.
        moments: mean (d,) and covariance (d, d) by layer, of the requested layers.
        features: all feature vectors, or those selected for storage; or None.
        logits: logits of the classes, (n, classes); or None.
        captioned: the images again with their captions, in batches; or None.
        pairs: the images again with the real images that their conditions come from, in batches; or None.
        device: device of the networks that measure the images.
    """

    count: int
    moments: dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]]
    features: ArrayFile | None = None
    logits: ArrayFile | None = None
    captioned: Iterable[tuple[NDArray[np.uint8], list[str]]] | None = None
    pairs: Iterable[tuple[NDArray[np.uint8], NDArray[np.uint8]]] | None = None
    device: torch.device = torch.device("cpu")


def measure(
    extractor: Any, images: Iterable[NDArray[np.uint8]], needs: set[str], only: NDArray[np.int64] | None = None
) -> ImageStatistics:
    """Look at every image once.

    Args:
        extractor: an opened extractor.
        images: batches of uint8 (n, height, width, channels).
        needs: of ``moments``, ``spatial``, ``features`` (all of them) and ``logits``.
        only: numbers of the images whose features are kept; None: all.
    """
    moments = {LAYERS[need]: Moments() for need in LAYERS if need in needs}
    spools = {name: Spool() for name in ("features", "logits") if name in needs}
    count = 0
    for batch in images:
        layers = extractor.compute_layers(batch)
        for name, sums in moments.items():
            sums.add(layers[name])
        for name, spool in spools.items():
            kept = slice(None) if only is None else np.isin(np.arange(count, count + len(batch)), only)
            spool.add(layers[name][kept])
        count += len(batch)
    found = {name: sums.mean_and_covariance for name, sums in moments.items()}
    rows = {name: spool.rows() for name, spool in spools.items()}
    return ImageStatistics(count, found, rows.get("features"), rows.get("logits"), device=extractor.device)


def iterate_rows(images: Any, indices: NDArray[np.int64] | range, size: int = BATCH) -> Iterator[Any]:
    """Rows of `images` in the order of `indices`, at most `size` at a time."""
    for start in range(0, len(indices), size):
        part = indices[start : start + size]
        yield images[slice(part.start, part.stop) if isinstance(part, range) else part]
