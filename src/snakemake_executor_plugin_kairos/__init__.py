"""Snakemake's executor ``kairos``: the SLURM plugin's, whose jobs outlive the controller that sent them.

Snakemake finds it by its name; ``profiles/slurm`` says ``executor: kairos``, and the SLURM plugin's settings are
``kairos-…`` there. Nothing else in this repository subclasses or changes what is Snakemake's or a plugin's; names that
these do not promise to keep are in `private`.
"""

from snakemake_executor_plugin_slurm import ExecutorSettings, common_settings

from snakemake_executor_plugin_kairos.executor import Executor

__all__ = ["Executor", "ExecutorSettings", "common_settings"]
