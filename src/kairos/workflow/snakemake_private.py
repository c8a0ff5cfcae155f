"""All that kairos uses of Snakemake and its SLURM plugin without their promise to keep it, and what breaks without it.

``tests/test_private_names.py`` looks for each attribute, in the newest releases too; pyproject.toml caps the versions.
Four habits of theirs have no name to look for; the tests on SLURM, ``tests/cluster``, rely on them:

- Snakemake records a job as finished in the mode ``ExecMode.DEFAULT`` alone.
- The plugin names jobs after ``run_uuid``, by which the next controller finds them.
- The plugin reports what sbatch says after the words ``sbatch call:``.
- The plugin calls ``report_job_error`` for a job that SLURM cannot take now; it would use up the job's attempts.
"""

from pathlib import Path
from typing import Any

_RECORDS, _JOBS = "snakemake.persistence:PersistenceBase", "snakemake.jobs"
_GROUPS, _SLURM = "snakemake.settings.types:GroupSettings", "snakemake_executor_plugin_slurm"
NAMES = [  # module and class, attribute, what would happen without it
    (_RECORDS, "_filter_incomplete_keys", "outputs that a killed job has deleted would make its training start over"),
    (f"{_JOBS}:Job", "_attempt", "what fails again in the same way would be tried `retries` times"),
    (f"{_JOBS}:GroupJob", "_attempt", "trainings that share a job would be tried again, too"),
    (f"{_JOBS}:Job", "non_derived_params", "an earlier job that does other work could be waited for"),
    (_GROUPS, "group_components", "each of the trainings that share a GPU would be a job of its own"),
    (f"{_SLURM}:Executor", "report_job_error", "a job that SLURM cannot take now would use up its attempts"),
    (f"{_SLURM}.partitions:PartitionLimits", "max_runtime", "kairos check would know no longest time of a job"),
]


def on_the_books(workflow: Any, job: Any) -> bool:
    """Return True if Snakemake has recorded a job as finished, and not as begun since."""
    records = workflow.persistence
    return records.has_metadata(job) and not records._filter_incomplete_keys([str(output) for output in job.output])


def no_further_attempt(job: Any) -> None:
    """Let a job that fails not be tried again. (By the public setter it would give back more than it has taken.)"""
    job._attempt = job.restart_times + 1


def together(workflow: Any, group: str, number: int) -> str:
    """The name of a group of which up to so many jobs become one, although nothing connects them.

    Called when Snakemake asks a rule for its group: its settings come after the Snakefile is read.
    """
    if settings := workflow.group_settings:  # none where nothing is executed, such as for a summary
        settings.group_components = {group: number, **settings.group_components}
    return group


def longest(partitions: Path, gpu: bool) -> float:
    """Minutes that the longest partition of a partition file allows; with `gpu` of those that take jobs with one."""
    from snakemake_executor_plugin_slurm.partitions import read_partition_file

    limits = [partition.limits for partition in read_partition_file(partitions)]
    return max((one.max_runtime for one in limits if one.max_gpu or not gpu), default=0.0)
