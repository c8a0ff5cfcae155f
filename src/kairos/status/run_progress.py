"""Progress of every training run of an experiment, read from small files: a thousand runs take a moment.

A run writes ``.state/progress.json``, which is outdated if the process was killed. A lock that is held shows that the
process is alive, and SLURM's queue shows that its job is.
"""

import fcntl
import glob
import os
import re
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kairos.config import Experiment, load
from kairos.files import glance, list_by_step
from kairos.progress import duration
from kairos.slurm import Job
from kairos.stages import RUN_FOLDERS, TRAIN, run_folder
from kairos.training.job import ProgressRecord, read_progress
from kairos.validity import Result, Validity, format_changes, state_folder
from kairos_timesteps.errors import KairosError

# all states of a run, in the order in which `kairos status` counts them
STATES = ("running", "starting", "queued", "failed", "dead", "stopped", "waiting", "outdated", "complete")
_ACTIVE = ("running", "starting", "queued")
_TROUBLE = ("failed", "dead", "stopped")  # states whose reason is in the progress file or the logs
_FRESH_SECONDS = 30.0  # age below which a progress file from another machine needs no lock
_SILENT_SECONDS = 300.0  # silence from which a running job gets a note, and a job that only has a log has failed
_LOG_NAME = re.compile(r"train_(.+_seed\d+?)(?:_\d+)?\.log")  # train_uniform_seed0.log, or _2.log for segment 2
_LOG_TAIL = 2000  # bytes at the end of a log that are searched for its last line


@dataclass(frozen=True)
class Outline:
    """The training runs of an experiment, and the folder of its results.

    Attributes:
        results: folder of the results.
        trainings: method and seed of each run.
        milestones: steps, 0 first; empty if only a folder of results is known.
        experiment: the experiment; None if only a folder of results is known.
    """

    results: Path
    trainings: list[tuple[str, int]]
    milestones: tuple[int, ...] = ()
    experiment: Experiment | None = None

    @cached_property
    def validity(self) -> Validity | None:
        """Decides which results are valid; None if only a folder of results is known."""
        return None if self.experiment is None else Validity(self.experiment, self.results)

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


def load_outline(path: Path) -> Outline:
    """Return the outline of an experiment from its file or its folder of results.

    The results of an experiment file are in ``results/<experiment>`` of the working directory. For a folder of results,
    the newest frozen experiment of that folder is read, see `_find_kept_experiment`. Without one, the outline has the
    training runs that have a folder, and neither milestones nor an experiment.

    Raises:
        KairosError: the folder has neither a frozen experiment nor a training run.
        ConfigError: the file is missing, or is not a valid experiment.
    """
    is_folder = path.is_dir()
    experiment_file = _find_kept_experiment(path) if is_folder else path
    if experiment_file is None:
        return Outline(results=path, trainings=_list_training_folders(path))
    experiment = load(experiment_file)
    return Outline(
        results=path if is_folder else Path("results") / experiment.experiment,
        trainings=[(method, seed) for method in experiment.methods for seed in experiment.seeds],
        milestones=experiment.milestones,
        experiment=experiment,
    )


def _find_kept_experiment(results: Path) -> Path | None:
    """Return the path of the newest frozen experiment in ``.kairos/config`` for a folder of results.

    None: there is no such file, or the folder is not in ``results`` of the working directory.
    """
    if results.resolve() != (Path("results") / results.name).resolve():
        return None
    any_hash = "?" * 16  # 16 characters: `*` would also find files of an experiment named `<name>-other`
    kept_files = Path(".kairos/config").glob(f"{results.name}-{any_hash}.yaml")
    return max(kept_files, key=os.path.getmtime, default=None)


def _list_training_folders(results: Path) -> list[tuple[str, int]]:
    """Return method and seed of each folder of a training run, such as ``uniform/seed0``, sorted by both.

    Raises:
        KairosError: there is no folder of a training run.
    """
    trainings = []
    for folder in results.glob(RUN_FOLDERS):
        seed = folder.name.removeprefix("seed")
        if seed.isdigit():
            trainings.append((folder.parent.name, int(seed)))
    if not trainings:
        raise KairosError(f"{results}: no training run there; pass an experiment file or a folder results/<experiment>")
    return sorted(trainings)


@dataclass(frozen=True)
class RunProgress:
    """State and progress of a training run.

    Attributes:
        method, seed: the training run.
        state: one of `STATES`. ``dead``: the progress file is of a running job, but no process holds the lock.
            ``outdated``: all files of the run were computed with earlier settings.
        step: completed steps, as far as known; 0 for an outdated run.
        last_step: step at which the run is complete, usually the last milestone, see `_find_last_step`; None: unknown.
        rate: steps per second; None if the run is not running, or has not measured its rate yet.
        location: host and job as text; empty: unknown.
        note: why the run is in its state, such as the error of a failed one; empty: nothing to add.
        logs: log files of a run that failed, died or stopped, or that waits without a progress file; else empty.
    """

    method: str
    seed: int
    state: str
    step: int
    last_step: int | None
    rate: float | None
    location: str
    note: str
    logs: tuple[str, ...] = ()

    @property
    def seconds_left(self) -> float | None:
        """Seconds to the last step at the present rate; None if the rate or the last step is unknown."""
        if not self.rate or self.last_step is None:
            return None
        return (self.last_step - self.step) / self.rate


def list_run_progress(outline: Outline, jobs: list[Job]) -> list[RunProgress]:
    """Return the progress of all training runs of an experiment, in the order of `outline.trainings`.

    `jobs` are the experiment's jobs in SLURM's queue. If a run is in several jobs, the last of them is used.
    """
    job_by_run: dict[tuple[str, int], Job] = {}
    for job_in_queue in jobs:
        for training in job_in_queue.trainings:
            job_by_run[training] = job_in_queue
    job_by_number = {job_in_queue.number: job_in_queue for job_in_queue in jobs}
    logs = RunLogs(outline.results)
    runs = []
    for method, seed in outline.trainings:
        progress = read_progress(outline.run_folder(method, seed))
        job = job_by_run.get((method, seed))
        if job is None:  # the queue may not list a job's training runs; the progress file contains the job
            job = job_by_number.get(str(progress.get("job") or ""))  # no job has the number ""
        runs.append(_assess_run(outline, method, seed, progress, job, logs))
    return runs


def _assess_run(
    outline: Outline, method: str, seed: int, progress: ProgressRecord, job: Job | None, run_logs: "RunLogs"
) -> RunProgress:
    """Return the state and progress of a training run, from its record, progress file, job, snapshots and logs.

    A run that is not active (running, starting or queued), and whose settings differ from the experiment's, is
    ``outdated``. A run that only has a log is ``starting`` if the log is new and empty, else ``failed``. For all
    other runs see `_find_state`. `progress` is empty without a progress file, and `job` is None if the queue does not
    contain the run.
    """
    # the record of the run's end, and the step at which the run is complete
    folder = outline.run_folder(method, seed)
    begun_identity = progress.get("identity")  # of the run that was begun last; the record may be of an earlier one
    record = glance(folder / "training.json")
    if begun_identity and record.get("identity", begun_identity) != begun_identity:
        record = {}  # the run has started again with other settings; a record without an identity is kept
    last_milestone = outline.milestones[-1] if outline.milestones else None
    last_step = _find_last_step(last_milestone, record, progress)

    # the state without the logs; any record is complete if no number of steps is known, and one without steps is not
    is_complete = bool(record) and (last_step is None or record.get("steps", -1) >= last_step)
    state = _find_state(folder, progress, job, is_complete)
    if state not in _ACTIVE:
        changes = _find_changed_settings(outline, method, seed, begun_identity)
        if changes:
            return RunProgress(
                method=method,
                seed=seed,
                state="outdated",
                step=0,
                last_step=last_milestone,
                rate=None,
                location="",
                note=f"changed settings: {changes}",
            )

    # the logs of a run that has failed, stopped or written no progress
    needs_logs = state in _TROUBLE or (state == "waiting" and not progress)
    logs = run_logs.find(method, seed, progress.get("job")) if needs_logs else ()
    note = _find_note(state, progress, job, logs)
    if state == "waiting" and logs and not record:
        # only a log: the job ended before its first step, or has not written its first message yet
        is_new = not note and time.time() - os.path.getmtime(logs[0]) < _SILENT_SECONDS
        state = "starting" if is_new else "failed"
    return RunProgress(
        method=method,
        seed=seed,
        state=state,
        step=_find_completed_steps(folder, record, progress),
        last_step=last_step,
        rate=(progress.get("rate") or None) if state == "running" else None,  # a rate of 0 is treated as unknown
        location=_find_location(state, progress, job),
        note=note,
        logs=logs,
    )


def _find_last_step(last_milestone: int | None, record: dict[str, Any], progress: ProgressRecord) -> int | None:
    """Return the step at which a training run is complete; None: unknown.

    It is the last milestone, or the recorded steps if they are more. Without milestones (`last_milestone` is None) it
    is the last step of the present job or, without a progress file, the recorded steps. `record` and `progress` are
    empty if their file is missing.
    """
    recorded_steps: int | None = record.get("steps")
    if last_milestone is None:
        last_step: int | None = progress.get("of", recorded_steps)
        return last_step
    if recorded_steps is None:
        return last_milestone
    return max(last_milestone, recorded_steps)  # more, if the run was longer before the experiment was shortened


def _find_completed_steps(folder: Path, record: dict[str, Any], progress: ProgressRecord) -> int:
    """Return the number of completed steps: the larger number of record and progress file, else the last snapshot's.

    Snapshots are read only if both files are missing. Without any of them the result is 0.
    """
    if record or progress:
        return int(max(record.get("steps", 0), progress.get("step", 0)))
    snapshots = [path for path in list_by_step(folder / "snapshots") if (path / "snapshot.json").exists()]
    return int(snapshots[-1].name) if snapshots else 0


def _find_state(folder: Path, progress: ProgressRecord, job: Job | None, is_complete: bool) -> str:
    """Return the state of a training run whose files are not outdated, from its progress file, job and record.

    The first case that applies decides:

    1. The progress file contains ``running``, and the process is alive: ``running``.
    2. A job is in the queue: ``queued`` if it is pending, else ``starting``.
    3. The run's record covers the last milestone (`is_complete`): ``complete``.
    4. The progress file contains ``running``, so the process was killed: ``dead``.
    5. There is no progress file, or it is of a completed earlier segment: ``waiting``.
    6. The state is in the progress file: ``stopped`` or ``failed``.
    """
    reported = progress.get("state", "")
    if reported == "running" and _is_alive(folder / ".state" / "lock", progress, job):
        return "running"
    if job is not None:
        return "queued" if job.pending else "starting"
    if is_complete:
        return "complete"
    if reported == "running":
        return "dead"
    # a job that completed an earlier segment: the next one is due
    return "waiting" if reported in ("", "complete") else str(reported)


def _find_changed_settings(outline: Outline, method: str, seed: int, begun_identity: str | None) -> str:
    """Return what has changed since a run was computed, as text; empty: nothing, or it is unknown.

    It is found in the record of the first published snapshot. If the state that the run wrote last has another identity
    (`begun_identity`; None: no state), it is found in the record of the first snapshot of that state. Without a
    snapshot or an experiment file it is unknown.
    """
    if outline.validity is None:
        return ""
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


def _find_note(state: str, progress: ProgressRecord, job: Job | None, logs: tuple[str, ...]) -> str:
    """Return why a run is in its state, from the queue, the progress file or the log; empty: nothing to add.

    - queued: SLURM's reason.
    - dead: the age of the last update.
    - failed or stopped: the message of the progress file or, without one, the last line of the log.
    - running or starting: SLURM's state of the job if it is not RUNNING. A running run whose last update is older than
      five minutes has the age of that update.
    - waiting: the last line of the log.

    Only the first file of `logs` is read.
    """
    if state == "queued" and job is not None:
        return job.reason if job.reason != "None" else ""  # squeue writes "None" for no reason
    if state == "dead":
        return f"no process holds its lock; last update {format_age(progress['updated'])}"
    if state in _TROUBLE:
        return str(progress.get("message") or read_last_line(logs))
    if job is not None and job.state != "RUNNING":  # such as COMPLETING
        return job.state.lower()
    if state == "running":
        is_silent = time.time() - progress["updated"] > _SILENT_SECONDS
        return f"last update {format_age(progress['updated'])}" if is_silent else ""
    return read_last_line(logs)


def format_age(unix_time: float) -> str:
    """Return the duration since a time as text, such as ``3:05 ago``; a time in the future is treated as now."""
    seconds = max(time.time() - unix_time, 0)
    return f"{duration(seconds)} ago"


def _find_location(state: str, progress: ProgressRecord, job: Job | None) -> str:
    """Return host and job of a run as text, such as ``node1 job 17``, as far as known; empty: neither is known.

    The host is in the progress file, and the job in the queue or else in the progress file. For a run that is queued,
    starting or complete, no host and only a job in the queue is included.
    """
    # a run that waits has no host yet, and the host of a complete run does not matter
    host = "" if state in ("queued", "starting", "complete") else str(progress.get("host", ""))
    job_number = None
    if job is not None:
        job_number = job.number
    elif host:
        job_number = progress.get("job")
    if not job_number:
        return host
    return f"{host} job {job_number}".strip()


def _is_alive(lock: Path, progress: ProgressRecord, job: Job | None) -> bool:
    """Return True if the process that wrote a progress file as running is still alive.

    While SLURM lists the job that wrote the file as pending or running, the queue alone decides. Then the job must have
    started, and the file must be newer than its start. Otherwise the process is alive if its lock is held. Locks may
    not reach other machines, so a file of another machine, or without a host, also counts if it is less than 30 s old.
    """
    has_written_file = job is not None and job.number == str(progress.get("job"))  # no job has the number "None"
    waits_or_runs = job is not None and (job.pending or job.state == "RUNNING")
    if job is not None and has_written_file and waits_or_runs:  # `job is not None` is for the type checker alone
        # an older progress file is from before SLURM requeued the job
        return job.begun is not None and progress["updated"] >= job.begun
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


class RunLogs:
    """Log files of training jobs, written by the workflow, or by SLURM's plugin in the working directory.

    The constructor lists the workflow's logs, so that `find` does not return logs that are created later.

    Args:
        results: folder of the experiment's results.
    """

    def __init__(self, results: Path):
        self._workflow_logs: dict[str, list[str]] = {}  # paths by training run, such as uniform_seed0
        with suppress(OSError):  # no job has written a log yet
            for name in os.listdir(results / "logs"):
                match = _LOG_NAME.fullmatch(name)
                if match:
                    run_name = match[1]
                    self._workflow_logs.setdefault(run_name, []).append(f"{results}/logs/{name}")
        self._slurm_folders = [folder.as_posix() for folder in Path(".snakemake/slurm_logs").glob("*_train*")]

    def find(self, method: str, seed: int, job: str | None) -> tuple[str, ...]:
        """Return the paths of a training run's newest log of the workflow and newest log of SLURM's plugin.

        A kind without a log is left out, so that the tuple may be empty. `job` is the number of the run's last SLURM
        job, whose log is found even if it is of several training runs; None: unknown.
        """
        workflow_logs = self._workflow_logs.get(f"{method}_seed{seed}", [])
        slurm_logs: list[str] = []
        for folder in self._slurm_folders:
            slurm_logs += glob.glob(f"{folder}/{method}_{seed}/*.log")
            if job is not None:
                slurm_logs += glob.glob(f"{folder}/{job}.log")  # the log of a job with several training runs
        logs_by_kind = (workflow_logs, slurm_logs)
        return tuple(max(logs, key=os.path.getmtime) for logs in logs_by_kind if logs)  # the newest of each kind


def read_last_line(logs: tuple[str, ...]) -> str:
    """Return the last line of the first file of `logs`, without blanks around it; empty: there is none."""
    lines = read_last_lines(logs[0]) if logs else []
    return lines[-1].strip() if lines else ""


def read_last_lines(log: str) -> list[str]:
    """Return the lines in the last 2000 bytes of a log file, of which the first may be incomplete.

    Blank lines at both ends are left out. The list is empty if the file does not exist or cannot be read. The result
    for an empty file is a list with one empty line.
    """
    with suppress(OSError), open(log, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - _LOG_TAIL))
        text = file.read().decode(errors="replace")
        return text.strip().split("\n")
    return []
