# Statistics of the real images that samples are compared with, and the reference rows.


rule reference:
    input:
        layout.inputs("reference"),
    output:
        update(layout.outputs("reference")),
    log:
        layout.log_file("reference"),
    priority: layout.shared_priority
    conda:
        "../../envs/environment.yml"
    threads: layout.feature_threads
    resources:
        mem_mb=scaled_by_attempt(6000),
        runtime=scaled_by_attempt(120),
        gpu=layout.gpus("reference"),
    params:
        config=layout.config_argument,
    shell:
        "kairos reference --config {params.config} 2>&1 | tee {log}"
