"""What each stage's results depend on: fields of the experiment and the code that computes them.

Both ledgers use this: Snakemake in its ``params:``, DVC through the file that `kairos ledger fingerprints` writes. A
field that is not named here, such as a batch size that does not change the images, makes nothing run again.
"""

from typing import Any

from kairos.diffusion.registries import PROCESSES
from kairos.evaluation.registries import EXTRACTORS, METRICS
from kairos.fingerprint import fingerprint
from kairos.models.registries import MODELS
from kairos.sampling.registries import SCHEDULERS
from kairos.training.identity import code_roots, trajectory_settings

Plain = dict[str, Any]
SHARED = ("prepare", "autoencoder", "encode", "extractor", "reference")
PER_TRAINING = ("train", "sample", "evaluate")
AFTER = ("report", "track")


def of(stage: str, plain: Plain, method: str | None = None) -> Plain:
    """All that a stage's results depend on: its `settings`, and ``code``."""
    return {**settings(stage, plain, method), "code": code(stage, plain, method)}


def settings(stage: str, plain: Plain, method: str | None = None) -> Plain:
    """The fields that a stage's results depend on, defaults included, by a name for each group.

    Args:
        stage: name of the stage.
        plain: the whole resolved experiment.
        method: for the stages of a training, which one.
    """
    dataset, autoencoder, evaluation = plain["dataset"], plain["autoencoder"], plain["evaluation"]
    computing = _only(plain["training"], "threads", "deterministic")
    kind = autoencoder["kind"]
    match stage:
        case "prepare":
            return {"dataset": _without(dataset, "flips")}
        case "autoencoder" if kind == "none":
            return {"autoencoder": {"kind": kind}}
        case "autoencoder" if kind == "pretrained":
            return {"autoencoder": _only(autoencoder, "kind", "path"), "computing": computing}
        case "autoencoder":
            return {"autoencoder": _without(autoencoder, "path"), "flips": dataset["flips"], "computing": computing}
        case "encode" if kind == "none":
            return {"flips": dataset["flips"]}
        case "encode":
            batch_size = autoencoder["encode_batch_size"]
            return {"flips": dataset["flips"], "batch_size": batch_size, "computing": computing}
        case "train":
            return {
                "model": plain["model"],
                "diffusion": plain["diffusion"],
                "method": plain["methods"][method],
                "training": trajectory_settings(plain["training"]),
            }
        case "sample":
            num = evaluation["num_samples"] * evaluation["sets"]
            return {"sampling": _without(plain["sampling"], "batch_size"), "num": num, "computing": computing}
        case "extractor":
            return {"extractor": evaluation["extractor"], "computing": computing}
        case "reference":
            return {"evaluation": _without(evaluation, "extractor"), "computing": computing}
        case "evaluate":  # what the reference was made with
            return {}
        case "report":
            return {"experiment": _without(plain, "tracking")}
        case "track":
            return {"tracking": plain["tracking"]}
    raise ValueError(f"no stage {stage!r}")


def code(stage: str, plain: Plain, method: str | None = None) -> str:
    """Fingerprint of the code that computes a stage's results."""
    return fingerprint(_roots(stage, plain, method))


def _roots(stage: str, plain: Plain, method: str | None) -> list[str]:
    model = MODELS.entry(plain["model"]["name"]).module
    process = PROCESSES.entry(plain["diffusion"]["process"]["name"]).module
    extractor = EXTRACTORS.entry(plain["evaluation"]["extractor"]["name"]).module
    metrics = [entry.module for entry in METRICS.values()]
    match stage:
        case "prepare":
            return ["kairos.data.prepare", "kairos.data.sources"]
        case "autoencoder":
            return ["kairos.autoencoders.stage"]
        case "encode":
            return ["kairos.autoencoders.encode", "kairos.autoencoders.codec"]
        case "train":
            assert method is not None
            return code_roots(plain, method)
        case "sample":
            scheduler = SCHEDULERS.entry(plain["sampling"]["scheduler"]["name"]).module
            return ["kairos.sampling.sample", scheduler, model, process]
        case "extractor":
            return ["kairos.evaluation.extractors", extractor]
        case "reference":
            return ["kairos.evaluation.reference", extractor, *metrics]
        case "evaluate":
            return ["kairos.evaluation.evaluate", model, process, extractor, *metrics]
        case "report":
            return ["kairos.report.build"]
        case "track":
            return ["kairos.tracking.track"]
    raise ValueError(f"no stage {stage!r}")


def _only(values: Plain, *names: str) -> Plain:
    return {name: values[name] for name in names}


def _without(values: Plain, *names: str) -> Plain:
    return {name: value for name, value in values.items() if name not in names}
