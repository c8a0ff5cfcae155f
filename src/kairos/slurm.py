"""SLURM's queue, as the workflow fills it.

All jobs of an experiment have one name. What each makes is written down in ``.kairos/jobs/<experiment>/<number>.json``
(see `snakemake_executor_plugin_kairos.executor`); its comment names the rule, and mostly method and seed.
"""

import getpass
import hashlib
import os
import re
import shutil
import subprocess
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from kairos.files import read_json
from kairos_timesteps.errors import DamagedError

NO_CLUSTER = "DNS SRV lookup failed"  # what SLURM's commands say where nothing tells them of a cluster
WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")  # states of jobs that have not begun
_WISHES = re.compile("SQUEUE_|SACCT_|SINFO_|SLURM_TIME_FORMAT")
_COMMENT = re.compile(r"rule_train(?:_\d+)?_wildcards_(.+)_(\d+)")
_OUTPUT = re.compile(r"([^/]+)/seed(\d+)/(?:milestones/.*|training\.json)")

Training = tuple[str, int]  # method and seed


def job_name(results: str) -> str:
    """The name of all of an experiment's jobs in the queue: `squeue --name`, `scancel --name`."""
    here = hashlib.sha256(os.path.abspath(results).encode()).hexdigest()[:6]
    return f"kairos-{re.sub(r'[^A-Za-z0-9_-]', '-', os.path.basename(results))}-{here}"


@dataclass(frozen=True)
class Job:
    """A job that waits or runs.

    Attributes:
        number, state, reason: as SLURM has them.
        begun: Unix time at which it last started, in whole seconds; None where it waits.
        stage: the rule whose job it is.
        trainings: those that it works on.
    """

    number: str
    state: str
    reason: str
    begun: float | None
    stage: str
    trainings: tuple[Training, ...]

    @property
    def pending(self) -> bool:
        """True if the job has not started."""
        return self.state in WAITING


def jobs(results: Path) -> tuple[list[Job], str]:
    """The jobs of an experiment, and what SLURM complains of, mostly nothing. Without SLURM there are none."""
    if shutil.which("squeue") is None:
        return [], ""
    good, answer = queue(results, "%i|%T|%r|%S|%k")
    if not good:
        return [], "" if NO_CLUSTER in answer else f"squeue: {answer}"
    return [_job(results, *line.split("|", 4)) for line in answer.splitlines()], ""


def queue(results: str | Path, what: str, patience: float = 10) -> tuple[bool, str]:
    """Query squeue for an experiment's jobs; return True and its output, or False and the error.

    Args:
        results: folder of the experiment's results, which determines the name of its jobs.
        what: format of an output line, as for ``squeue --format``.
        patience: seconds to wait for an answer.
    """
    whose = (f"--user={getpass.getuser()}", f"--name={job_name(str(results))}")
    return ask("squeue", "--noheader", *whose, f"--format={what}", patience=patience)


def job_records_folder(results: str | Path) -> Path:
    """Return the folder of the records of an experiment's jobs: one JSON file per job, named by its number."""
    return Path(".kairos/jobs") / os.path.basename(results)


def plain_environment() -> dict[str, str]:
    """The environment without a user's own wishes for what SLURM's commands show, and how."""
    return {name: value for name, value in os.environ.items() if not _WISHES.match(name)}


def ask(*command: str, patience: float = 10) -> tuple[bool, str]:
    """Run a SLURM command for at most `patience` seconds; return True and its output, or False and the error."""
    environment = plain_environment()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=patience, check=False, env=environment)
    except subprocess.TimeoutExpired:
        return False, f"no answer within {patience:g} s"
    return done.returncode == 0, done.stdout if done.returncode == 0 else " ".join(done.stderr.split())[:400]


def _job(results: Path, number: str, state: str, reason: str, start: str, comment: str) -> Job:
    book = job_records_folder(results) / f"{number}.json"
    try:
        outputs = [os.path.relpath(path, results) for path in read_json(book)["outputs"]]
    except (OSError, DamagedError):  # sent this instant, or by another folder's controller
        match = _COMMENT.fullmatch(comment)
        found = {(match[1], int(match[2]))} if match else set()
    else:
        found = {(match[1], int(match[2])) for match in map(_OUTPUT.fullmatch, outputs) if match}
    begun = None
    if state not in WAITING:  # else it is an estimate
        with suppress(ValueError):
            begun = datetime.fromisoformat(start).timestamp()  # local time, as squeue's
    return Job(number, state, reason, begun, comment.removeprefix("rule_").split("_")[0], tuple(sorted(found)))


def summary(found: list[Job]) -> str:
    """Return the numbers of waiting and running jobs of each stage, as a line."""
    counts = Counter((job.stage, "wait" if job.pending else "run") for job in found)
    return "in the queue: " + ", ".join(f"{stage} {number} {what}" for (stage, what), number in sorted(counts.items()))
