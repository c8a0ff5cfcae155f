"""Names of Snakemake that its documentation does not promise, each with the issue whose solution would replace it.

`tests/test_private_names.py` looks for each name, also in the newest releases; `pyproject.toml` caps the versions.
"""

from typing import Any

NAMES = [  # module and class, attribute, issue
    ("snakemake.settings.types:GroupSettings", "group_components", "snakemake#1408: sizes of groups in the Snakefile"),
]


def set_jobs_per_group(workflow: Any, group: str, job_count: int) -> str:
    """Let Snakemake combine up to `job_count` unconnected jobs of a group, unless the user sets it; return `group`."""
    settings = workflow.group_settings
    if settings is not None:  # None if nothing is executed
        settings.group_components = {group: job_count, **settings.group_components}
    return group
