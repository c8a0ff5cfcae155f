"""Dependencies of each stage's results: fields of the experiment and the code that computes the results.

Snakemake records them in its ``params:``, and DVC in the file that `kairos ledger fingerprints` writes. Fields that no
stage depends on, such as a batch size or a number of shards that does not change the images, make nothing run again.
"""

from collections.abc import Collection
from typing import Any, NamedTuple

from kairos.analyses.settings import SnapshotOptions
from kairos.autoencoders.settings import AutoencoderConfig
from kairos.config import Experiment
from kairos.evaluation.settings import METRICS, MetricOptions
from kairos.fingerprint import fingerprint
from kairos.section import Section
from kairos.training.identity import code_roots, trajectory_settings

Fields = dict[str, Any]
SHARED_STAGES = ("prepare", "autoencoder", "text", "encode", "extractor", "reference")
TRAINING_STAGES = ("train", "sample", "evaluate")  # stages with jobs for each training run


class Dependencies(NamedTuple):
    """Dependencies of a stage's results.

    Attributes:
        fields: settings of the experiment as plain values, defaults included, by the name of a group.
        modules: modules that compute the results; the modules that they import are included too.
    """

    fields: Fields
    modules: list[str]


def shared_stages(experiment: Experiment) -> tuple[str, ...]:
    """Return the stages of `SHARED_STAGES` that an experiment has: without ``text`` unless it encodes captions."""
    return tuple(stage for stage in SHARED_STAGES if stage != "text" or experiment.text_encoder)


def collect_params(stage: str, experiment: Experiment, method: str | None = None) -> Fields:
    """Return the fields that a stage's results depend on and, under ``code``, the fingerprint of the code.

    A fingerprint is a hash of the modules that compute the results. Arguments and errors are listed in
    `find_dependencies`.
    """
    dependencies = find_dependencies(stage, experiment, method)
    return {**dependencies.fields, "code": fingerprint(dependencies.modules)}


def find_dependencies(stage: str, experiment: Experiment, method: str | None = None) -> Dependencies:
    """Return the fields and modules that a stage's results depend on.

    Args:
        stage: a stage of `SHARED_STAGES` or `TRAINING_STAGES`, ``report`` or ``track``, or ``measure_NAME`` or
            ``analyse_NAME`` of an analysis. Stage ``text`` is possible for every experiment.
        experiment: the resolved experiment.
        method: name of the method, which stage ``train`` needs and other stages ignore.

    Raises:
        KeyError: the experiment has no such analysis or, for stage ``train``, no such method; or the stage is unknown.
    """
    if stage == "train":  # the only stage whose fields and code differ between methods
        return _train_stage(experiment, method=str(method))  # not None here; `str` is for the type checker
    if stage == "report":
        fields = {"experiment": _dump(experiment, leave_out=("tracking", "plugins"))}
        return Dependencies(fields, ["kairos.report.build"])
    if stage == "track":
        return Dependencies({"tracking": _dump(experiment.tracking)}, ["kairos.tracking.track"])
    if stage == "sample":
        return _sample_stage(experiment)
    stages = {**_analysis_stages(experiment), **_data_stages(experiment), **_evaluation_stages(experiment)}
    return stages[stage]


def _train_stage(experiment: Experiment, method: str) -> Dependencies:
    """Return the dependencies of a method's training runs, for any seed.

    The fields ``model``, ``diffusion``, ``method`` and ``training`` contain the settings that change the weights.

    Raises:
        KeyError: the experiment has no such method.
    """
    run = experiment.run_settings(method, seed=0)  # the seed is not a parameter: each seed has a separate job
    fields = {
        "model": run.model.plain(),
        "diffusion": _dump(run.diffusion),
        "method": _dump(run.method),
        "training": trajectory_settings(run.training, run.method),
    }
    return Dependencies(fields, code_roots(run))


def _data_stages(experiment: Experiment) -> dict[str, Dependencies]:
    """Return the dependencies of the stages prepare, autoencoder, text and encode, by stage.

    Each stage has only the fields that change its results with the present kind of autoencoder. Stage text is included
    even if the experiment has no text encoder, whose settings are then empty.
    """
    dataset, autoencoder = experiment.dataset, experiment.autoencoder
    computing = _computing(experiment)
    autoencoder_fields: Fields = {"autoencoder": _autoencoder_settings(autoencoder)}
    encode_fields: Fields = {"flips": dataset.flips, "low_resolution": dataset.low_resolution}
    if autoencoder.kind == "train":
        autoencoder_fields["flips"] = dataset.flips
    if autoencoder.kind != "none":  # in pixel space neither stage computes anything
        autoencoder_fields |= computing
        encode_fields |= {"batch_size": autoencoder.encode_batch_size, **computing}
    if autoencoder.dtype != "float32":  # the default is not listed, so that older latents keep their record
        encode_fields["dtype"] = autoencoder.dtype
    prepare_fields = {"dataset": _dump(dataset, leave_out=("flips", "low_resolution"))}
    text_fields = {"text_encoder": _dump(experiment.text_encoder), **computing}
    return {
        "prepare": Dependencies(prepare_fields, ["kairos.data.prepare", "kairos.data.sources"]),
        "autoencoder": Dependencies(autoencoder_fields, ["kairos.autoencoders.train_or_load"]),
        "text": Dependencies(text_fields, ["kairos.text_encoders.encode_captions"]),
        "encode": Dependencies(encode_fields, ["kairos.autoencoders.encode", "kairos.autoencoders.codec"]),
    }


def _autoencoder_settings(autoencoder: AutoencoderConfig) -> Fields:
    """Return the settings of section `autoencoder` that the results of stage autoencoder depend on.

    A trained autoencoder has all settings but ``path``, ``shards`` and ``dtype``. The other kinds have only the kind
    and, if pretrained, ``path`` and ``scaling``.
    """
    if autoencoder.kind == "none":
        return {"kind": autoencoder.kind}
    if autoencoder.kind == "pretrained":
        return {"kind": autoencoder.kind, "path": autoencoder.path, "scaling": autoencoder.scaling}
    # `path` is of a pretrained autoencoder; stage encode alone uses `shards` and `dtype`
    return _dump(autoencoder, leave_out=("path", "shards", "dtype"))


def _sample_stage(experiment: Experiment) -> Dependencies:
    """Return the dependencies of stage sample, without batch size and number of shards, which do not change the images.

    Field ``num`` is the number of images of all sets, ``sampling`` contains the section's other settings, and
    ``computing`` is the field of `_computing`.
    """
    evaluation, sampling = experiment.evaluation, experiment.sampling
    fields = {
        "sampling": _dump(sampling, leave_out=("batch_size", "shards")),
        "num": evaluation.num_samples * evaluation.sets,
        **_computing(experiment),
    }
    return Dependencies(fields, ["kairos.sampling.sample", sampling.scheduler.module(), *_network_modules(experiment)])


def _evaluation_stages(experiment: Experiment) -> dict[str, Dependencies]:
    """Return the dependencies of the stages extractor, reference and evaluate, by stage.

    Stage evaluate has no fields: the reference, an input of its jobs, depends on them. The modules include the code of
    the listed metrics, or of all metrics if none is listed. Stage reference leaves out metrics that need a network.
    """
    evaluation = experiment.evaluation
    computing = _computing(experiment)
    extractor = evaluation.extractor.module()
    metrics: Collection[MetricOptions | type[MetricOptions]] = evaluation.metrics or METRICS.values()  # default: all
    # the reference consists of real images, which have no network: metrics that need a snapshot do not run on it
    image_metrics = [metric for metric in metrics if "milestone" not in metric.needs]
    extractor_fields = {"extractor": evaluation.extractor.plain(), **computing}
    reference_fields = {"evaluation": _dump(evaluation, leave_out=("extractor", "primary_metric")), **computing}
    evaluate_modules = ["kairos.evaluation.evaluate", *_network_modules(experiment), extractor]
    evaluate_modules += [metric.module() for metric in metrics]
    reference_modules = ["kairos.evaluation.reference", extractor, *(metric.module() for metric in image_metrics)]
    return {
        "extractor": Dependencies(extractor_fields, ["kairos.evaluation.extractors", extractor]),
        "reference": Dependencies(reference_fields, reference_modules),
        "evaluate": Dependencies({}, evaluate_modules),
    }


def _analysis_stages(experiment: Experiment) -> dict[str, Dependencies]:
    """Return the dependencies of stage ``analyse_NAME`` of each analysis, and ``measure_NAME`` if it reads snapshots.

    The options of the analysis are in the field ``options``. Stage ``analyse_NAME`` also has the settings of all
    methods, in ``methods``. Stage ``measure_NAME`` also has ``computing``, and lacks the options that select methods
    and snapshots.
    """
    stages = {}
    for analysis in experiment.analyses:
        code = analysis.module()
        if isinstance(analysis, SnapshotOptions):
            # a measurement is of one snapshot of one method: the selection of methods and snapshots does not change it
            measured_options = _dump(analysis, leave_out=("methods", "milestones"))
            measure_modules = ["kairos.analyses.tables", code, *_network_modules(experiment)]
            measure_fields = {"options": measured_options, **_computing(experiment)}
            stages[f"measure_{analysis.name}"] = Dependencies(measure_fields, measure_modules)
        methods = {name: _dump(method) for name, method in experiment.methods.items()}
        analyse_fields = {"options": analysis.plain(), "methods": methods}
        stages[f"analyse_{analysis.name}"] = Dependencies(analyse_fields, ["kairos.report.analysis_figures", code])
    return stages


def _computing(experiment: Experiment) -> Fields:
    """Return a field ``computing`` with ``threads`` and ``deterministic``, which change the last bits of results."""
    training = experiment.training
    return {"computing": {"threads": training.threads, "deterministic": training.deterministic}}


def _network_modules(experiment: Experiment) -> list[str]:
    """Return the dotted names of the modules of the experiment's network and diffusion process."""
    return [experiment.model.module(), experiment.diffusion.process.module()]


def _dump(section: Section | None, leave_out: Collection[str] = ()) -> Fields:
    """Return a section's fields as values of JSON, except the fields in `leave_out`; empty if `section` is None."""
    if section is None:
        return {}
    return section.model_dump(mode="json", exclude=set(leave_out))
