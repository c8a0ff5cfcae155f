"""What is measured of a set of images while they come: moments summed up in float64, scores, and features on disk.

No set of images and no set of features is ever held in memory, so a set may be of any size.
"""

import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BATCH = 64  # images whose features are computed at a time
ROWS = 1024  # feature vectors looked at a time
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


class Score:
    """The Inception score of logits that come in batches: mean over splits, in the order of the images.

    exp of the mean divergence of p(y|x) from p(y), per split of 5,000 images or what is left (Salimans et al. 2016, in
    the splits of ADM's evaluator).
    """

    SPLIT = 5000

    def __init__(self) -> None:
        self._splits: list[tuple[int, Any, Any]] = []  # count, sums of p(y|x) (classes,) and of p log p

    def add(self, logits: Tensor) -> None:
        """Add logits (n, classes)."""
        while len(logits):
            if not self._splits or self._splits[-1][0] == self.SPLIT:
                self._splits.append((0, 0.0, 0.0))
            count, total, negentropy = self._splits[-1]
            part = logits[: self.SPLIT - count]
            logits = logits[len(part) :]
            log_p = part.double().log_softmax(1)
            p = log_p.exp()
            self._splits[-1] = count + len(part), total + p.sum(0), negentropy + (p * log_p).sum()

    @property
    def value(self) -> float:
        """The mean over splits."""
        means = [(total / count, negentropy / count) for count, total, negentropy in self._splits]
        return float(np.mean([(mean - torch.xlogy(p, p).sum()).exp().item() for p, mean in means]))


class Spool:
    """Feature vectors in a file without a name: float32, appended, and read by slice or by numbers.

    Args:
        width: of a vector.
        only: ascending numbers of those that are kept of all that are added; None: all.
    """

    def __init__(self, width: int, only: NDArray[np.int64] | None = None):
        self.width, self._only, self._seen, self._count = width, only, 0, 0
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as this object)

    def add(self, values: Tensor) -> None:
        """Append vectors (n, width)."""
        if self._only is not None:
            first, end = np.searchsorted(self._only, [self._seen, self._seen + len(values)])
            numbers, self._seen = self._only[first:end] - self._seen, self._seen + len(values)
            values = values[numbers]
        self._file.seek(self._count * self.width * 4)
        self._file.write(values.float().numpy().tobytes())
        self._count += len(values)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, numbers: slice | NDArray[np.int64]) -> Tensor:
        """Vectors (n, width), float32."""
        if not isinstance(numbers, slice):
            return torch.cat([self[int(number) : int(number) + 1] for number in numbers])
        start, stop, _ = numbers.indices(self._count)
        self._file.seek(start * self.width * 4)
        content = bytearray(self._file.read(max(stop - start, 0) * self.width * 4))
        return torch.frombuffer(content, dtype=torch.float32).reshape(-1, self.width)


def blocks(vectors: Any) -> Iterator[Tensor]:
    """All of some vectors (n, d), at most `ROWS` at a time."""
    return (vectors[start : start + ROWS] for start in range(0, len(vectors), ROWS))


@dataclass(frozen=True)
class Captioned:
    """Images and their captions.

    Attributes:
        images: gives batches of uint8 (n, height, width, channels).
        texts: one for each image.
        device: where a network looks at both.
    """

    images: Callable[[], Iterable[NDArray[np.uint8]]]
    texts: list[str]
    device: torch.device


@dataclass(frozen=True)
class Measured:
    """What was measured of a set of images.

    Attributes:
        count: number of images.
        moments: mean (d,) and covariance (d, d) by layer, of the layers that were asked for.
        features: all feature vectors, or those that were to be kept; or None.
        score: the Inception score, or None.
        captioned: the images again, with captions where they have any.
    """

    count: int
    moments: dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]]
    features: Spool | None = None
    score: float | None = None
    captioned: Captioned | None = None


def measure(
    extractor: Any, images: Iterable[NDArray[np.uint8]], needs: set[str], only: NDArray[np.int64] | None = None
) -> Measured:
    """Look at every image once.

    Args:
        extractor: an opened extractor.
        images: batches of uint8 (n, height, width, channels).
        needs: of ``moments``, ``spatial``, ``features`` (all of them) and ``logits``.
        only: numbers of the images whose features are kept; None: all.
    """
    moments = {LAYERS[need]: Moments() for need in LAYERS if need in needs}
    spool = Spool(extractor.width, only) if "features" in needs else None
    score = Score() if "logits" in needs else None
    asked: list[tuple[str, Any]] = [*moments.items(), ("features", spool), ("logits", score)]
    count = 0
    for batch in images:
        layers = extractor.layers_of(batch)
        count += len(batch)
        for name, sink in asked:
            if sink is not None:
                sink.add(layers[name])
    found = {name: sums.mean_and_covariance for name, sums in moments.items()}
    return Measured(count, found, spool, score.value if score else None)


def in_batches(images: Any, indices: NDArray[np.int64] | range, size: int = BATCH) -> Iterator[NDArray[np.uint8]]:
    """Rows of `images` in the order of `indices`, at most `size` at a time."""
    for start in range(0, len(indices), size):
        part = indices[start : start + size]
        yield images[slice(part.start, part.stop) if isinstance(part, range) else part]
