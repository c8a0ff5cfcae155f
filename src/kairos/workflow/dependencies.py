"""Dependencies of each stage's results: fields of the experiment and the code that computes the results.

Snakemake records them in its ``params:``, and DVC in the file that `kairos ledger fingerprints` writes. Fields that no
stage depends on, such as a batch size or a number of shards that does not change the images, make nothing run again.
"""

from typing import Any, NamedTuple

from kairos.analyses.registries import ANALYSES
from kairos.evaluation.registries import EXTRACTORS, METRICS, needs_of
from kairos.fingerprint import fingerprint
from kairos.models.registries import MODELS
from kairos.sampling.registries import SCHEDULERS
from kairos.training.identity import code_roots, trajectory_settings
from kairos_timesteps.diffusion.registries import PROCESSES

Plain = dict[str, Any]
SHARED_STAGES = ("prepare", "autoencoder", "text", "encode", "extractor", "reference")
TRAINING_STAGES = ("train", "sample", "evaluate")  # stages with jobs for each training run


class Dependencies(NamedTuple):
    """Dependencies of a stage's results.

    Attributes:
        fields: settings of the experiment, defaults included, by the name of a group.
        modules: modules that compute the results; the modules that they import count too.
    """

    fields: Plain
    modules: list[str]


def shared_stages(plain: Plain) -> tuple[str, ...]:
    """Return the stages that all training runs of an experiment share; ``text`` only if captions are encoded."""
    return tuple(stage for stage in SHARED_STAGES if stage != "text" or plain["text_encoder"])


def collect_params(stage: str, plain: Plain, method: str | None = None) -> Plain:
    """Return the fields that a stage's results depend on and, under ``code``, the fingerprint of the code.

    Args:
        stage: name of the stage.
        plain: the whole resolved experiment.
        method: name of the method, for a stage of `TRAINING_STAGES`.
    """
    dependencies = find_dependencies(stage, plain, method)
    return {**dependencies.fields, "code": fingerprint(dependencies.modules)}


def find_dependencies(stage: str, plain: Plain, method: str | None = None) -> Dependencies:
    """Return the fields and modules that a stage's results depend on.

    Args:
        stage: name of the stage.
        plain: the whole resolved experiment.
        method: name of the method, for a stage of `TRAINING_STAGES`.
    """
    if stage == "train":  # the only stage whose fields and code differ between methods
        return _train_stage(plain, str(method))
    stages = {
        **_analysis_stages(plain),
        **_data_stages(plain),
        **_evaluation_stages(plain),
        "sample": _sample_stage(plain),
        "report": Dependencies({"experiment": _without(plain, "tracking", "plugins")}, ["kairos.report.build"]),
        "track": Dependencies(_only(plain, "tracking"), ["kairos.tracking.track"]),
    }
    return stages[stage]


def _train_stage(plain: Plain, method: str) -> Dependencies:
    """Return the dependencies of a method's training runs."""
    fields = _only(plain, "model", "diffusion")
    fields |= {"method": plain["methods"][method], "training": trajectory_settings(plain, method)}
    return Dependencies(fields, code_roots(plain, method))


def _data_stages(plain: Plain) -> dict[str, Dependencies]:
    """Return the dependencies of the stages that prepare and encode images and captions."""
    dataset, autoencoder, computing = plain["dataset"], plain["autoencoder"], _computing(plain)
    autoencoder_fields = {"autoencoder": _autoencoder_settings(autoencoder)}
    encode_fields = _only(dataset, "flips", "low_resolution")
    if autoencoder["kind"] == "train":
        autoencoder_fields |= _only(dataset, "flips")
    if autoencoder["kind"] != "none":  # in pixel space neither stage computes anything
        autoencoder_fields |= computing
        encode_fields |= {"batch_size": autoencoder["encode_batch_size"], **computing}
    if "dtype" in autoencoder:  # the default is not listed, so that older latents keep their record
        encode_fields |= _only(autoencoder, "dtype")
    prepare_fields = {"dataset": _without(dataset, "flips", "low_resolution")}
    text_fields = {**_only(plain, "text_encoder"), **computing}
    return {
        "prepare": Dependencies(prepare_fields, ["kairos.data.prepare", "kairos.data.sources"]),
        "autoencoder": Dependencies(autoencoder_fields, ["kairos.autoencoders.train_or_load"]),
        "text": Dependencies(text_fields, ["kairos.text_encoders.encode_captions"]),
        "encode": Dependencies(encode_fields, ["kairos.autoencoders.encode", "kairos.autoencoders.codec"]),
    }


def _autoencoder_settings(autoencoder: Plain) -> Plain:
    """Return the settings of section `autoencoder` that its kind uses and that change its weights."""
    if autoencoder["kind"] == "none":
        return _only(autoencoder, "kind")
    if autoencoder["kind"] == "pretrained":
        return _only(autoencoder, "kind", "path", "scaling")
    return _without(autoencoder, "path", "shards", "dtype")


def _sample_stage(plain: Plain) -> Dependencies:
    """Return the dependencies of sampling; batch size and number of shards do not change the images."""
    evaluation, sampling = plain["evaluation"], plain["sampling"]
    fields = {"sampling": _without(sampling, "batch_size", "shards")}
    fields |= {"num": evaluation["num_samples"] * evaluation["sets"], **_computing(plain)}
    solver = SCHEDULERS.entry(sampling["scheduler"]["name"]).module
    return Dependencies(fields, ["kairos.sampling.sample", solver, *_network_modules(plain)])


def _evaluation_stages(plain: Plain) -> dict[str, Dependencies]:
    """Return the dependencies of the stages that compare samples with the reference."""
    evaluation, computing = plain["evaluation"], _computing(plain)
    extractor = EXTRACTORS.entry(evaluation["extractor"]["name"]).module
    metric_names = [metric["name"] for metric in evaluation["metrics"] or []] or list(METRICS)  # default: all metrics
    metric_modules = {name: METRICS.entry(name).module for name in metric_names}
    # the reference is real images, which have no network: metrics that need one do not run on it
    image_metric_modules = [
        module for name, module in metric_modules.items() if "milestone" not in needs_of([{"name": name}])
    ]
    extractor_fields = {**_only(evaluation, "extractor"), **computing}
    reference_fields = {"evaluation": _without(evaluation, "extractor", "primary_metric"), **computing}
    evaluate_modules = ["kairos.evaluation.evaluate", *_network_modules(plain), extractor, *metric_modules.values()]
    return {
        "extractor": Dependencies(extractor_fields, ["kairos.evaluation.extractors", extractor]),
        "reference": Dependencies(reference_fields, ["kairos.evaluation.reference", extractor, *image_metric_modules]),
        "evaluate": Dependencies({}, evaluate_modules),  # the reference, an input, follows from its fields
    }


def _analysis_stages(plain: Plain) -> dict[str, Dependencies]:
    """Return the dependencies of the stages ``measure_NAME`` and ``analyse_NAME`` of each analysis."""
    stages = {}
    for settings in plain.get("analyses", []):
        name, code = settings["name"], ANALYSES.entry(settings["name"]).module
        # a measurement is of one snapshot of one method: the selection of methods and snapshots does not change it
        measure_fields = {"asked": _without(settings, "methods", "milestones"), **_computing(plain)}
        measure_modules = ["kairos.analyses.tables", code, *_network_modules(plain)]
        analyse_fields = {"asked": settings, **_only(plain, "methods")}
        stages[f"measure_{name}"] = Dependencies(measure_fields, measure_modules)
        stages[f"analyse_{name}"] = Dependencies(analyse_fields, ["kairos.report.analysis_figures", code])
    return stages


def _computing(plain: Plain) -> Plain:
    """Return the settings that change the last bits of every computed result."""
    return {"computing": _only(plain["training"], "threads", "deterministic")}


def _network_modules(plain: Plain) -> list[str]:
    """Return the modules of the network and of the diffusion process."""
    model, process = plain["model"]["name"], plain["diffusion"]["process"]["name"]
    return [MODELS.entry(model).module, PROCESSES.entry(process).module]


def _only(values: Plain, *names: str) -> Plain:
    """Return the entries with some names."""
    return {name: values[name] for name in names}


def _without(values: Plain, *names: str) -> Plain:
    """Return the entries except those with some names."""
    return {name: value for name, value in values.items() if name not in names}
