# The rules of kairos as it is installed; rules of your own go below.
#   snakemake                                 the demo (params.yaml)
#   snakemake --configfile FILE               another experiment; `kairos new FILE --data FOLDER` writes one
from kairos.workflow import controller
from kairos.workflow.project import installed

layout = controller.open_layout(workflow, config, ancient)


module pipeline:
    snakefile:
        str(installed() / "Snakefile")
    config:
        config


use rule * from pipeline


onstart:
    controller.starts(workflow, layout)


onsuccess:
    controller.succeeded(workflow, layout)


onerror:
    controller.failed(workflow, layout)
