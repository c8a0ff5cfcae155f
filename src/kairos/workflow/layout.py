"""Layout of an experiment for the workflow: its folders and files, its training runs, stages, rules and jobs."""

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from kairos.analyses.settings import AnalysisOptions
from kairos.config import Experiment, freeze, load
from kairos.downloads import warn_of_missing
from kairos.evaluation.settings import InceptionOptions
from kairos.files import glance, read_json, sha256_json, write_json, write_text
from kairos.stages import ENCODE, STAGES, TRAIN, Stage, list_stages, run_folder
from kairos.training.job import read_progress
from kairos.validity import Result, Validity
from kairos.workflow.rules import gpus_per_job
from kairos_timesteps.errors import KairosError

PLAN_VARIABLE = "KAIROS_PLAN"  # environment variable with the path of the controller's plan, which jobs inherit
_PLAN_DIGITS = 8  # of the hash in the names of plans
_INCEPTION_THREADS = 8  # of a job that computes features
OUTDATED = Path(".kairos/outdated")  # input of every job whose results are not valid, newer than all of its outputs
_SHARDS_FOLDER = ".shards"  # for the outputs and timing files of jobs that compute a shard


@dataclass(frozen=True)
class Segment:
    """Consecutive steps of every training run, which are one job.

    Attributes:
        steps: steps at which the segment exports snapshots, ascending.
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
        plan_file: the plan of the controller, see `write_plan`; None outside of the workflow.
        notes: lines for the user, printed before anything runs.
        validity: decides which results are valid; None in the processes of jobs, where the controller has decided.
        ignores_age: function; it returns False while Snakemake may run jobs whose results are valid, such as forced
            ones. The age of inputs then counts, because Snakemake does not check a job whose inputs from a running job
            are all ``ancient``.
        mark_ancient: the function ``ancient`` of the Snakefile language, which marks an input whose age is ignored.
    """

    experiment: Experiment
    config_file: Path
    plan_file: Path | None = None
    notes: list[str] = field(default_factory=list)
    validity: Validity | None = None
    ignores_age: Callable[[], bool] = lambda: True
    mark_ancient: Callable[[str], Any] = str

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
    def rule_files(self) -> list[str]:
        """Names of the files of rules without suffix, one for each stage; the rules of all analyses share a file."""
        return [row.name for row in STAGES if row.command and (row.per_analysis or row.name in self.stages)]

    def gpus(self, stage: str, is_shard: bool = False) -> int:
        """Return the number of GPUs that a job of a stage requests, 0 or 1; for training, that a process requests.

        Merging shards of latents needs no GPU, and neither do the stages of the autoencoder in pixel space.
        """
        in_pixels = self.experiment.autoencoder.kind == "none" and stage in ("autoencoder", ENCODE.name)
        merges = stage == ENCODE.name and bool(self.shards(stage)) and not is_shard
        if self.stages[stage].computes_on != "gpu" or in_pixels or merges:
            return 0
        return gpus_per_job(self.experiment)

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

        The order is that of `stages`. A rule ``STAGE_shards``, which computes shards, follows its stage. The target
        ``all`` is left out.
        """
        counts: dict[str, int] = {}
        for name, row in self.stages.items():
            counts[name] = 1
            if row.per_snapshot and row.per_analysis:
                counts[name] = len(self._validity.list_results(name))
            elif row.per_snapshot:
                counts[name] = len(self.trainings) * len(self.segments)
            shard_count = len(self.shards(name))  # per training run and segment
            if shard_count > 0:
                counts[f"{name}_shards"] = counts[name] * shard_count
        return counts

    # Files and folders

    @property
    def results(self) -> str:
        """The experiment's folder, relative to the working directory."""
        return f"results/{self.experiment.experiment}"

    def training_folder(self, method: str, seed: int | str) -> str:
        """Return the folder of a training run."""
        return run_folder(self.results, method, seed).as_posix()

    def outputs(self, stage: str, segment: Segment | None = None) -> list[str]:
        """Return the paths of the records that a job of a stage writes, with Snakemake wildcards.

        Args:
            stage: name of the stage.
            segment: segment of the training run; None: the job has one result. If every snapshot has one, wildcard
                ``{step}`` is the snapshot's name.
        """
        return self._record_paths(stage, segment.snapshots if segment else ["{step}"])

    def input_paths(self, stage: str, segment: Segment | None = None) -> list[str]:
        """Return the paths of the files that a job of a stage reads, with Snakemake wildcards.

        They are the records of the needed results. A segment of training also reads the record of the snapshot from
        which it resumes, and the report reads pictures and metrics. For `segment` see `outputs`.
        """
        row = self.stages[stage]
        if not row.per_snapshot:
            paths = [self._record_path(result) for result in self._validity.list_needed(Result(stage))]
            return [*paths, *self._list_report_files()] if stage == "report" else paths
        snapshots = segment.snapshots if segment else ["{step}"]
        paths = [path for needed in row.needs for path in self._record_paths(needed, snapshots)]
        return [*paths, *self._record_paths(stage, segment.previous)] if stage == TRAIN.name and segment else paths

    def _record_paths(self, stage: str, snapshots: list[str]) -> list[str]:
        path = f"{self.results}/{self.stages[stage].record_path}"
        if not self.stages[stage].per_snapshot:
            return [path]
        return [path.format(method="{method}", seed="{seed}", snapshot=name) for name in snapshots]

    def shard_path(self, stage: str, shard: str, method: str = "", seed: int | str = "", snapshot: str = "") -> str:
        """Return the path of a computed shard: a folder of latents, or a file of samples of a snapshot."""
        # shards of other settings or code have another folder
        key = self._validity.describe_stage(stage, None)["key"][:16]
        if stage == "encode":
            batch_size = self.experiment.autoencoder.encode_batch_size
            return f"{self.results}/{_SHARDS_FOLDER}/{key}/batch{batch_size}/latents.{shard}"
        folder = f"{self.training_folder(method, seed)}/{_SHARDS_FOLDER}/{key}"
        return f"{folder}/batch{self.experiment.sampling.batch_size}/{snapshot}.{shard}.npz"

    def log_file(self, stage: str, segment: Segment | None = None, is_shard: bool = False) -> str:
        """Return the path of a job's log, with Snakemake wildcards; for the arguments see `outputs`."""
        name = stage
        if self.stages[stage].per_snapshot:
            name += f"_{{method}}_seed{{seed}}{segment.suffix}" if segment else "_{method}_seed{seed}_{step}"
        return f"{self.results}/logs/{name}{'.{shard}' if is_shard else ''}.log"

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

    def list_targets(self) -> list[str]:
        """Return the paths of the records of all results, and of the other files that the report reads."""
        results = [result for stage in self.stages for result in self._validity.list_results(stage)]
        return [*map(self._record_path, results), *self._list_report_files()]

    def _list_report_files(self) -> list[str]:
        """Return the paths of other files that the report reads: metrics, sample grids, tables and figures."""
        paths = []
        for method, seed in self.trainings:
            folder = self.training_folder(method, seed)
            paths += [f"{folder}/training.json", f"{folder}/metrics.jsonl"]
            paths += [f"{folder}/samples/{snapshot}.png" for snapshot in self.snapshots]
        return paths + [
            f"{self.results}/analyses/{name}.{suffix}" for name in self.analyses for suffix in ("csv", "png")
        ]

    def _record_path(self, result: Result) -> str:
        return self._validity.path(result).as_posix()

    @cached_property
    def _validity(self) -> Validity:
        """Source of paths, keys and lists of results: `validity` or, in a job's process, an object without results."""
        return self.validity or Validity(self.experiment, self.results, reads_outside=True)

    # The plan

    @property
    def plan(self) -> str:
        """Hash of the controller's plan, which is part of the names of its jobs."""
        assert self.plan_file is not None
        return self.plan_file.stem.rpartition("-")[2]

    def describe_plan(self) -> dict[str, Any]:
        """Return what decides the jobs of the experiment: keys of stages, segments, and training runs of a group.

        ``keys`` contains the key of each stage that computes results; of training, by ``train.METHOD``.
        """
        keys = {}
        for name in self.stages:
            for method in self.methods if name == TRAIN.name else [None]:
                stage = f"{name}.{method}" if method else name
                keys[stage] = self._validity.describe_stage(name, method)["key"]
        return {
            "keys": keys,
            "segments": [list(segment.steps) for segment in self.segments],
            "trainings": self.trainings,
            "trainings_per_gpu": self.experiment.training.trainings_per_gpu,
        }

    # Values of the rules' directives

    def wildcard_pattern(self, values: list[Any]) -> str:
        """Return a wildcard constraint, a regular expression, that matches exactly the texts of the values."""
        return "|".join(re.escape(str(value)) for value in values)

    def records(self, *paths: str) -> Callable[[Any], list[str]]:
        """Return an input function for records: those of valid results are ``ancient``, so that their age is ignored.

        Args:
            paths: paths of records, with Snakemake wildcards.
        """

        def list_paths(wildcards: Any) -> list[str]:
            filled = [path.format(**wildcards) for path in paths]
            return [self.mark_ancient(path) if self._has_ignored_age(path) else path for path in filled]

        return list_paths

    def inputs(self, stage: str, segment: Segment | None = None) -> Callable[[Any], list[str]]:
        """Return the input function of a stage's rule: the files that the job reads, and `OUTDATED` if it has to run.

        A job has to run if one of its results is not valid. For `segment` see `outputs`, for the files `records`.
        """
        list_records = self.records(*self.input_paths(stage, segment))

        def list_paths(wildcards: Any) -> list[str]:
            outdated = [] if self._is_valid_job(stage, segment, wildcards) else [OUTDATED.as_posix()]
            return outdated + list_records(wildcards)

        return list_paths

    def _is_valid_job(self, stage: str, segment: Segment | None, wildcards: Any) -> bool:
        """Return True if all results of a job are valid."""
        if self.validity is None:  # a job, of which the controller has decided that it runs
            return True
        seed = int(wildcards.seed) if hasattr(wildcards, "seed") else None
        method, snapshot = wildcards.get("method"), wildcards.get("step")
        results = [Result(stage, method, seed, name) for name in (segment.snapshots if segment else [snapshot])]
        is_valid = all(map(self.validity.is_valid, results))
        if stage == TRAIN.name and segment and segment.is_last:
            return is_valid and self._has_ended(results[-1])
        return is_valid

    def has_valid_outputs(self, outputs: list[str]) -> bool:
        """Return True if the outputs of a job exist, and results among them have the present key and inputs.

        Files are read again, unlike in `validity`. An error that prevents this counts as an invalid output.
        """
        layout = replace(self, validity=Validity(self.experiment, self.results, reads_outside=True))
        try:
            results = [result for result in map(layout._validity.find_result, outputs) if result is not None]
            if not (all(map(os.path.exists, outputs)) and all(map(layout._validity.is_unchanged, results))):
                return False
            return "training.json" not in map(os.path.basename, outputs) or layout._has_ended(results[-1])
        except (OSError, KairosError, LookupError):
            return False

    def _has_ended(self, result: Result) -> bool:
        """Return True if training.json has the identity and the step of the run's last snapshot."""
        run_record = glance(run_folder(self.results, str(result.method), str(result.seed)) / "training.json")
        snapshot_record = self._validity.record(result)
        last = (snapshot_record["identity"], snapshot_record["step"])
        return (run_record.get("identity"), run_record.get("steps")) == last

    def _has_ignored_age(self, path: str) -> bool:
        """Return True if the age of an input does not count: it is no record, or the record of a valid result.

        Ages of all results count if `ignores_age` returns False; in a job's process, no age counts.
        """
        if self.validity is None or not path.startswith(f"{self.results}/"):
            return True
        if not self.ignores_age():
            return False
        result = self.validity.find_result(path)
        return result is None or self.validity.is_valid(result)

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
    results = f"results/{resolved.experiment}"
    validity = Validity(resolved, results, reads_outside=True)
    layout = Layout(resolved, freeze(resolved), notes=notes + warn_of_missing(resolved), validity=validity)
    if validity.lacks_images:
        record_file = validity.path(Result("prepare"))
        layout.notes.append(f"dataset: files are missing here; the hash in {record_file} is used in their place")
    # different in each run, since Snakemake may compare contents
    write_text(OUTDATED, f"Results of jobs with this input are not valid. Written at {time.time_ns()}.\n")
    return layout


def write_plan(layout: Layout) -> Layout:
    """Write the plan of a controller for its jobs and for the next controller; return the layout with its file.

    The file ``.kairos/config/<experiment>-<hash>.json`` contains `Layout.describe_plan` and, as ``experiment``, the
    path of the frozen experiment.
    """
    content = {"experiment": str(layout.config_file.resolve()), **layout.describe_plan()}
    name = layout.experiment.experiment
    path = layout.config_file.with_name(f"{name}-{sha256_json(content)[:_PLAN_DIGITS]}.json").resolve()
    write_json(path, content)
    return replace(layout, plan_file=path)


def read_plan(layout: Layout, plan: str) -> dict[str, Any]:
    """Return the plan of an earlier controller of an experiment; empty: there is none."""
    return glance(layout.config_file.with_name(f"{layout.experiment.experiment}-{plan}.json"))


def load_planned_layout() -> Layout:
    """Return the layout, without notes, of the plan whose path `PLAN_VARIABLE` contains.

    Raises:
        KeyError: the controller has not set the variable.
        OSError, DamagedError: the plan is missing or damaged.
    """
    path = Path(os.environ[PLAN_VARIABLE])
    config_file = Path(read_json(path)["experiment"])
    return Layout(load(config_file), config_file, plan_file=path)


def find_planned_layout(config_file: Path | None) -> Layout | None:
    """Return the layout of the controller's plan if a command was called for its experiment; None: a user called it."""
    if config_file is None or PLAN_VARIABLE not in os.environ:
        return None
    layout = load_planned_layout()
    return layout if config_file.resolve() == layout.config_file else None
