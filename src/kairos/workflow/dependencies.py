"""Dependencies of each stage's results: fields of the experiment and the code that computes them.

Both ledgers use this: Snakemake in its ``params:``, DVC through the file that `kairos ledger fingerprints` writes. A
field that is not listed here, such as a batch size or a number of shards that does not change the images, makes nothing
run again.
"""

from typing import Any

from kairos.analyses.registries import ANALYSES
from kairos.evaluation.registries import EXTRACTORS, METRICS, needs_of
from kairos.fingerprint import fingerprint
from kairos.models.registries import MODELS
from kairos.sampling.registries import SCHEDULERS
from kairos.training.identity import code_roots, trajectory_settings
from kairos_timesteps.diffusion.registries import PROCESSES

Plain = dict[str, Any]
SHARED = ("prepare", "autoencoder", "text", "encode", "extractor", "reference")
PER_TRAINING = ("train", "sample", "evaluate")


def shared(plain: Plain) -> tuple[str, ...]:
    """The stages that all trainings share: captions are encoded for a model that is told of them."""
    return tuple(stage for stage in SHARED if stage != "text" or plain["text_encoder"])


def of(stage: str, plain: Plain, method: str | None = None) -> Plain:
    """All that a stage's results depend on: fields, defaults included, by a name for each group, and their ``code``.

    Args:
        stage: name of the stage.
        plain: the whole resolved experiment.
        method: for the stages of a training, which one.
    """
    fields, roots = parts(stage, plain, method)
    return {**fields, "code": fingerprint(roots)}


def parts(stage: str, plain: Plain, method: str | None = None) -> tuple[Plain, list[str]]:
    """Return the fields that decide a stage's results, and the roots of its code; arguments as for `of`."""
    return _training(plain, str(method)) if stage == "train" else _others(plain)[stage]


def _training(plain: Plain, method: str) -> tuple[Plain, list[str]]:
    own = {"method": plain["methods"][method], "training": trajectory_settings(plain, method)}
    return {**_only(plain, "model", "diffusion"), **own}, code_roots(plain, method)


def _others(plain: Plain) -> dict[str, tuple[Plain, list[str]]]:
    """Return for each stage other than train the fields, and the modules that compute its results."""
    dataset, autoencoder, evaluation = plain["dataset"], plain["autoencoder"], plain["evaluation"]
    computing = {"computing": _only(plain["training"], "threads", "deterministic")}
    kind, flips = autoencoder["kind"], _only(dataset, "flips")
    computed = {} if kind == "none" else computing
    own = {"none": ("kind",), "pretrained": ("kind", "path", "scaling")}.get(kind)
    made = {"autoencoder": _only(autoencoder, *own) if own else _without(autoencoder, "path", "shards")}
    batch = {"batch_size": autoencoder["encode_batch_size"]} if computed else {}
    samples = {"num": evaluation["num_samples"] * evaluation["sets"]}
    images = {"dataset": _without(dataset, "flips", "low_resolution")}
    encoded = {**_only(dataset, "flips", "low_resolution"), **batch, **computed}
    drawn = {"sampling": _without(plain["sampling"], "batch_size", "shards"), **samples, **computing}
    compared = {"evaluation": _without(evaluation, "extractor", "primary_metric"), **computing}

    model = MODELS.entry(plain["model"]["name"]).module
    process = PROCESSES.entry(plain["diffusion"]["process"]["name"]).module
    extractor = EXTRACTORS.entry(evaluation["extractor"]["name"]).module
    scheduler = SCHEDULERS.entry(plain["sampling"]["scheduler"]["name"]).module
    named = [metric["name"] for metric in evaluation["metrics"] or []] or list(METRICS)
    metrics = {name: METRICS.entry(name).module for name in named}
    of_images = [metrics[name] for name in named if "milestone" not in needs_of([{"name": name}])]
    analyses = {}
    for asked in plain.get("analyses", []):
        name, code = asked["name"], ANALYSES.entry(asked["name"]).module
        chosen = {"asked": _without(asked, "methods", "milestones"), **computing}  # which ones changes no table of one
        analyses[f"measure_{name}"] = chosen, ["kairos.analyses.tables", code, model, process]
        analyses[f"analyse_{name}"] = (
            {"asked": asked, **_only(plain, "methods")},
            ["kairos.report.analysis_figures", code],
        )
    return {
        **analyses,
        "prepare": (images, ["kairos.data.prepare", "kairos.data.sources"]),
        "autoencoder": (
            {**made, **(flips if kind == "train" else {}), **computed},
            ["kairos.autoencoders.train_or_load"],
        ),
        "text": ({**_only(plain, "text_encoder"), **computing}, ["kairos.text_encoders.encode_captions"]),
        "encode": (encoded, ["kairos.autoencoders.encode", "kairos.autoencoders.codec"]),
        "sample": (drawn, ["kairos.sampling.sample", scheduler, model, process]),
        "extractor": ({**_only(evaluation, "extractor"), **computing}, ["kairos.evaluation.extractors", extractor]),
        "reference": (compared, ["kairos.evaluation.reference", extractor, *of_images]),
        # its fields are those that the reference was made with
        "evaluate": ({}, ["kairos.evaluation.evaluate", model, process, extractor, *metrics.values()]),
        "report": ({"experiment": _without(plain, "tracking", "plugins")}, ["kairos.report.build"]),
        "track": (_only(plain, "tracking"), ["kairos.tracking.track"]),
    }


def _only(values: Plain, *names: str) -> Plain:
    return {name: values[name] for name in names}


def _without(values: Plain, *names: str) -> Plain:
    return {name: value for name, value in values.items() if name not in names}
