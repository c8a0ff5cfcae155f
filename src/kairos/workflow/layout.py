"""Layout of an experiment for the workflow: its folders and files, its training runs, stages, rules and jobs."""

import glob
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import product
from pathlib import Path
from typing import Any

from kairos.analyses.settings import AnalysisOptions, analysed_snapshots, snapshot_table_path
from kairos.config import Experiment, freeze, load
from kairos.downloads import warn_of_missing
from kairos.evaluation.settings import InceptionOptions
from kairos.files import glance
from kairos.outside_files import hash_contents
from kairos.stages import Stage, hash_stage_code, list_sections, list_stages, run_folder, select_fields
from kairos.training.job import read_progress
from kairos.workflow.rules import gpus_per_job

FROZEN_VARIABLE = "KAIROS_EXPERIMENT"  # environment variable with the path of the controller's frozen experiment
_INCEPTION_THREADS = 8  # of a job that computes features
_SHARED = ("prepare", "autoencoder", "text", "encode", "extractor", "reference")
TRAINING_STAGES = ("train", "sample", "evaluate")  # stages with jobs for each training run
_SHARDS_FOLDER = ".shards"  # for the outputs and timing files of jobs that compute a shard


@dataclass(frozen=True)
class Segment:
    """Consecutive steps of every training run, which are one job.

    Attributes:
        steps: the segment's snapshots, by their steps.
        previous: list with the name of the snapshot that the segment starts from; empty for the first segment.
        number: number of the segment, from 1.
        suffix: ``_`` and the number, for rule names and log files; empty if the training run has one segment.
        is_last: True if the training run is complete after the segment.
    """

    steps: tuple[int, ...]
    previous: list[str]
    number: int
    suffix: str
    is_last: bool

    @property
    def snapshots(self) -> list[str]:
        """Names of the segment's snapshots in folders and files, such as ``0000400``."""
        return name_snapshots(self.steps)


@dataclass(frozen=True)
class Layout:
    """Layout of an experiment for the Snakefile: paths, stages and dependencies.

    Attributes:
        experiment: the checked experiment.
        config_file: frozen copy of the experiment, which all jobs read.
        notes: lines for the user, printed before anything runs.
    """

    experiment: Experiment
    config_file: Path
    notes: list[str] = field(default_factory=list)

    # Parts of the experiment

    @property
    def methods(self) -> list[str]:
        """Names of the methods."""
        return list(self.experiment.methods)

    @property
    def trainings(self) -> list[tuple[str, int]]:
        """Method and seed of every training run, by method and then by seed."""
        return [(method, seed) for method in self.methods for seed in self.experiment.seeds]

    @property
    def snapshots(self) -> list[str]:
        """Names of the snapshots of every training run in folders and files, such as ``0000400``, by ascending step."""
        return name_snapshots(self.experiment.milestones)

    @property
    def analyses(self) -> dict[str, AnalysisOptions]:
        """The experiment's analyses by name."""
        return {analysis.name: analysis for analysis in self.experiment.analyses}

    @cached_property
    def segments(self) -> list[Segment]:
        """Segments of every training run, in order."""
        steps_by_segment = self.experiment.segments
        count = len(steps_by_segment)
        segments: list[Segment] = []
        for number, steps in enumerate(steps_by_segment, 1):
            segment = Segment(
                steps=steps,
                previous=segments[-1].snapshots[-1:] if segments else [],
                number=number,
                suffix=f"_{number}" if count > 1 else "",
                is_last=number == count,
            )
            segments.append(segment)
        return segments

    @property
    def gpus_per_job(self) -> int:
        """Number of GPUs that a computing job requests from a scheduler: 0 or 1."""
        return gpus_per_job(self.experiment)

    @property
    def feature_threads(self) -> int:
        """Number of threads of a job that computes features: 8 for Inception, otherwise those of training.

        Snakemake lowers it to the run's cores. A thread of Inception needs about 0.2 GiB of memory.
        """
        is_inception = isinstance(self.experiment.evaluation.extractor, InceptionOptions)
        return _INCEPTION_THREADS if is_inception else self.experiment.training.threads

    # Stages, rules and jobs

    @cached_property
    def stages(self) -> dict[str, Stage]:
        """Stages of the experiment by name, see `list_stages`."""
        return list_stages(self.experiment)

    @property
    def shared_stages(self) -> tuple[str, ...]:
        """Names of the stages before training, whose results all training runs share, in order."""
        return tuple(name for name in self.stages if name in _SHARED)

    @property
    def text_stages(self) -> list[str]:
        """``["text"]`` if the experiment encodes captions, else an empty list."""
        return ["text"] if "text" in self.shared_stages else []

    def shards(self, stage: str) -> list[str]:
        """Return the names of the shards that a stage is split into, ``1of2`` ...; an empty list if it is not split.

        Only ``sample``, and ``encode`` with an autoencoder, can be split; a single shard is treated as not split.
        """
        count = 0
        if stage == "sample":
            count = self.experiment.sampling.shards
        elif stage == "encode" and self.experiment.autoencoder.kind != "none":
            count = self.experiment.autoencoder.shards
        if count <= 1:
            return []
        return [f"{number}of{count}" for number in range(1, count + 1)]

    def stage_rules(self, stage: str) -> list[str]:
        """Return a stage's rule names without suffixes of segments: STAGE and, if it is split, ``STAGE_shards``."""
        # rule STAGE_shards computes the shards, and rule STAGE then merges them
        return [stage, f"{stage}_shards"] if self.shards(stage) else [stage]

    def sampling_group(self, segment: Segment) -> str:
        """Return the group, with Snakemake wildcards, in which a scheduler samples and evaluates a segment as one job.

        An example is ``images_{method}_seed{seed}_2``; the text contains the braces.
        """
        return f"images_{{method}}_seed{{seed}}{segment.suffix}"

    def training_group(self, segment: Segment) -> Callable[[Any], str] | None:
        """Return a function from wildcards to the name of the group of training runs that a scheduler runs as one job.

        Consecutive training runs share a group: group 0 of segment 2 is ``trainings_2_0``. A training run that would
        diverge again, according to its progress file, is a separate group, such as ``trainings_2_0_alone_speed_seed1``.
        None: each training run has a separate GPU, so the experiment has no groups.
        """
        trainings_per_gpu = self.experiment.training.trainings_per_gpu
        if trainings_per_gpu == 1:
            return None
        # consecutive in `trainings`, so that every run of the workflow has equal groups
        group_numbers = {training: index // trainings_per_gpu for index, training in enumerate(self.trainings)}

        def name_group(wildcards: Any) -> str:
            """Return the name of a training run's group, after reading the run's progress file."""
            method, seed = wildcards.method, int(wildcards.seed)
            progress = read_progress(Path(self.training_folder(method, seed)))
            # in a group, a training run that diverges again would stop the other training runs at each attempt
            has_diverged = not progress.get("again", True)  # True by default: without a file it has not diverged
            group = f"trainings{segment.suffix}_{group_numbers[method, seed]}"
            return f"{group}_alone_{method}_seed{seed}" if has_diverged else group

        return name_group

    @property
    def shared_priority(self) -> int:
        """Priority of jobs that all training runs wait for: above that of every job of a training run."""
        return 2 * len(self.experiment.seeds)

    def priority(self, stage: str) -> Callable[[Any], int]:
        """Return a function from wildcards to the priority of a training run's job; higher ones start first.

        Jobs of the first seed start first. Within a seed, sampling and evaluation start before further training runs.
        """
        rank_of_seed = {str(seed): rank for rank, seed in enumerate(reversed(self.experiment.seeds))}
        is_after_training = int(stage != "train")
        return lambda wildcards: 2 * rank_of_seed[wildcards.seed] + is_after_training

    def count_jobs(self) -> dict[str, int]:
        """Return the number of jobs of each rule by its name without a suffix; segments of a rule are added up.

        The order is: shared stages, stages of training runs, ``measure_NAME`` and then ``analyse_NAME`` of the
        analyses, ``report``, and ``track`` if tracking is enabled. A rule ``STAGE_shards``, which computes shards,
        follows its stage. Rules without jobs, and rule ``all``, are left out.
        """
        training_job_count = len(self.trainings) * len(self.segments)
        counts: dict[str, int] = {}
        for stage in (*self.shared_stages, *TRAINING_STAGES):
            count = training_job_count if stage in TRAINING_STAGES else 1
            counts[stage] = count
            shard_count = len(self.shards(stage))  # per training run and segment
            if shard_count > 0:
                counts[f"{stage}_shards"] = count * shard_count
        for name in self.analyses:
            measurement_count = len(self.measurement_files(name))
            if measurement_count > 0:
                counts[f"measure_{name}"] = measurement_count
        for name in self.analyses:
            counts[f"analyse_{name}"] = 1
        counts["report"] = 1
        if self.experiment.tracking.enabled:
            counts["track"] = 1
        return counts

    # Files and folders

    @property
    def results(self) -> str:
        """The experiment's folder, relative to the working directory."""
        return f"results/{self.experiment.experiment}"

    def training_folder(self, method: str, seed: int | str) -> str:
        """Return the folder of a training run."""
        return run_folder(self.results, method, seed).as_posix()

    @property
    def external_reference(self) -> list[str]:
        """The ``.npz`` file of real images that samples are compared with; empty if the data set is the reference."""
        reference = self.experiment.evaluation.reference
        return [reference] if reference.endswith(".npz") else []

    @property
    def start_weights(self) -> list[str]:
        """The record of the snapshot that training runs start from; empty if they start from random weights."""
        start = self.experiment.training.start_from
        return [f"{start}/milestone.json"] if start else []

    @property
    def analysis_outputs(self) -> list[str]:
        """Paths of the table (CSV) and figure (PNG) of each analysis."""
        return [f"{self.results}/analyses/{name}.{suffix}" for name in self.analyses for suffix in ("csv", "png")]

    def measurement_files(self, analysis: str) -> list[str]:
        """Return the paths of an analysis' measurements, one per snapshot that it selects; empty if it reads none."""
        snapshots = analysed_snapshots(self.analyses[analysis], self.experiment)
        return [snapshot_table_path(self.results, analysis, method, seed, step) for method, seed, step in snapshots]

    def analysis_inputs(self, analysis: str) -> list[str]:
        """Return the paths of the files that the table of an analysis is computed from.

        These are its measurements at snapshots. An analysis that reads strategies or evaluations instead depends on
        the records of all snapshots of all training runs. The list is empty for an analysis that reads none of these.
        """
        files = self.measurement_files(analysis)
        # path of a snapshot's record in the folder of a training run, by the kind of results that an analysis reads
        path_by_kind = {"strategies": "milestones/{}/milestone.json", "evaluations": "evaluation/{}.json"}
        record_path = path_by_kind.get(self.analyses[analysis].reads)
        if record_path is not None:
            for (method, seed), snapshot in product(self.trainings, self.snapshots):
                files.append(f"{self.training_folder(method, seed)}/{record_path.format(snapshot)}")
        return files

    def training_end(self, wildcards: Any) -> list[str]:
        """Return a list with the path of a run's ``training.json`` for jobs of the last snapshot; else an empty list.

        Jobs of other snapshots do not wait for the end of the training run, which this file records.
        """
        folder = self.training_folder(wildcards.method, wildcards.seed)
        return [f"{folder}/training.json"] if wildcards.step == self.snapshots[-1] else []

    def shard_path(self, stage: str, shard: str, method: str = "", seed: int | str = "", snapshot: str = "") -> str:
        """Return the path of a computed shard: a folder of latents, or a file of samples of a snapshot."""
        if stage == "encode":
            return f"{self.results}/{_SHARDS_FOLDER}/latents.{shard}"
        folder = f"{self.training_folder(method, seed)}/{_SHARDS_FOLDER}"
        return f"{folder}/batch{self.experiment.sampling.batch_size}/{snapshot}.{shard}.npz"  # of whole batches

    def timing_file(self, stage: str, run: str | None = None, segment: int = 1, shard: str | None = None) -> str:
        """Return the path of the file with a job's times, which is no output, because it differs in every run.

        Args:
            stage: name of the stage, or of the stage and more.
            run: method and seed of the training run, such as ``speed_seed1``; None: a stage that all runs share.
            segment: number of the run's segment.
            shard: name of the job's shard; None: the job computes no shard.
        """
        name = stage if run is None else f"{stage}/{run}/{segment}"
        if shard is not None:
            name = f"{_SHARDS_FOLDER}/{name}.{shard}"
        return f"{self.results}/timing/{name}.json"

    def checksum_file(self, stage: str, method: str, seed: int | str, segment: Segment) -> str:
        """Return the path of the file with the checksums of a job's outputs, for one segment of a training run."""
        # the files of all runs and segments are in one folder, on which DVC's report stage can depend
        return f"{self.results}/sums/{stage}/{method}_seed{seed}/{segment.number}.txt"

    def report_inputs(self) -> list[str]:
        """Return the paths of all files that the report and the import into MLflow depend on.

        First come the records of shared stages, then the files of each training run, then the checksum files of jobs,
        then the tables and figures of analyses.
        """
        shared_records = ("dataset/manifest", "autoencoder/manifest", "extractor/manifest", "reference/reference")
        paths = [f"{self.results}/{record}.json" for record in shared_records]

        # the files of a training run, relative to its folder
        snapshot_files = ("milestones/{}/milestone.json", "samples/{}.png", "evaluation/{}.json")
        training_files = ["training.json", "metrics.jsonl"]
        for snapshot in self.snapshots:
            training_files += [path.format(snapshot) for path in snapshot_files]

        for method, seed in self.trainings:
            paths += [f"{self.training_folder(method, seed)}/{path}" for path in training_files]
        for stage, (method, seed), segment in product(TRAINING_STAGES, self.trainings, self.segments):
            paths.append(self.checksum_file(stage, method, seed, segment))
        return paths + self.analysis_outputs

    # Values of the rules' directives

    def wildcard_pattern(self, values: list[Any]) -> str:
        """Return a wildcard constraint, a regular expression, that matches exactly the texts of the values."""
        return "|".join(re.escape(str(value)) for value in values)

    def rule_params(self, stage: str) -> dict[str, Any]:
        """Return the ``params:`` of a stage's rules: ``config`` and the keys of `dependencies`, as functions.

        ``config`` returns the path of the frozen experiment. The other keys are those of `dependencies`. Each value is
        a function of a job's wildcards. Snakemake runs a job again if a value other than ``config`` changes.
        """
        row = self.stages[stage]
        depends_on_method = row.name == "train"

        # Snakemake calls the functions only for stages that have jobs, which saves the other hashes
        @cache  # one hash for all functions and jobs of a method
        def collect_values(method: str | None) -> dict[str, Any]:
            return self.dependencies(stage, method)

        # a function defined in the comprehension below would see only the last name
        def build_function(name: str) -> Callable[[Any], Any]:
            def find_value(wildcards: Any) -> Any:
                method = wildcards.method if depends_on_method else None
                return collect_values(method)[name]

            return find_value

        # the names of the fields are equal for all methods
        sections = list_sections(self.experiment, row, self.methods[0] if depends_on_method else None)
        names = [*select_fields(row, sections), "code", *(["outside"] if self.outside_paths(stage) else [])]
        values = {name: build_function(name) for name in names}
        return {**values, "config": self.config_argument}

    def dependencies(self, stage: str, method: str | None = None) -> dict[str, Any]:
        """Return the fields that a stage's results depend on, the hash of its ``code``, and of ``outside`` files.

        `method` is the name of the method, for stage ``train``; other stages have equal fields for all methods.
        """
        row = self.stages[stage]
        sections = list_sections(self.experiment, row, method)
        values = {**select_fields(row, sections), "code": hash_stage_code(row, sections)}
        return {**values, "outside": self.hash_outside_files(stage)} if self.outside_paths(stage) else values

    def hash_outside_files(self, stage: str) -> str | None:
        """Return the hash of the files outside of the results that a stage reads; None if there are none.

        If images or lists of the data set are not on this machine, it is the hash in the record of the data set.
        """
        paths = self.outside_paths(stage)
        recorded = self.recorded_source() if stage == "prepare" else None
        if recorded is not None:
            return recorded
        existing = [path for path in paths if os.path.exists(path)]
        return hash_contents(existing) if existing else None

    def recorded_source(self) -> str | None:
        """Return the hash in the record of the data set, if a file of it is not on this machine; else None."""
        if all(os.path.exists(path) for path in self.outside_paths("prepare")):
            return None
        recorded: str | None = glance(f"{self.results}/dataset/manifest.json").get("source_sha256")
        return recorded

    def outside_paths(self, stage: str) -> list[str]:
        """Return the paths of the files and folders outside of the results that a stage reads.

        Some may be missing: a path of a network may be a hub id.
        """
        experiment = self.experiment
        paths: list[str | None] = []
        if stage == "prepare":
            dataset = experiment.dataset
            paths += dataset.caption_files
            for section in dataset.sections:
                # a list may be followed by the value that selects its lines, such as list_eval_partition.txt:0
                paths.append(re.sub(r":\d+$", "", section.files) if section.files else None)
                path = str(section.path) if section.path else ""
                # a name that exists may contain characters of patterns; a pattern without files is missing
                matches = [] if os.path.exists(path) else sorted(glob.glob(path, recursive=True))
                paths += matches or [path]
        elif stage == "autoencoder" and experiment.autoencoder.kind == "pretrained":
            paths.append(experiment.autoencoder.path)
        elif stage == "text" and experiment.text_encoder is not None:
            paths.append(experiment.text_encoder.path)
        elif stage == "extractor":
            paths.append(getattr(experiment.evaluation.extractor, "path", None))
        elif stage in ("reference", "evaluate"):
            paths += self.external_reference
            paths += [getattr(metric, "path", None) for metric in experiment.evaluation.metrics or ()]
        return [path for path in paths if path]

    def config_argument(self, wildcards: Any, output: Any) -> str:
        """Return the path of the frozen experiment as text.

        The arguments are unused: Snakemake does not record the result of a function that takes `output`.
        """
        return self.config_file.as_posix()


def name_snapshots(steps: tuple[int, ...]) -> list[str]:
    """Return the names of snapshots in folders and files: their steps in 7 digits, such as ``0000400``."""
    return [f"{step:07d}" for step in steps]


def create_layout(experiment: Experiment) -> Layout:
    """Return the layout of an experiment: select the extractor for ``auto``, and write a frozen copy of the experiment.

    The copy is a file in ``.kairos/config``, see `freeze`. The notes of the layout are the notes of the selection, and
    a warning for each missing file.

    Raises:
        ConfigError: the experiment's evaluation is not possible, or weights that it starts from are missing.
        DamagedError: the record of these weights is damaged.
    """
    resolved, notes = experiment.resolve()
    layout = Layout(resolved, config_file=freeze(resolved), notes=notes + warn_of_missing(resolved))
    if layout.recorded_source() is not None:
        record = f"{layout.results}/dataset/manifest.json"
        layout.notes.append(f"dataset: files are missing here; the hash in {record} is used in their place")
    return layout


def load_frozen_layout() -> Layout:
    """Return the layout, without notes, of the frozen experiment whose path `FROZEN_VARIABLE` contains.

    Raises:
        KeyError: the controller has not set the variable.
    """
    path = Path(os.environ[FROZEN_VARIABLE])
    return Layout(load(path), config_file=path)
