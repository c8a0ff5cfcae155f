"""A training run as a job: requests to stop early, the end of a SLURM job's time, and the progress file.

This module imports no torch.
"""

import json
import os
import signal
import socket
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Self, TypedDict, cast

from kairos import ranks
from kairos.files import glance
from kairos.slurm import run_command
from kairos_timesteps import distributed

STATUS = 75  # exit status EX_TEMPFAIL: stopped by request; the same command resumes
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)  # requests to stop
_SAVE_MARGIN = 30.0  # seconds that remain for a save in addition to three times the longest one so far
_WRITE_INTERVAL = 5.0  # seconds between two writes of the progress file
_EXCHANGE_INTERVAL = 1.0  # seconds between two exchanges of stop requests among ranks
ACTIVE_STATES = ("starting", "running")  # states in a progress file whose job has not ended


class StoppedEarly(SystemExit):
    """Training stops before its last step because a stop was requested.

    It is not an `Exception`, so that no library catches it.

    Args:
        reason: the signal or time limit that requested the stop; empty if another process reports it.
    """

    def __init__(self, reason: str):
        super().__init__(STATUS)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class StopRequest:
    """Requests that this process stop early, with their reason.

    The context handles SIGTERM, SIGUSR1 and SIGINT, and restores the previous handlers at its end. Before `begin` there
    is nothing to save, and a signal raises `StoppedEarly` where it arrives. After `begin`, `reason_to_stop` returns the
    reason, which is the first signal. A second SIGINT ends the process at once.

    Attributes:
        reason: why the process should stop; empty: no request.
    """

    def __init__(self) -> None:
        self.reason = ""
        self._has_begun = False
        self._was_interrupted = False  # by a SIGINT
        self._previous_handlers: dict[int, Any] = {}
        self._job_end = 0.0  # end of the SLURM job, Unix time; 0: unknown

    def __enter__(self) -> Self:
        self._previous_handlers = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: object) -> None:
        """Record a signal as the reason to stop if there is none yet; later signals do nothing, except a second SIGINT.

        Raises:
            StoppedEarly: this is the first signal, and `begin` has not been called: there is nothing to save yet.
            KeyboardInterrupt: this is the second SIGINT.
        """
        name = signal.Signals(number).name
        if name == "SIGINT":
            if self._was_interrupted:
                raise KeyboardInterrupt
            self._was_interrupted = True
        if self.reason:
            return
        self.reason = name
        if not self._has_begun:
            raise StoppedEarly(f"{name}: stopped before the first step")

    def begin(self) -> None:
        """Mark the start of the steps: from now on, signals are only recorded, so that the run can save and stop.

        Also looks up the end of the SLURM job, see `end_of_slurm_job`.

        Raises:
            StoppedEarly: a stop was requested already.
        """
        self._has_begun = True
        if self.reason:  # a library may have caught the error of `_handle`
            raise StoppedEarly(f"{self.reason}: stopped before the first step")
        self._job_end = end_of_slurm_job()

    def reason_to_stop(self, longest_save: float) -> str:
        """Return why the run should stop now, such as ``SIGTERM``; empty if it need not.

        The end of a SLURM job is treated as a request if less time remains than three times `longest_save` plus 30 s,
        and becomes `reason`. A job whose end is unknown has no such request.

        Args:
            longest_save: seconds that the longest save of checkpoint and snapshot took.
        """
        if not self.reason and self._job_end:
            remaining = self._job_end - time.time()
            if remaining < 3 * longest_save + _SAVE_MARGIN:
                self.reason = f"{max(remaining, 0):.0f} s before the job's time is over"
        return self.reason


class CollectiveStop:
    """Decides after every step whether to stop, so that all ranks stop after an equal step.

    A single process decides after every step. Several ranks exchange their requests about once a second, because an
    exchange is a collective. They also exchange the mean time of a step over all ranks. All ranks therefore agree on
    the number of steps until the next exchange. This number at most doubles from one exchange to the next.

    Args:
        stop_request: requests to this process.
    """

    def __init__(self, stop_request: StopRequest):
        self._stop_request = stop_request
        self._steps = 0  # since the last exchange
        self._interval = 1  # steps from the last exchange to the next
        self._last_exchange = time.monotonic()

    def after_step(self, longest_save: float) -> bool:
        """Return True if any rank was requested to stop; every rank must call this after each of its steps.

        The result is equal on all ranks, and False between two exchanges. A request is therefore noticed up to about a
        second later, or after one step if steps take longer.
        """
        is_requested_here = bool(self._stop_request.reason_to_stop(longest_save))
        rank_count = distributed.ranks()
        if rank_count == 1:
            return is_requested_here
        self._steps += 1
        if self._steps < self._interval:  # on all ranks at equal steps
            return False
        seconds = time.monotonic() - self._last_exchange
        request_count, seconds_of_all_ranks = ranks.add([float(is_requested_here), seconds])
        # mean time of a step: seconds_of_all_ranks / rank_count seconds passed on each rank in self._steps steps.
        # _EXCHANGE_INTERVAL divided by it is the number of steps per interval.
        steps_per_exchange = int(_EXCHANGE_INTERVAL * rank_count * self._steps / max(seconds_of_all_ranks, 1e-9))
        self._interval = max(1, min(steps_per_exchange, 2 * self._interval))
        self._steps = 0
        self._last_exchange = time.monotonic()
        return request_count > 0


def end_of_slurm_job() -> float:
    """Return the Unix time at which this SLURM job's time limit ends; 0 outside of SLURM, or if no limit is known.

    Older versions of SLURM do not set SLURM_JOB_END_TIME; then squeue is called, for at most 20 s. The result is also 0
    if squeue is missing or fails, or if a text is not a time.
    """
    end = os.environ.get("SLURM_JOB_END_TIME")
    job = os.environ.get("SLURM_JOB_ID")
    with suppress(ValueError, OSError):  # a text that is not a time; squeue is missing
        if end:
            return float(end)
        if job:
            _, answer = run_command("squeue", "--noheader", "--jobs", job, "--format", "%e", timeout=20)
            # local time, such as 2026-01-31T12:00:00; N/A or an error message raises ValueError
            return datetime.fromisoformat(answer.strip()).timestamp()
    return 0.0


class ProgressRecord(TypedDict, total=False):
    """Content of ``.state/progress.json``, see `ProgressFile`.

    Attributes:
        identity: identity of the training run; None: not known yet, or the job ended before it was known.
        step: completed steps.
        of: last step of the job.
        rate: steps per second between the last two writes by `ProgressFile.update`; None: not known yet.
        seconds: training time of the run.
        state: ``starting`` until the first update, ``running``, ``complete``, ``stopped`` or ``failed``.
        message: why the job stopped or failed.
        again: True if another attempt may succeed; only at the end of a job.
        updated: Unix time of the write.
        host: host of the job.
        pid: process of the job.
        job: number of the SLURM job; None: not in SLURM.
    """

    identity: str | None
    step: int
    of: int
    rate: float | None
    seconds: float
    state: str
    message: str
    again: bool
    updated: float
    host: str
    pid: int
    job: str | None


def read_progress(run_folder: Path) -> ProgressRecord:
    """Return the progress that the last job of a training run wrote; empty if there is none or it is damaged."""
    return cast(ProgressRecord, glance(run_folder / ".state" / "progress.json"))


class ProgressFile:
    """``.state/progress.json``: step and rate of a training run for `kairos status`, written at most every 5 s.

    Results do not depend on the file, so it is written without fsync. The constructor writes state ``starting``, with
    step and seconds of the previous job's file.

    Args:
        state_folder: ``.state`` of the run's folder, whose lock the run holds.
        last_step: last milestone of this job.
        reports: True if this process writes start and steps. A process that fails writes the failure in any case.
    """

    def __init__(self, state_folder: Path, last_step: int, reports: bool = True):
        self._reports = reports
        self._path = state_folder / "progress.json"
        self._content: ProgressRecord = {
            "identity": None, "step": 0, "of": last_step, "rate": None, "seconds": 0.0, "state": "starting",
            "message": "", "updated": 0.0, "host": socket.gethostname(), "pid": os.getpid(),
            "job": os.environ.get("SLURM_JOB_ID"),
        }  # fmt: skip
        self._started = time.time()
        # a job that fails before its first update writes where the previous job ended
        previous = glance(self._path)
        self._previous_identity = previous.get("identity")
        previous_fields = {name: previous[name] for name in ("step", "seconds") if name in previous}
        self._content |= cast(ProgressRecord, previous_fields)
        self._last_write: tuple[float, int] | None = None  # monotonic time and step
        if reports:
            self._write()

    def update(self, step: int, seconds: float) -> None:
        """Record the number of completed steps and the training time in seconds, and write the file at most every 5 s.

        A process that does not report writes nothing. The rate is the mean since the last write by this method; at the
        first write it is None.
        """
        self._content |= {"state": "running", "step": step, "seconds": round(seconds, 3)}
        if not self._reports:
            return
        now = time.monotonic()
        if self._last_write is not None:
            last_time, last_step = self._last_write
            if now - last_time < _WRITE_INTERVAL:
                return
            self._content["rate"] = round((step - last_step) / (now - last_time), 4)
        self._last_write = now, step
        self._write()

    def set_identity(self, identity: str) -> None:
        """Write the identity of the training run; steps of a previous job with another identity are not its steps."""
        self._content["identity"] = identity
        if identity != self._previous_identity:
            self._content |= {"step": 0, "seconds": 0.0}
        if self._reports:
            self._write()

    def write_end(self, state: str, message: str = "", again: bool = True) -> None:
        """Write how the job ended, at once, also from a process that does not report.

        Args:
            state: ``complete``, ``stopped`` or ``failed``.
            message: reason; only its first line is written.
            again: another attempt may succeed; irrelevant for state ``complete``.
        """
        self._content |= {"state": state, "message": message.strip().split("\n")[0], "again": again}
        self._write()

    def has_failed(self) -> bool:
        """Return True if a process of this job has written that it failed."""
        record = glance(self._path)
        return record.get("state") == "failed" and bool(record["updated"] > self._started)

    def _write(self) -> None:
        """Write the content to the file, atomically and with the present time under ``updated``.

        After a failure of a process of the job nothing is written: the first failure is kept. Errors such as a full
        disk are ignored here, because saving a checkpoint reports them.
        """
        if self.has_failed():
            return
        temporary = self._path.with_name(".tmp-progress.json")
        with suppress(OSError):
            temporary.write_text(json.dumps(self._content | {"updated": time.time()}) + "\n", encoding="utf-8")
            os.replace(temporary, self._path)
