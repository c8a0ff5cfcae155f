"""Progress of every training run of an experiment, read from small files: a thousand runs take a moment.

A run writes ``.state/progress.json``, which is outdated if the process was killed. The lock file next to it shows that
the process is alive, and the queue that its job is.
"""

import fcntl
import glob
import os
import re
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kairos.files import glance
from kairos.progress import duration
from kairos.report.outdated import format_changes
from kairos.slurm import Job
from kairos.status.outline import Outline
from kairos.training.job import read_progress

STATES = ("running", "starting", "queued", "failed", "dead", "stopped", "waiting", "outdated", "complete")
_AT_WORK = ("running", "starting", "queued")
_TROUBLE = ("failed", "dead", "stopped")
_FRESH = 30.0  # seconds for which a word from another machine is taken without a lock that tells of it
_LOG = re.compile(r"train_(.+_seed\d+?)(?:_\d+)?\.log")
_LAST = 2000  # bytes of a log that its last line is looked for in


@dataclass(frozen=True)
class Training:
    """A training as it stands.

    Attributes:
        state: one of `STATES`; ``dead`` said that it runs, and no process holds its lock; ``outdated``: all that there
            is of the training was computed with earlier settings.
        step: steps done, as far as is known; 0 of an outdated one.
        of: its last milestone.
        rate: steps per second; None where it does not run.
        where: host and job.
        note: why it waits, stopped or failed.
        logs: files to look into, where something went wrong.
    """

    method: str
    seed: int
    state: str
    step: int
    of: int | None
    rate: float | None
    where: str
    note: str
    logs: tuple[str, ...] = ()

    @property
    def left(self) -> float | None:
        """Seconds that remain at this rate."""
        return (self.of - self.step) / self.rate if self.rate and self.of is not None else None


def trainings(outline: Outline, jobs: list[Job]) -> list[Training]:
    """All trainings of an experiment in its order."""
    queued = {training: job for job in jobs for training in job.trainings}
    numbers = {job.number: job for job in jobs}
    logs = Logs(outline.results)
    return [_look(outline, *each, queued.get(each), numbers, logs) for each in outline.trainings]


def _look(outline: Outline, method: str, seed: int, job: Job | None, jobs: dict[str, Job], written: "Logs") -> Training:
    folder = outline.results / method / f"seed{seed}"
    record, progress = glance(folder / "training.json"), read_progress(folder)
    begun = progress.get("identity")
    if begun and record.get("identity", begun) != begun:  # the training has begun again with other settings
        record = {}
    last, done = outline.milestones[-1] if outline.milestones else None, record.get("steps", -1)
    of = last
    of = progress.get("of", done if record else None) if of is None else max(of, done)
    said = progress.get("state", "")
    job = job or jobs.get(str(progress.get("job") or ""))
    if said == "running" and _alive(folder / ".state" / "lock", progress, job):
        state = "running"
    elif job is not None:
        state = "queued" if job.pending else "starting"
    elif record and (of is None or done >= of):
        state = "complete"
    else:
        state = {"running": "dead", "complete": "waiting", "": "waiting"}.get(said, said)
    if state not in _AT_WORK and (changes := _changes(outline, method, seed, begun)):
        return Training(method, seed, "outdated", 0, last, None, "", f"changed settings: {changes}")
    published = () if progress or record else folder.glob("milestones/[0-9]*/milestone.json")
    step = max(progress.get("step", 0), done, 0, *(int(path.parent.name) for path in published))
    wanted = state in _TROUBLE or (state == "waiting" and not progress)
    logs = written.of(method, seed, progress.get("job")) if wanted else ()
    note = _note(state, progress, job, logs)
    if state == "waiting" and logs and not record:  # it left a log and nothing else: it ended before its first step
        silent = not note and time.time() - os.path.getmtime(logs[0]) < 10 * _FRESH  # or has yet to say a word
        state = "starting" if silent else "failed"
    rate = (progress.get("rate") or None) if state == "running" else None
    return Training(method, seed, state, step, of, rate, _where(state, progress, job), note, logs)


def _changes(outline: Outline, method: str, seed: int, begun: str | None) -> str:
    """The settings that changed since a training was computed; empty where none did or its settings are not known.

    Args:
        outline: the experiment.
        method, seed: the training.
        begun: identity of the state that the training has written last, where there is a state.
    """
    if outline.expected is None:
        return ""
    record = first_milestone(outline.results / method / f"seed{seed}")
    if begun and (record is None or outline.expected.snapshot_record(record).get("identity") != begun):
        record = first_milestone(outline.results / method / f"seed{seed}" / ".state" / begun[:16])
    return format_changes(outline.expected.find_changes(method, seed, record)) if record else ""


def first_milestone(folder: Path) -> Path | None:
    """The record of the milestone with the lowest step in a training's folder; a new training replaces it first."""
    return min(folder.glob("milestones/[0-9]*/milestone.json"), default=None)


def _note(state: str, progress: dict[str, Any], job: Job | None, logs: tuple[str, ...]) -> str:
    if state == "queued" and job is not None:
        return job.reason if job.reason != "None" else ""
    if state == "dead":
        return f"no process holds its lock; last heard of {ago(progress['updated'])}"
    if state in _TROUBLE:
        return str(progress.get("message") or last_line(logs))
    if job is not None and job.state != "RUNNING":
        return job.state.lower()
    if state == "running":
        quiet = time.time() - progress["updated"] > 10 * _FRESH
        return f"last heard of {ago(progress['updated'])}" if quiet else ""
    return last_line(logs)


def ago(moment: float) -> str:
    """Return the duration since a moment (Unix time), as text."""
    return f"{duration(max(time.time() - moment, 0))} ago"


def _where(state: str, progress: dict[str, Any], job: Job | None) -> str:
    host = "" if state in ("queued", "starting", "complete") else str(progress.get("host", ""))
    number = job.number if job is not None else progress.get("job") if host else None
    return " ".join(part for part in (host, f"job {number}" if number else "") if part)


def _alive(lock: Path, progress: dict[str, Any], job: Job | None) -> bool:
    """Return True if the process that wrote a progress file as running is still alive.

    Where locks do not reach from machine to machine, the queue or a recent progress file replaces the lock.
    """
    if job is not None and job.number == str(progress.get("job")) and (job.pending or job.state == "RUNNING"):
        return job.begun is not None and progress["updated"] >= job.begun  # else it is from before SLURM requeued it
    if held(lock):
        return True
    return progress.get("host") != socket.gethostname() and time.time() - progress["updated"] < _FRESH


def held(lock: Path) -> bool:
    """Return True if a process holds a lock file.

    The check takes the lock as shared and releases it at once, so it keeps no process out.
    """
    try:
        with open(lock, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return not isinstance(error, FileNotFoundError)
    return False


class Logs:
    """Log files of training jobs: the workflow's own, listed once, and those that SLURM's plugin keeps."""

    def __init__(self, results: Path):
        self._own: dict[str, list[str]] = {}
        with suppress(OSError):
            for name in os.listdir(results / "logs"):
                if match := _LOG.fullmatch(name):
                    self._own.setdefault(match[1], []).append(f"{results}/logs/{name}")
        self._kept = [folder.as_posix() for folder in Path(".snakemake/slurm_logs").glob("*_train*")]

    def of(self, method: str, seed: int, job: str | None) -> tuple[str, ...]:
        """The newest log of a training, and the newest that SLURM's plugin has kept of one of its jobs."""
        kept = [path for folder in self._kept for path in glob.glob(f"{folder}/{method}_{seed}/*.log")]
        kept += [path for folder in self._kept for path in glob.glob(f"{folder}/{job}.log")]
        both = (self._own.get(f"{method}_seed{seed}", []), kept)
        return tuple(max(found, key=os.path.getmtime) for found in both if found)


def last_line(logs: tuple[str, ...]) -> str:
    """The last line of the first of some logs."""
    with suppress(OSError, IndexError), open(logs[0], "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _LAST))
        return file.read().decode(errors="replace").strip().split("\n")[-1].strip()
    return ""
