"""Code of the workflow that the Snakefile, DVC and the SLURM executor share.

Only the process of the fork server imports torch.

- `layout`: files, stages, rules and jobs of an experiment; `rules`: arguments and resources of the rules.
- `controller`: start and end of a run; `fork_server`: quick job starts; `final_errors`: jobs that are not tried again.
- `batch_script`: wrapper of SLURM jobs.
- `recording`: recordings of results for git and DVC; `records`: changes of records; `project`: projects of users.
- `snakemake_private`: a name of Snakemake that its documentation does not promise.
"""
