"""What each stage's results depend on: fields of the experiment and the code that computes them.

Both ledgers use this: Snakemake in its ``params:``, DVC through the file that `kairos ledger fingerprints` writes. A
field that is not named here, such as a batch size or a number of shards that does not change the images, makes nothing
run again.
"""

from typing import Any

from kairos.diffusion.registries import PROCESSES
from kairos.evaluation.registries import EXTRACTORS, METRICS, needs_of
from kairos.fingerprint import fingerprint
from kairos.models.registries import MODELS
from kairos.sampling.registries import SCHEDULERS
from kairos.training.identity import code_roots, trajectory_settings

Plain = dict[str, Any]
SHARED = ("prepare", "autoencoder", "text", "encode", "extractor", "reference")
PER_TRAINING = ("train", "sample", "evaluate")


def shared(plain: Plain) -> tuple[str, ...]:
    """The stages that all trainings share: captions are encoded for a model that is told of them."""
    return tuple(stage for stage in SHARED if stage != "text" or plain["text_encoder"])


def of(stage: str, plain: Plain, method: str | None = None) -> Plain:
    """All that a stage's results depend on: its `settings`, and ``code``, the fingerprint of what computes them."""
    return {**settings(stage, plain, method), "code": fingerprint(_roots(stage, plain, method))}


def settings(stage: str, plain: Plain, method: str | None = None) -> Plain:
    """The fields that a stage's results depend on, defaults included, by a name for each group.

    Args:
        stage: name of the stage.
        plain: the whole resolved experiment.
        method: for the stages of a training, which one.
    """
    dataset, autoencoder, evaluation = plain["dataset"], plain["autoencoder"], plain["evaluation"]
    computing, kind = _only(plain["training"], "threads", "deterministic"), autoencoder["kind"]
    if stage == "train":
        return {
            "model": plain["model"],
            "diffusion": plain["diffusion"],
            "method": plain["methods"][method],
            "training": trajectory_settings(plain["training"]),
        }
    flips, computed = _only(dataset, "flips"), {} if kind == "none" else {"computing": computing}
    own = {"none": ("kind",), "pretrained": ("kind", "path", "scaling")}.get(kind)
    made = _only(autoencoder, *own) if own else _without(autoencoder, "path", "shards")
    batch = {"batch_size": autoencoder["encode_batch_size"]} if computed else {}
    images = {"num": evaluation["num_samples"] * evaluation["sets"], "computing": computing}
    return {
        "prepare": {"dataset": _without(dataset, "flips", "low_resolution")},
        "autoencoder": {"autoencoder": made, **(flips if kind == "train" else {}), **computed},
        "text": {"text_encoder": plain["text_encoder"], "computing": computing},
        "encode": {**_only(dataset, "flips", "low_resolution"), **batch, **computed},
        "sample": {"sampling": _without(plain["sampling"], "batch_size", "shards"), **images},
        "extractor": {"extractor": evaluation["extractor"], "computing": computing},
        "reference": {"evaluation": _without(evaluation, "extractor"), "computing": computing},
        "evaluate": {},  # what the reference was made with
        "report": {"experiment": _without(plain, "tracking")},
        "track": {"tracking": plain["tracking"]},
    }[stage]


def _roots(stage: str, plain: Plain, method: str | None) -> list[str]:
    """The modules that compute a stage's results."""
    if stage == "train":
        assert method is not None
        return code_roots(plain, method)
    model = MODELS.entry(plain["model"]["name"]).module
    process = PROCESSES.entry(plain["diffusion"]["process"]["name"]).module
    extractor = EXTRACTORS.entry(plain["evaluation"]["extractor"]["name"]).module
    named = [metric["name"] for metric in plain["evaluation"]["metrics"] or []] or list(METRICS)
    metrics = [METRICS.entry(name).module for name in named]
    of_images = [METRICS.entry(name).module for name in named if "milestone" not in needs_of([{"name": name}])]
    scheduler = SCHEDULERS.entry(plain["sampling"]["scheduler"]["name"]).module
    return {
        "prepare": ["kairos.data.prepare", "kairos.data.sources"],
        "autoencoder": ["kairos.autoencoders.stage"],
        "text": ["kairos.text.stage"],
        "encode": ["kairos.autoencoders.encode", "kairos.autoencoders.codec"],
        "sample": ["kairos.sampling.sample", scheduler, model, process],
        "extractor": ["kairos.evaluation.extractors", extractor],
        "reference": ["kairos.evaluation.reference", extractor, *of_images],
        "evaluate": ["kairos.evaluation.evaluate", model, process, extractor, *metrics],
        "report": ["kairos.report.build"],
        "track": ["kairos.tracking.track"],
    }[stage]


def _only(values: Plain, *names: str) -> Plain:
    return {name: values[name] for name in names}


def _without(values: Plain, *names: str) -> Plain:
    return {name: value for name, value in values.items() if name not in names}
