"""Stage `evaluate`: distances of samples from real images, and the validation loss, with the evaluation protocol."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kairos import compute, resource_usage
from kairos.array_shapes import ImageBatch
from kairos.data.latents import Latents, open_latents
from kairos.evaluation import metrics
from kairos.evaluation.extractors import Extractor, build_extractor, open_extractor
from kairos.evaluation.measurements import iterate_rows, measure
from kairos.evaluation.reference import Reference, open_external_reference, open_reference
from kairos.evaluation.separation import describe_gaussian_limit, find_instrument_faults, gaussian_value
from kairos.evaluation.settings import EXTRACTORS, METRICS, LossSettings
from kairos.files import atomic_folder, check_files, open_record, read_record, write_record
from kairos.progress import ProgressBar, log
from kairos.sampling.conditions import check_conditions, select_condition_sources
from kairos.sampling.sample import load_settings, set_up_device
from kairos.sampling.samples_file import SamplesFile, open_samples
from kairos.sampling.settings import GUIDANCE
from kairos_timesteps.errors import ConfigError, KairosError
from kairos_timesteps.options import options_without_name

PUBLISHED_EXTRACTORS = ("inception", "dinov2")  # extractors that need no data set


@dataclass(frozen=True)
class EvaluationJob:
    """Samples to evaluate.

    Attributes:
        samples: npz file.
        out: JSON record to write.
        snapshot: folder of the snapshot, for the validation loss and paired metrics; None: other metrics alone.
    """

    samples: Path
    out: Path
    snapshot: Path | None = None


def run(
    jobs: list[EvaluationJob],
    reference: Path,
    extractor: Path | None = None,
    latents: Path | None = None,
    sets: int = 1,
    metric_names: list[str] | None = None,
    device: str | None = None,
    finished: Callable[[EvaluationJob], None] = lambda job: None,
) -> None:
    """Evaluate every job, write its record, and print the warnings about numbers of images once.

    Threads, device and determinism of this process are set as in the first snapshot's training run. Without a snapshot
    one thread computes, deterministically, on a GPU if one is usable. Argument `device` replaces the device. The
    reference fixes the extractor's precision. Marks the end of start-up, see `resource_usage.end_startup`.

    Args:
        jobs: samples to evaluate.
        reference: folder or reference/record.json of stage reference, or an npz file of real images.
        extractor: folder of the extractor, ``inception`` or ``dinov2``, see `cache_published_extractor`. None:
            ``../extractor``, relative to the reference's folder, or with an npz reference the extractor that the
            metrics are defined for.
        latents: folder of the latents for the validation loss; None: ``../../../../../latents``, relative to the
            snapshot.
        sets: with an npz reference: number of sets that the samples are split into.
        metric_names: with an npz reference: names of metrics; None or empty: the default metrics of the extractor.
        device: name of the device; None: as described above.
        finished: function that is called after each job.

    Raises:
        ConfigError: `metric_names` is not empty with another reference, or the extractor is not decided, see
            `_find_extractor`.
        KairosError: a file is missing or damaged, or files do not belong together. The records of earlier jobs remain.
    """
    is_external = reference.suffix == ".npz"
    if metric_names and not is_external:
        raise ConfigError(
            f"--metrics: got {','.join(metric_names)}, allowed with an npz reference only; "
            f"{reference} fixes its metrics"
        )
    extractor_folder = _find_extractor(reference, extractor, metric_names or [])

    # set up the process, and open extractor and reference
    snapshots = [job.snapshot for job in jobs if job.snapshot is not None]
    if snapshots:  # threads and determinism as in training
        _, snapshot_record = load_settings(snapshots[0], overrides={})  # checks the record, too
        selected_device = set_up_device(snapshot_record, device)
    else:
        device_field = "--device" if device else "--device (default)"
        selected_device = compute.setup(1, device or "auto", device_field=device_field)
    opened_extractor = open_extractor(extractor_folder, selected_device)
    resource_usage.end_startup()
    if is_external:
        opened_reference = open_external_reference(reference, opened_extractor, metric_names)
    else:
        opened_reference = open_reference(reference, opened_extractor)
    opened_extractor = replace(opened_extractor, precision=opened_reference.record["precision"])

    # evaluate, and collect equal warnings of several files
    files_by_warning: dict[str, list[str]] = {}
    for job in jobs:
        for warning in evaluate(job, opened_reference, opened_extractor, sets, latents):
            files_by_warning.setdefault(warning, []).append(str(job.samples))
        finished(job)
    _print_warnings(files_by_warning, opened_reference.record.get("warnings", []))


def _find_extractor(reference: Path, extractor: Path | None, metric_names: list[str]) -> Path:
    """Return the folder of the extractor, after building a published extractor in the cache if it is not there.

    Argument `extractor` is a folder, which is returned without a check that it exists, or the name of a published
    extractor. If it is None, the reference decides:

    * npz file: the published extractor that the metrics are defined for;
    * other references: ``../extractor``, relative to the reference's folder.

    Raises:
        ConfigError: the metrics decide no extractor, or a folder here has the name of the published extractor.
        KairosError: the weights of a published extractor are missing and cannot be downloaded.
    """
    if extractor is None and reference.suffix == ".npz":
        return cache_published_extractor(_extractor_of_metrics(metric_names))
    if extractor is None:
        reference_folder = reference if reference.is_dir() else reference.parent
        return reference_folder / "../extractor"
    name = str(extractor)
    if name not in PUBLISHED_EXTRACTORS:
        return extractor
    if extractor.exists():
        raise ConfigError(
            f"--extractor: got {name}, the name of a published extractor and of a folder here; allowed: "
            f"{extractor.absolute()} for the folder, or {name} in another working directory for the published one"
        )
    return cache_published_extractor(name)


def _extractor_of_metrics(names: list[str]) -> str:
    """Return the name of the one extractor that metrics are defined for; metrics for any extractor are ignored.

    Raises:
        ConfigError: a name is unknown, no metric is defined for one extractor, or two metrics for different ones.
    """
    extractors = {METRICS.find(name).extractor for name in names} - {""}  # empty: any extractor
    if len(extractors) != 1:
        raise ConfigError(
            "--extractor: got none, required with an npz as --reference: pass a folder, inception or dinov2, or "
            "metrics that are defined for one of them, such as --metrics fid"
        )
    return extractors.pop()


def _print_warnings(files_by_warning: dict[str, list[str]], printed: list[str]) -> None:
    """Print each warning once, with the first of its files and the number of the others, unless `printed` contains it.

    Args:
        files_by_warning: samples files by warning.
        printed: warnings that stage reference has printed, maybe with a prefix that ends with a colon.
    """
    for warning, (first, *others) in files_by_warning.items():
        was_printed = any(line == warning or line.endswith(f": {warning}") for line in printed)
        if was_printed:
            continue
        files = first
        if others:
            noun = "file" if len(others) == 1 else "files"
            files = f"{first} (and {len(others)} other {noun})"
        metrics.warn(files, warning)


def cache_published_extractor(name: str) -> Path:
    """Return the folder of a published extractor in the cache, after building it if it is missing or damaged.

    The cache is `metrics.cache_folder`. The folder is replaced as a whole, because other evaluations may read it at
    the same time. Building may download weights.

    Raises:
        KairosError: the weights are missing and cannot be downloaded.
    """
    folder = metrics.cache_folder() / name
    try:
        record = open_record(folder, "evaluate")
        check_files(folder, record["files"], "run the evaluation again")
    except KairosError:  # missing or damaged; the message is not shown
        with atomic_folder(folder) as new_folder:
            build_extractor(EXTRACTORS.select({"name": name}), dataset=None, folder=new_folder)
    return folder


def evaluate(
    job: EvaluationJob, reference: Reference, extractor: Extractor, sets: int, latents: Path | None
) -> list[str]:
    """Evaluate one samples file, write its record, and return the warnings that its images are few.

    The caller prints the returned warnings, since it joins equal warnings of several files. Messages report the
    distance, and the images that are left over after the last full set. The record's ``step`` is None if the samples
    file contains none. Its ``warnings`` are the reasons why the reference's distances cannot rank methods, the warnings
    about left-over and few images, and a distance that is not below a fitted Gaussian's. It has
    ``validation`` only with metrics of the snapshot's network. Metrics that need a snapshot are left out without one.

    Args:
        job: the samples and the record to write.
        reference: statistics of real images, metrics and fixed settings.
        extractor: the opened feature extractor.
        sets: number of sets, if the reference does not fix the number of images per set.
        latents: folder of the latents; None: ``../../../../../latents``, relative to the snapshot.

    Raises:
        KairosError: too few images, the samples lack something that a metric needs, or files are missing, damaged or
            do not belong together, see `_open_training_latents`.
    """
    samples = open_samples(job.samples)
    needs = reference.comparison.needs
    file = str(job.samples)
    image_sets, unused_warnings = split_into_sets(len(samples.images), reference.record["num_samples"], sets, file)
    few_images_warnings = metrics.check_image_count(len(image_sets[0]), extractor.width, file)
    training_latents = None  # latents of the snapshot, if metrics need them
    if job.snapshot is not None and needs & {"pairs", "snapshot"}:
        snapshot_record = read_record(job.snapshot / "snapshot.json")
        training_latents = _open_training_latents(job, samples.protocol, snapshot_record, latents)

    scores = []  # columns of each set
    progress = ProgressBar(sum(len(indices) for indices in image_sets), f"evaluate {file}", "image")
    for indices in image_sets:
        statistics = measure(extractor, iterate_rows(samples.images, indices), needs, progress=progress)
        if "captions" in needs:
            statistics = replace(statistics, captioned=pair_with_captions(file, samples, indices))
        if "pairs" in needs and training_latents is not None:
            pairs = pair_with_real_images(samples, indices, training_latents, snapshot_record["conditions"])
            statistics = replace(statistics, pairs=pairs)
        scores.append(reference.comparison.score(statistics))
    progress.close()

    columns = metrics.summarise(scores)
    gaussian_warnings = _find_gaussian_warnings(columns, reference.record)
    record = {
        "step": samples.protocol.get("step"),
        "metrics": columns,
        "protocol": _evaluation_protocol(samples.protocol, reference.record, extractor, image_sets),
        "warnings": [
            *find_instrument_faults(reference.record),
            *unused_warnings,
            *few_images_warnings,
            *gaussian_warnings,
        ],
    }
    if "snapshot" in needs and training_latents is not None:
        record["validation"] = _compute_losses(job, samples.protocol, reference, training_latents, extractor)
    write_record(job.out, record)
    log(f"evaluate {file}: {metrics.format_metric(columns, reference.comparison.distance_column)}")
    return few_images_warnings


def _find_gaussian_warnings(columns: dict[str, Any], reference: dict[str, Any]) -> list[str]:
    """Return a list with a warning if the distance in `columns` is not below a fitted Gaussian's, else an empty list.

    `reference` is the record of the reference; an external one has no Gaussian.
    """
    limit = describe_gaussian_limit(reference)
    if limit is None or columns[reference["metric"]] < gaussian_value(reference, reference["metric"]):
        return []
    return [limit]


def _compute_losses(
    job: EvaluationJob, protocol: dict[str, Any], reference: Reference, latents: Latents, extractor: Extractor
) -> dict[str, Any]:
    """Return the fields of all metrics that evaluate the snapshot's network on held-out images, in one dictionary.

    The network has the weights that generated the samples, or the averaged ones if the sampling protocol does not
    contain ``weights``. The caller ensures that the job has a snapshot, on whose `latents` it was trained. `extractor`
    determines device and precision.
    """
    from kairos.snapshots import open_snapshot

    assert job.snapshot is not None
    weights = protocol.get("weights") or "ema"
    snapshot = open_snapshot(job.snapshot, weights, extractor.device)
    settings = LossSettings(**reference.record["validation"], precision=extractor.precision)
    results: dict[str, Any] = {}
    for metric in reference.comparison.metrics:
        if "snapshot" in metric.needs:
            compute_loss = metric.load()  # not `build`, which would add the metric's options as first argument
            results |= compute_loss(snapshot, latents, settings, extractor.device)
    return results


def pair_with_captions(file: str, samples: SamplesFile, indices: range) -> Iterable[tuple[ImageBatch, list[str]]]:
    """Return batches of the images `indices` with the captions that they were generated from.

    Invalid bytes of a caption are replaced. The batches can be iterated once.

    Raises:
        KairosError: the samples file contains no captions.
    """
    captions = samples.conditions.get("text")
    if captions is None or captions.dtype.kind != "S":  # S: UTF-8 bytes
        raise KairosError(
            f"{file}: contains no captions, which metric clip needs; evaluate samples of a model with condition text"
        )

    def text_batches() -> Iterator[list[str]]:
        for batch in iterate_rows(captions, indices):
            yield [text.decode("utf-8", "replace") for text in batch.tolist()]

    return zip(iterate_rows(samples.images, indices), text_batches())


def pair_with_real_images(
    samples: SamplesFile, indices: range, latents: Latents, conditions: dict[str, dict[str, Any]]
) -> Iterable[tuple[ImageBatch, ImageBatch]]:
    """Return generated images with the real images of their conditions, in batches of uint8 (n, h, w, channels).

    The batches can be iterated once.

    Args:
        samples: the samples file.
        indices: indices of the generated images.
        latents: latents that the model was trained on.
        conditions: descriptions of the model's conditions.

    Raises:
        KairosError: the sampling protocol has no field ``labels``, which decides the conditions of an image.
    """
    protocol = samples.protocol
    if "labels" not in protocol:
        raise KairosError(
            "evaluation.metrics: psnr needs samples with their conditions; got a file without `labels` in its "
            "protocol; generate the samples with kairos sample"
        )
    sources = select_condition_sources(latents, indices, conditions, protocol["labels"], protocol["seed"])
    return zip(iterate_rows(samples.images, indices), iterate_rows(latents.dataset.images, sources))


def split_into_sets(images: int, num_samples: int | None, sets: int, file: str) -> tuple[list[range], list[str]]:
    """Split images into consecutive sets of equal size; print and return a warning about images that are left over.

    The result contains the indices of each set, and the list of warnings, empty if no image is left over.

    Args:
        images: number of images.
        num_samples: images per set, fixed by the reference, so that `sets` is ignored; None: `sets` sets.
        sets: number of sets if their size is not fixed.
        file: the samples file, for messages.

    Raises:
        KairosError: the images fill no set: they are fewer than `num_samples`, or than `sets` if that is None.
    """
    if num_samples is None:
        set_size = images // sets
        set_count = sets if set_size > 0 else 0
        least_images = sets  # one image per set
    else:
        set_size = num_samples
        set_count = images // num_samples
        least_images = num_samples
    if set_count == 0:
        raise KairosError(f"{file}: got {images} images, allowed: at least {least_images}, one full set")
    warnings = []
    unused = images - set_count * set_size
    if unused > 0:
        warnings.append(f"the last {unused} images fill no set of {set_size} and are not used")
        metrics.warn(file, warnings[0])
    image_sets = [range(start, start + set_size) for start in range(0, set_count * set_size, set_size)]
    return image_sets, warnings


def _evaluation_protocol(
    sampling: dict[str, Any], reference: dict[str, Any], extractor: Extractor, image_sets: list[range]
) -> dict[str, Any]:
    """Return all settings that decide the metrics, on one level; settings that an external samples file lacks are None.

    They are settings of the sampling, the reference and the extractor. Options of the solver are on that level too.
    ``n_samples`` is the number of images in a set. ``accuracy`` is not a setting, but the extractor's accuracy as a
    classifier; None for a published extractor.
    """
    scheduler = sampling.get("scheduler") or {}
    return {
        **{name: sampling.get(name) for name in ("steps", "nfe", *GUIDANCE, "weights", "identity")},
        **dict.fromkeys(("spacing", "clip", "eta", "variance")),  # None unless the solver has them
        **options_without_name(scheduler),  # options of the solver; its name is field ``scheduler``
        "extractor": extractor.name,
        "extractor_hash": extractor.hash,
        "accuracy": extractor.record["accuracy"],
        "n_samples": len(image_sets[0]),
        "sets": len(image_sets),
        "scheduler": scheduler.get("name"),
        "sample_seed": sampling.get("seed"),
        "sample_precision": sampling.get("precision"),
        "reference_hash": reference["reference_hash"],
        "eval_seed": reference["eval_seed"],
        "eval_precision": extractor.precision,
    }


def _open_training_latents(
    job: EvaluationJob, protocol: dict[str, Any], record: dict[str, Any], latents: Path | None
) -> Latents:
    """Open the latents that a snapshot was trained on, and check that samples, snapshot and latents belong together.

    Samples of other projects, which contain no identity and step, are accepted, and so are any latents for imported
    weights, whose data are unknown. The caller ensures that the job has a snapshot.

    Raises:
        KairosError: the samples were generated from another snapshot, or the latents are missing, are not the
            snapshot's, or lack a condition of its model.
    """
    assert job.snapshot is not None
    snapshot = (record["identity"], record["step"])
    # fields that samples of other projects lack are taken as equal
    sampled_snapshot = (protocol.get("identity", record["identity"]), protocol.get("step", record["step"]))
    if sampled_snapshot != snapshot:
        raise KairosError(
            f"{job.samples}: generated from another snapshot than {job.snapshot}; generate the samples again"
        )
    folder = latents or job.snapshot / "../../../../../latents"
    training_latents = open_latents(folder)
    for name in ("autoencoder_sha256", "dataset_sha256"):
        if record[name] not in (None, training_latents.record[name]):  # None: imported weights
            raise KairosError(
                f"{folder}: {name} differs from {job.snapshot}; pass the latents that the snapshot was trained on as "
                "--latents DIR"
            )
    check_conditions(training_latents, record["conditions"], folder)
    return training_latents
