"""All that kairos uses of Snakemake and its SLURM plugin without their promise to keep it, and what breaks without it.

``tests/test_private_names.py`` looks for each, also in the newest releases; pyproject.toml caps the versions.
"""

from pathlib import Path
from typing import Any

_BOOKS, _JOBS = "snakemake.persistence:PersistenceBase", "snakemake.jobs"
_GROUPS, _SLURM = "snakemake.settings.types:GroupSettings", "snakemake_executor_plugin_slurm:Executor"
NAMES = [  # module and class, a word of its code, what would happen where it is no longer there
    (_BOOKS, "_filter_incomplete_keys", "outputs that a killed job has deleted would make its training start over"),
    (_BOOKS, "exec_mode == ExecMode.DEFAULT", "what ends without a controller would not be on Snakemake's books"),
    (f"{_JOBS}:Job", "_attempt", "what fails again in the same way would be tried `retries` times"),
    (f"{_JOBS}:GroupJob", "_attempt", "so would trainings that share a job"),
    (f"{_JOBS}:Job", "non_derived_params", "an earlier job that does other work could be waited for"),
    (_GROUPS, "group_components", "each of the trainings that share a GPU would be a job of its own"),
    (_SLURM, "self.run_uuid = ", "jobs would be named anew in each run, and the next controller would not find them"),
    (_SLURM, "sbatch call:", "words of the command line would be taken for SLURM's refusal of it"),
    ("snakemake_executor_plugin_slurm.partitions:PartitionLimits", "max_runtime", "kairos check would know none"),
    (_SLURM, "self.report_job_error(job_info, msg=msg)", "a job that SLURM cannot take now would use up its attempts"),
]


def on_the_books(workflow: Any, job: Any) -> bool:
    """Whether Snakemake has written a job down as done, and not as begun since."""
    books = workflow.persistence
    return books.has_metadata(job) and not books._filter_incomplete_keys([str(output) for output in job.output])


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
