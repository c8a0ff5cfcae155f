"""Progress of every training run of an experiment, read from small files: a thousand runs take a moment.

A file counts only for its owner:

- Results count by their identity and the settings in their records.
- The progress file of a run, ``.state/progress.json``, contains identity and job. It is outdated if its process was
  killed: a lock that is held shows that the process is alive, and SLURM's queue shows that its job is.
- Logs explain a state. They also show that a later attempt ended before it took the lock of the run.
"""

import fcntl
import os
import socket
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kairos.config import Experiment, load
from kairos.files import glance, list_by_step
from kairos.progress import duration
from kairos.slurm import Job, find_trainings
from kairos.snapshots import step_name
from kairos.stages import RUN_FOLDERS, TRAIN, run_folder
from kairos.status.job_logs import SILENT_SECONDS, JobLogs, find_end_of_job, find_error, log_age
from kairos.training.job import ACTIVE_STATES, ProgressRecord, read_progress
from kairos.validity import Result, Validity, format_changes, state_folder
from kairos_timesteps.errors import KairosError

# all states of a run, in the order in which `kairos status` counts them
STATES = ("running", "starting", "queued", "failed", "dead", "stopped", "waiting", "outdated", "complete")
_TROUBLE = ("failed", "dead", "stopped")  # states whose reason is in the progress file or the logs
_FRESH_SECONDS = 30.0  # age below which a progress file from another machine needs no lock


@dataclass(frozen=True)
class Outline:
    """The training runs of an experiment, and the folder of its results.

    Attributes:
        results: folder of the results.
        experiment: the experiment.
        note: where the experiment is from if no file of it is known; else empty.
    """

    results: Path
    experiment: Experiment
    note: str = ""

    @cached_property
    def trainings(self) -> list[tuple[str, int]]:
        """Method and seed of each run."""
        return [(method, seed) for method in self.experiment.methods for seed in self.experiment.seeds]

    @property
    def milestones(self) -> tuple[int, ...]:
        """Steps of the snapshots of each run, 0 first."""
        return self.experiment.milestones

    @cached_property
    def validity(self) -> Validity:
        """Decides which results are valid."""
        return Validity(self.experiment, self.results)

    @cached_property
    def _run_folders(self) -> dict[tuple[str, int], Path]:
        """Folder of each training run; cached, since every file of a run is found through it."""
        return {(method, seed): run_folder(self.results, method, seed) for method, seed in self.trainings}

    def run_folder(self, method: str, seed: int) -> Path:
        """Return the folder of a training run.

        Raises:
            KeyError: the outline has no such training run.
        """
        return self._run_folders[method, seed]

    def count_other_runs(self) -> int:
        """Return the number of folders of training runs that the experiment does not list."""
        return len({*self.results.glob(RUN_FOLDERS)} - {*self._run_folders.values()})


def load_outline(path: Path) -> Outline:
    """Return the outline of an experiment from its file or its folder of results.

    The results of an experiment file are in ``results/<experiment>`` of the working directory. For a folder of results,
    the newest frozen experiment of that folder is read, see `_find_kept_experiment`. Without one, such as in pulled
    results, the experiment is that in the record of the newest snapshot.

    Raises:
        KairosError: the folder has neither a frozen experiment nor a snapshot.
        ConfigError: the file is missing, or is not a valid experiment.
    """
    is_folder = path.is_dir()
    experiment_file = _find_kept_experiment(path) if is_folder else path
    if experiment_file is None:
        if not any(path.glob(f"{RUN_FOLDERS}/snapshots/*/snapshot.json")):
            has_runs = any(path.glob(RUN_FOLDERS))
            problem = "contains no snapshot yet, which records the experiment" if has_runs else "no training run there"
            raise KairosError(f"{path}: {problem}; pass the experiment file or a folder results/<experiment>")
        from kairos.report.collect import load_recorded_experiment  # imports pandas, which takes a second

        note = "experiment: as recorded with the newest snapshot; pass the experiment file if it lists other runs"
        return Outline(path, load_recorded_experiment(path), note)
    experiment = load(experiment_file)
    return Outline(path if is_folder else Path("results") / experiment.experiment, experiment)


def _find_kept_experiment(results: Path) -> Path | None:
    """Return the path of the newest frozen experiment in ``.kairos/config`` for a folder of results.

    None: there is no such file, or the folder is not in ``results`` of the working directory.
    """
    if results.resolve() != (Path("results") / results.name).resolve():
        return None
    any_hash = "?" * 16  # 16 characters: `*` would also find files of an experiment named `<name>-other`
    kept_files = Path(".kairos/config").glob(f"{results.name}-{any_hash}.yaml")
    return max(kept_files, key=os.path.getmtime, default=None)


@dataclass(frozen=True)
class RunProgress:
    """State and progress of a training run.

    Attributes:
        method, seed: the training run.
        state: one of `STATES`. ``dead``: the progress file is of a running job, but no process holds the lock.
            ``outdated``: all files of the run were computed with earlier settings.
        step: completed steps, as far as known; 0 for an outdated run.
        last_step: step at which the run is complete: the last milestone, or the recorded steps if they are more.
        rate: steps per second; None if the run is not running, or has not measured its rate yet.
        location: host and job as text; empty: unknown.
        note: why the run is in its state, such as the error of a failed one; empty: nothing to add.
        logs: log files of a run that failed, died or stopped; else empty.
        identity: identity of the run in the progress file or else in its record; None: unknown.
    """

    method: str
    seed: int
    state: str
    step: int
    last_step: int
    rate: float | None = None
    location: str = ""
    note: str = ""
    logs: tuple[str, ...] = ()
    identity: str | None = None

    @property
    def seconds_left(self) -> float | None:
        """Seconds to the last step at the present rate; None if the rate is unknown."""
        return (self.last_step - self.step) / self.rate if self.rate else None


def list_run_progress(outline: Outline, jobs: list[Job], queue_is_known: bool = True) -> list[RunProgress]:
    """Return the progress of all training runs of an experiment, in the order of `outline.trainings`.

    Args:
        outline: the experiment.
        jobs: its jobs in SLURM's queue. If a run is in several, the job in its progress file counts, else the last.
        queue_is_known: False if SLURM has not answered, so that `jobs` may lack some.
    """
    runs_per_job = outline.experiment.training.trainings_per_gpu
    training_jobs = [job for job in jobs if job.stage in ("train", "trainings")]
    job_by_run: dict[tuple[str, int], Job] = {}
    for training_job in training_jobs:
        runs_of_job = find_trainings(training_job.comment, outline.trainings, runs_per_job)
        job_by_run |= dict.fromkeys(runs_of_job, training_job)
    job_by_number = {job.number: job for job in jobs}
    logs = JobLogs(outline.results, queue_is_known)
    runs = []
    for method, seed in outline.trainings:
        progress = read_progress(outline.run_folder(method, seed))
        job = job_by_number.get(str(progress.get("job"))) or job_by_run.get((method, seed))
        run_logs = _RunLogs(logs, outline, method, seed)
        runs.append(_assess_run(outline, method, seed, progress, job, run_logs))
    return runs


def _assess_run(
    outline: Outline, method: str, seed: int, progress: ProgressRecord, job: Job | None, logs: "_RunLogs"
) -> RunProgress:
    """Return the state and progress of a training run.

    The first case that applies decides:

    1. The progress file contains ``running`` or ``starting``, and the process is alive: this state.
    2. A job is in the queue that has not written the progress file: ``queued`` if it is pending, else ``starting``.
    3. Record and snapshots of the run cover all milestones and have the experiment's settings: ``complete``.
    4. A later attempt than that of the progress file has begun, see `_RunLogs.find_later_attempt`: its state.
    5. The results have other settings than the experiment: ``outdated``.
    6. The progress file contains ``running`` or ``starting``, so the process was killed: ``dead``.
    7. There is no progress file, or it is of a completed earlier segment: ``waiting``.
    8. The state is in the progress file: ``stopped`` or ``failed``.

    `progress` is empty without a progress file, and `job` is None if the queue does not contain the run.
    """
    folder = outline.run_folder(method, seed)
    is_active = progress.get("state") in ACTIVE_STATES and _is_alive(folder / ".state" / "lock", progress, job)
    record = glance(folder / "training.json")
    if not is_active:
        progress = _drop_discarded(folder, progress)
    begun, ended = progress.get("identity"), record.get("identity")
    if begun and ended and begun != ended:  # one of the two is of other settings
        if not is_active and ended in outline.validity.identities(method, seed):
            progress = {}
        else:
            record = {}
    is_in_queue = job is not None and not _has_reported(progress, job)
    changes = "" if is_active or is_in_queue else _find_changed_settings(outline, method, seed, progress)
    step = 0 if changes else _find_completed_steps(folder, record, progress)
    last_step = max(outline.milestones[-1], record.get("steps", 0))  # more, if the experiment has been shortened

    state, note = str(progress.get("state", "")), ""
    if is_active:
        note = _describe_activity(progress, job)
    elif job is not None and is_in_queue:  # `job is not None` is for the type checker alone
        state, note = "queued" if job.pending else "starting", _describe_job(job)
    elif not changes and _is_complete(outline, method, seed, record):
        state = "complete"
    elif later_attempt := logs.find_later_attempt(progress):
        state, note = later_attempt
        progress = {}  # of an earlier attempt
    elif changes and (not progress or progress.get("identity")):  # else the run failed before it knew its identity
        state, note, last_step = "outdated", f"changed settings: {changes}", outline.milestones[-1]
        progress, record = {}, {}
    elif state in ACTIVE_STATES:
        state = "dead"
        age = f"no process holds its lock; last update {_format_age(progress['updated'])}"
        note = "; ".join(filter(None, [logs.find_end_of_job(progress), age]))
    elif state in _TROUBLE:
        note = progress["message"]
    else:
        state = "waiting"
    return RunProgress(
        method=method,
        seed=seed,
        state=state,
        step=step,
        last_step=last_step,
        rate=(progress.get("rate") or None) if state == "running" else None,  # a rate of 0 is treated as unknown
        location=_find_location(state, progress, job),
        note=note,
        logs=logs.list_paths(progress) if state in _TROUBLE else (),
        identity=progress.get("identity") or record.get("identity"),
    )


def _drop_discarded(folder: Path, progress: ProgressRecord) -> ProgressRecord:
    """Return the content of a progress file; empty if the state that it is about has been discarded."""
    identity = progress.get("identity")
    return {} if identity and not state_folder(folder, identity).exists() else progress


def _find_completed_steps(folder: Path, record: dict[str, Any], progress: ProgressRecord) -> int:
    """Return the number of completed steps: the larger number of record and progress file, else the last snapshot's.

    Snapshots are read only if both files are missing. Without any of them the result is 0.
    """
    if record or progress:
        return int(max(record.get("steps", 0), progress.get("step", 0)))
    snapshots = [path for path in list_by_step(folder / "snapshots") if (path / "snapshot.json").exists()]
    return int(snapshots[-1].name) if snapshots else 0


def _is_complete(outline: Outline, method: str, seed: int, record: dict[str, Any]) -> bool:
    """Return True if a run's record covers all milestones, their snapshots exist, and the last has its identity."""
    *earlier, last = [Result(TRAIN.name, method, seed, step_name(step)) for step in outline.milestones]
    if record.get("steps", -1) < outline.milestones[-1]:
        return False
    last_record = outline.validity.record(last)
    has_identity = bool(last_record) and last_record.get("identity") == record.get("identity")
    return has_identity and all(outline.validity.path(result).is_file() for result in earlier)


def _find_changed_settings(outline: Outline, method: str, seed: int, progress: ProgressRecord) -> str:
    """Return what has changed since a run was computed, as text; empty: nothing, or it is unknown.

    It is found in the record of the first published snapshot. If the state that the run wrote last has another
    identity, it is found in the record of the first snapshot of that state. Without a snapshot it is unknown.
    """
    begun_identity = progress.get("identity")
    folder = outline.run_folder(method, seed)
    snapshot = find_first_snapshot(folder)
    published_identity = glance(snapshot).get("identity") if snapshot else None
    if begun_identity and begun_identity != published_identity:
        # a newer run has begun and published nothing yet: its snapshots are in its state folder, named by 16 digits
        snapshot = find_first_snapshot(state_folder(folder, begun_identity))
    if snapshot is None:
        return ""
    result = Result(TRAIN.name, method, seed, snapshot.parent.name)
    return format_changes(outline.validity.compare(result, glance(snapshot)))


def find_first_snapshot(folder: Path) -> Path | None:
    """Return the path of the record of the snapshot with the lowest step; None: there is none.

    A run with new settings replaces this snapshot before all others, so its record has the present settings. The folder
    belongs to a training run or a state. Snapshots without a record are skipped.
    """
    records = (snapshot / "snapshot.json" for snapshot in list_by_step(folder / "snapshots"))
    return next((record for record in records if record.exists()), None)


def _describe_job(job: Job) -> str:
    """Return SLURM's reason for a pending job, and SLURM's state of another one unless it is RUNNING."""
    if job.pending:
        return job.reason if job.reason != "None" else ""  # squeue writes "None" for no reason
    return job.state.lower() if job.state != "RUNNING" else ""  # such as COMPLETING


def _describe_activity(progress: ProgressRecord, job: Job | None) -> str:
    """Return the text of `_describe_job` or, if it is empty, the age of the last update of a silent run."""
    is_silent = time.time() - progress["updated"] > SILENT_SECONDS
    age = f"last update {_format_age(progress['updated'])}" if is_silent else ""
    return (job is not None and _describe_job(job)) or age


def _format_age(unix_time: float) -> str:
    """Return the duration since a time as text, such as ``3:05 ago``; a time in the future is treated as now."""
    return f"{duration(max(time.time() - unix_time, 0))} ago"


def _find_location(state: str, progress: ProgressRecord, job: Job | None) -> str:
    """Return host and job of a run as text, such as ``node1 job 17``, as far as known; empty: neither is known.

    The host is in the progress file, and the job in the queue or else in the progress file. For a run that is queued,
    waiting or complete, and before its job writes the progress file, only a job in the queue is included.
    """
    has_host = state not in ("queued", "waiting", "complete") and (job is None or _has_reported(progress, job))
    host = progress.get("host", "") if has_host else ""
    number = job.number if job is not None else progress.get("job") if host else None
    return " ".join(filter(None, [host, f"job {number}" if number else ""]))


def _has_reported(progress: ProgressRecord, job: Job) -> bool:
    """Return True if a job has written the progress file since its last start; SLURM may have requeued it before."""
    is_of_job = job.number == str(progress.get("job")) and job.begun is not None
    return is_of_job and not job.pending and progress["updated"] >= (job.begun or 0.0)


def _is_alive(lock: Path, progress: ProgressRecord, job: Job | None) -> bool:
    """Return True if the process that wrote a progress file as running or starting is still alive.

    While SLURM lists the job that wrote the file as pending or running, the queue alone decides, see `_has_reported`.
    Otherwise the process is alive if its lock is held. Locks may not reach other machines, so a file of another
    machine, or without a host, also counts if it is less than 30 s old.
    """
    if job is not None and job.number == str(progress.get("job")) and (job.pending or job.state == "RUNNING"):
        return _has_reported(progress, job)
    if is_locked(lock):
        return True
    is_of_other_machine = progress.get("host") != socket.gethostname()
    return is_of_other_machine and time.time() - progress["updated"] < _FRESH_SECONDS


def is_locked(lock: Path) -> bool:
    """Return True if a process holds the lock, or the file cannot be opened or locked; False if there is no file.

    The check takes the lock as shared and releases it at once, so it keeps no process out.
    """
    try:
        with open(lock, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


@dataclass(frozen=True)
class _RunLogs:
    """Logs of a training run: of the command, and of SLURM about its jobs."""

    logs: JobLogs
    outline: Outline
    method: str
    seed: int

    @cached_property
    def _log(self) -> Path | None:
        return self.logs.find_log(f"train_{self.method}_seed{self.seed}")

    @cached_property
    def _slurm_log(self) -> Path | None:
        folders = [f"rule_{TRAIN.name}*/{self.method}_{self.seed}"]
        runs_per_job = self.outline.experiment.training.trainings_per_gpu
        if runs_per_job > 1:  # as the workflow names the groups of runs that share a job
            group = f"group_trainings*_{self.outline.trainings.index((self.method, self.seed)) // runs_per_job}"
            folders += [f"{group}_train*", f"{group}_alone_{self.method}_seed{self.seed}_train*"]
        return self.logs.find_slurm_log(*folders)

    def list_paths(self, progress: ProgressRecord) -> tuple[str, ...]:
        """Return the logs of the last attempt: of the command, and of SLURM unless its job is of an earlier attempt."""
        slurm_log = self._slurm_log
        if slurm_log is not None and slurm_log.stem != progress.get("job") and not _is_later(slurm_log, progress):
            slurm_log = None
        return tuple(str(log) for log in (self._log, slurm_log) if log)

    def find_end_of_job(self, progress: ProgressRecord) -> str:
        """Return why SLURM's job of a progress file has ended; empty: unknown."""
        is_of_job = self._slurm_log is not None and self._slurm_log.stem == progress.get("job")
        return find_end_of_job(self._slurm_log) if is_of_job else ""

    def find_later_attempt(self, progress: ProgressRecord) -> tuple[str, str] | None:
        """Return state and note of an attempt that has begun after that of the progress file; None: there is none.

        The attempt has not taken the run's lock, else it would have written the progress file. No job in the queue
        computes the run. The caller passes an empty `progress` if there is no progress file.

        - SLURM's log is of a later job: ``starting`` if it may still run, see `JobLogs.may_run`. Otherwise it is
          ``stopped`` if it was cancelled, else ``failed``.
        - The log of the command ends with another error than that of the progress file: ``stopped`` or ``failed``.
        - The log of the command is empty: ``starting`` if a controller runs, and the log is new. Otherwise it is
          ``failed``, but only without a progress file, which would tell more.
        """
        slurm_log, log = self._slurm_log, self._log
        reason = find_end_of_job(slurm_log)
        # a job of several runs may have found this one complete
        is_other_run = progress.get("state") == "complete" and self.outline.experiment.training.trainings_per_gpu > 1
        is_later = slurm_log is not None and self.logs.is_recent(slurm_log) and _is_later(slurm_log, progress)
        if slurm_log is not None and is_later and reason and not is_other_run:
            if self.logs.may_run(slurm_log):
                return "starting", ""
            is_cancelled = "CANCELLED" in reason and "TIME LIMIT" not in reason
            return "stopped" if is_cancelled else "failed", reason
        if log is None or not self.logs.is_recent(log) or log.stat().st_mtime <= progress.get("updated", 0.0):
            return None
        error, message = find_error(log), progress.get("message")
        if error:
            is_of_progress_file = bool(message) and str(message) in error
            is_request = "run the same command again to resume" in error
            return None if is_of_progress_file else ("stopped" if is_request else "failed", error)
        is_empty = log.stat().st_size == 0
        if (is_empty or not progress) and log_age(log) < SILENT_SECONDS and self.logs.has_controller:
            return "starting", ""
        return ("failed", "its job ended without a message") if is_empty and not progress else None


def _is_later(slurm_log: Path, progress: ProgressRecord) -> bool:
    """Return True if SLURM's log is of a later job than the progress file; SLURM numbers jobs in ascending order."""
    number = progress.get("job")
    if number is not None and number.isdecimal():
        return int(slurm_log.stem) > int(number)
    return slurm_log.stat().st_mtime > progress.get("updated", 0.0)
