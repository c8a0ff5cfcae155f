"""The jobs of an experiment in SLURM's queue, which is the only record of them.

The name of a job contains the experiment and the hash of the plan of the controller that submitted it. The comment of a
job, which Snakemake's SLURM plugin writes, contains the rule or group and its wildcards.
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

NO_CLUSTER = "DNS SRV lookup failed"  # in the output of SLURM's commands on machines without a configured cluster
PENDING_STATES = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")  # states of jobs that have not started
_USER_OPTIONS = re.compile("SQUEUE_|SACCT_|SINFO_|SLURM_TIME_FORMAT")  # environment variables that change outputs
# states of jobs that have ended; SLURM may start a preempted job, or one whose node failed, again
ENDED_STATES = (
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
    "TIMEOUT",
)  # fmt: skip
_TRAINING = re.compile(r"rule_train(?:_\d+)?_wildcards_(.+)_(\d+)")  # comment, such as rule_train_2_wildcards_speed_0
# comments of groups, which end with the names of their rules: rule_trainings_2_0_train_2
_TRAININGS = re.compile(r"rule_trainings(?:_\d+)?_(\d+)_train(?:_\d+)?")
_IMAGES = re.compile(r"rule_images_(.+)_seed(\d+)(?:_\d+)?(?:_(?:evaluate|sample)(?:_\d+)?)+")
_ALONE = re.compile(r"rule_trainings(?:_\d+)?_\d+_alone_(.+)_seed(\d+)_train(?:_\d+)?")

TrainingRun = tuple[str, int]  # method and seed


def job_name(results: str | Path) -> str:
    """Return the first part of the names of an experiment's jobs; a dash and the plan follow, see `Layout.plan`.

    It is ``kairos-<name of the results folder>-<6 hex digits>``, with a hash of the folder's absolute path.
    """
    path_hash = hashlib.sha256(os.path.abspath(results).encode()).hexdigest()[:6]
    experiment = re.sub(r"[^A-Za-z0-9_-]", "-", os.path.basename(results))
    return f"kairos-{experiment}-{path_hash}"


def slurm_logs_folder(results: str | Path) -> Path:
    """Return the folder of SLURM's logs of an experiment's jobs, as the SLURM plugin lays them out.

    Examples of logs are ``rule_train/speed_0/17.log``, with method, seed and number of the job, and
    ``group_trainings_0_train/18.log``.
    """
    return Path(".snakemake/slurm_logs") / job_name(results)


@dataclass(frozen=True)
class Job:
    """A job in the queue.

    Attributes:
        number: SLURM's number of the job.
        state: SLURM's state of the job, such as RUNNING.
        reason: SLURM's reason for the state.
        begun: Unix time of the last start, in whole seconds; None for a pending job, and if SLURM reports no time.
        plan: hash of the plan of the controller that submitted the job, see `kairos.workflow.layout.Layout.plan`.
        comment: the rule or group with its wildcards, such as ``rule_train_wildcards_speed_0``.
    """

    number: str
    state: str
    reason: str
    begun: float | None
    plan: str
    comment: str

    @property
    def stage(self) -> str:
        """Stage of the job, or the first word of the name of a group: ``images`` or ``trainings``.

        The number of a segment and the suffix ``_shards`` of a rule are left out. The rules ``measure_NAME`` and
        ``analyse_NAME`` are stages.
        """
        rule, _, _ = self.comment.removeprefix("rule_").partition("_wildcards_")
        return rule if rule.startswith(("measure_", "analyse_")) else rule.split("_")[0]

    @property
    def pending(self) -> bool:
        """True if the job has not started."""
        return self.state in PENDING_STATES


def list_jobs(results: str | Path) -> tuple[list[Job], str]:
    """Return the jobs of `query_jobs` and an error message, which is empty where no cluster is configured."""
    if shutil.which("squeue") is None:
        return [], ""
    jobs, error = query_jobs(results)
    return jobs, "" if NO_CLUSTER in error else error


def query_jobs(results: str | Path, with_ended: bool = False, timeout: float = 10) -> tuple[list[Job], str]:
    """Return this user's jobs of an experiment in SLURM's queue, and an error message, empty on success.

    With an error message the list is empty, although there may be jobs. The jobs are in squeue's order.

    Args:
        results: folder of the experiment's results.
        with_ended: include the jobs that have ended since SLURM's ``MinJobAge``.
        timeout: seconds to wait for an answer.

    Raises:
        FileNotFoundError: squeue does not exist.
    """
    states = ["--states=all"] if with_ended else []
    fields = "--format=%i|%T|%r|%S|%j|%k"  # number, state, reason, start time, name, comment
    command = ("squeue", "--noheader", f"--user={getpass.getuser()}", *states, fields)
    succeeded, answer = run_command(*command, timeout=timeout)
    if not succeeded:
        return [], f"squeue: {answer}"
    name = job_name(results)
    return [_parse_job(line) for line in answer.splitlines() if f"|{name}-" in line], ""


def plain_environment() -> dict[str, str]:
    """Return a copy of the environment without the variables by which users change the output of SLURM's commands.

    They are ``SLURM_TIME_FORMAT`` and all whose names begin with ``SQUEUE_``, ``SACCT_`` or ``SINFO_``.
    """
    return {name: value for name, value in os.environ.items() if not _USER_OPTIONS.match(name)}


def run_command(*command: str, timeout: float = 10) -> tuple[bool, str]:
    """Run a SLURM command for at most `timeout` seconds; return True and its output, or False and the error.

    The command runs in `plain_environment`. The error is one line of at most 400 characters, from stderr; it may
    be empty. After a timeout the result is False and ``no answer within 10 s``.

    Raises:
        FileNotFoundError: the command does not exist.
    """
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, check=False, env=plain_environment()
        )
    except subprocess.TimeoutExpired:
        return False, f"no answer within {timeout:g} s"
    if result.returncode != 0:
        return False, " ".join(result.stderr.split())[:400]
    return True, result.stdout


def _parse_job(line: str) -> Job:
    number, state, reason, start, name, comment = line.split("|", 5)
    begun = None
    if state not in PENDING_STATES:  # the start time of a pending job is an estimate
        with suppress(ValueError):  # such as N/A
            begun = datetime.fromisoformat(start).timestamp()  # in local time, like squeue's output
    return Job(number, state, reason, begun, plan=name.rpartition("-")[2], comment=comment)


def find_trainings(comment: str, trainings: list[TrainingRun], trainings_per_gpu: int) -> list[TrainingRun]:
    """Return the training runs that a job computes, samples or evaluates, according to its comment; often empty.

    Args:
        comment: comment of the job.
        trainings: all training runs of the experiment, in order.
        trainings_per_gpu: number of consecutive training runs that share a job.
    """
    if match := _TRAINING.fullmatch(comment) or _ALONE.fullmatch(comment) or _IMAGES.fullmatch(comment):
        return [(match[1], int(match[2]))]
    if match := _TRAININGS.fullmatch(comment):
        first = int(match[1]) * trainings_per_gpu
        return trainings[first : first + trainings_per_gpu]
    return []


def summarize_jobs(jobs: list[Job]) -> str:
    """Return the numbers of running and waiting jobs of each stage, sorted by stage, as a text.

    Example: ``in the queue: sample 2 wait, train 1 run``. A job that is not pending is reported as running. The caller
    ensures that there is a job.
    """
    counts = Counter((job.stage, "wait" if job.pending else "run") for job in jobs)
    facts = [f"{stage} {count} {verb}" for (stage, verb), count in sorted(counts.items())]
    return f"in the queue: {', '.join(facts)}"
