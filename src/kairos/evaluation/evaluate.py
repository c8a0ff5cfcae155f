"""Stage `evaluate`: distances of samples from the real images, and the validation loss, each with its protocol."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kairos import compute, resource_usage
from kairos.data.latents import Latents, open_latents
from kairos.evaluation import metrics
from kairos.evaluation.extractors import Extractor, build_extractor, open_extractor
from kairos.evaluation.moments import iterate_rows, measure
from kairos.evaluation.reference import Reference, open_external_reference, open_reference
from kairos.evaluation.registries import METRICS, needs_of
from kairos.evaluation.settings import LossSettings
from kairos.files import atomic_folder, check_files, open_record, read_json, write_json
from kairos.progress import say
from kairos.sampling.conditions import check_conditions, select_condition_sources
from kairos.sampling.sample import load_settings, set_up_device
from kairos.sampling.samples_file import SamplesFile, open_samples
from kairos.sampling.settings import GUIDANCE
from kairos_timesteps.errors import ConfigError, KairosError
from kairos_timesteps.options import but_name

PUBLISHED = ("inception", "dinov2")  # extractors that no data set is needed for


@dataclass(frozen=True)
class EvaluationJob:
    """Samples to evaluate.

    Args:
        samples: npz file.
        out: the JSON record that is written.
        milestone: folder, for the validation loss; None: distances alone.
    """

    samples: Path
    out: Path
    milestone: Path | None = None


def run(
    jobs: list[EvaluationJob],
    reference: Path,
    extractor: Path | None = None,
    latents: Path | None = None,
    sets: int = 1,
    wanted: list[str] | None = None,
) -> None:
    """Evaluate every job.

    Args:
        jobs: what is evaluated.
        reference: folder or reference.json of stage reference, or an npz file of real images.
        extractor: its folder, ``inception`` or ``dinov2``; None: ``../extractor``, seen from the reference's folder, or
            with an npz reference the one that the metrics are defined for.
        latents: folder for the validation loss; None: ``../../../../latents``, seen from the milestone.
        sets: with an npz reference: sets that the samples are split into.
        wanted: with an npz reference: names of metrics; None: those usual for the extractor.

    Raises:
        KairosError: a file is missing, damaged, or does not belong to the others.
    """
    outside = reference.suffix == ".npz"
    if wanted and not outside:
        raise ConfigError(f"--metrics: got {','.join(wanted)}, allowed with an npz reference; {reference} has its own")
    if outside and extractor is None:
        needed = {METRICS.entry(name).facts.get("extractor", "") for name in wanted or ()} - {""}
        if len(needed) != 1:
            raise ConfigError(
                "--extractor: got none, allowed where --reference is an npz: a folder, inception or dinov2; or metrics "
                "that are defined for one of them, such as --metrics fid"
            )
        extractor = Path(needed.pop())
    if str(extractor) in PUBLISHED and not Path(str(extractor)).exists():
        extractor = cache_published_extractor(str(extractor))
    milestone = next((job.milestone for job in jobs if job.milestone), None)
    device = compute.setup(1, "auto") if milestone is None else set_up_device(load_settings(milestone, {})[1])
    folder = reference if reference.is_dir() else reference.parent
    opened = open_extractor(extractor or folder / "../extractor", device)
    resource_usage.end_startup()
    known = open_external_reference(reference, opened, wanted) if outside else open_reference(reference, opened)
    opened = replace(opened, precision=known[0]["precision"])
    files: dict[str, list[str]] = {}  # by the warning about their numbers of images
    for job in jobs:
        for warning in evaluate(job, known, opened, sets, latents):
            files.setdefault(warning, []).append(str(job.samples))
    printed = known[0].get("warnings", [])  # by stage reference, each with what it is about
    for warning, (first, *others) in files.items():
        if not any(line == warning or line.endswith(f": {warning}") for line in printed):
            more = f" (and {len(others)} other file{'s' * (len(others) > 1)})" if others else ""
            metrics.warn(first + more, warning)


def cache_published_extractor(name: str) -> Path:
    """Return the folder of a published extractor in the cache.

    Evaluations that run at the same time read the folder, so it is made only where it is missing or damaged, and then
    replaced as a whole.
    """
    folder = metrics.CACHE / name
    try:
        manifest = open_record(folder, "evaluate")
        check_files(folder, manifest["files"], "run the evaluation again")
    except KairosError:
        with atomic_folder(folder) as new_folder:
            build_extractor({"name": name}, None, new_folder)
    return folder


def evaluate(
    job: EvaluationJob, reference: Reference, extractor: Extractor, sets: int, latents: Path | None
) -> list[str]:
    """Evaluate one samples file, write its record, and return the warnings about its number of images."""
    samples, (fixed, target) = open_samples(job.samples), reference
    protocol, needs, where = samples.protocol, target.needs, str(job.samples)
    parts, warnings = split_into_sets(len(samples.images), fixed["num_samples"], sets, where)
    few_images = metrics.check_image_count(len(parts[0]), extractor.width, where)
    trained_on = None
    if job.milestone is not None and needs & {"pairs", "milestone"}:
        milestone = read_json(job.milestone / "milestone.json")
        trained_on = _open_training_latents(job, protocol, milestone, latents)
    scores = []
    for part in parts:
        measured = measure(extractor, iterate_rows(samples.images, part), needs)
        if "captions" in needs:
            measured = replace(measured, captioned=_pair_with_captions(where, samples, part))
        if "pairs" in needs and trained_on is not None:
            measured = replace(
                measured, pairs=pair_with_real_images(samples, part, trained_on, milestone["conditions"])
            )
        scores.append(target.score(measured))
    found = metrics.summarise(scores)
    record = {
        "step": protocol.get("step"),
        "metrics": found,
        "protocol": _protocol(protocol, fixed, extractor, parts),
        "warnings": warnings + few_images,
    }
    if "milestone" in needs and trained_on is not None and job.milestone is not None:
        from kairos.milestones import open_milestone

        # the weights that were sampled, or the average where that is unknown
        opened = open_milestone(job.milestone, protocol.get("weights") or "ema", extractor.device)
        loss, record["validation"] = LossSettings(**fixed["validation"], precision=extractor.precision), {}
        for named in target.metrics:
            if "milestone" in needs_of([named]):
                code = METRICS.entry(named["name"]).load()
                record["validation"] |= code(opened, trained_on, loss, extractor.device)
    write_json(job.out, record)
    say(f"evaluate {where}: {metrics.format_metric(found, target.metric)}")
    return few_images


def _pair_with_captions(where: str, samples: SamplesFile, part: range) -> Iterable[tuple[np.ndarray, list[str]]]:
    """A set of images with the captions that they were drawn of, in batches.

    Raises:
        KairosError: the file has none.
    """
    told = samples.conditions.get("text")
    if told is None or told.dtype.kind != "S":
        raise KairosError(f"{where}: holds no captions, which metric clip needs; only a model told of text has them")
    texts = ([text.decode("utf-8", "replace") for text in batch.tolist()] for batch in iterate_rows(told, part))
    return zip(iterate_rows(samples.images, part), texts)


def pair_with_real_images(
    samples: SamplesFile, part: range, latents: Latents, conditions: dict[str, dict[str, Any]]
) -> Iterable[tuple[np.ndarray, np.ndarray]]:
    """A set of images with the real images that their conditions come from, batches of uint8 (n, h, w, channels).

    Args:
        samples: all images, and how their conditions were chosen.
        part: numbers of the set's images.
        latents: what the model was trained on.
        conditions: descriptions of those that it takes.

    Raises:
        KairosError: the samples do not say how their conditions were chosen.
    """
    protocol = samples.protocol
    if "labels" not in protocol:
        raise KairosError("evaluation.metrics: psnr needs samples whose file says what they show: kairos sample's")
    origin = select_condition_sources(latents, part, conditions, protocol["labels"], protocol["seed"])
    return zip(iterate_rows(samples.images, part), iterate_rows(latents.dataset.images, origin))


def split_into_sets(images: int, num_samples: int | None, sets: int, where: str) -> tuple[list[range], list[str]]:
    """Sets of equal size in the order of the images, and the warnings that are said.

    Args:
        images: how many there are.
        num_samples: images per set, as the reference fixes it; None: `sets` sets.
        sets: number of sets where the size is not fixed.
        where: the file, for the error.

    Raises:
        KairosError: fewer images than one set has.
    """
    size = num_samples or images // sets
    count = images // size if size else 0
    if count == 0:
        raise KairosError(f"{where}: got {images} images, allowed: at least {num_samples or sets}, one full set")
    rest = images - count * size
    warnings = [f"the last {rest} images fill no set of {size} and are not used"] if rest else []
    for warning in warnings:
        metrics.warn(where, warning)
    return [range(k * size, (k + 1) * size) for k in range(count)], warnings


def _protocol(
    sampled: dict[str, Any], fixed: dict[str, Any], extractor: Extractor, parts: list[range]
) -> dict[str, Any]:
    """How the numbers came about; what images from outside do not say is null."""
    scheduler = sampled.get("scheduler") or {}
    return {
        **{name: sampled.get(name) for name in ("steps", "nfe", *GUIDANCE, "weights", "identity")},
        **dict.fromkeys(("spacing", "clip", "eta", "variance")),
        **but_name(scheduler),
        "extractor": extractor.name,
        "extractor_hash": extractor.hash,
        "accuracy": extractor.manifest["accuracy"],
        "n_samples": len(parts[0]),
        "sets": len(parts),
        "scheduler": scheduler.get("name"),
        "sample_seed": sampled.get("seed"),
        "sample_precision": sampled.get("precision"),
        "reference_hash": fixed["reference_hash"],
        "eval_seed": fixed["eval_seed"],
        "eval_precision": extractor.precision,
    }


def _open_training_latents(
    job: EvaluationJob, protocol: dict[str, Any], record: dict[str, Any], latents: Path | None
) -> Latents:
    """The latents that a milestone with this record was trained on.

    Raises:
        KairosError: the samples were drawn from another milestone, or the latents are others.
    """
    assert job.milestone is not None
    drawn = (protocol.get("identity", record["identity"]), protocol.get("step", record["step"]))
    if drawn != (record["identity"], record["step"]):
        raise KairosError(f"{job.samples}: drawn from another milestone than {job.milestone}; draw the samples again")
    folder = latents or job.milestone / "../../../../latents"
    opened = open_latents(folder)
    for name in ("autoencoder_sha256", "dataset_sha256"):
        if record[name] not in (None, opened.manifest[name]):  # None: of imported weights it is not known
            raise KairosError(
                f"{folder}: {name} is not that of {job.milestone}; pass the latents it was trained on as --latents DIR"
            )
    check_conditions(opened, record["conditions"], folder)
    return opened
