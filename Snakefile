# kairos: compare timestep strategies for diffusion training.
#   snakemake                                        the demo (params.yaml)
#   snakemake --configfile experiments/cifar10.yaml  another experiment; nothing of params.yaml leaks into it
from snakemake.utils import min_version

from kairos.workflow import controller
from kairos.workflow.rules import processes_per_node, scaled_by_attempt, training_resources

min_version("9.19")

layout = controller.open_layout(workflow, config, ancient)
# Inputs of a rule are the records of the results that its stage needs (table: `kairos.stages`), ancient while these are
# valid. If a result of the job is not valid, a file that is newer than every output is an input too, so that Snakemake runs
# the job. Outputs are records; `update` keeps the earlier one, with which the job compares its inputs. `config` is the
# frozen experiment, which later edits do not change.
RESULTS = layout.results
TRAINING = layout.training_folder("{method}", "{seed}")


envvars:
    "KAIROS_PLAN",  # for executors whose jobs do not inherit the controller's environment


# image of envs/kairos.def, for `--software-deployment-method apptainer`; the cluster's profile shows the options
container: "kairos.sif"


wildcard_constraints:
    method=layout.wildcard_pattern(layout.methods),
    seed=layout.wildcard_pattern(layout.experiment.seeds),
    shard=r"\d+of\d+",


localrules:
    all,
    report,


rule all:
    input:
        f"{RESULTS}/report.html",
        f"{RESULTS}/summary.csv",
        layout.records(*layout.list_targets()),  # of all stages: a deleted result is computed again


for name in layout.rule_files:

    include: f"workflow/rules/{name}.smk"


onstart:
    controller.starts(workflow, layout)


onsuccess:
    controller.succeeded(workflow, layout)


onerror:
    controller.failed(workflow, layout)
