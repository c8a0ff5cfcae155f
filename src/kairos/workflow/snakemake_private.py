"""Private names of Snakemake and its SLURM plugin that kairos uses, and what breaks if a release removes them.

``tests/test_private_names.py`` looks for each name, also in the newest releases; ``pyproject.toml`` caps the versions.
This module imports nothing of kairos, so that the test runs with only Snakemake and the plugin installed.

kairos also relies on four behaviours that have no name. The tests on SLURM, ``tests/cluster``, check these behaviours:

- Snakemake records a job as finished only in the mode ``ExecMode.DEFAULT``.
- The plugin names jobs after ``run_uuid``, by which the next controller finds them.
- The plugin reports the output of sbatch after the words ``sbatch call:``.
- The plugin calls ``report_job_error`` for a job that SLURM cannot accept now, which would use up the job's attempts.
"""

from pathlib import Path
from typing import Any

_JOB, _GROUP_JOB = "snakemake.jobs:Job", "snakemake.jobs:GroupJob"
_GROUP_SETTINGS = "snakemake.settings.types:GroupSettings"
_SLURM_EXECUTOR = "snakemake_executor_plugin_slurm:Executor"
_PARTITION_LIMITS = "snakemake_executor_plugin_slurm.partitions:PartitionLimits"
NAMES = [  # module and class, attribute, what would happen without the attribute
    (_JOB, "_attempt", "a job that fails again in the same way would be retried `retries` times"),
    (_GROUP_JOB, "_attempt", "training runs that share a job would be retried, too"),
    (_JOB, "non_derived_params", "the controller could wait for an earlier job that does other work"),
    (_GROUP_SETTINGS, "group_components", "each of the training runs that share a GPU would be a separate job"),
    (_SLURM_EXECUTOR, "report_job_error", "a job that SLURM cannot accept now would use up its attempts"),
    ("snakemake.resources:Resource", "parse_human_friendly", "kairos check could not read runtimes such as 2h"),
    (_PARTITION_LIMITS, "max_runtime", "kairos check could not compare a job's duration with the limits of partitions"),
]


def mark_ancient(path: str) -> Any:
    """Return an input of a rule whose age Snakemake ignores."""
    from snakemake.io import ancient

    return ancient(path)


def prevent_retry(job: Any) -> None:
    """Prevent another attempt of a job, or group of jobs, whose present attempt has failed.

    The number of the present attempt is set to the last one that Snakemake allows.
    """
    last_attempt = job.restart_times + 1
    job._attempt = last_attempt  # the public setter would return more resources to the scheduler than the job has taken


def set_jobs_per_group(workflow: Any, group: str, job_count: int) -> str:
    """Let Snakemake combine up to `job_count` jobs of a group that do not depend on each other; return `group`.

    A number that the user has set for the group is kept. Without group settings, such as for a summary, nothing
    changes. Rules call this function when Snakemake evaluates their group: the settings do not exist before.
    """
    settings = workflow.group_settings
    if settings is not None:  # None if nothing is executed
        number_by_group = {group: job_count}
        number_by_group.update(settings.group_components)  # replaces `job_count` by the user's number
        settings.group_components = number_by_group
    return group


def parse_runtime(runtime: int | str) -> float | None:
    """Return a resource `runtime` in minutes: a number of minutes, or a text such as ``2h``.

    The result is None for any other text, such as ``60 * attempt``, which Snakemake evaluates for each job.
    """
    from snakemake.exceptions import WorkflowError
    from snakemake.resources import Resource

    try:
        return float(Resource.parse_human_friendly("runtime", runtime))
    except WorkflowError:
        return None


def read_longest_limit(partition_file: Path, gpu: bool) -> float:
    """Return the time limit, in minutes, of the longest partition in a partition file; 0 if there is no partition.

    Args:
        partition_file: the SLURM plugin's description of a cluster's partitions.
        gpu: True to consider only partitions with GPUs.
    """
    from snakemake_executor_plugin_slurm.partitions import read_partition_file  # imports pandas

    limits = [partition.limits for partition in read_partition_file(partition_file)]
    if gpu:
        limits = [limit for limit in limits if limit.max_gpu]
    return max((limit.max_runtime for limit in limits), default=0.0)
