"""Table of stages: what decides the results of each stage, and which command computes them.

The command line, the workflow, `kairos plan`, `status`, `new` and `record`, and the report iterate over it.
A new stage is a row here, a rule file ``workflow/rules/STAGE.smk`` and a module. `kairos.stage_keys` selects the fields
of a stage and hashes its code. This module imports nothing of kairos, because every command imports it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class Stage:
    """A stage: a row of the table.

    Attributes:
        name: name of the stage, of its rule and of its command.
        command: module of the stage's command, with functions ``add_arguments(name, parser)`` and ``run(arguments)``;
            empty: a stage that another stage's command computes.
        description: what the command does, in one line.
        needs: stages whose results it reads. Stages that the experiment lacks are ignored.
        fields: sections and fields of the experiment that its results depend on. ``method`` stands for sampler,
            weighting and coupling of a method, ``analysis`` for the options of an analysis.
        no_effect: parts of these fields that are left out, as they change no result beyond rounding, with the reason.
        code: modules that compute the results; all that they import is included, except `LEFT_OUT`.
        components: fields that select components, whose code is included.
        record_path: path of the result's record in the folder of results, with the names of method, seed and snapshot.
        content_fields: fields of the record whose hash is the content of the result, see `validity.content`.
        per_snapshot: True: one result for each snapshot of each training run; False: one result for the experiment.
        computes_on: ``gpu`` or ``cpu``, where PyTorch computes the results; empty: without PyTorch.
        per_analysis: True: one stage for each analysis of the experiment.
        section: section of the experiment without which the stage is left out, see `list_stages`.
        is_summary: True if the result only presents other results, with clock times, so that it differs between equal
            runs. `kairos record` leaves it out, as do `accept` and `discard` unless ``--stage`` names it.
    """

    name: str
    command: str = ""
    description: str = ""
    needs: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    no_effect: Mapping[str, str] = field(default_factory=dict)
    code: tuple[str, ...] = ()
    components: tuple[str, ...] = ()
    record_path: str = ""
    content_fields: tuple[str, ...] = ("files",)
    per_snapshot: bool = False
    per_analysis: bool = False
    computes_on: Literal["", "cpu", "gpu"] = ""
    section: str = ""
    is_summary: bool = False


RUN_FOLDER = "methods/{method}/seed{seed}"  # folder of a training run below a folder of results
COMPUTING = ("training.threads", "training.deterministic")  # they change the last bits of results
NETWORK = ("model", "diffusion.process")

STAGES = (
    Stage(
        "prepare",
        command="kairos.cli.data",
        description="convert a data set to the format of the pipeline",
        fields=("dataset",),
        no_effect={
            "dataset.flips": "stages autoencoder and encode flip the images",
            "dataset.low_resolution": "stage encode reduces the images",
        },
        code=("kairos.data.prepare",),
        record_path="dataset/record.json",
        content_fields=("content_sha256",),
    ),
    Stage(
        "autoencoder",
        command="kairos.cli.data",
        description="train or fetch the autoencoder",
        needs=("prepare",),
        fields=("autoencoder", "dataset.flips", *COMPUTING),
        no_effect={
            "autoencoder.shards": "jobs of stage encode",
            "autoencoder.dtype": "latents on disk, of stage encode",
        },
        code=("kairos.autoencoders.train_or_load", "kairos.compute"),
        record_path="autoencoder/record.json",
        computes_on="gpu",
        content_fields=("sha256", "scaling_factor", "shift_factor"),
    ),
    Stage(
        "text",
        command="kairos.cli.data",
        description="encode the captions of a data set",
        needs=("prepare",),
        fields=("text_encoder", *COMPUTING),
        code=("kairos.text_encoders.encode_captions", "kairos.compute"),
        record_path="text/record.json",
        section="text_encoder",
        computes_on="gpu",
        content_fields=("content_sha256",),
    ),
    ENCODE := Stage(
        "encode",
        command="kairos.cli.data",
        description="encode a data set into latent moments",
        needs=("prepare", "autoencoder", "text"),
        fields=(
            "dataset.flips",
            "dataset.low_resolution",
            "autoencoder.encode_batch_size",
            "autoencoder.dtype",
            *COMPUTING,
        ),
        code=("kairos.autoencoders.encode", "kairos.compute"),
        record_path="latents/record.json",
        computes_on="gpu",
        content_fields=("content_sha256",),
    ),
    EXTRACTOR := Stage(
        "extractor",
        command="kairos.cli.evaluate",
        description="train or fetch the feature extractor",
        needs=("prepare",),
        fields=("evaluation.extractor", *COMPUTING),
        code=("kairos.evaluation.extractors",),
        components=("evaluation.extractor",),
        record_path="extractor/record.json",
        computes_on="cpu",
        content_fields=("name", "metric", "sha256", "check"),
    ),
    REFERENCE := Stage(
        "reference",
        command="kairos.cli.evaluate",
        description="compute statistics of real images and the reference rows",
        needs=("prepare", "autoencoder", "encode", "extractor"),
        fields=("evaluation", *COMPUTING),
        no_effect={
            "evaluation.extractor": "in the result of stage extractor",
            "evaluation.primary_metric": "the report ranks by it",
        },
        code=("kairos.evaluation.reference",),
        components=("evaluation.extractor", "evaluation.possible_image_metrics"),
        record_path="reference/record.json",
        computes_on="gpu",
        content_fields=(
            *("content_sha256", "rows", "extractor_hash", "reference", "metrics", "num_samples", "sets", "eval_seed"),
            *("precision", "validation"),
        ),
    ),
    TRAIN := Stage(
        "train",
        command="kairos.cli.train",
        description="train one method with one seed",
        needs=("encode",),
        fields=("model", "diffusion", "method", "training"),
        no_effect={
            "training.processes": "the global batch is drawn; they count for couplings by rank, see `select_fields`",
            "training.nodes": "machines of the processes",
            "training.trainings_per_gpu": "runs that share a GPU",
            "training.device": "the type of the device in use counts instead",
            "training.milestones": "select the exported steps; a schedule without length contains the last one",
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
        record_path=f"{RUN_FOLDER}/snapshots/{{snapshot}}/snapshot.json",
        computes_on="gpu",
        per_snapshot=True,
    ),
    Stage(
        "sample",
        command="kairos.cli.sample",
        description="generate images from snapshots",
        needs=("train", "autoencoder", "encode"),
        fields=("sampling", "evaluation.num_samples", "evaluation.sets", *COMPUTING),
        no_effect={
            "sampling.batch_size": "an image is a function of the seed and its index",
            "sampling.shards": "jobs, each of whole batches",
        },
        code=("kairos.sampling.sample",),
        components=(*NETWORK, "sampling.scheduler"),
        record_path=f"{RUN_FOLDER}/samples/{{snapshot}}.json",
        content_fields=("content_sha256",),
        computes_on="gpu",
        per_snapshot=True,
    ),
    Stage(
        "evaluate",
        command="kairos.cli.evaluate",
        description="compare samples with real images",
        needs=("train", "sample", "encode", "extractor", "reference"),  # the reference fixes metrics, threads, seeds
        code=("kairos.evaluation.evaluate",),
        components=(*NETWORK, "evaluation.extractor", "evaluation.possible_metrics"),
        record_path=f"{RUN_FOLDER}/evaluation/{{snapshot}}.json",
        computes_on="gpu",
        content_fields=("metrics", "validation"),
        per_snapshot=True,
    ),
    MEASURE := Stage(
        "measure",
        needs=("train", "encode"),
        fields=("analysis", *COMPUTING),
        no_effect={
            "analysis.methods": "a measurement is of one method",
            "analysis.milestones": "a measurement is of one snapshot",
        },
        code=("kairos.analyses.tables",),
        components=(*NETWORK, "analysis"),
        record_path=f"{RUN_FOLDER}/analyses/{{analysis}}.{{snapshot}}.json",
        per_snapshot=True,
        per_analysis=True,
        computes_on="gpu",
    ),
    Stage(
        "analyse",
        command="kairos.cli.analyse",
        description="write table and figure of an analysis, or measure one snapshot",
        needs=("measure", "train", "evaluate"),  # at most one of these, see `_READ_BY_ANALYSIS`
        fields=("analysis", "methods"),
        code=("kairos.report.analysis_figures",),
        components=("analysis",),
        record_path="analyses/{analysis}.json",
        per_analysis=True,
        computes_on="cpu",
    ),
    Stage(
        "report",
        command="kairos.cli.report",
        description="write table, figures and report of an experiment",
        needs=("prepare", "autoencoder", "extractor", "reference", "train", "sample", "evaluate", "analyse"),
        fields=("*",),  # all sections
        no_effect={"tracking": "stage track imports the results", "plugins": "their code is hashed with the methods"},
        code=("kairos.report.build",),
        record_path="report.json",
        is_summary=True,
    ),
    Stage(
        "track",
        command="kairos.cli.report",
        description="import an experiment's results into MLflow",
        needs=("report",),
        fields=("tracking",),
        code=("kairos.tracking.track",),
        record_path="tracking.json",
        section="tracking",
        is_summary=True,
    ),
)
# stage that an analysis reads, by its `reads`
_READ_BY_ANALYSIS = {"snapshot": "measure", "strategies": "train", "evaluations": "evaluate"}

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
    "kairos.stage_keys": "hashes fields and code",
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
    """Return the stages of an `Experiment` by name, in the order of the table.

    ``needs`` of each stage lists only stages of the experiment.
    A stage is left out if its section is null or not enabled. Instead of ``analyse``, each analysis NAME has a stage
    ``analyse_NAME`` and, if it measures snapshots, ``measure_NAME``.
    """
    stages: dict[str, Stage] = {}
    for row in STAGES:
        section = getattr(experiment, row.section) if row.section else True
        if row.per_analysis:
            for analysis in experiment.analyses:
                if row is not MEASURE or analysis.reads == "snapshot":
                    stages[f"{row.name}_{analysis.name}"] = _row_of_analysis(row, analysis)
        elif section and getattr(section, "enabled", True):
            stages[row.name] = row
    for name, row in stages.items():
        analyses = [other for other in stages if other.startswith("analyse_")] if "analyse" in row.needs else []
        stages[name] = replace(row, needs=(*(need for need in row.needs if need in stages), *analyses))
    return stages


def _row_of_analysis(row: Stage, analysis: Any) -> Stage:
    needs = row.needs
    if row is not MEASURE:
        read = _READ_BY_ANALYSIS.get(analysis.reads, "")
        needs = (f"measure_{analysis.name}",) if read == MEASURE.name else (read,)
    record_path = row.record_path.replace("{analysis}", analysis.name)
    return replace(row, name=f"{row.name}_{analysis.name}", record_path=record_path, needs=needs)


def run_folder(results: Path | str, method: str, seed: int | str) -> Path:
    """Return the folder of a training run below a folder of results."""
    return Path(results, RUN_FOLDER.format(method=method, seed=seed))
