"""SLURM's queue as Snakemake's executor plugin fills it: a job's comment names rule and wildcards.

``rule_train_1_wildcards_<method>_<seed>`` is a training's first segment. All jobs of a run share a name (a random
number), so what tells two experiments of one folder apart is the prefix that the profile may give it; without a prefix
jobs are taken for the experiment that is asked about.
"""

import getpass
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

_FORMAT = "%i|%T|%r|%j|%Z|%k"  # number, state, reason, name, folder, comment
NO_CLUSTER = "DNS SRV lookup failed"  # what SLURM's commands say where nothing tells them of a cluster
_PATIENCE = 10  # seconds for an answer
_TRAINING = re.compile(r"rule_train(?:_\d+)?_wildcards_(.+)_(\d+)")
_RUN = re.compile(r"(?:(.+)_)?[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass(frozen=True)
class Job:
    """A job that is queued or runs: its number, SLURM's state and reason, the plugin's comment."""

    number: str
    state: str
    reason: str
    comment: str

    @property
    def pending(self) -> bool:
        """Whether it has not begun."""
        return self.state in ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")


def jobs(experiment: str, folder: Path) -> tuple[list[Job], str]:
    """The user's jobs that were submitted from `folder` for an experiment, and what SLURM complains of, mostly empty.

    Without SLURM there are none.
    """
    if shutil.which("squeue") is None:
        return [], ""
    command = ["squeue", "--noheader", f"--user={getpass.getuser()}", f"--format={_FORMAT}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, check=False)
    except subprocess.TimeoutExpired:
        return [], f"squeue: no answer within {_PATIENCE} s"
    if NO_CLUSTER in done.stderr:
        return [], ""
    if done.returncode:
        return [], "squeue: " + " ".join(done.stderr.split())[:200]
    return parse(done.stdout, experiment, folder), ""


def parse(listing: str, experiment: str, folder: Path) -> list[Job]:
    """Jobs of a listing in this module's format that are of `folder` and may be of `experiment`."""
    found = []
    for line in listing.splitlines():
        number, state, reason, name, where, comment = line.split("|", 5)
        run = _RUN.fullmatch(name)
        if run and Path(where) == folder and run[1] in (None, prefix(experiment)):
            found.append(Job(number, state, reason, comment))
    return found


def prefix(experiment: str) -> str:
    """The prefix of job names that stands for an experiment: the plugin allows letters, digits, _ and - only."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", experiment)[:50]


def by_training(found: list[Job]) -> dict[tuple[str, int], Job]:
    """The job of each training that has one."""
    matches = ((_TRAINING.fullmatch(job.comment), job) for job in found)
    return {(match[1], int(match[2])): job for match, job in matches if match}
