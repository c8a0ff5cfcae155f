"""Table of stages: the fields, the code and the earlier stages that decide the results of each stage.

`select_fields` returns the fields, and `hash_stage_code` hashes the code. The inputs in ``workflow/rules`` list the
files of earlier stages.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kairos.code_hash import hash_code
from kairos.library_components import LibraryComponent

if TYPE_CHECKING:
    from kairos.components import ComponentOptions
    from kairos_timesteps.registry import Registry

Sections = Mapping[str, Any]  # sections of an experiment by name, see `list_sections`
Fields = dict[str, Any]  # fields of an experiment as JSON values


@dataclass(frozen=True)
class Stage:
    """A stage: a row of the table.

    Attributes:
        name: name of the stage, of its rule and of its command.
        needs: stages whose results it reads; the inputs of its rule list their files.
        fields: sections and fields of the experiment that its results depend on. ``method`` stands for sampler,
            weighting and coupling of a method, ``analysis`` for the options of an analysis.
        no_effect: parts of these fields that change no result of the stage, with the reason.
        code: modules that compute the results; all that they import is included, except `LEFT_OUT`.
        components: fields that select components, whose code is included.
        record: path of the result's record in the folder of results, with the names of method, seed and snapshot.
        content: fields of the record that describe the result, such as the hashes of its files.
        of_run: True if every snapshot of a training run has results of its own; False: one result for the experiment.
    """

    name: str
    needs: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    no_effect: Mapping[str, str] = field(default_factory=dict)
    code: tuple[str, ...] = ()
    components: tuple[str, ...] = ()
    record: str = ""
    content: tuple[str, ...] = ("files",)
    of_run: bool = False


RUN_FOLDER = "methods/{method}/seed{seed}"  # folder of a training run below a folder of results
COMPUTING = ("training.threads", "training.deterministic")  # they change the last bits of results
NETWORK = ("model", "diffusion.process")

STAGES = (
    Stage(
        "prepare",
        fields=("dataset",),
        no_effect={
            "dataset.flips": "stages autoencoder and encode flip the images",
            "dataset.low_resolution": "stage encode reduces the images",
        },
        code=("kairos.data.prepare",),
        record="dataset/record.json",
        content=("content_sha256",),
    ),
    Stage(
        "autoencoder",
        needs=("prepare",),
        fields=("autoencoder", "dataset.flips", *COMPUTING),
        no_effect={
            "autoencoder.shards": "jobs of stage encode",
            "autoencoder.dtype": "latents on disk, of stage encode",
        },
        code=("kairos.autoencoders.train_or_load", "kairos.compute"),
        record="autoencoder/record.json",
        content=("sha256", "scaling_factor", "shift_factor"),
    ),
    Stage(
        "text",
        needs=("prepare",),
        fields=("text_encoder", *COMPUTING),
        code=("kairos.text_encoders.encode_captions", "kairos.compute"),
        record="text/record.json",
        content=("content_sha256",),
    ),
    ENCODE := Stage(
        "encode",
        needs=("prepare", "autoencoder", "text"),
        fields=(
            "dataset.flips",
            "dataset.low_resolution",
            "autoencoder.encode_batch_size",
            "autoencoder.dtype",
            *COMPUTING,
        ),
        code=("kairos.autoencoders.encode", "kairos.compute"),
        record="latents/record.json",
        content=("content_sha256",),
    ),
    EXTRACTOR := Stage(
        "extractor",
        needs=("prepare",),
        fields=("evaluation.extractor", *COMPUTING),
        code=("kairos.evaluation.extractors",),
        components=("evaluation.extractor",),
        record="extractor/record.json",
        content=("name", "metric", "sha256", "check"),
    ),
    REFERENCE := Stage(
        "reference",
        needs=("prepare", "autoencoder", "encode", "extractor"),
        fields=("evaluation", *COMPUTING),
        no_effect={
            "evaluation.extractor": "in the result of stage extractor",
            "evaluation.primary_metric": "the report ranks by it",
        },
        code=("kairos.evaluation.reference",),
        components=("evaluation.extractor", "evaluation.possible_image_metrics"),
        record="reference/record.json",
        content=(
            *("files", "rows", "extractor_hash", "reference", "metrics", "num_samples", "sets", "eval_seed"),
            *("precision", "validation"),
        ),
    ),
    TRAIN := Stage(
        "train",
        needs=("encode",),
        fields=("model", "diffusion", "method", "training"),
        no_effect={
            "training.processes": "sums in another order; for couplings by rank see `select_fields`",
            "training.nodes": "machines of the processes",
            "training.trainings_per_gpu": "runs that share a GPU",
            "training.device": "the type of the device in use counts instead",
            "training.milestones": "steps that are exported; as the end of a schedule, the last one is its length",
            "training.segments": "jobs of a run, which resumes exactly",
            "training.checkpoint_every": "states from which a run resumes exactly",
            "training.log_every": "lines of the log",
        },
        code=("kairos.training.run",),
        components=(
            *NETWORK,
            "method.sampler",
            "method.weighting",
            "method.coupling",
            "diffusion.losses",
            "training.optimizer",
            "training.schedule",
            "training.ema",
            "training.probes",
        ),
        record=f"{RUN_FOLDER}/snapshots/{{snapshot}}/snapshot.json",
        of_run=True,
    ),
    Stage(
        "sample",
        needs=("train", "autoencoder", "encode"),
        fields=("sampling", "evaluation.num_samples", "evaluation.sets", *COMPUTING),
        no_effect={
            "sampling.batch_size": "an image is a function of the seed and its index",
            "sampling.shards": "jobs, each of whole batches",
        },
        code=("kairos.sampling.sample",),
        components=(*NETWORK, "sampling.scheduler"),
        record=f"{RUN_FOLDER}/samples/{{snapshot}}.json",
        of_run=True,
    ),
    Stage(
        "evaluate",
        needs=(
            "train",
            "sample",
            "encode",
            "extractor",
            "reference",
        ),  # reference/record.json fixes metrics, threads and seeds
        code=("kairos.evaluation.evaluate",),
        components=(*NETWORK, "evaluation.extractor", "evaluation.possible_metrics"),
        record=f"{RUN_FOLDER}/evaluation/{{snapshot}}.json",
        content=("metrics", "validation"),
        of_run=True,
    ),
)
MEASURE = Stage(  # of an analysis that measures snapshots
    "measure",
    needs=("train", "encode"),
    fields=("analysis", *COMPUTING),
    no_effect={
        "analysis.methods": "a measurement is of one method",
        "analysis.milestones": "a measurement is of one snapshot",
    },
    code=("kairos.analyses.tables",),
    components=(*NETWORK, "analysis"),
    record=f"{RUN_FOLDER}/analyses/{{analysis}}.{{snapshot}}.json",
    of_run=True,
)
ANALYSE = Stage(  # of an analysis; `list_stages` sets what it needs
    "analyse",
    fields=("analysis", "methods"),
    code=("kairos.report.analysis_figures",),
    components=("analysis",),
    record="analyses/{analysis}.json",
)
SUMMARIES = (
    Stage(
        "report",
        needs=("prepare", "autoencoder", "extractor", "reference", "train", "sample", "evaluate"),
        fields=("*",),  # all sections
        no_effect={"tracking": "stage track imports the results", "plugins": "in the code of the methods"},
        code=("kairos.report.build",),
        record="report.json",
    ),
    Stage("track", needs=("report",), fields=("tracking",), code=("kairos.tracking.track",), record="tracking.json"),
)

RUN_FOLDERS = "methods/*/seed*"  # pattern of the folders of training runs below a folder of results

LEFT_OUT = {  # modules whose code changes no result, with the reason
    "kairos.array_shapes": "annotations",
    "kairos.code_hash": "compares code",
    "kairos.components": "reads options; their values are fields",
    "kairos.config": "reads the experiment; its values are fields",
    "kairos.config.experiment": "reads the experiment; its values are fields",
    "kairos.config.sweeps": "reads the experiment; its values are fields",
    "kairos.data.linked_images": "returns the images of stage prepare, or raises an error",
    "kairos.devices": "names of devices",
    "kairos.files": "reads and writes files",
    "kairos.library_components": "reads options; their values are fields",
    "kairos.process_exit": "ends a process",
    "kairos.progress": "prints",
    "kairos.quick_imports": "order of imports",
    "kairos.resource_usage": "measures times and memory",
    "kairos.section": "reads options; their values are fields",
    "kairos.shapes": "annotations",
    "kairos.slurm": "queries SLURM",
    "kairos.stages": "this table",
    "kairos.training.checkpoint": "stores a state, which is compared with its hash",
    "kairos.training.job": "ends a run early; it resumes exactly",
    "kairos.training.launch": "starts the processes of a run",
    "kairos.training.provenance": "describes how a result was computed",
    "kairos.training.run_folder": "files of a run, which resumes exactly",
    "kairos.validity": "compares results",
    "kairos_timesteps.components": "imports all components; the selected ones are included",
    "kairos_timesteps.errors": "raises errors",
    "kairos_timesteps.monitoring": "shows numbers",
    "kairos_timesteps.options": "reads options; their values are fields",
    "kairos_timesteps.registry": "finds components by name; the selected ones are included",
    "kairos_timesteps.samplers": "imports all samplers; the selected ones are included",
    "kairos_timesteps.weightings": "imports all weightings; the selected ones are included",
}


def list_stages(experiment: Any) -> dict[str, Stage]:
    """Return the stages of an `Experiment` by name, in their order.

    Stage ``text`` is left out if no captions are encoded. An analysis NAME has stage ``analyse_NAME`` and, if it
    measures snapshots, ``measure_NAME``. Stage ``track`` is left out if tracking is off.
    """
    stages = {stage.name: stage for stage in STAGES}
    if not experiment.text_encoder:
        del stages["text"]
        stages["encode"] = replace(stages["encode"], needs=("prepare", "autoencoder"))
    for analysis in experiment.analyses:
        needs = {"snapshot": (f"measure_{analysis.name}",), "strategies": ("train",), "evaluations": ("evaluate",)}
        analyse = replace(ANALYSE, needs=needs.get(analysis.reads, ()))
        for row in (MEASURE, analyse) if analysis.reads == "snapshot" else (analyse,):
            name = f"{row.name}_{analysis.name}"
            record = row.record.replace("{analysis}", analysis.name)
            stages[name] = replace(row, name=name, record=record)
    report, track = SUMMARIES
    analyses = (f"analyse_{analysis.name}" for analysis in experiment.analyses)
    stages["report"] = replace(report, needs=(*report.needs, *analyses))
    if experiment.tracking.enabled:
        stages["track"] = track
    return stages


def run_folder(results: Path | str, method: str, seed: int | str) -> Path:
    """Return the folder of a training run below a folder of results."""
    return Path(results, RUN_FOLDER.format(method=method, seed=seed))


def list_sections(experiment: Any, stage: Stage, method: str | None = None) -> Sections:
    """Return the sections of an experiment by name, and ``method`` and ``analysis`` of a job of the stage.

    Args:
        experiment: the resolved experiment, an `Experiment`.
        stage: the stage.
        method: name of the job's method; None: the stage is not `of_run`, or its fields do not depend on the method.
    """
    sections = {name: getattr(experiment, name) for name in type(experiment).model_fields}
    if method is not None:
        sections["method"] = experiment.methods[method]
    for analysis in experiment.analyses:
        if stage.name in (f"measure_{analysis.name}", f"analyse_{analysis.name}"):
            sections["analysis"] = analysis
    return sections


def select_fields(stage: Stage, sections: Sections) -> Fields:
    """Return the fields that the results of a stage depend on, nested as in the experiment, with JSON values."""
    names = [name for name in sections if name != "method"] if stage.fields == ("*",) else stage.fields
    no_effect = set(stage.no_effect)
    if stage.name == "train" and sections["method"].coupling.facts.get("by_rank"):
        no_effect.discard("training.processes")  # each process couples its slice of the batch
    fields: Fields = {}
    for name in names:
        section, _, entry = name.partition(".")
        if name in no_effect:
            continue
        value = _dump(sections[section])
        if entry:
            fields.setdefault(section, {})[entry] = value[entry]
        elif isinstance(value, dict):
            fields[section] = {key: item for key, item in value.items() if f"{section}.{key}" not in no_effect}
        else:
            fields[section] = value
    if "schedule" in fields.get("training", {}):
        fields["training"]["schedule"] = resolve_schedule(_dump(sections["training"]))
    return fields


def resolve_schedule(training: Fields) -> Fields:
    """Return the schedule of section `training`; one that ends at the last milestone gets this length.

    The milestone is as the experiment file states it, so ``10 epochs`` differs from the equal number of steps.
    """
    schedule: Fields = training["schedule"]
    is_open = "length" in schedule and schedule["length"] is None
    return {**schedule, "length": training["milestones"][-1]} if is_open else schedule


def _dump(value: Any) -> Any:
    """Return sections and components, also in lists and dictionaries, as JSON values."""
    if isinstance(value, LibraryComponent):
        return value.plain()
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if isinstance(value, dict):
        return {name: _dump(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_dump(item) for item in value]
    return value


def hash_stage_code(stage: Stage, sections: Sections) -> str:
    """Return the hash of the code that computes the results of a stage."""
    return hash_modules(list_modules(stage, sections))


def hash_modules(modules: Iterable[str]) -> str:
    """Return the hash of the code of modules, given by dotted names, and of all that they import except `LEFT_OUT`."""
    return hash_code(modules, frozenset(LEFT_OUT))


def list_modules(stage: Stage, sections: Sections) -> list[str]:
    """Return the modules that a stage's code starts from: those of its row and of the components in use."""
    modules = set(stage.code)
    for name in stage.components:
        section, *attributes = name.split(".")
        selected = sections[section]
        for attribute in attributes:
            selected = getattr(selected, attribute)
        for component in selected if isinstance(selected, list | tuple) else [selected]:
            modules |= modules_of(component)
    return sorted(modules)


def modules_of(component: "ComponentOptions | type[ComponentOptions] | LibraryComponent") -> set[str]:
    """Return the modules of a component, and of the components that its options name, such as those of a mixture."""
    if isinstance(component, LibraryComponent):
        return _library_modules(component.registry, component.plain())
    return {component.module()}


def _library_modules(registry: "Registry", component: dict[str, Any]) -> set[str]:
    entry = registry.entry(component["name"])
    modules = {entry.module}
    for option in entry.component.options.values():
        if option.component:
            value = component.get(option.public_name, option.default)
            for choice in value if isinstance(value, list) else [value]:  # a name, or a dictionary of name and options
                modules |= _library_modules(registry, {"name": choice} if isinstance(choice, str) else choice)
    return modules
