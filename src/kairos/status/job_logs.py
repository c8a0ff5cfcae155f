"""Logs of an experiment's jobs: messages of the jobs, and messages of SLURM about jobs that it has ended.

The logs of jobs are in the folder of results, and SLURM's logs in a folder with the name of the experiment's jobs.
"""

import os
import re
import socket
import time
from contextlib import suppress
from pathlib import Path

from kairos.slurm import slurm_logs_folder

_TAIL = 65536  # bytes at the end of a log that are searched: Snakemake's messages follow those of the job
# lines that begin an error of a command, or the executor's message of a rejected job, up to the end of the log
_ERROR = re.compile(r"kairos: |Traceback ")
# lines with which SLURM, the kernel or the shell reports the end of a job: those with a cause come first
_END_OF_JOB = (
    re.compile(r"oom[-_ ]?kill|out of memory|exceeded .*memory|TIME LIMIT|NODE FAIL|PREEMPTION", re.IGNORECASE),
    re.compile(r"^(slurmstepd|srun)\S*: error|\bkilled\b|\bCANCELLED\b", re.IGNORECASE),
)
_QUEUE_SECONDS = 10.0  # age of SLURM's log below which its job may have started since the queue was queried
SILENT_SECONDS = 300.0  # silence from which a job that is not known to run is treated as ended
_SUCCESS = "(100%) done"  # in the last lines of Snakemake's output
_LOG_OF_RUN = re.compile(r"(train_.+_seed\d+?)(?:_\d+)?\.log")  # train_uniform_seed0.log, or _2.log for segment 2


class JobLogs:
    """Logs of an experiment's jobs, listed once.

    Args:
        results: folder of the experiment's results.
        queue_is_known: False if SLURM has not answered, so that a job that is not in the queue may still run.
    """

    def __init__(self, results: Path, queue_is_known: bool = True):
        self._queue_is_known = queue_is_known
        self._lock = results / ".lock"  # a controller writes it at its start
        self._slurm_folder = slurm_logs_folder(results)
        self._start = self._lock.stat().st_mtime if self._lock.exists() else 0.0
        self._paths: dict[str, list[Path]] = {}  # by name without the segment: train_uniform_seed0, encode
        with suppress(OSError):  # no job has written a log yet
            for name in os.listdir(results / "logs"):
                match = _LOG_OF_RUN.fullmatch(name)
                key = match[1] if match else name.removesuffix(".log")
                self._paths.setdefault(key, []).append(results / "logs" / name)

    @property
    def has_controller(self) -> bool:
        """True if the process of the last controller is alive, or if it runs on another machine.

        The controller's lock is not tried, since a controller that starts at this moment would fail.
        """
        with suppress(OSError):
            match = re.fullmatch(r"pid (\d+) on (.*)", self._lock.read_text(encoding="utf-8"))
            return match is not None and (match[2] != socket.gethostname() or os.path.exists(f"/proc/{match[1]}"))
        return False

    def find_log(self, name: str) -> Path | None:
        """Return the newest log of a stage or training run, such as ``encode`` or ``train_uniform_seed0``."""
        return max(self._paths.get(name, ()), key=os.path.getmtime, default=None)

    def find_slurm_log(self, *folders: str) -> Path | None:
        """Return SLURM's log of the newest job in some folders, patterns such as ``rule_train*/uniform_0``."""
        paths = [path for folder in folders for path in self._slurm_folder.glob(f"{folder}/*.log")]
        numbered = [path for path in paths if path.stem.isdecimal()]
        return max(numbered, key=lambda path: int(path.stem), default=None)

    def may_run(self, slurm_log: Path) -> bool:
        """Return True if the job of a log, which is not in the queue as far as known, may still run."""
        return log_age(slurm_log) < (_QUEUE_SECONDS if self._queue_is_known else SILENT_SECONDS)

    def is_recent(self, log: Path | None) -> bool:
        """Return True if a log exists and is not from before the last start of a controller, which starts jobs anew."""
        return log is not None and log.stat().st_mtime >= self._start


def log_age(log: Path) -> float:
    """Return the seconds since the last line of a log."""
    return time.time() - log.stat().st_mtime


def read_last_line(log: Path | None) -> str:
    """Return the last line of a log; empty without a log or a line."""
    lines = _read_last_lines(log)
    return lines[-1].strip() if lines else ""


def find_error(log: Path | None) -> str:
    """Return the error at the end of a job's log in one line; of a traceback its last line; empty without an error."""
    lines = _read_last_lines(log)
    # an error ends the command, so that all lines after it belong to its message
    error = next((lines[index:] for index, line in enumerate(lines) if _ERROR.match(line)), [])
    if error and error[0].startswith("Traceback"):
        error = error[-1:]
    return " ".join(line.strip() for line in error).removeprefix("kairos: ")


def find_end_of_job(log: Path | None) -> str:
    """Return why a SLURM job has ended, from SLURM's log; empty without a log, or if the job has succeeded.

    The log contains the lines of the job and of Snakemake, too. The reason is the last line that reports a cause, such
    as memory. Without one it is, in this order, the last line of SLURM or the shell, the job's error, or the last line.
    """
    if log is None:
        return ""
    lines = _read_last_lines(log)
    if any(_SUCCESS in line for line in lines[-5:]):
        return ""
    ends = [line for pattern in _END_OF_JOB for line in reversed(lines) if pattern.search(line)]
    errors = [line.removeprefix("kairos: ") for line in lines if line.startswith("kairos: ")]
    return [*ends, *errors, *lines[-1:], f"SLURM job {log.stem} ended without a message"][0].strip()


def _read_last_lines(log: Path | None) -> list[str]:
    """Return the lines at the end of a log, of which the first may be incomplete, without blank lines at both ends."""
    if log is None:
        return []
    with suppress(OSError), open(log, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
        text = file.read().decode(errors="replace").strip()
        return text.split("\n") if text else []
    return []
