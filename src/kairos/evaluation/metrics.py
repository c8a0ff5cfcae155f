"""Formulas of the metrics of a set of images, each called as ``metric(options, statistics, comparison)``.

A metric returns columns: a dictionary from column name to number. Module `settings` lists the measurements that each
metric needs.

Fréchet distance, precision and recall are computed here, because torch-fidelity holds all features in memory. KID is
computed here, because the import of torch-fidelity takes about 2 s. torch-fidelity computes the Inception score.
"""

import functools
import os
import statistics as stats
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from kairos.array_shapes import Covariance, FeatureArray, Gaussian, IntegerArray, LayerCovariance, LayerGaussian
from kairos.data.arrays import iterate_blocks
from kairos.evaluation.measurements import ImageStatistics, MomentSums
from kairos.evaluation.settings import (
    GAUSSIAN_MEASUREMENTS,
    KidOptions,
    MetricOptions,
    PrecisionOptions,
    RecallOptions,
    needs_of,
)
from kairos.files import atomic, sha256_bytes, sha256_json
from kairos.finite import demand_finite
from kairos.progress import log
from kairos_timesteps.errors import KairosError

ROWS = 1024  # feature vectors processed at a time
SPLIT = 5000  # consecutive images in a split of the Inception score, as in ADM's evaluator
_KID_SEED = 2020  # torch-fidelity's default
MAX_STORED = 10_000  # feature vectors to store, the number of images in ADM's reference for precision and recall

# names of the arrays of mean and covariance in npz files, by layer
_ARRAY_NAMES = {measurement.layer: measurement.arrays for measurement in GAUSSIAN_MEASUREMENTS.values()}

OtherFeatures = Float[np.ndarray, "others features"]
Kernel = Float[np.ndarray, "batch others"]
SquareKernel = Float[np.ndarray, "batch batch"]


@dataclass(frozen=True)
class RealStatistics:
    """Statistics of the real images that metrics compare samples with.

    Three functions handle the fields one by one: `save`, `load` and `statistics_to_store`.

    Attributes:
        gaussians: mean (d,) and covariance (d, d) of each layer.
        features: features of at most `MAX_STORED` evenly spread images, float32 (n, d); empty if no metric needs them.
        count: number of images; 0 if mean and covariance came from a file without that number.
    """

    gaussians: dict[str, LayerGaussian]
    features: FeatureArray = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    count: int = 0

    @functools.cached_property
    def hash(self) -> str:
        """SHA-256 of the features' mean and covariance and of the number of images; other layers are not included."""
        mean, covariance = self.gaussians["features"]
        return sha256_bytes(mean.tobytes() + covariance.tobytes() + str(self.count).encode())

    @functools.cached_property
    def roots(self) -> dict[str, LayerCovariance]:
        """Symmetric root of the covariance (d, d) by layer, computed on the first access."""
        return {name: _root(covariance) for name, (_, covariance) in self.gaussians.items()}

    def save(self, path: Path) -> None:
        """Write the statistics to an npz file atomically; means and covariances have the names of published files."""
        arrays: Any = {}
        for layer, (mean, covariance) in self.gaussians.items():
            mean_name, covariance_name = _ARRAY_NAMES[layer]
            arrays |= {mean_name: mean, covariance_name: covariance}
        with atomic(path) as file:
            np.savez(file, **arrays, features=self.features, count=np.array(self.count))

    @staticmethod
    def load(path: Path) -> "RealStatistics":
        """Read statistics from an npz file that `save` wrote, completely into memory; layers may be missing."""
        with np.load(path, allow_pickle=False) as file:
            gaussians = {}
            for layer, (mean_name, covariance_name) in _ARRAY_NAMES.items():
                if mean_name in file:
                    gaussians[layer] = (file[mean_name], file[covariance_name])
            return RealStatistics(gaussians, features=file["features"], count=int(file["count"]))


@dataclass(frozen=True)
class Comparison:
    """Comparison of samples with real images.

    Attributes:
        distance_column: column of the Fréchet distance, such as ``fid``.
        real: statistics of the real images.
        metrics: the metrics to compute, with their options.
    """

    distance_column: str
    real: RealStatistics
    metrics: tuple[MetricOptions, ...]

    @property
    def needs(self) -> set[str]:
        """Measurements that the metrics need of a set of images; see `settings.MEASUREMENTS`."""
        return needs_of(self.metrics)

    def score(self, statistics: ImageStatistics) -> dict[str, float]:
        """Return the columns of all metrics for one set of images, except those that evaluate a snapshot's network.

        A metric without its captions or pairs has no columns.

        Raises:
            NotFiniteError: a value of a metric is not finite.
        """
        columns: dict[str, float] = {}
        for metric in self.metrics:
            if "snapshot" not in metric.needs:
                values = metric.build(statistics, self)
                columns |= values
                arrays = {column: np.array(value) for column, value in values.items()}
                remedy = "leave it out of evaluation.metrics, or set another evaluation.extractor"
                demand_finite(arrays, f"metric {metric.name}", remedy)
        return columns


def statistics_to_store(statistics: ImageStatistics) -> RealStatistics:
    """Return the statistics to store from the measurements of real images.

    Logits, captions and pairs are left out. Features are read into memory; features that were not measured become an
    array (0, 0).
    """
    if statistics.features is None:
        features = np.zeros((0, 0), np.float32)
    else:
        features = statistics.features[:]
    return RealStatistics(statistics.gaussians, features, statistics.count)


def indices_to_store(count: int) -> IntegerArray:
    """Return the increasing indices of at most `MAX_STORED` of `count` feature vectors, evenly spread, int64 (n,)."""
    return np.unique(np.linspace(0, count - 1, min(count, MAX_STORED)).astype(np.int64))


def cache_folder() -> Path:
    """Return the folder of statistics and extractors that all experiments of a user share; it may be missing.

    It is ``$KAIROS_CACHE``, or else ``kairos`` in the user's folder of caches.
    """
    caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return Path(os.environ.get("KAIROS_CACHE") or caches / "kairos")


def load_or_compute(key: Any, compute: Callable[[Path], RealStatistics]) -> RealStatistics:
    """Return statistics from the cache, after computing and storing them if the cache lacks them.

    Two processes may compute one file at the same time. The later rename replaces the file as a whole. A damaged file
    is computed again, with a message.

    Args:
        key: JSON value that identifies the statistics: hashes of images, extractor and code, and the measurements.
        compute: computes the statistics; its argument is the path at which it may keep partial results. The file is
            deleted when the statistics are stored.
    """
    path = cache_folder() / f"statistics-{sha256_json(key)[:32]}.npz"
    partial = path.with_suffix(".partial.npz")
    try:
        return RealStatistics.load(path)
    except FileNotFoundError:
        pass
    except Exception:  # numpy and zipfile raise many kinds for a damaged file
        log(f"{path}: damaged, computed again")
    computed = compute(partial)
    computed.save(path)
    partial.unlink(missing_ok=True)
    return computed


def check_image_count(count: int, width: int, subject: str) -> list[str]:
    """Return a list with one warning if there are fewer than 10 images per feature, else an empty list.

    Args:
        count: number of images.
        width: number of features.
        subject: the images, for the message.

    Raises:
        KairosError: `count` is at most `width`: the covariance does not have full rank, and the distance means little.
    """
    if count <= width:
        raise KairosError(
            f"{subject}: got {count} images, allowed: more than {width}, the number of features "
            "(fewer make the Fréchet distance meaningless; an extractor with fewer features needs fewer)"
        )
    if count >= 10 * width:
        return []
    return [f"{count} images are fewer than 10 times the {width} features: distances are biased upwards"]


def warn(subject: str, warning: str) -> None:
    """Print a warning on stderr about a subject, such as a file or a field."""
    log(f"warning: {subject}: {warning}")


def frechet(options: MetricOptions, statistics: ImageStatistics, comparison: Comparison) -> dict[str, float]:
    """Compute the Fréchet distance of the features (Heusel et al. 2017) as column `Comparison.distance_column`."""
    samples = statistics.gaussians["features"]
    return {comparison.distance_column: frechet_distance(samples, comparison.real, layer="features")}


def sfid(options: MetricOptions, statistics: ImageStatistics, comparison: Comparison) -> dict[str, float]:
    """Compute sFID, the Fréchet distance of Inception's spatial features (Nash et al. 2021; ADM's evaluator)."""
    samples = statistics.gaussians["spatial"]
    return {"sfid": frechet_distance(samples, comparison.real, layer="spatial")}


def frechet_distance(samples: Gaussian, real: RealStatistics, layer: str) -> float:
    """Return |m1 - m2|² + tr(C1 + C2 - 2 (C1 C2)^½), the Fréchet distance of two Gaussians.

    Args:
        samples: mean and covariance of the samples' features, m1 and C1.
        real: statistics of the real images, with m2 and C2.
        layer: layer of the features.
    """
    mean, covariance = samples
    real_mean, real_covariance = real.gaussians[layer]
    root = real.roots[layer]
    # the trace of the root is the trace of the symmetric (R C1 R)^½ with R = C2^½, which has no complex eigenvalues
    eigenvalues = np.linalg.eigvalsh(root @ covariance @ root)
    difference = mean - real_mean
    # rounding can make eigenvalues negative
    trace = np.trace(covariance) + np.trace(real_covariance) - 2 * np.sqrt(eigenvalues.clip(0)).sum()
    return float(difference @ difference + trace)


def _root(covariance: Covariance) -> Covariance:
    """Return the symmetric root of a covariance (d, d); negative eigenvalues are treated as 0."""
    values, vectors = np.linalg.eigh(covariance)
    return np.asarray((vectors * np.sqrt(values.clip(0))) @ vectors.T)


def kid(options: KidOptions, statistics: ImageStatistics, comparison: Comparison) -> dict[str, float]:
    """Compute the unbiased kernel distance (Bińkowski et al. 2018), mean over subsets of at most half the images.

    The kernel is (gamma x·y + 1)³. For Inception, gamma is the published 1/d. Features of an extractor that kairos
    trains have an arbitrary scale. For them gamma is 1 / mean |x|² of the real features, which makes the distance
    independent of the scale. At most `MAX_STORED` evenly spread samples and real images are used. The subsets are those
    of torch-fidelity, drawn by a fixed seed. There is no column if a subset would have fewer than two images.
    """
    assert statistics.features is not None
    real = comparison.real.features.astype(np.float64)
    samples = statistics.features[indices_to_store(len(statistics.features))].astype(np.float64)
    size = min(options.subset_size, len(samples) // 2, len(real) // 2)
    if size < 2:
        return {}
    if comparison.distance_column == "fid":  # the column of Inception alone
        gamma = 1 / real.shape[1]
    else:
        gamma = 1 / float(torch.from_numpy(real).square().sum(1).mean())
    random = np.random.RandomState(_KID_SEED)
    distances = []
    for _ in range(options.subsets):
        x = samples[random.choice(len(samples), size, replace=False)]
        y = real[random.choice(len(real), size, replace=False)]
        # unbiased estimate of the squared maximum mean discrepancy: `within` has only pairs of different images
        within = _sum_over_pairs(_kernel(x, x, gamma)) + _sum_over_pairs(_kernel(y, y, gamma))
        between = _kernel(x, y, gamma).sum(axis=0).sum()
        distances.append(within / (size * (size - 1)) - 2 * between / (size * size))
    return {"kid": float(np.mean(distances))}


def _kernel(x: FeatureArray, y: OtherFeatures, gamma: float) -> Kernel:
    """Return the polynomial kernel of KID (n, m) of feature vectors (n, d) and (m, d)."""
    return np.asarray((x @ y.T * gamma + 1) ** 3)


def _sum_over_pairs(kernel: SquareKernel) -> float:
    """Return the sum of a kernel (n, n) over the pairs of different vectors, without its diagonal."""
    return float((kernel.sum(axis=1) - np.diagonal(kernel)).sum())


def isc(options: MetricOptions, statistics: ImageStatistics, comparison: Comparison) -> dict[str, float]:
    """Compute the Inception score (Salimans et al. 2016), mean over splits of at most `SPLIT` images.

    The splits are consecutive images; the last split may be smaller.
    """
    assert statistics.logits is not None
    from torch_fidelity.metric_isc import KEY_METRIC_ISC_MEAN, isc_features_to_metric  # its import takes a second

    splits = _iterate_vectors(statistics.logits, SPLIT)
    # one call per split: torch-fidelity's option is the number of splits, not their size
    scores = [isc_features_to_metric(logits, splits=1, shuffle=False) for logits in splits]
    return {"isc": stats.fmean(score[KEY_METRIC_ISC_MEAN] for score in scores)}


def psnr(options: MetricOptions, statistics: ImageStatistics, comparison: Comparison) -> dict[str, float]:
    """Compute the mean peak signal-to-noise ratio in dB of image pairs; no column if the images have no pairs.

    The ratio is computed for each pair and then averaged. The mean squared error of a pair is at least 1e-12.
    """
    if statistics.pairs is None:
        return {}
    # mean squared error of each image, of pixels from 0 to 255
    batches = [np.square(samples.astype(float) - real).mean((1, 2, 3)) for samples, real in statistics.pairs]
    errors = np.concatenate(batches).clip(1e-12)  # no division by zero
    decibels = 10 * np.log10(255**2 / errors)
    return {"psnr": float(np.mean(decibels))}


def precision(options: PrecisionOptions, statistics: ImageStatistics, comparison: Comparison) -> dict[str, float]:
    """Compute the share of samples inside the manifold of the stored real images (Kynkäänniemi et al. 2019)."""
    return {"precision": share_inside(statistics.features, comparison.real.features, options.neighbours)}


def recall(options: RecallOptions, statistics: ImageStatistics, comparison: Comparison) -> dict[str, float]:
    """Compute the share of stored real images inside the manifold of the samples (Kynkäänniemi et al. 2019)."""
    return {"recall": share_inside(comparison.real.features, statistics.features, options.neighbours)}


def share_inside(points: Any, manifold: Any, neighbours: int) -> float:
    """Return the share of points that are inside a manifold: in a ball around one of its vectors.

    The ball of a vector reaches to its `neighbours`-th nearest neighbour in the manifold. With at most `neighbours`
    vectors there is no such neighbour: balls are infinite, and the share is 1. Distances are computed in blocks, so
    memory holds neither all pairs nor all vectors.

    Args:
        points: one or more feature vectors, float32 (n, d).
        manifold: feature vectors, float32 (m, d).
        neighbours: number of the nearest neighbour.
    """
    # radius of each ball: distances to the nearest vectors, (m, neighbours + 1); the nearest one is the vector itself
    nearest_distances = torch.full((len(manifold), neighbours + 1), torch.inf)
    for vectors, nearest in zip(_iterate_vectors(manifold), nearest_distances.split(ROWS)):  # `nearest` is a view
        for others in _iterate_vectors(manifold):
            # keep the smallest of the distances so far and those to the next block
            candidates = torch.cat([nearest, torch.cdist(vectors, others)], 1)
            nearest[:] = candidates.topk(neighbours + 1, largest=False).values
    radii = nearest_distances.max(1).values  # distance to the last of the `neighbours` nearest
    # points inside any ball
    inside_count = 0
    for block in _iterate_vectors(points):
        is_inside = torch.zeros(len(block), dtype=torch.bool)
        for centres, centre_radii in zip(_iterate_vectors(manifold), radii.split(ROWS)):
            is_inside |= (torch.cdist(block, centres) <= centre_radii).any(1)
        inside_count += int(is_inside.sum())
    return inside_count / len(points)


def _iterate_vectors(vectors: Any, size: int = ROWS) -> Iterator[Tensor]:
    """Yield the rows of an array or array file (n, ...) in order, as tensors of at most `size` rows."""
    return map(torch.from_numpy, iterate_blocks([vectors], size))


def bootstrap(statistics: ImageStatistics, comparison: Comparison, resamples: int, seed: int) -> float:
    """Return the standard deviation of the Fréchet distance over bootstrap resamples of one set of images.

    Args:
        statistics: measurements of the set. The caller ensures that they contain the features of all its images.
        comparison: statistics of the real images.
        resamples: number of resamples, 2 or more. Each has the size of the set and is drawn with replacement.
        seed: seed of the resamples.
    """
    assert statistics.features is not None
    random = np.random.default_rng(seed)
    count = statistics.count
    distances = []
    for _ in range(resamples):
        indices = random.integers(0, count, count)
        multiplicities = np.bincount(indices, minlength=count)  # how often each image is drawn
        sums = MomentSums()
        for features, weights in zip(_iterate_vectors(statistics.features), _iterate_vectors(multiplicities)):
            sums.add(features, weights)
        distances.append(frechet_distance(sums.mean_and_covariance, comparison.real, layer="features"))
    return stats.stdev(distances)


def summarise(scores: list[dict[str, float]]) -> dict[str, Any]:
    """Return means, standard deviations and values over sets of images, by column.

    For a column ``x`` of every set's `scores` there are ``x`` (mean), ``x_spread`` (standard deviation with divisor
    n - 1, None for one set) and ``x_sets`` (values). The caller ensures that all sets have the columns of the first.
    """
    result: dict[str, Any] = {}
    for name in scores[0]:
        values = [float(score[name]) for score in scores]
        result[name] = stats.fmean(values)
        result[f"{name}_spread"] = stats.stdev(values) if len(values) > 1 else None
        result[f"{name}_sets"] = values
    return result


def format_metric(columns: dict[str, Any], name: str) -> str:
    """Return name and value of a metric as text, with its standard deviation if there is one: ``fid 12.34 ± 0.5``.

    `columns` is a result of `summarise`, or a reference row.
    """
    text = f"{name} {columns[name]:.4g}"
    deviation = columns[f"{name}_spread"]
    if deviation is None:
        return text
    return f"{text} ± {deviation:.2g}"
