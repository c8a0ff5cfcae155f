"""Snakemake executor plugin ``kairos``: the SLURM plugin's executor, whose jobs outlive their controller.

Snakemake finds the plugin by its name. ``profiles/slurm`` selects it by ``executor: kairos``. The SLURM plugin's
settings are ``kairos-...`` there. Outside of this package, only the module `kairos.workflow.snakemake_private` changes
objects of Snakemake. It lists the private names that kairos uses.
"""

from snakemake_executor_plugin_slurm import ExecutorSettings, common_settings

from snakemake_executor_plugin_kairos.executor import Executor

__all__ = ["Executor", "ExecutorSettings", "common_settings"]
