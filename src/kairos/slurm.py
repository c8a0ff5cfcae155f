"""The jobs of an experiment in SLURM's queue.

All jobs of an experiment have one name in the queue. The workflow records the outputs of each job in
``.kairos/jobs/<experiment>/<number>.json`` (see `snakemake_executor_plugin_kairos.executor`). The comment of a job
contains the Snakemake rule, and for training jobs method and seed.
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

from kairos.files import DamagedError, read_json

NO_CLUSTER = "DNS SRV lookup failed"  # in the output of SLURM's commands on machines without a configured cluster
PENDING_STATES = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")  # states of jobs that have not started
_USER_OPTIONS = re.compile("SQUEUE_|SACCT_|SINFO_|SLURM_TIME_FORMAT")  # environment variables that change outputs
# comment of a training job, with method and seed: "rule_train_wildcards_speed_0", "rule_train_2_wildcards_speed_0"
_COMMENT = re.compile(r"rule_train(?:_\d+)?_wildcards_(.+)_(\d+)")
# output of a training job, with method and seed: "methods/speed/seed0/training.json"
_OUTPUT = re.compile(r"methods/([^/]+)/seed(\d+)/(?:snapshots/.*|training\.json)")

TrainingRun = tuple[str, int]  # method and seed


def job_name(results: str) -> str:
    """Return the name of all jobs of an experiment in the queue, for `squeue --name` and `scancel --name`.

    It is ``kairos-<name of the results folder>-<6 hex digits>``, with a hash of the folder's absolute path.
    """
    path_hash = hashlib.sha256(os.path.abspath(results).encode()).hexdigest()[:6]
    experiment = re.sub(r"[^A-Za-z0-9_-]", "-", os.path.basename(results))
    return f"kairos-{experiment}-{path_hash}"


@dataclass(frozen=True)
class Job:
    """A pending or running job.

    Attributes:
        number: SLURM's number of the job.
        state: SLURM's state of the job, such as RUNNING.
        reason: SLURM's reason for the state.
        begun: Unix time of the last start, in whole seconds; None for a pending job, and if SLURM reports no time.
        stage: stage of the job's Snakemake rule, such as ``sample`` for the rules sample_1 and sample_shards. For a
            group of rules it is the first word of the group's name, ``images`` or ``trainings``.
        trainings: training runs that the job works on.
    """

    number: str
    state: str
    reason: str
    begun: float | None
    stage: str
    trainings: tuple[TrainingRun, ...]

    @property
    def pending(self) -> bool:
        """True if the job has not started."""
        return self.state in PENDING_STATES


def list_jobs(results: Path) -> tuple[list[Job], str]:
    """Return the jobs of an experiment in SLURM's queue, and an error message, empty on success.

    Without SLURM, or on a machine without a configured cluster, there are no jobs and no error. With an error message
    the list is empty, although there may be jobs. The jobs are in squeue's order.

    Args:
        results: folder of the experiment's results.
    """
    if shutil.which("squeue") is None:
        return [], ""
    succeeded, answer = query_queue(results, "%i|%T|%r|%S|%k")  # number, state, reason, start time, comment
    if succeeded:
        return [_parse_job(results, line) for line in answer.splitlines()], ""
    if NO_CLUSTER in answer:
        return [], ""
    return [], f"squeue: {answer}"


def query_queue(results: str | Path, fields: str, timeout: float = 10) -> tuple[bool, str]:
    """Query squeue for this user's jobs of an experiment; return True and its output, or False and the error.

    The output has a line for each job, without a header. Errors are described in `run_command`.

    Args:
        results: folder of the experiment's results, which determines the name of its jobs.
        fields: format of an output line, as for ``squeue --format``.
        timeout: seconds to wait for an answer.

    Raises:
        FileNotFoundError: squeue does not exist.
    """
    user, name = f"--user={getpass.getuser()}", f"--name={job_name(str(results))}"
    return run_command("squeue", "--noheader", user, name, f"--format={fields}", timeout=timeout)


def job_records_folder(results: str | Path) -> Path:
    """Return the folder of the records of an experiment's jobs: one JSON file per job, named by its number.

    The path is relative to the working directory.
    """
    return Path(".kairos/jobs") / os.path.basename(results)


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


def _parse_job(results: Path, line: str) -> Job:
    """Return the job in a line of squeue with number, state, reason, start time and comment.

    Example: ``17|RUNNING|None|2026-11-25T12:00:00|rule_train_wildcards_speed_0``, a job of stage ``train``. The start
    time of a pending job is ignored. The job's record is read too, see `_find_training_runs`.
    """
    number, state, reason, start, comment = line.split("|", 4)
    begun = None
    if state not in PENDING_STATES:  # the start time of a pending job is an estimate
        with suppress(ValueError):  # such as N/A
            begun = datetime.fromisoformat(start).timestamp()  # in local time, like squeue's output
    training_runs = sorted(_find_training_runs(results, number, comment))
    return Job(
        number=number,
        state=state,
        reason=reason,
        begun=begun,
        stage=_find_stage(comment),
        trainings=tuple(training_runs),
    )


def _find_stage(comment: str) -> str:
    """Return the stage in a job's comment: the rule without the number of a segment and the suffix ``_shards``.

    For ``measure_NAME`` and ``analyse_NAME``, the rules of an analysis, the rule is the stage. Examples:

    * ``rule_sample_shards_wildcards_speed_0_1of2``: ``sample``.
    * ``rule_measure_agreement_wildcards_speed_0_0000100``: ``measure_agreement``.
    * ``rule_images_speed_seed0_1``, a group of jobs: ``images``.
    """
    rule, _, _ = comment.removeprefix("rule_").partition("_wildcards_")
    if rule.startswith(("measure_", "analyse_")):
        return rule
    stage, *_ = rule.split("_")
    return stage


def _find_training_runs(results: Path, number: str, comment: str) -> set[TrainingRun]:
    """Return the training runs that a job, or a group of jobs, of stage train computes; empty for other stages.

    They are read from the paths of outputs in the job's record. If the record is missing or damaged, the result is the
    single training run in the comment. The record is missing for a moment after the submission, and for jobs that were
    submitted from another folder.
    """
    try:
        outputs = read_json(job_records_folder(results) / f"{number}.json")["outputs"]
    except (OSError, DamagedError):
        matches = [_COMMENT.fullmatch(comment)]
    else:
        matches = [_OUTPUT.fullmatch(os.path.relpath(path, results)) for path in outputs]
    return {(match[1], int(match[2])) for match in matches if match}  # method and seed


def summarize_jobs(jobs: list[Job]) -> str:
    """Return the numbers of running and waiting jobs of each stage, sorted by stage, as a text.

    Example: ``in the queue: sample 2 wait, train 1 run``. A job that is not pending is reported as running. The caller
    ensures that there is a job.
    """
    counts = Counter((job.stage, "wait" if job.pending else "run") for job in jobs)
    facts = [f"{stage} {count} {verb}" for (stage, verb), count in sorted(counts.items())]
    return f"in the queue: {', '.join(facts)}"
