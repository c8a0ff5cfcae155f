"""Code of the workflow that the Snakefile, DVC and the SLURM executor share.

Only the process of the fork server imports torch.

- `layout`: files, stages, rules and jobs of an experiment; `dependencies`: what the results of each stage depend on.
- `rules`: arguments and resources of the rules; `controller`: start and end of a run; `fork_server`: quick job starts.
- `dvc_records`: DVC's record of the results; `batch_script`: wrapper of SLURM jobs; `project`: projects of users.
- `snakemake_private`: private names of Snakemake and its SLURM plugin.
"""
