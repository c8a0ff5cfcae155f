"""Stage `reference`: statistics of the real images, and rows that say what a distance means.

Each row is compared with the same reference as the samples:

* ``floor``: held-out images; no model can be expected below it.
* ``reconstruction``: the same held-out images through the autoencoder.
* ``gaussian``: a Gaussian with mean and covariance of the training latents, sampled and decoded.
* ``noise``: uniformly random pixels.

All have as many images per set as the samples, the first two as many as are held out where those are fewer.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kairos import resource_usage
from kairos.autoencoders.codec import Codec, load_codec
from kairos.data.dataset import PreparedDataset, open_dataset, to_uint8
from kairos.data.latents import Latents, open_latents
from kairos.evaluation import external_reference, metrics
from kairos.evaluation.extractors import Extractor, open_extractor
from kairos.evaluation.metrics import RealStatistics, Target
from kairos.evaluation.moments import LAYERS, iterate_rows, measure
from kairos.evaluation.registries import UNREAL, default_metrics, needs_of
from kairos.evaluation.settings import EvaluationConfig, check_metrics, metrics_with_options
from kairos.files import check_files, open_record, sha256_file, sha256_json, write_json
from kairos.progress import Progress, say
from kairos.sampling.samples_file import open_samples
from kairos_timesteps.errors import KairosError
from kairos_timesteps.randomness import Stream, derived_seed

RESAMPLES = 20
GAUSSIAN_IMAGES = 10_000
GAUSSIAN_VALUES = 2**27  # 512 MB of float32
_HELD_OUT = f"standard deviation over {RESAMPLES} bootstrap resamples of the one set of held-out images"
_GENERATED = "standard deviation over sets of fresh draws"
Reference = tuple[dict[str, Any], Target]  # reference.json, or the same fields for images from outside; and the target
ImageSource = Callable[[int], Iterator[np.ndarray]]  # from the number of a set to batches of its images
SPREADS = {"floor": _HELD_OUT, "reconstruction": _HELD_OUT, "gaussian": _GENERATED, "noise": _GENERATED}


def build_reference(
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
        KairosError: too few images for the extractor's features, or a file from outside that does not fit.
    """
    images, opened = open_dataset(dataset), open_extractor(extractor, device, evaluation.precision)
    codec, encoded = load_codec(autoencoder, device), open_latents(latents)
    resource_usage.end_startup()
    wanted = tuple(evaluation.metrics_for(opened.manifest["kind"], len(images.heldout) > 0))
    target = Target(opened.manifest["metric"], _real(evaluation.reference, images, opened, wanted), wanted)
    num, seed, warnings = evaluation.num_samples, evaluation.seed, []
    for what, number in {"evaluation.num_samples": num, "real images": target.statistics.count}.items():
        if number:  # published moments do not tell of how many images they are
            for warning in metrics.check_image_count(number, opened.width, what):
                metrics.warn(what, warning)
                warnings.append(f"{what}: {warning}")
    fitted, gaussian = _gaussian(encoded, codec, num, seed)
    drawn = {"gaussian": gaussian, "noise": _noise(images.images.shape[1:], num, seed)}
    rows = _rows(evaluation, images, codec, drawn, opened, target)

    target.statistics.save(out / "statistics.npz")
    record = {
        "extractor": opened.name,
        "extractor_hash": opened.hash,
        "metric": target.metric,
        "metrics": wanted,
        "features": opened.width,
        "accuracy": opened.manifest["accuracy"],
        "reference": evaluation.reference,
        "dataset_sha256": images.manifest["content_sha256"],
        "autoencoder_sha256": codec.manifest["sha256"],
        "real_images": target.statistics.count,
        "num_samples": num,
        "sets": evaluation.sets,
        **_fixed(evaluation, target.statistics, opened),
        "rows": rows,
        "spread_of": {name: SPREADS[name] for name in rows},
        "gaussian": f"mean and sample covariance of {fitted} training latents",
        "warnings": warnings,
        "files": {"statistics.npz": sha256_file(out / "statistics.npz")},
    }
    write_json(out / "reference.json", record)
    for name, row in rows.items():
        say(f"reference: {name} {metrics.format_metric(row, target.metric)}")
    return record


def open_reference(path: Path, extractor: Extractor) -> Reference:
    """Open what stage `reference` wrote, given as folder or as reference.json: its record, and what it compares with.

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
    real = RealStatistics.load(path.parent / "statistics.npz")
    return record, Target(record["metric"], real, tuple(record["metrics"]))


def open_external_reference(path: Path, extractor: Extractor, wanted: list[str] | None) -> Reference:
    """Return record and target of a reference from an npz file of real images or published moments.

    The statistics are cached by the content of the file.

    Raises:
        KairosError: the file lacks something that the metrics need, or contains too few images for the extractor.
    """
    kind = extractor.manifest["kind"]
    named = metrics_with_options(wanted or default_metrics(kind, True))
    check_metrics(named, kind)
    statistics = load_external_statistics(path, extractor, needs_of(named) - UNREAL)
    record = {"num_samples": None, **_fixed(EvaluationConfig(), statistics, extractor)}
    return record, Target(extractor.manifest["metric"], statistics, tuple(named))


def _fixed(evaluation: EvaluationConfig, real: RealStatistics, extractor: Extractor) -> dict[str, Any]:
    """Return the settings that a reference's record fixes for all its evaluations, and the hash of the reference."""
    return {
        "reference_hash": sha256_json({"statistics": real.hash, "extractor": extractor.hash}),
        "eval_seed": evaluation.seed,
        "precision": evaluation.precision,
        "validation": {"images": evaluation.loss_images, "strata": evaluation.strata, "seed": evaluation.seed},
    }


def _real(
    which: str, dataset: PreparedDataset, extractor: Extractor, wanted: tuple[dict[str, Any], ...]
) -> RealStatistics:
    """Statistics of the training images, of all, or of a file from outside; cached by content."""
    needs = needs_of(wanted) - UNREAL
    if which not in ("train", "all"):
        return load_external_statistics(Path(which), extractor, needs)
    indices = dataset.train if which == "train" else np.arange(len(dataset.images))
    parts = {"dataset": dataset.manifest["content_sha256"], "split": which}
    return _of_images(dataset.images, indices, extractor, needs, parts)


def load_external_statistics(path: Path, extractor: Extractor, needs: set[str]) -> RealStatistics:
    """Statistics of a file, cached by its content: published moments where it holds them, else those of its images.

    Raises:
        KairosError: see `external_reference.read_moments`; or too few images for the extractor.
    """
    found = external_reference.read_moments(path, extractor.width, needs, "reference")
    moments = {LAYERS[need]: pair for need, pair in found.items()}
    rest = needs - found.keys()
    if not rest:
        return RealStatistics(moments)
    images = open_samples(path).images
    if "moments" in rest:
        for warning in metrics.check_image_count(len(images), extractor.width, str(path)):
            metrics.warn(str(path), warning)
    own = _of_images(images, range(len(images)), extractor, rest, {"images": sha256_file(path)})
    return RealStatistics({**own.moments, **moments}, own.features, 0 if moments else own.count)


def _of_images(
    images: Any, indices: Any, extractor: Extractor, needs: set[str], parts: dict[str, Any]
) -> RealStatistics:
    """Statistics of some images; `parts` decides which they are."""
    parts = {**parts, "extractor": extractor.hash, "precision": extractor.precision, "needs": sorted(needs)}
    batches, kept = iterate_rows(images, indices), metrics.indices_to_store(len(indices))
    return metrics.load_or_compute(parts, lambda: metrics.statistics_to_store(measure(extractor, batches, needs, kept)))


def _rows(
    evaluation: EvaluationConfig,
    dataset: PreparedDataset,
    codec: Codec,
    drawn: dict[str, ImageSource],
    extractor: Extractor,
    target: Target,
) -> dict[str, dict[str, Any]]:
    """The rows that can be made, by name, each with its number of images per set and the columns of the metrics."""
    heldout, num, seed = dataset.heldout[: evaluation.num_samples], evaluation.num_samples, evaluation.seed
    numbers = range(len(heldout))
    one_set = {
        "floor": lambda: iterate_rows(dataset.images, heldout),
        "reconstruction": lambda: map(codec.reconstructed, map(dataset.load_tensor, iterate_rows(heldout, numbers))),
    }
    if len(heldout) <= extractor.width:
        say(
            f"reference: rows floor and reconstruction are left out: {len(heldout)} images are held out, and "
            f"{extractor.width} features need more"
        )
        one_set = {}
    elif len(heldout) < num:
        say(f"warning: rows floor and reconstruction are of {len(heldout)} images, all that are held out")
    rows, captions = {}, dataset.captions if "captions" in target.needs else None
    progress = Progress(len(one_set) + len(drawn), "reference", "row")
    with torch.inference_mode():
        for name, images in one_set.items():
            measured = measure(extractor, images(), target.needs | {"features"})
            if captions is not None:
                texts = captions.texts(captions.caption_indices(heldout))
                measured = replace(measured, captioned=zip(images(), iterate_rows(texts, numbers)))
            scores = target.score(measured)
            spread = metrics.bootstrap(measured, target, RESAMPLES, derived_seed(seed, "bootstrap"))
            spreads = {f"{column}_spread": spread if column == target.metric else None for column in scores}
            rows[name] = {"n_samples": len(heldout), **scores, **spreads}
            progress.advance()
        for name, set_of in drawn.items():
            sets = (measure(extractor, set_of(number), target.needs) for number in range(evaluation.sets))
            rows[name] = {"n_samples": num, **metrics.summarise([target.score(one) for one in sets])}
            progress.advance()
    progress.close()
    return rows


def _gaussian(latents: Latents, codec: Codec, count: int, seed: int) -> tuple[int, ImageSource]:
    """A Gaussian with mean and sample covariance of the training latents, whatever their dimension.

    Of training latents as a training sees them, at most `GAUSSIAN_IMAGES`, fewer where they are large. Draws are
    mean + z rows / sqrt(n-1) with z ~ N(0, I_n) and the centred latents as rows: exactly that covariance, full where
    there are more latents than dimensions, of rank n-1 otherwise, without ever forming it.

    Returns:
        Number of latents, and what gives a numbered set of `count` decoded draws.
    """
    dimension = int(np.prod(latents.shape))
    fitted = min(len(latents.train), GAUSSIAN_IMAGES, max(2, GAUSSIAN_VALUES // dimension))
    order = Stream(seed, "gaussian images").permutation(len(latents.train))
    chosen = latents.train[order[:fitted].sort().values.numpy()]
    parts = []
    for part in iterate_rows(chosen, range(fitted)):
        noise = Stream(seed, "gaussian latents").normal(0, torch.from_numpy(part), latents.shape)
        parts.append(latents.load_x0(part, noise=noise).flatten(1))
    rows = torch.cat(parts)  # (n, d)
    mean = rows.mean(0)
    rows -= mean

    def drawn(number: int) -> Iterator[np.ndarray]:
        for part in iterate_rows(range(count), range(count)):
            z = Stream(seed, "gaussian draws").normal(number, part, (fitted,))
            x0 = mean + z @ rows / (fitted - 1) ** 0.5
            yield to_uint8(codec.decode(x0.view(-1, *latents.shape)))

    return fitted, drawn


def _noise(shape: tuple[int, ...], count: int, seed: int) -> ImageSource:
    """Return a function that yields a numbered set of `count` uniformly random images, in uint8 batches (n, *shape)."""

    def drawn(number: int) -> Iterator[np.ndarray]:
        random = np.random.default_rng(derived_seed(seed, "noise images", number))
        for part in iterate_rows(range(count), range(count)):
            yield random.integers(0, 256, (len(part), *shape), dtype=np.uint8)

    return drawn
