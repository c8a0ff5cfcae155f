"""Stage `reference`: statistics of the training images, and rows that say what a distance means.

Every row has as many images per set as the samples and is compared with the same statistics:

* ``floor``: held-out images; no model can be expected below it.
* ``reconstruction``: the same held-out images through the autoencoder.
* ``gaussian``: a Gaussian with mean and covariance of the training latents, sampled and decoded.
* ``noise``: uniformly random pixels.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kairos import clock
from kairos.data.dataset import PreparedDataset, open_dataset, to_uint8
from kairos.errors import KairosError
from kairos.evaluation import distances
from kairos.evaluation.distances import Sample, Statistics, Target
from kairos.evaluation.extractors import Extractor, extract, open_extractor
from kairos.evaluation.settings import EvaluationConfig, LossSettings
from kairos.files import check_files, open_record, sha256_file, sha256_json, write_json
from kairos.progress import Progress, say
from kairos.randomness import Stream, derived_seed

BATCH = 128
RESAMPLES = 20
GAUSSIAN_IMAGES = 10_000
GAUSSIAN_VALUES = 2**27  # 512 MB of float32
SPREADS = {
    "floor": f"standard deviation over {RESAMPLES} bootstrap resamples of the one set of held-out images",
    "reconstruction": f"standard deviation over {RESAMPLES} bootstrap resamples of the one set of held-out images",
    "gaussian": "standard deviation over sets of fresh draws",
    "noise": "standard deviation over sets of fresh draws",
}


@dataclass(frozen=True)
class Reference:
    """A reference opened for evaluations.

    Args:
        record: reference.json, or the same fields for images from outside.
        target: what samples are compared with.
    """

    record: dict[str, Any]
    target: Target

    @property
    def loss_settings(self) -> LossSettings:
        """The validation loss."""
        return LossSettings(**self.record["validation"], precision=self.record["precision"])


def build(
    evaluation: EvaluationConfig,
    device: torch.device,
    dataset: Path,
    autoencoder: Path,
    latents: Path,
    extractor: Path,
    out: Path,
) -> dict[str, Any]:
    """Write the reference's folder and return its record.

    Raises:
        KairosError: fewer held-out images than samples, or too few for the extractor's features.
    """
    from kairos.autoencoders.codec import load_codec
    from kairos.autoencoders.quality import reconstruct
    from kairos.data.latents import open_latents

    images, opened = open_dataset(dataset), open_extractor(extractor, device, evaluation.precision)
    codec, encoded = load_codec(autoencoder, device), open_latents(latents)
    clock.work_begins()
    if evaluation.num_samples > len(images.heldout):
        raise KairosError(
            f"evaluation.num_samples: got {evaluation.num_samples}, allowed: at most {len(images.heldout)}, the number "
            "of held-out images, which rows floor and reconstruction are made of; lower it or raise dataset.heldout"
        )
    numbers = {"evaluation.num_samples": evaluation.num_samples, "training images": len(images.train)}
    warnings = [
        f"{what}: {warning}"
        for what, number in numbers.items()
        for warning in distances.check_number(number, opened.width, what)
    ]
    for warning in warnings:
        say(f"warning: {warning}")
    target = Target(opened.manifest["metric"], training_statistics(images, opened), evaluation.kid)

    heldout = images.heldout[: evaluation.num_samples]
    gaussian = Gaussian.fit(encoded, evaluation.seed)
    draws = range(evaluation.sets)
    size = (evaluation.num_samples, *images.images.shape[1:])
    rows = {}
    progress = Progress(4, "reference", "row")
    with torch.inference_mode():
        rows["floor"] = _bootstrapped(opened, images.images[heldout], target, evaluation.seed)
        progress.advance()
        others = reconstruct(codec, images, heldout, BATCH)
        rows["reconstruction"] = _bootstrapped(opened, others, target, evaluation.seed)
        progress.advance()
        drawn = (gaussian.decoded(codec, evaluation.num_samples, evaluation.seed, number) for number in draws)
        rows["gaussian"] = _repeated(opened, drawn, target)
        progress.advance()
        drawn = (noise_images(size, evaluation.seed, number) for number in draws)
        rows["noise"] = _repeated(opened, drawn, target)
        progress.advance()
    progress.close()

    target.statistics.save(out / "statistics.npz")
    record = {
        "extractor": opened.name,
        "extractor_hash": opened.hash,
        "metric": target.metric,
        "features": opened.width,
        "accuracy": opened.manifest["accuracy"],
        "reference_hash": reference_hash(target.statistics, opened),
        "dataset_sha256": images.manifest["content_sha256"],
        "autoencoder_sha256": codec.manifest["sha256"],
        "real_images": target.statistics.count,
        "num_samples": evaluation.num_samples,
        "sets": evaluation.sets,
        "kid": evaluation.kid,
        "eval_seed": evaluation.seed,
        "precision": evaluation.precision,
        "validation": {"images": evaluation.loss_images, "strata": evaluation.strata, "seed": evaluation.seed},
        "rows": rows,
        "spread_of": SPREADS,
        "gaussian": f"mean and sample covariance of {len(gaussian.rows)} training latents",
        "warnings": warnings,
        "files": {"statistics.npz": sha256_file(out / "statistics.npz")},
    }
    write_json(out / "reference.json", record)
    for name, row in rows.items():
        say(f"reference: {name} {target.metric} {row[target.metric]:.4g} ± {row[target.metric + '_spread'] or 0:.2g}")
    return record


def open_reference(path: Path, extractor: Extractor) -> Reference:
    """Open what stage `reference` wrote, given as folder or as reference.json.

    Raises:
        KairosError: it is missing, or was made with another extractor.
        DamagedError: the statistics have changed.
    """
    path = path / "reference.json" if path.is_dir() else path
    record = open_record(path.parent, "reference", path.name)
    check_files(path.parent, record["files"], "make it again with: kairos reference")
    if record["extractor_hash"] != extractor.hash:
        raise KairosError(
            f"{path}: made with extractor {record['extractor']} {record['extractor_hash'][:12]}, "
            f"got {extractor.name} {extractor.hash[:12]}; pass that one as --extractor DIR"
        )
    return Reference(record, Target(record["metric"], Statistics.load(path.parent / "statistics.npz"), record["kid"]))


def training_statistics(images: PreparedDataset, extractor: Extractor) -> Statistics:
    """Statistics of the training split, cached by content hash."""
    parts = {"dataset": images.manifest["content_sha256"], "split": "train", "extractor": extractor.hash}
    if extractor.precision != "fp32":
        parts["precision"] = extractor.precision

    def compute_them() -> Statistics:
        return distances.statistics(extract(extractor, images.images[images.train])[extractor.layer])

    return distances.cached(parts, compute_them)


def reference_hash(statistics: Statistics, extractor: Extractor) -> str:
    """What identifies a reference: real statistics and extractor."""
    return sha256_json({"statistics": statistics.hash, "extractor": extractor.hash})


@dataclass(frozen=True)
class Gaussian:
    """A Gaussian with mean and sample covariance of the training latents, whatever their dimension.

    Draws are mean + z rows / sqrt(n-1) with z ~ N(0, I_n) and the centred latents as rows: exactly that covariance,
    full where there are more latents than dimensions, of rank n-1 otherwise, without ever forming it.

    Args:
        mean: of the latents in model space, (d,).
        rows: centred latents, (n, d).
        shape: of one latent, (c, h, w).
    """

    mean: torch.Tensor
    rows: torch.Tensor
    shape: tuple[int, ...]

    @staticmethod
    def fit(latents: Any, seed: int) -> "Gaussian":
        """From training latents as a training sees them, at most `GAUSSIAN_IMAGES`, fewer where they are large."""
        dimension = int(np.prod(latents.shape))
        count = min(len(latents.train), GAUSSIAN_IMAGES, max(2, GAUSSIAN_VALUES // dimension))
        order = Stream(seed, "gaussian images").permutation(len(latents.train))
        chosen = latents.train[order[:count].sort().values.numpy()]
        parts = []
        for start in range(0, count, BATCH):
            part = chosen[start : start + BATCH]
            noise = Stream(seed, "gaussian latents").normal(0, torch.from_numpy(part), latents.shape)
            parts.append(latents.batch(part, noise=noise).flatten(1))
        rows = torch.cat(parts)  # (n, d)
        mean = rows.mean(0)
        return Gaussian(mean, rows - mean, tuple(latents.shape))

    def decoded(self, codec: Any, count: int, seed: int, number: int) -> NDArray[np.uint8]:
        """Set `number` of draws as images, uint8 (count, height, width, channels)."""
        parts = []
        for start in range(0, count, BATCH):
            part = range(start, min(start + BATCH, count))
            z = Stream(seed, "gaussian draws").normal(number, part, (len(self.rows),))
            latents = self.mean + z @ self.rows / (len(self.rows) - 1) ** 0.5
            parts.append(to_uint8(codec.decode(latents.view(-1, *self.shape))))
        return np.concatenate(parts)


def noise_images(size: tuple[int, ...], seed: int, number: int) -> NDArray[np.uint8]:
    """Set `number` of uniformly random pixels."""
    random = np.random.default_rng(derived_seed(seed, "noise images", number))
    return random.integers(0, 256, size, dtype=np.uint8)


def _repeated(extractor: Extractor, sets: Iterator[NDArray[np.uint8]], target: Target) -> dict[str, Any]:
    """Mean and spread over sets of images."""
    samples = [distances.sample_of(extractor, extract(extractor, images)) for images in sets]
    return distances.summarise([distances.score(sample, target) for sample in samples])


def _bootstrapped(extractor: Extractor, images: NDArray[np.uint8], target: Target, seed: int) -> dict[str, Any]:
    """Value of one set of images; its spread over resamples with replacement, for there is no second set."""
    sample = distances.sample_of(extractor, extract(extractor, images))
    random = np.random.default_rng(derived_seed(seed, "bootstrap"))
    resamples = []
    for _ in range(RESAMPLES):
        chosen = torch.from_numpy(random.integers(0, len(images), len(images)))
        logits = sample.logits[chosen] if sample.logits is not None else None
        resamples.append(distances.score(Sample(sample.features[chosen], logits), target))
    spreads = distances.summarise(resamples)
    row = distances.score(sample, target)
    return {**row, **{f"{name}_spread": spreads[f"{name}_spread"] for name in row}}
