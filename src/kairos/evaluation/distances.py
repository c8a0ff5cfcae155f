"""Distances between sets of images in feature space, with torch-fidelity's own functions and formulas."""

import statistics as stats
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch_fidelity.metric_fid import KEY_METRIC_FID, fid_features_to_statistics, fid_statistics_to_metric
from torch_fidelity.metric_isc import KEY_METRIC_ISC_MEAN, isc_features_to_metric
from torch_fidelity.metric_kid import KEY_METRIC_KID_MEAN, kid_features_to_metric

from kairos.errors import KairosError
from kairos.evaluation.extractors import Extractor
from kairos.evaluation.registries import METRICS, NoOptions
from kairos.files import atomic, sha256_bytes, sha256_json
from kairos.progress import say

CACHE = Path(".kairos/cache")
KID_IMAGES = 10_000  # real images whose features are kept for kernel distances
KID_SUBSET = 1000  # the published size, where there are enough images
KID_SUBSETS = 50


@dataclass(frozen=True)
class Statistics:
    """What is kept of a set of images: mean (d,), covariance (d, d), and features (at most `KID_IMAGES`, d)."""

    mu: NDArray[np.float64]
    sigma: NDArray[np.float64]
    features: NDArray[np.float32]
    count: int

    @property
    def hash(self) -> str:
        """SHA-256 of the mean, the covariance and the number of images."""
        return sha256_bytes(self.mu.tobytes() + self.sigma.tobytes() + str(self.count).encode())

    def save(self, path: Path) -> None:
        """Write an npz file atomically."""
        with atomic(path) as file:
            np.savez(file, mu=self.mu, sigma=self.sigma, features=self.features, count=np.array(self.count))

    @staticmethod
    def load(path: Path) -> "Statistics":
        """Read the npz file."""
        with np.load(path, allow_pickle=False) as file:
            return Statistics(file["mu"], file["sigma"], file["features"], int(file["count"]))


@dataclass(frozen=True)
class Sample:
    """Features of one set of images: of the compared layer (n, d), and logits (n, classes) where there are any."""

    features: torch.Tensor
    logits: torch.Tensor | None = None


@dataclass(frozen=True)
class Target:
    """What samples are compared with.

    Args:
        metric: column of the Fréchet distance.
        statistics: of the real images.
        kid: whether kernel distances are computed.
    """

    metric: str
    statistics: Statistics
    kid: bool = True


def sample_of(extractor: Extractor, layers: dict[str, torch.Tensor]) -> Sample:
    """The layers that metrics are computed from."""
    return Sample(layers[extractor.layer], layers[extractor.logits] if extractor.logits else None)


def statistics(features: torch.Tensor) -> Statistics:
    """Mean and covariance of features (n, d), in float64."""
    values = fid_features_to_statistics(features.double())
    kept = np.unique(np.linspace(0, len(features) - 1, min(len(features), KID_IMAGES)).astype(int))
    return Statistics(values["mu"], values["sigma"], features[kept].float().numpy(), len(features))


def cached(parts: Any, compute: Callable[[], Statistics]) -> Statistics:
    """Statistics by content hash: computed once, then read from `.kairos/cache`.

    Two processes at once compute the same and the later rename wins, so neither sees half a file.

    Args:
        parts: JSON value that decides the statistics: hashes of the images and of the extractor.
        compute: what to do where there is no whole file yet.
    """
    path = CACHE / f"statistics-{sha256_json(parts)[:32]}.npz"
    try:
        return Statistics.load(path)
    except FileNotFoundError:
        pass
    except Exception:  # damaged: numpy and zipfile raise many kinds
        say(f"{path}: damaged, computed again")
    result = compute()
    result.save(path)
    return result


def check_number(count: int, width: int, what: str) -> list[str]:
    """Whether `what`, so many images, are enough for the covariance of `width` features; the warnings, if any.

    Raises:
        KairosError: as many images as features or fewer: the covariance has no full rank and the distance means little.
    """
    if count <= width:
        raise KairosError(
            f"{what}: got {count} images, allowed: more than {width}, the number of features "
            "(fewer make the Fréchet distance meaningless; an extractor with fewer features needs fewer)"
        )
    if count < 10 * width:
        return [f"{count} images are fewer than 10 times the {width} features: distances are biased upwards"]
    return []


def frechet(options: NoOptions, sample: Sample, target: Target) -> dict[str, float]:
    """Fréchet distance of Gaussians fitted to the features."""
    own, real = statistics(sample.features), target.statistics
    left, right = {"mu": own.mu, "sigma": own.sigma}, {"mu": real.mu, "sigma": real.sigma}
    return {target.metric: fid_statistics_to_metric(left, right, verbose=False)[KEY_METRIC_FID]}


def kid(options: NoOptions, sample: Sample, target: Target) -> dict[str, float]:
    """Unbiased kernel distance, mean over subsets of at most half the images.

    The kernel is (gamma x·y + 1)³. For Inception gamma is the published 1/d. Features of a classifier of our own have
    any scale, so that gamma = 1 / mean |x|² of the real features takes its place: the distance is free of their scale.
    """
    if not target.kid:
        return {}
    real = torch.from_numpy(target.statistics.features)
    size = min(KID_SUBSET, len(sample.features) // 2, len(real) // 2)
    if size < 2:
        return {}
    gamma = None if target.metric == "fid" else 1 / float(real.double().square().sum(1).mean())
    result = kid_features_to_metric(
        sample.features.double(),
        real.double(),
        kid_subsets=KID_SUBSETS,
        kid_subset_size=size,
        kid_kernel_poly_gamma=gamma,
        verbose=False,
    )
    return {"kid": result[KEY_METRIC_KID_MEAN]}


def isc(options: NoOptions, sample: Sample, target: Target) -> dict[str, float]:
    """Inception score; only Inception has the logits for it."""
    if sample.logits is None:
        return {}
    return {"isc": isc_features_to_metric(sample.logits)[KEY_METRIC_ISC_MEAN]}


def score(sample: Sample, target: Target) -> dict[str, float]:
    """All registered metrics of one set of images."""
    columns: dict[str, float] = {}
    for name in METRICS:
        columns.update(METRICS.build(name, {}, sample, target))
    return columns


def summarise(scores: list[dict[str, float]]) -> dict[str, Any]:
    """Mean over sets of each column, its spread (standard deviation over sets, null for one) and the sets' values."""
    result: dict[str, Any] = {}
    for name in scores[0]:
        values = [float(score[name]) for score in scores]
        result[name] = stats.fmean(values)
        result[f"{name}_spread"] = stats.stdev(values) if len(values) > 1 else None
        result[f"{name}_sets"] = values
    return result
