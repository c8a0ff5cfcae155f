"""Measurements of a set of images, taken batch by batch: moments summed in float64, features and logits on disk.

Memory never holds all images or all features, so a set may have any size.
"""

import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int, Num
from torch import Tensor

from kairos.array_shapes import FeatureArray, Gaussian, ImageBatch, IntegerArray, LayerGaussian
from kairos.data.arrays import ArrayFile, write_npy_header
from kairos.evaluation.settings import GAUSSIAN_MEASUREMENTS
from kairos.files import atomic, set_missing_filename
from kairos.progress import ProgressBar, log
from kairos.shapes import Features, LayerFeatures
from kairos.threads import count_job_threads, map_in_order

Multiplicities = Num[Tensor, "batch"]  # how often each feature vector counts
StoredIndices = Int[np.ndarray, "stored"]

BATCH = 64  # images whose features are computed at a time
_SAVE_SECONDS = 30.0  # least time between two files of partial sums


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

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the sums by name, for `restore`; vectors must have been added."""
        tensors = {"shift": self._shift, "sum": self._sum, "products": self._products}
        return {"count": np.array(self.count), **{name: tensor.numpy() for name, tensor in tensors.items()}}

    def restore(self, arrays: dict[str, np.ndarray]) -> None:
        """Replace the sums by those that `arrays` returned."""
        self.count = float(arrays["count"])
        self._shift, self._sum, self._products = (
            torch.from_numpy(arrays[name]) for name in ("shift", "sum", "products")
        )

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
                self._header_bytes = self._file.tell()
            self._file.write(values.numpy().tobytes())

    def copy(self) -> FeatureArray:
        """Return all added vectors, float32 (n, d), in memory; at least one must have been added."""
        self._file.flush()
        rows = np.fromfile(self._file.name, np.float32, offset=self._header_bytes)
        return rows.reshape(self._shape)

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
    progress: ProgressBar | None = None,
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
        progress: advances by the measured images.
    """
    sums = _Sums(needs, stored_indices)
    for batch, layers in _compute_layers(extractor, images):
        sums.add(layers, len(batch))
        if progress is not None:
            progress.advance(len(batch))
    return sums.statistics(extractor.device)


def measure_resumably(
    extractor: Any,
    images: Any,
    indices: IntegerArray | range,
    needs: set[str],
    stored_indices: StoredIndices,
    partial: Path,
) -> ImageStatistics:
    """Measure `images` at `indices` as `measure` does, and resume from the sums that a killed process has saved.

    Sums are saved after the first whole batch that ends `_SAVE_SECONDS` or more after the last save. The result equals
    that of an uninterrupted call bit for bit. Messages report the progress.

    Args:
        extractor, needs, stored_indices: as of `measure`.
        images: uint8 (N, height, width, channels).
        indices: indices of the measured images.
        partial: npz file of the sums so far, which the caller deletes in the end. One that cannot be read is ignored.
    """
    sums = _Sums(needs, stored_indices)
    if partial.exists():
        try:
            sums.load(partial)
        except Exception as error:  # numpy and zipfile raise many kinds for a damaged file
            log(f"{partial}: cannot be read ({error}), computed again")
            sums = _Sums(needs, stored_indices)
    progress = ProgressBar(len(indices), "reference: real images", "image", start=sums.count)
    saved = time.monotonic()
    for batch, layers in _compute_layers(extractor, iterate_rows(images, indices[sums.count :])):
        sums.add(layers, len(batch))
        progress.advance(len(batch))
        is_whole_batch = sums.count % BATCH == 0  # a later process cuts the batches at the same images
        if is_whole_batch and sums.count < len(indices) and time.monotonic() - saved > _SAVE_SECONDS:
            sums.save(partial)
            saved = time.monotonic()
    progress.close()
    return sums.statistics(extractor.device)


def _compute_layers(
    extractor: Any, images: Iterable[ImageBatch]
) -> Iterator[tuple[ImageBatch, dict[str, LayerFeatures]]]:
    """Yield batches of images with the values of the extractor's layers; on a CPU the job's threads compute ahead.

    A batch is computed by one thread, so the values do not depend on the number of threads.
    """
    threads = 1
    if extractor.device.type == "cpu":
        threads = max(1, count_job_threads() // torch.get_num_threads())

    def compute(batch: ImageBatch) -> tuple[ImageBatch, dict[str, LayerFeatures]]:
        return batch, extractor.compute_layers(batch)

    return map_in_order(compute, images, threads, chunk=1)


class _Sums:
    """Running sums and stored vectors of the images that have been measured so far, see `measure`.

    Attributes:
        count: number of added images.
    """

    def __init__(self, needs: set[str], stored_indices: StoredIndices | None):
        self.stored_indices = stored_indices
        self.sums_by_layer = {}  # sums for mean and covariance
        for name, measurement in GAUSSIAN_MEASUREMENTS.items():
            if name in needs:
                self.sums_by_layer[measurement.layer] = MomentSums()
        # a buffer per layer; the layers have the names of the measurements
        self.buffers = {name: FeatureBuffer() for name in ("features", "logits") if name in needs}
        self.count = 0

    def add(self, layers: dict[str, LayerFeatures], count: int) -> None:
        """Add the layers of `count` images."""
        for layer, sums in self.sums_by_layer.items():
            sums.add(layers[layer])
        stored_rows: Any = slice(None)  # all images of the batch
        if self.stored_indices is not None:
            stored_rows = np.isin(np.arange(self.count, self.count + count), self.stored_indices)
        for layer, buffer in self.buffers.items():
            buffer.add(layers[layer][stored_rows])
        self.count += count

    def statistics(self, device: torch.device) -> ImageStatistics:
        """Return the statistics of all added images; none can be added afterwards."""
        array_files = {layer: buffer.rows() for layer, buffer in self.buffers.items()}
        return ImageStatistics(
            count=self.count,
            gaussians={layer: sums.mean_and_covariance for layer, sums in self.sums_by_layer.items()},
            features=array_files.get("features"),
            logits=array_files.get("logits"),
            device=device,
        )

    def save(self, path: Path) -> None:
        """Write all sums and stored vectors to an npz file atomically."""
        arrays: Any = {"count": np.array(self.count)}
        for layer, sums in self.sums_by_layer.items():
            arrays |= {f"{layer}.{name}": values for name, values in sums.arrays().items()}
        for layer, buffer in self.buffers.items():
            arrays[f"{layer}.rows"] = buffer.copy()
        with atomic(path) as file:
            np.savez(file, **arrays)

    def load(self, path: Path) -> None:
        """Read what `save` wrote into these sums, to which nothing has been added."""
        with np.load(path, allow_pickle=False) as file:
            for layer, sums in self.sums_by_layer.items():
                sums.restore({name: file[f"{layer}.{name}"] for name in ("count", "shift", "sum", "products")})
            for layer, buffer in self.buffers.items():
                buffer.add(torch.from_numpy(file[f"{layer}.rows"]))
            self.count = int(file["count"])


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
