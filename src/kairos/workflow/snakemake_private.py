"""Names of Snakemake and its SLURM plugin that their documentation does not promise, each with what would replace it.

`tests/test_private_names.py` looks for each name, also in the newest releases; `pyproject.toml` caps the versions.
"""

from pathlib import Path
from typing import Any

NAMES = [  # module and class, attribute, and the issue whose solution would replace it
    ("snakemake.settings.types:GroupSettings", "group_components", "snakemake#1408: sizes of groups in the Snakefile"),
    ("snakemake_executor_plugin_slurm.partitions", "read_partition_file", "none filed: limits of partitions"),
    ("snakemake_executor_plugin_slurm.utils", "parse_time_to_minutes", "none filed: limits of partitions"),
    ("snakemake_executor_plugin_slurm.utils", "get_job_wildcards", "snakemake#762: external job ids are lost"),
]


def set_jobs_per_group(workflow: Any, group: str, job_count: int) -> str:
    """Let Snakemake combine up to `job_count` unconnected jobs of a group, unless the user sets it; return `group`."""
    settings = workflow.group_settings
    if settings is not None:  # None if nothing is executed
        settings.group_components = {group: job_count, **settings.group_components}
    return group


def read_minutes(runtime: int | str) -> float | None:
    """Return a time, such as ``2h`` or ``1-00:00:00``, in minutes; None for other texts, such as expressions."""
    from snakemake_executor_plugin_slurm.utils import parse_time_to_minutes
    from snakemake_interface_common.exceptions import WorkflowError

    try:
        return float(parse_time_to_minutes(runtime))
    except WorkflowError:
        return None


def read_longest_limit(partition_file: Path, gpu: bool) -> float:
    """Return the longest time limit, in minutes, in a file of partitions, or of those with GPUs; 0 without any."""
    from snakemake_executor_plugin_slurm.partitions import read_partition_file

    limits = [partition.limits for partition in read_partition_file(partition_file)]
    return max((limit.max_runtime for limit in limits if limit.max_gpu or not gpu), default=0.0)
