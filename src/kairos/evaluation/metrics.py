"""The formulas of all metrics of a set of images, each called as ``metric(options, measured, target)``.

Each gives columns: a dictionary of numbers. What they need to be measured stands beside their names, in `registries`.
"""

import functools
import statistics as stats
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch_fidelity.metric_isc import KEY_METRIC_ISC_MEAN, isc_features_to_metric
from torch_fidelity.metric_kid import KEY_METRIC_KID_MEAN, kid_features_to_metric

from kairos.data.arrays import iterate_blocks
from kairos.evaluation import external_reference
from kairos.evaluation.moments import LAYERS, ImageStatistics, Moments
from kairos.evaluation.registries import METRICS, KidOptions, ManifoldOptions, NoOptions, needs_of
from kairos.files import atomic, sha256_bytes, sha256_json
from kairos.progress import say
from kairos.section import build
from kairos_timesteps.errors import KairosError

CACHE = Path(".kairos/cache")
ROWS = 1024  # feature vectors looked at a time
SPLIT = 5000  # images of a split of the Inception score, in order, as in ADM's evaluator
KEPT = 10_000  # real images whose features are kept, as many as ADM's reference has for precision and recall

_NAMES = {layer: external_reference.PUBLISHED[need] for need, layer in LAYERS.items()}  # of arrays in npz files

Gaussian = tuple[NDArray[np.float64], NDArray[np.float64]]


@dataclass(frozen=True)
class RealStatistics:
    """Statistics of the real images that metrics compare samples with.

    Attributes:
        moments: mean (d,) and covariance (d, d) by layer.
        features: features of at most `KEPT` evenly spread images, float32 (n, d); empty if no metric needs them.
        count: number of images; 0 if the moments came from a file without that number.
    """

    moments: dict[str, Gaussian]
    features: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    count: int = 0

    @functools.cached_property
    def hash(self) -> str:
        """SHA-256 of the features' mean and covariance and of the number of images."""
        mean, covariance = self.moments["features"]
        return sha256_bytes(mean.tobytes() + covariance.tobytes() + str(self.count).encode())

    @functools.cached_property
    def roots(self) -> dict[str, NDArray[np.float64]]:
        """The symmetric root of each covariance."""
        return {name: _root(covariance) for name, (_, covariance) in self.moments.items()}

    def save(self, path: Path) -> None:
        """Write an npz file atomically; `mu` and `sigma`, `mu_s` and `sigma_s` are named as in published files."""
        arrays: Any = {name: part for layer, pair in self.moments.items() for name, part in zip(_NAMES[layer], pair)}
        with atomic(path) as file:
            np.savez(file, **arrays, features=self.features, count=np.array(self.count))

    @staticmethod
    def load(path: Path) -> "RealStatistics":
        """Read the npz file."""
        with np.load(path, allow_pickle=False) as file:
            moments = {layer: (file[mean], file[sigma]) for layer, (mean, sigma) in _NAMES.items() if mean in file}
            return RealStatistics(moments, file["features"], int(file["count"]))


@dataclass(frozen=True)
class Target:
    """Statistics and metrics that samples are compared by.

    Attributes:
        metric: column of the Fréchet distance.
        statistics: statistics of the real images.
        metrics: the metrics to compute, with their options.
    """

    metric: str
    statistics: RealStatistics
    metrics: tuple[dict[str, Any], ...]

    @property
    def needs(self) -> set[str]:
        """Measurements that the metrics need of a set of images; see `moments.measure`."""
        return needs_of(self.metrics)

    def score(self, measured: ImageStatistics) -> dict[str, float]:
        """All columns of one set of images."""
        columns: dict[str, float] = {}
        for named in self.metrics:
            if "milestone" not in needs_of([named]):
                columns |= build(METRICS, named, measured, self)
        return columns


def statistics_to_store(measured: ImageStatistics) -> RealStatistics:
    """Return the statistics of real images to store, from what was measured of the images."""
    features = np.zeros((0, 0), np.float32) if measured.features is None else measured.features[:]
    return RealStatistics(measured.moments, features, measured.count)


def indices_to_store(count: int) -> NDArray[np.int64]:
    """Return the indices of at most `KEPT` of `count` vectors, evenly spread."""
    return np.unique(np.linspace(0, count - 1, min(count, KEPT)).astype(np.int64))


def load_or_compute(parts: Any, compute: Callable[[], RealStatistics]) -> RealStatistics:
    """Statistics by content hash: computed once, then read from `.kairos/cache`.

    Two processes at once compute the same and the later rename wins, so neither sees half a file.

    Args:
        parts: JSON value that decides the statistics: hashes of the images and of the extractor, and what is needed.
        compute: what to do where there is no whole file yet.
    """
    path = CACHE / f"statistics-{sha256_json(parts)[:32]}.npz"
    try:
        return RealStatistics.load(path)
    except FileNotFoundError:
        pass
    except Exception:  # damaged: numpy and zipfile raise many kinds
        say(f"{path}: damaged, computed again")
    result = compute()
    result.save(path)
    return result


def check_image_count(count: int, width: int, what: str) -> list[str]:
    """Check that `what`, `count` images, are enough for the covariance of `width` features, and return the warnings.

    Raises:
        KairosError: as many images as features or fewer: the covariance has no full rank and the distance means little.
    """
    if count <= width:
        raise KairosError(
            f"{what}: got {count} images, allowed: more than {width}, the number of features "
            "(fewer make the Fréchet distance meaningless; an extractor with fewer features needs fewer)"
        )
    if count >= 10 * width:
        return []
    return [f"{count} images are fewer than 10 times the {width} features: distances are biased upwards"]


def warn(what: str, warning: str) -> None:
    """Print a warning about `what`."""
    say(f"warning: {what}: {warning}")


def frechet(options: NoOptions, measured: ImageStatistics, target: Target) -> dict[str, float]:
    """Fréchet distance of Gaussians fitted to the features (Heusel et al. 2017)."""
    return {target.metric: frechet_distance(measured.moments["features"], target.statistics, "features")}


def sfid(options: NoOptions, measured: ImageStatistics, target: Target) -> dict[str, float]:
    """Compute sFID, the Fréchet distance of Inception's spatial features (Nash et al. 2021; ADM's evaluator)."""
    return {"sfid": frechet_distance(measured.moments["spatial"], target.statistics, "spatial")}


def frechet_distance(own: Gaussian, real: RealStatistics, layer: str) -> float:
    """|m1 - m2|² + tr(C1 + C2 - 2 (C1 C2)^½).

    The trace of the root is that of the symmetric (R C1 R)^½ with R = C2^½, which needs no complex eigenvalues.
    """
    (mean, covariance), (real_mean, real_covariance) = own, real.moments[layer]
    root = real.roots[layer]
    values = np.linalg.eigvalsh(root @ covariance @ root)
    difference = mean - real_mean
    trace = np.trace(covariance) + np.trace(real_covariance) - 2 * np.sqrt(values.clip(0)).sum()
    return float(difference @ difference + trace)


def _root(covariance: NDArray[np.float64]) -> NDArray[np.float64]:
    values, vectors = np.linalg.eigh(covariance)
    return np.asarray((vectors * np.sqrt(values.clip(0))) @ vectors.T)


def kid(options: KidOptions, measured: ImageStatistics, target: Target) -> dict[str, float]:
    """Unbiased kernel distance (Bińkowski et al. 2018), mean over subsets of at most half the images.

    The kernel is (gamma x·y + 1)³. For Inception gamma is the published 1/d. Features of an extractor of our own have
    any scale, so that gamma = 1 / mean |x|² of the real features takes its place: the distance is free of their scale.
    """
    assert measured.features is not None
    real = torch.from_numpy(target.statistics.features).double()
    own = torch.from_numpy(measured.features[indices_to_store(len(measured.features))]).double()
    size = min(options.subset_size, len(own) // 2, len(real) // 2)
    if size < 2:
        return {}
    gamma = None if target.metric == "fid" else 1 / float(real.square().sum(1).mean())
    result = kid_features_to_metric(
        own, real, kid_subsets=options.subsets, kid_subset_size=size, kid_kernel_poly_gamma=gamma, verbose=False
    )
    return {"kid": result[KEY_METRIC_KID_MEAN]}


def isc(options: NoOptions, measured: ImageStatistics, target: Target) -> dict[str, float]:
    """Inception score (Salimans et al. 2016), mean over splits, the last of what is left."""
    assert measured.logits is not None
    scores = [isc_features_to_metric(part, splits=1, shuffle=False) for part in _parts(measured.logits, SPLIT)]
    return {"isc": stats.fmean(score[KEY_METRIC_ISC_MEAN] for score in scores)}


def psnr(options: NoOptions, measured: ImageStatistics, target: Target) -> dict[str, float]:
    """Mean over images of the peak signal-to-noise ratio in dB; no column where they have no pairs."""
    if measured.pairs is None:
        return {}
    errors = [np.square(one.astype(float) - other).mean((1, 2, 3)) for one, other in measured.pairs]  # each (n,)
    return {"psnr": float(np.mean(10 * np.log10(255**2 / np.concatenate(errors).clip(1e-12))))}


def precision(options: ManifoldOptions, measured: ImageStatistics, target: Target) -> dict[str, float]:
    """Share of the samples inside the manifold of the real images (Kynkäänniemi et al. 2019)."""
    return {"precision": share_inside(measured.features, target.statistics.features, options.neighbours)}


def recall(options: ManifoldOptions, measured: ImageStatistics, target: Target) -> dict[str, float]:
    """Share of the real images inside the manifold of the samples."""
    return {"recall": share_inside(target.statistics.features, measured.features, options.neighbours)}


def share_inside(points: Any, manifold: Any, neighbours: int) -> float:
    """Share of points (n, d) in a ball around one of `manifold` (m, d) that reaches to its `neighbours`-th neighbour.

    In blocks: neither all pairs nor all vectors are ever held.
    """
    radii = torch.full((len(manifold), neighbours + 1), torch.inf)  # itself is one of them
    for own, nearest in zip(_parts(manifold), radii.split(ROWS)):
        for other in _parts(manifold):
            both = torch.cat([nearest, torch.cdist(own, other)], 1)
            nearest[:] = both.topk(neighbours + 1, largest=False).values
    found = 0
    for part in _parts(points):
        hit = torch.zeros(len(part), dtype=torch.bool)
        for block, radius in zip(_parts(manifold), radii.max(1).values.split(ROWS)):
            hit |= (torch.cdist(part, block) <= radius).any(1)
        found += int(hit.sum())
    return found / len(points)


def _parts(vectors: Any, size: int = ROWS) -> Iterator[Tensor]:
    """All of some vectors (n, d), at most `size` at a time."""
    return map(torch.from_numpy, iterate_blocks([vectors], size))


def bootstrap(measured: ImageStatistics, target: Target, resamples: int, seed: int) -> float:
    """Standard deviation of the Fréchet distance over resamples of one set's images, with replacement."""
    assert measured.features is not None
    random, values = np.random.default_rng(seed), []
    for _ in range(resamples):
        drawn, moments = random.integers(0, measured.count, measured.count), Moments()
        weights = np.bincount(drawn, minlength=measured.count)
        for part, weight in zip(_parts(measured.features), _parts(weights)):
            moments.add(part, weight)
        values.append(frechet_distance(moments.mean_and_covariance, target.statistics, "features"))
    return stats.stdev(values)


def summarise(scores: list[dict[str, float]]) -> dict[str, Any]:
    """Mean over sets of each column, its spread (standard deviation over sets, null for one) and the sets' values."""
    result: dict[str, Any] = {}
    for name in scores[0]:
        values = [float(score[name]) for score in scores]
        result[name] = stats.fmean(values)
        result[f"{name}_spread"] = stats.stdev(values) if len(values) > 1 else None
        result[f"{name}_sets"] = values
    return result


def format_metric(found: dict[str, Any], name: str) -> str:
    """A metric for the terminal, its spread where there is one."""
    spread = found[f"{name}_spread"]
    return f"{name} {found[name]:.4g}" + ("" if spread is None else f" ± {spread:.2g}")
