"""Stage `reference`: statistics of the real images, and reference rows that put a distance into context.

A reference row contains the metrics of images that no model has generated, compared with the real images:

* ``floor``: real held-out images; no model can be expected to score below them.
* ``reconstruction``: the held-out images through the autoencoder.
* ``gaussian``: samples of a Gaussian with mean and covariance of the training latents, decoded.
* ``noise``: uniformly random pixels.

Rows have ``evaluation.num_samples`` images per set. The first two have fewer if fewer images are held out.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kairos import resource_usage
from kairos.array_shapes import ImageBatch
from kairos.autoencoders.codec import Codec, load_codec
from kairos.data.dataset import HeldoutIndices, PreparedDataset, open_dataset
from kairos.data.latents import Latents, open_latents
from kairos.data.linked_images import delete_temporary_copy
from kairos.data.pixels import to_uint8
from kairos.data.random_order import random_order
from kairos.evaluation import external_reference, metrics
from kairos.evaluation.extractors import Extractor, describe_replacement, open_extractor
from kairos.evaluation.measurements import iterate_rows, measure, measure_resumably
from kairos.evaluation.metrics import Comparison, RealStatistics
from kairos.evaluation.separation import find_instrument_faults
from kairos.evaluation.settings import (
    EXTRACTORS,
    MEASUREMENTS,
    METRICS,
    SPLITS,
    EvaluationConfig,
    MetricOptions,
    check_metrics,
    default_metrics,
    metrics_with_options,
    needs_of_real_images,
)
from kairos.files import check_files, hash_npz, open_record, sha256_file, sha256_json, write_record
from kairos.progress import ProgressBar, log
from kairos.sampling.samples_file import open_samples
from kairos.stage_keys import hash_modules
from kairos_timesteps.errors import KairosError
from kairos_timesteps.randomness import Stream, derived_seed

RESAMPLES = 20  # bootstrap resamples of the held-out images
GAUSSIAN_IMAGES = 10_000  # most latents to which the Gaussian is fitted
GAUSSIAN_VALUES = 2**27  # most numbers in these latents: 512 MB of float32
_HELDOUT_DEVIATION = f"standard deviation over {RESAMPLES} bootstrap resamples of the one set of held-out images"
_GENERATED_DEVIATION = "standard deviation over sets of fresh draws"
ImageSource = Callable[[int], Iterator[ImageBatch]]  # function of a set's number that yields batches of its images
SPREADS = {  # meaning of columns ``<metric>_spread``, by row
    "floor": _HELDOUT_DEVIATION,
    "reconstruction": _HELDOUT_DEVIATION,
    "gaussian": _GENERATED_DEVIATION,
    "noise": _GENERATED_DEVIATION,
}


@dataclass(frozen=True)
class Reference:
    """Reference that samples are compared with.

    Attributes:
        record: content of reference/record.json, or for external images its fields that evaluations use.
        comparison: statistics of the real images, and the metrics to compute.
    """

    record: dict[str, Any]
    comparison: Comparison


def build_reference(
    evaluation: EvaluationConfig,
    device: torch.device,
    dataset: Path,
    autoencoder: Path,
    latents: Path,
    extractor: Path,
    out: Path,
) -> dict[str, Any]:
    """Write statistics.npz and record.json of stage `reference` into `out`; return the content of the record.

    It contains the reference rows, settings, hashes and warnings: the reasons why the distance cannot rank methods, a
    replaced extractor, and few images. The statistics of the real images are also stored in the cache, see
    `metrics.load_or_compute`. The temporary copy of the data set's images is deleted. Messages report the rows and
    warnings. Marks the end of start-up, see `resource_usage.end_startup`.

    Args:
        evaluation: section `evaluation`.
        device: device of the extractor and the autoencoder.
        dataset, autoencoder, latents, extractor: folders of the stages before.
        out: folder to write, created if necessary.

    Raises:
        KairosError: a folder is missing or damaged, there are too few images for the extractor's features, or an
            external file lacks something.
    """
    prepared = open_dataset(dataset)
    opened_extractor = open_extractor(extractor, device, evaluation.precision)
    codec = load_codec(autoencoder, device)
    training_latents = open_latents(latents)
    resource_usage.end_startup()

    # statistics of the real images
    selected = tuple(evaluation.metrics_for(opened_extractor.record["kind"], heldout=len(prepared.heldout) > 0))
    opened_extractor.check_layers(selected)
    real = _real_statistics(evaluation.reference, prepared, opened_extractor, selected)
    comparison = Comparison(distance_column=opened_extractor.record["metric"], real=real, metrics=selected)
    num_samples = evaluation.num_samples
    count_warnings = _check_image_counts(num_samples, real.count, opened_extractor.width)

    # reference rows
    fitted_count, gaussian = _gaussian_source(training_latents, codec, num_samples, evaluation.seed)
    noise = _noise_source(prepared.images.shape[1:], num_samples, evaluation.seed)
    generated = {"gaussian": gaussian, "noise": noise}
    rows = _compute_rows(evaluation, prepared, codec, generated, opened_extractor, comparison)

    real.save(out / "statistics.npz")
    record = {
        "extractor": opened_extractor.name,
        "extractor_hash": opened_extractor.hash,
        "metric": comparison.distance_column,
        "metrics": [metric.plain() for metric in selected],
        "features": opened_extractor.width,
        "accuracy": opened_extractor.record["accuracy"],
        "extractor_check": opened_extractor.record["check"],
        "extractor_warnings": opened_extractor.record["warnings"],
        "reference": evaluation.reference,
        "dataset_sha256": prepared.record["content_sha256"],
        "autoencoder_sha256": codec.record["sha256"],
        "real_images": real.count,
        "num_samples": num_samples,
        "sets": evaluation.sets,
        **_fixed_settings(evaluation, real, opened_extractor),
        "rows": rows,
        "spread_of": {name: SPREADS[name] for name in rows},
        "gaussian": f"mean and sample covariance of {fitted_count} training latents",
        "files": {"statistics.npz": sha256_file(out / "statistics.npz")},
        "content_sha256": hash_npz(out / "statistics.npz"),
    }
    faults = find_instrument_faults(record)
    for fault in faults:
        log(f"warning: {fault}")
    replacement_notes = describe_replacement(opened_extractor.record)
    record["warnings"] = [*faults, *replacement_notes, *count_warnings]
    write_record(out / "record.json", record)
    delete_temporary_copy(dataset)  # no later stage reads all images
    for name, row in rows.items():
        log(f"reference: {name} {metrics.format_metric(row, comparison.distance_column)}")
    return record


def _check_image_counts(num_samples: int, real_images: int, width: int) -> list[str]:
    """Print and return warnings if a set has fewer than 10 images per feature; there are `width` features.

    Both `num_samples`, the images per set, and the number of real images are checked. A returned warning begins with
    ``evaluation.num_samples: `` or ``real images: ``. The number of real images is 0 if it is unknown, as for published
    moments; it is then not checked.

    Raises:
        KairosError: a number of images is at most `width`.
    """
    warnings = []
    for name, count in {"evaluation.num_samples": num_samples, "real images": real_images}.items():
        if count == 0:  # unknown
            continue
        for warning in metrics.check_image_count(count, width, name):
            metrics.warn(name, warning)
            warnings.append(f"{name}: {warning}")
    return warnings


def open_reference(path: Path, extractor: Extractor) -> Reference:
    """Open the output of stage `reference`, from its folder or its record, after comparing files with hashes.

    The metrics have the options in the record.

    Raises:
        KairosError: the reference is missing, or was computed with another extractor.
        DamagedError: the file of statistics has changed.
    """
    path = path / "record.json" if path.is_dir() else path
    record = open_record(path.parent, command="reference", name=path.name)
    check_files(path.parent, record["files"], "make it again with: kairos reference")
    if record["extractor_hash"] != extractor.hash:
        raise KairosError(
            f"{path}: got extractor {extractor.name} {extractor.hash[:12]}, expected {record['extractor']} "
            f"{record['extractor_hash'][:12]}, with which the reference was computed; pass it as --extractor DIR"
        )
    comparison = Comparison(
        distance_column=record["metric"],
        real=RealStatistics.load(path.parent / "statistics.npz"),
        metrics=tuple(METRICS.select(metric) for metric in record["metrics"]),
    )
    return Reference(record, comparison)


def open_external_reference(path: Path, extractor: Extractor, metric_names: list[str] | None) -> Reference:
    """Open an npz file of real images or published moments as reference; the statistics are cached by its content.

    The record contains default settings, the extractor's warnings, and None as number of images per set: evaluations
    split the samples into a number of sets. A warning about few images is printed.

    Args:
        path: the npz file.
        extractor: the feature extractor.
        metric_names: names of metrics; None or empty: the default metrics of the extractor, with the validation loss.

    Raises:
        ConfigError: a metric is unknown or does not fit the extractor, or not exactly one metric ranks methods.
        KairosError: the file lacks something that the metrics need, or contains too few images for the extractor.
    """
    kind = extractor.record["kind"]
    # held-out images: samples with a snapshot have a validation loss; for others it is left out
    selected = metrics_with_options(metric_names or default_metrics(kind, heldout=True))
    check_metrics(selected, kind)
    extractor.check_layers(selected)
    real = load_external_statistics(path, extractor, needs_of_real_images(selected))
    warnings = extractor.record["warnings"]
    record = {
        "num_samples": None,
        "extractor_warnings": warnings,
        "warnings": warnings,
        **_fixed_settings(EvaluationConfig(), real, extractor),
    }
    comparison = Comparison(distance_column=extractor.record["metric"], real=real, metrics=tuple(selected))
    return Reference(record, comparison)


def _fixed_settings(evaluation: EvaluationConfig, real: RealStatistics, extractor: Extractor) -> dict[str, Any]:
    """Return the record fields of a reference that all its evaluations use.

    ``reference_hash`` includes the statistics of the real images and the extractor. ``eval_seed`` and ``precision`` are
    settings, and ``validation`` contains the number of images, strata and seed of the validation loss.
    """
    return {
        "reference_hash": sha256_json({"statistics": real.hash, "extractor": extractor.hash}),
        "eval_seed": evaluation.seed,
        "precision": evaluation.precision,
        "validation": {"images": evaluation.loss_images, "strata": evaluation.strata, "seed": evaluation.seed},
    }


def _real_statistics(
    reference: str, dataset: PreparedDataset, extractor: Extractor, selected: tuple[MetricOptions, ...]
) -> RealStatistics:
    """Return the statistics of the real images, cached by content; the metrics `selected` decide the measurements.

    `reference` is ``train``, ``heldout``, ``all`` (both) or the path of an npz file.

    Raises:
        KairosError: the npz file lacks a measurement, or contains too few images, see `load_external_statistics`.
    """
    needs = needs_of_real_images(selected)
    if reference not in SPLITS:
        return load_external_statistics(Path(reference), extractor, needs)
    splits = {"train": dataset.train, "heldout": dataset.heldout, "all": np.arange(len(dataset.images))}
    indices = splits[reference]
    cache_key = {"dataset": dataset.record["content_sha256"], "split": reference}
    return _measure_cached(dataset.images, indices, extractor, needs, cache_key)


def load_external_statistics(path: Path, extractor: Extractor, needs: set[str]) -> RealStatistics:
    """Return the statistics of an npz file: published moments if it contains them, the rest measured on its images.

    Measurements are cached by the content of the file. The number of images is 0 if a published moment is used. A
    warning about few images is printed.

    Args:
        path: the npz file.
        extractor: the feature extractor.
        needs: measurements of real images that the metrics need, see `settings.MEASUREMENTS`.

    Raises:
        KairosError: the file lacks a measurement, see `external_reference.read_moments`; or too few images.
    """
    published = external_reference.read_moments(path, extractor.width, needs, "reference")
    published_gaussians = {MEASUREMENTS[need].layer: gaussian for need, gaussian in published.items()}
    missing = needs - published.keys()
    if not missing:
        return RealStatistics(published_gaussians)
    images = open_samples(path).images
    if "moments" in missing:  # the covariance of the images needs more images than features
        for warning in metrics.check_image_count(len(images), extractor.width, str(path)):
            metrics.warn(str(path), warning)
    statistics = _measure_cached(images, range(len(images)), extractor, missing, {"images": sha256_file(path)})
    # published moments may be of more images than the file has, so their number is unknown
    count = 0 if published_gaussians else statistics.count
    return replace(statistics, gaussians={**statistics.gaussians, **published_gaussians}, count=count)


def _measure_cached(
    images: Any, indices: Any, extractor: Extractor, needs: set[str], cache_key: dict[str, Any]
) -> RealStatistics:
    """Return the statistics of uint8 images (N, height, width, channels) at `indices`, with the measurements `needs`.

    They are read from the cache if the present code has computed them before, or else computed and stored there.
    `cache_key` identifies the images, by JSON values. Features are kept for at most `metrics.MAX_STORED` images; the
    moments are of all images. A killed process leaves partial sums in the cache, and the next one resumes from them.
    """
    extractor_code = EXTRACTORS.find(extractor.record["kind"]).module()  # imported by name alone
    cache_key = {
        **cache_key,
        "extractor": extractor.hash,
        "precision": extractor.precision,
        "needs": sorted(needs),
        "code": hash_modules([measure.__module__, extractor.__module__, extractor_code, metrics.__name__]),
    }

    def compute(partial: Path) -> RealStatistics:
        stored = metrics.indices_to_store(len(indices))
        statistics = measure_resumably(extractor, images, indices, needs, stored, partial)
        return metrics.statistics_to_store(statistics)

    return metrics.load_or_compute(cache_key, compute)


def _compute_rows(
    evaluation: EvaluationConfig,
    dataset: PreparedDataset,
    codec: Codec,
    generated: dict[str, ImageSource],
    extractor: Extractor,
    comparison: Comparison,
) -> dict[str, dict[str, Any]]:
    """Return the reference rows by name, each with the columns of the metrics and ``n_samples``, its images per set.

    Rows ``floor`` and ``reconstruction`` have one set: the first ``num_samples`` held-out images, or all if they are
    fewer. They are missing if too few images are held out, see `_heldout_sources`. Reference ``heldout`` has no row
    ``floor``, which would compare images with themselves. The other rows are `generated`, with
    ``evaluation.sets`` sets, whose means and standard deviations they contain. If metrics need captions, the first
    caption of each held-out image is used. Progress is shown by row and image.
    """
    heldout = dataset.heldout[: evaluation.num_samples]
    heldout_sources = _heldout_sources(
        heldout, dataset, codec, num_samples=evaluation.num_samples, width=extractor.width
    )
    if evaluation.reference == "heldout":
        heldout_sources.pop("floor", None)
    captions = None
    if heldout_sources and dataset.captions is not None and "captions" in comparison.needs:
        captions = dataset.captions.texts(dataset.captions.caption_indices(heldout))
    rows = {}
    with torch.inference_mode():
        for name, heldout_images in heldout_sources.items():
            progress = ProgressBar(len(heldout), f"reference: {name}", "image")
            scores = _score_heldout(heldout_images, captions, evaluation.seed, extractor, comparison, progress)
            rows[name] = {"n_samples": len(heldout), **scores}
            progress.close()
        for name, images_of_set in generated.items():
            progress = ProgressBar(evaluation.num_samples * evaluation.sets, f"reference: {name}", "image")
            set_scores = []
            for number in range(evaluation.sets):
                statistics = measure(extractor, images_of_set(number), comparison.needs, progress=progress)
                set_scores.append(comparison.score(statistics))
            rows[name] = {"n_samples": evaluation.num_samples, **metrics.summarise(set_scores)}
            progress.close()
    return rows


def _score_heldout(
    images: Callable[[], Iterator[ImageBatch]],
    captions: list[str] | None,
    seed: int,
    extractor: Extractor,
    comparison: Comparison,
    progress: ProgressBar,
) -> dict[str, Any]:
    """Return the columns of the metrics for one set of images, and the standard deviation of each column.

    Columns ``<column>_spread`` have the standard deviations: of a bootstrap for the distance, None for other metrics.

    Args:
        images: function that yields the images in batches; with captions it is called twice.
        captions: one caption of each image; None: no metric needs captions.
        seed: seed of the reference rows.
        extractor: the feature extractor.
        comparison: statistics of the real images, and the metrics.
        progress: advances by the measured images.
    """
    needs = comparison.needs | {"features"}  # the bootstrap needs features
    statistics = measure(extractor, images(), needs, progress=progress)
    if captions is not None:
        batches = zip(images(), iterate_rows(captions, range(len(captions))))
        statistics = replace(statistics, captioned=batches)
    scores = comparison.score(statistics)
    deviation = metrics.bootstrap(statistics, comparison, resamples=RESAMPLES, seed=derived_seed(seed, "bootstrap"))
    deviations = dict.fromkeys(f"{column}_spread" for column in scores)  # None: unknown for one set of images
    deviations[f"{comparison.distance_column}_spread"] = deviation
    return {**scores, **deviations}


def _heldout_sources(
    heldout: HeldoutIndices, dataset: PreparedDataset, codec: Codec, num_samples: int, width: int
) -> dict[str, Callable[[], Iterator[ImageBatch]]]:
    """Return functions by row, ``floor`` and ``reconstruction``, that yield the row's images in uint8 batches.

    There are no such rows unless more images are held out than there are features (`width`). A message reports that,
    and fewer held-out images than `num_samples`. `heldout` contains dataset indices, (n,).
    """
    if len(heldout) <= width:
        log(
            f"reference: rows floor and reconstruction are left out: {len(heldout)} images are held out, and "
            f"{width} features need more"
        )
        return {}
    if len(heldout) < num_samples:
        log(f"warning: rows floor and reconstruction are of {len(heldout)} images, all that are held out")

    def real_images() -> Iterator[ImageBatch]:
        return iterate_rows(dataset.images, heldout)

    def reconstructions() -> Iterator[ImageBatch]:
        for indices in iterate_rows(heldout, range(len(heldout))):
            yield codec.reconstruct(dataset.load_tensor(indices))

    return {"floor": real_images, "reconstruction": reconstructions}


def _gaussian_source(latents: Latents, codec: Codec, count: int, seed: int) -> tuple[int, ImageSource]:
    """Fit a Gaussian to random training latents; return their number and a source of decoded samples of the Gaussian.

    The source maps a set's number to its `count` images, yielded in uint8 batches. At most `GAUSSIAN_IMAGES` latents,
    and `GAUSSIAN_VALUES` values in total (but at least two latents), are fitted. They stay in memory as long as the
    source. Stochastic latents are sampled. The caller ensures that there are two training images or more.
    """
    dimension = int(np.prod(latents.shape))
    fitted_count = min(len(latents.train), GAUSSIAN_IMAGES, max(2, GAUSSIAN_VALUES // dimension))
    order = random_order(Stream(seed, "gaussian images"), len(latents.train))
    selected = latents.train[order[:fitted_count].sort().values.numpy()]  # sorted: read in the order of the file
    batches = []
    for indices in iterate_rows(selected, range(fitted_count)):
        noise = Stream(seed, "gaussian latents").normal(0, torch.from_numpy(indices), latents.shape)
        batches.append(latents.load_x0(indices, noise=noise).flatten(1))
    centred = torch.cat(batches)  # (n, d)
    mean = centred.mean(0)
    centred -= mean  # in place, because it may fill 512 MB

    def images_of_set(number: int) -> Iterator[ImageBatch]:
        for image_indices in iterate_rows(range(count), range(count)):  # consecutive ranges
            z = Stream(seed, "gaussian draws").normal(number, image_indices, (fitted_count,))
            # the covariance of x0 is the sample covariance of the latents, which is never formed; its rank is n - 1, or
            # the number of dimensions if that is smaller
            x0 = mean + z @ centred / (fitted_count - 1) ** 0.5
            yield to_uint8(codec.decode(x0.view(-1, *latents.shape)))

    return fitted_count, images_of_set


def _noise_source(shape: tuple[int, ...], count: int, seed: int) -> ImageSource:
    """Return a function that maps a set's number to batches of its `count` uniformly random uint8 images (n, *shape).

    The images depend on seed and number of the set alone.
    """

    def images_of_set(number: int) -> Iterator[ImageBatch]:
        random = np.random.default_rng(derived_seed(seed, "noise images", number))
        for image_indices in iterate_rows(range(count), range(count)):  # consecutive ranges
            yield random.integers(0, 256, (len(image_indices), *shape), dtype=np.uint8)

    return images_of_set
