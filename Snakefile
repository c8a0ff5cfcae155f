# kairos: compare timestep strategies for diffusion training.
#   snakemake                                        the demo (params.yaml)
#   snakemake --configfile experiments/cifar10.yaml  another experiment; nothing of params.yaml leaks into it
from snakemake.utils import min_version

from kairos.workflow import controller
from kairos.workflow.rules import processes_per_node, scaled_by_attempt, training_resources

min_version("9.19")

layout = controller.open_layout(workflow, config)
# Inputs of the rules: `layout.rerun_if_invalid` is empty if all results of the job are valid; else it is a file newer than
# every output, so that Snakemake runs the job. `layout.records` are records of results, ancient while these are valid.
# Outputs are records; `update` keeps the earlier one, with which the job compares its inputs. Of the params, `config` is
# the frozen experiment, and `key` the hash of settings and code, by which a controller recognises a job.
RESULTS = layout.results
TRAINING = layout.training_folder("{method}", "{seed}")


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
        layout.records(*layout.report_inputs()),  # to compute a file again that was deleted while the report exists
        f"{RESULTS}/tracking.json" if layout.experiment.tracking.enabled else [],


include: "workflow/rules/prepare.smk"
include: "workflow/rules/shared.smk"
include: "workflow/rules/encode.smk"
include: "workflow/rules/train.smk"
include: "workflow/rules/sample.smk"
include: "workflow/rules/evaluate.smk"
include: "workflow/rules/analyse.smk"
include: "workflow/rules/report.smk"


if layout.experiment.tracking.enabled:

    include: "workflow/rules/track.smk"


onstart:
    controller.starts(workflow, layout)


onsuccess:
    controller.succeeded(workflow, layout)


onerror:
    controller.failed(workflow, layout)
