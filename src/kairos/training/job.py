"""A training as a job: asked to leave early, it does so in good order; and it says how far it is.

Nothing is computed here.
"""

import json
import os
import signal
import socket
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from kairos import ranks
from kairos.files import glance
from kairos.slurm import ask
from kairos_timesteps import distributed

STATUS = 75  # EX_TEMPFAIL: ended early by request; the same command goes on
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_MARGIN = 30.0  # seconds that a checkpoint may take longer than three times the longest one so far
_EVERY = 5.0  # seconds between two words on the progress
_EXCHANGE = 1.0  # seconds between two exchanges among ranks on whether to leave


class StoppedEarly(SystemExit):
    """The training ends early because it was asked to; not an Exception, so that no library swallows it."""

    def __init__(self, reason: str):
        super().__init__(STATUS)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class StopRequest:
    """Requests that this job end early, with their reason.

    As a context manager it handles SIGTERM, SIGUSR1 and SIGINT. Until `begin` there is nothing to save, and a signal
    raises `StoppedEarly` where it arrives. From then on, `reason_to_stop` returns the reason. A second SIGINT
    ends the process at once.
    """

    def __init__(self) -> None:
        self.reason = ""
        self._begun = False
        self._before: dict[int, Any] = {}
        self._end = 0.0  # of the SLURM job, Unix time; 0: unknown

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._signalled) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _signalled(self, number: int, frame: object) -> None:
        name, before = signal.Signals(number).name, self.reason
        if name == before == "SIGINT":
            raise KeyboardInterrupt
        self.reason = before or name
        if not self._begun and not before:
            raise StoppedEarly(f"{name}: stopped before the first step")

    def begin(self) -> None:
        """Begin the steps: from now on, a request to end lets the run finish and save its step first."""
        self._begun = True
        if self.reason:
            raise StoppedEarly(f"{self.reason}: stopped before the first step")
        self._end = end_of_job()

    def reason_to_stop(self, saving: float) -> str:
        """Return the reason why the run should end now; empty if it need not.

        The end of a SLURM job counts as asking when less time remains than three times the longest checkpoint and
        milestone so far, and half a minute.

        Args:
            saving: seconds that the longest one took.
        """
        if not self.reason and self._end and (left := self._end - time.time()) < 3 * saving + _MARGIN:
            self.reason = f"{max(left, 0):.0f} s before the job's time is over"
        return self.reason


class CollectiveStop:
    """Decides whether to leave, such that all ranks leave after the same step.

    One process decides after every step. Several exchange their requests about once a second and not in every step,
    because an exchange is a collective. The number of steps until the next exchange is a function of what was exchanged
    last, the mean time of a step over all ranks, so that all ranks agree on it. It at most doubles from one exchange to
    the next.

    Args:
        leave: requests to this process.
    """

    def __init__(self, leave: StopRequest):
        self._leave = leave
        self._steps = 0  # since the last exchange
        self._interval = 1  # steps from the last exchange to the next
        self._exchanged = time.monotonic()

    def after_step(self, saving: float) -> bool:
        """Return True if any rank was asked to leave; every rank must call this after each of its steps.

        Args:
            saving: seconds that the longest checkpoint took.
        """
        asked = bool(self._leave.reason_to_stop(saving))
        count = distributed.ranks()
        if count == 1:
            return asked
        self._steps += 1
        if self._steps < self._interval:
            return False
        seconds = time.monotonic() - self._exchanged
        requests, seconds_of_all = ranks.add([float(asked), seconds])
        steps_in_time = int(_EXCHANGE * count * self._steps / max(seconds_of_all, 1e-9))
        self._interval = max(1, min(steps_in_time, 2 * self._interval))
        self._steps = 0
        self._exchanged = time.monotonic()
        return requests > 0


def end_of_job() -> float:
    """Return the end of this SLURM job's time limit, Unix time; 0 outside of SLURM or without a limit.

    Older versions of SLURM do not set SLURM_JOB_END_TIME; there the queue is asked once.
    """
    given, job = os.environ.get("SLURM_JOB_END_TIME"), os.environ.get("SLURM_JOB_ID")
    with suppress(ValueError, OSError):
        if given:
            return float(given)
        if job:
            _, told = ask("squeue", "--noheader", "--jobs", job, "--format", "%e", patience=20)
            return datetime.fromisoformat(told.strip()).timestamp()  # local time, as squeue's
    return 0.0


def read_progress(training: Path) -> dict[str, Any]:
    """Return the progress that the last job of a training run wrote (see `ProgressFile`); empty if there is none."""
    return glance(training / ".state" / "progress.json")


class ProgressFile:
    """``.state/progress.json``: how far the training is, for whoever looks on. Written at most every 5 s.

    It is no record: written without fsync, replaced whole.

    Args:
        folder: the training's ``.state``.
        of: last milestone of this job.
        often: whether it is this process that says how far it is; one that fails says so in any case.
    """

    def __init__(self, folder: Path, of: int, often: bool = True):
        self._often = often
        self._path = folder / "progress.json"
        self._content: dict[str, Any] = {
            "identity": None, "step": 0, "of": of, "rate": None, "seconds": 0.0, "state": "running", "message": "",
            "updated": 0.0, "host": socket.gethostname(), "pid": os.getpid(), "job": os.environ.get("SLURM_JOB_ID"),
            "log": None,
        }  # fmt: skip
        before = glance(self._path)  # where the job before it ended, until this one knows more
        self._content |= {name: before[name] for name in ("identity", "step", "seconds") if name in before}
        self._written: tuple[float, int] | None = None  # when, on the monotonic clock, and at which step

    def at(self, step: int, seconds: float) -> None:
        """The training is at `step` after `seconds` of training; written down when the last word is old."""
        self._content |= {"step": step, "seconds": round(seconds, 3)}
        if not self._often:
            return
        now = time.monotonic()
        if self._written is not None:
            then, before = self._written
            if now - then < _EVERY:
                return
            self._content["rate"] = round((step - before) / (now - then), 4)
        self._written = (now, step)
        self._write()

    def identify(self, identity: str) -> None:
        """Say which training it is."""
        self._content["identity"] = identity

    def end(self, state: str, message: str = "", again: bool = True) -> None:
        """The last word: ``complete``, ``stopped`` or ``failed``, why, and whether the same job may fare better."""
        self._content |= {"state": state, "message": message.strip().split("\n")[0], "again": again}
        self._write()

    def _write(self) -> None:
        temporary = self._path.with_name(".tmp-progress.json")
        with suppress(OSError):  # a full disk ends the training where something is lost, not here
            temporary.write_text(json.dumps(self._content | {"updated": time.time()}) + "\n", encoding="utf-8")
            os.replace(temporary, self._path)
