"""Stage `evaluate`: distances of samples from the real images, and the validation loss, each with its protocol."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kairos import clock, compute
from kairos.errors import ConfigError, KairosError
from kairos.evaluation import metrics
from kairos.evaluation.extractors import Extractor, make, open_extractor
from kairos.evaluation.metrics import Target
from kairos.evaluation.moments import Captioned, in_batches, measure
from kairos.evaluation.pairs import Told
from kairos.evaluation.reference import Reference, open_reference, outside_statistics, reference_hash
from kairos.evaluation.registries import METRICS, UNREAL, default_metrics, needs_of
from kairos.evaluation.settings import LossSettings, check_metrics, named_metrics
from kairos.evaluation.validation import latents_folder
from kairos.files import read_json, write_json
from kairos.options import but_name
from kairos.progress import say
from kairos.sampling.drawn_conditions import check_conditions
from kairos.sampling.sample import settings
from kairos.sampling.samples_file import Samples, open_samples
from kairos.sampling.settings import GUIDANCE
from kairos.section import build

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
        name, extractor = str(extractor), metrics.CACHE / str(extractor)
        make({"name": name}, None, extractor)
    device = _setup(next((job.milestone for job in jobs if job.milestone), None))
    folder = reference if reference.is_dir() else reference.parent
    opened = open_extractor(extractor or folder / "../extractor", device)
    clock.work_begins()
    known = outside_reference(reference, opened, wanted) if outside else open_reference(reference, opened)
    opened = replace(opened, precision=known.record["precision"])
    for job in jobs:
        evaluate(job, known, opened, sets if outside else None, latents, device)


def evaluate(
    job: EvaluationJob, reference: Reference, extractor: Extractor, sets: int | None, latents: Path | None, device: Any
) -> dict[str, Any]:
    """Evaluate one samples file, write its record and return it."""
    samples, target = open_samples(job.samples), reference.target
    images, protocol = samples.images, samples.protocol
    parts, warnings = split(len(images), reference.record["num_samples"], sets, str(job.samples))
    warnings += metrics.check_number(len(parts[0]), extractor.width, str(job.samples))
    scores = []
    for part in parts:
        measured = measure(extractor, in_batches(images, part), target.needs)
        captioned = _captioned(job, samples, part, extractor.device) if "captions" in target.needs else None
        scores.append(target.score(replace(measured, captioned=captioned)))
    if job.milestone is not None and "pairs" in target.needs:
        trained = read_json(job.milestone / "milestone.json")
        told = Told(_trained_on(job, protocol, trained, latents), trained["conditions"], protocol)
        for named in target.metrics:
            if "pairs" in needs_of([named]):
                scores = [score | build(METRICS, named, told.pairs(images, part)) for score, part in zip(scores, parts)]
    found = metrics.summarise(scores)
    record = {
        "step": protocol.get("step"),
        "metrics": found,
        "protocol": _protocol(protocol, reference, extractor, parts),
        "warnings": warnings,
    }
    if job.milestone is not None and "milestone" in target.needs:
        record["validation"] = _validation(job, protocol, reference, latents, device)
    write_json(job.out, record)
    value, spread = found[target.metric], found[f"{target.metric}_spread"] or 0
    say(f"evaluate {job.samples}: {target.metric} {value:.4g} ± {spread:.2g}")
    return record


def _captioned(job: EvaluationJob, samples: Samples, part: range, device: Any) -> Captioned:
    """A set of images with the captions that they were drawn of.

    Raises:
        KairosError: the file has none.
    """
    told = samples.conditions.get("text")
    if told is None or told.dtype.kind != "S":
        raise KairosError(
            f"{job.samples}: holds no captions, which metric clip needs; only a model told of text has them"
        )
    texts = [text.decode("utf-8", "replace") for text in told[part.start : part.stop].tolist()]
    return Captioned(lambda: in_batches(samples.images, part), texts, device)


def split(images: int, num_samples: int | None, sets: int | None, where: str) -> tuple[list[range], list[str]]:
    """Sets of equal size in the order of the images, and the warnings that are said.

    Args:
        images: how many there are.
        num_samples: images per set, as the reference fixes it; None: `sets` sets.
        sets: number of sets where the size is not fixed.
        where: the file, for the error.

    Raises:
        KairosError: fewer images than one set has.
    """
    size = num_samples or images // max(sets or 1, 1)
    count = images // size if size else 0
    if count == 0:
        raise KairosError(f"{where}: got {images} images, allowed: at least {num_samples or sets}, one full set")
    rest = images - count * size
    warnings = metrics.warned(where, f"the last {rest} images fill no set of {size} and are not used") if rest else []
    return [range(k * size, (k + 1) * size) for k in range(count)], warnings


def outside_reference(path: Path, extractor: Extractor, wanted: list[str] | None) -> Reference:
    """A reference made of an npz file of real images or of published moments; its statistics are cached by content.

    Raises:
        KairosError: the file has not what the metrics need, or holds too few images for the extractor.
    """
    kind = extractor.manifest["kind"]
    named = named_metrics(wanted or default_metrics(kind, True))
    check_metrics(named, kind)
    statistics = outside_statistics(path, extractor, needs_of(named) - UNREAL)
    record = {
        "num_samples": None,
        "reference_hash": reference_hash(statistics, extractor),
        "eval_seed": 0,
        "precision": "fp32",
        "validation": {"images": 256, "strata": 32, "seed": 0},
    }
    return Reference(record, Target(extractor.manifest["metric"], statistics, tuple(named)))


def _setup(milestone: Path | None) -> Any:
    """Threads and device as the milestone's training states them; one thread for images from outside."""
    if milestone is None:
        return compute.setup(1, "auto")
    training = settings(milestone, {})[1]["training"]
    return compute.setup(training["threads"], training["device"], training["deterministic"])


def _protocol(
    sampled: dict[str, Any], reference: Reference, extractor: Extractor, parts: list[range]
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
        "reference_hash": reference.record["reference_hash"],
        "eval_seed": reference.record["eval_seed"],
        "eval_precision": extractor.precision,
    }


def _validation(
    job: EvaluationJob, protocol: dict[str, Any], reference: Reference, latents: Path | None, device: Any
) -> dict[str, Any]:
    """The validation losses of the weights that were sampled, or of the EMA where that is unknown.

    Raises:
        KairosError: the samples were drawn from another milestone, or the latents are not those it was trained on.
    """
    from kairos.milestones import open_milestone

    assert job.milestone is not None
    milestone = open_milestone(job.milestone, protocol.get("weights") or "ema", device)
    opened = _trained_on(job, protocol, milestone.record, latents)
    loss = LossSettings(**reference.record["validation"], precision=reference.record["precision"])
    record: dict[str, Any] = {}
    for named in reference.target.metrics:
        if "milestone" in needs_of([named]):
            record |= METRICS.entry(named["name"]).load()(milestone, opened, loss, device)
    return record


def _trained_on(job: EvaluationJob, protocol: dict[str, Any], record: dict[str, Any], latents: Path | None) -> Any:
    """The latents that a milestone with this record was trained on.

    Raises:
        KairosError: the samples were drawn from another milestone, or the latents are others.
    """
    from kairos.data.latents import open_latents

    assert job.milestone is not None
    drawn = (protocol.get("identity", record["identity"]), protocol.get("step", record["step"]))
    if drawn != (record["identity"], record["step"]):
        raise KairosError(f"{job.samples}: drawn from another milestone than {job.milestone}; draw the samples again")
    folder = latents or latents_folder(job.milestone)
    opened = open_latents(folder)
    for name in ("autoencoder_sha256", "dataset_sha256"):
        if record[name] not in (None, opened.manifest[name]):  # None: of imported weights it is not known
            raise KairosError(
                f"{folder}: {name} is not that of {job.milestone}; pass the latents it was trained on as --latents DIR"
            )
    check_conditions(opened, record["conditions"], folder)
    return opened
