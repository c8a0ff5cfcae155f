"""Outputs of an experiment's stages: which exist, and which samples and evaluations have the experiment's settings."""

import textwrap
from functools import cached_property
from pathlib import Path

from kairos.files import list_by_step
from kairos.slurm import Job
from kairos.status.job_logs import JobLogs, find_end_of_job, find_error, log_age, read_last_line
from kairos.status.run_progress import Outline
from kairos.validity import Result, format_changes

_LINE_LENGTH = 120  # columns of a terminal
_LOG_INTERVAL = 60.0  # largest age in seconds of the last line of a job that is running; most write one every 10 s


class RunOutputs:
    """Samples and evaluations of a training run.

    A file is valid if it, and all that it was computed from, have the experiment's settings, see `kairos.validity`.

    Args:
        outline: the experiment.
        method, seed: the training run.

    Attributes:
        folder: folder of the training run.
    """

    def __init__(self, outline: Outline, method: str, seed: int):
        self.folder = outline.run_folder(method, seed)
        self._outline, self._method, self._seed = outline, method, seed

    @cached_property
    def samples(self) -> dict[str, bool]:
        """Validity of each file of samples, by the step in its name, such as ``0000400``; True: valid."""
        paths = list_by_step(self.folder / "samples", ".npz")
        return {path.stem: self._is_valid("sample", path) for path in paths}

    @cached_property
    def evaluations(self) -> dict[str, bool]:
        """Validity of each evaluation, by the step in its name, such as ``0000400``; True: valid."""
        paths = list_by_step(self.folder / "evaluation", ".json")
        return {path.stem: self._is_valid("evaluate", path) for path in paths}

    @property
    def last_evaluation(self) -> Path | None:
        """Path of the valid evaluation of the highest step; None: there is none."""
        paths = reversed(list_by_step(self.folder / "evaluation", ".json"))
        return next((path for path in paths if self.evaluations.get(path.stem)), None)

    @property
    def last_grid(self) -> Path | None:
        """Path of the PNG of the highest step whose samples are valid, see `_is_grid_valid`; None: there is none."""
        paths = reversed(list_by_step(self.folder / "samples", ".png"))
        return next((path for path in paths if self._is_grid_valid(path)), None)

    def _is_valid(self, stage: str, path: Path) -> bool:
        """Return True if the samples or the evaluation in a file have the experiment's settings and present inputs.

        A file without a record, or whose name is the step of no snapshot of the experiment, is not valid.
        """
        validity = self._outline.validity
        result = Result(stage, self._method, self._seed, path.stem)
        is_of_experiment = int(path.stem) in self._outline.milestones
        return is_of_experiment and bool(validity.record(result)) and not validity.find_changes(result)

    def _is_grid_valid(self, path: Path) -> bool:
        """Return True if the samples of an image grid are valid, also if they are deleted."""
        return self._is_valid("sample", path)


def summarise_stages(outline: Outline, outputs: list[RunOutputs], jobs: list[Job], queue_is_known: bool = True) -> str:
    """Return lines of text: complete and missing stages, messages of other stages, counts of samples and evaluations.

    A stage that all training runs share is complete if its record exists and is not outdated. `outputs` contains all
    training runs, and `jobs` the jobs in SLURM's queue. If `queue_is_known` is False, `jobs` may lack some.
    """
    validity = outline.validity
    shared = [row.name for row in validity.stages.values() if not row.per_snapshot]
    existing = [name for name in shared if validity.record(Result(name))]
    missing = [name for name in shared if name not in existing]
    changes = _find_changed_stages(outline, existing)
    outdated = [name for group in changes.values() for name in group]
    complete = [name for name in existing if name not in outdated]
    stages = f"complete: {', '.join(complete) or 'none'}; missing: {', '.join(missing) or 'none'}"
    if changes:
        groups = (f"{', '.join(group)} ({change})" for change, group in changes.items())
        stages += f"; outdated: {', '.join(groups)}"
    expected_count = len(outline.trainings) * len(outline.milestones)
    queued = {job.stage for job in jobs}
    stage_messages = _find_stage_messages(outline, [*missing, *outdated], queued, queue_is_known)
    samples = _count_files("samples", [run.samples for run in outputs], expected_count)
    evaluations = _count_files("evaluations", [run.evaluations for run in outputs], expected_count)
    counts = f"{samples}, {evaluations}"
    return "\n".join([stages, *stage_messages, counts, *_describe_other_code(outline), *_describe_outline(outline)])


def _find_changed_stages(outline: Outline, stages: list[str]) -> dict[str, list[str]]:
    """Return those stages that are outdated, by what has changed since they were computed."""
    changes: dict[str, list[str]] = {}
    for name in stages:
        stage_changes = outline.validity.find_changes(Result(name))
        if stage_changes:
            changes.setdefault(format_changes(stage_changes), []).append(name)
    return changes


def _describe_other_code(outline: Outline) -> list[str]:
    """Return a list with a line about results whose code alone differs from the present one; else it is empty."""
    validity = outline.validity
    names = [row.name for row in validity.stages.values() if not row.is_summary]
    results = [result for name in names for result in validity.list_results(name) if validity.record(result)]
    count = sum(map(validity.differs_by_code_only, results))
    if count == 0:
        return []
    return [f"{count} of {len(results)} results differ by code only; kairos accept keeps them"]


def _describe_outline(outline: Outline) -> list[str]:
    """Return lines about an experiment that is known from a record, and about runs that it does not list."""
    count = outline.count_other_runs()
    verb = "training run in the folder is" if count == 1 else "training runs in the folder are"
    other_runs = f"{count} {verb} not of this experiment" if count else ""
    return [line for line in (outline.note, other_runs) if line]


def _find_stage_messages(outline: Outline, stages: list[str], queued: set[str], queue_is_known: bool) -> list[str]:
    """Return lines with the error, or else the progress, at the end of each stage's log.

    An error is the text ``encode failed: ...`` in lines of at most 120 columns: the error of the stage, or the reason
    why SLURM has ended its job. A stage with a job in the queue, `queued`, has none, since its logs may be of an
    earlier job. Progress is the line ``now: ...``, cut at 120 columns: the last line, whatever it is, of a log written
    in the last minute, of a stage without results. A stage with neither has no line.
    """
    logs = JobLogs(outline.results, queue_is_known)
    messages = []
    for stage in stages:
        log, slurm_log = logs.find_log(stage), logs.find_slurm_log(f"rule_{stage}")
        last_line = read_last_line(log)
        error = find_error(log) if logs.is_recent(log) else ""
        if not last_line and slurm_log and logs.is_recent(slurm_log) and not logs.may_run(slurm_log):
            error = find_end_of_job(slurm_log)  # of a job that ended before its first line
        if error:
            messages += [] if stage in queued else textwrap.wrap(f"{stage} failed: {error}", _LINE_LENGTH)
        elif (
            log is not None
            and last_line
            and not outline.validity.record(Result(stage))
            and log_age(log) < _LOG_INTERVAL
        ):
            messages.append(f"now: {last_line}"[:_LINE_LENGTH])
    return messages


def _count_files(name: str, files_of_runs: list[dict[str, bool]], expected_count: int) -> str:
    """Return the number of valid files as text, such as ``samples 3 of 8 (1 outdated)``.

    Files that are not valid are counted as outdated; without them the bracket is left out. `files_of_runs` contains the
    validity of each file, by step, for each training run. `expected_count` is for the whole experiment.
    """
    validity = [is_valid for files in files_of_runs for is_valid in files.values()]
    valid_count, outdated_count = validity.count(True), validity.count(False)
    outdated = f" ({outdated_count} outdated)" if outdated_count else ""
    return f"{name} {valid_count} of {expected_count}{outdated}"
