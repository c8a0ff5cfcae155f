# Encoded captions, if the model is conditioned on them.


rule text:
    input:
        layout.inputs("text"),
    output:
        update(layout.outputs("text")),
    log:
        layout.log_file("text"),
    priority: layout.shared_priority
    conda:
        "../../envs/environment.yml"
    threads: layout.experiment.training.threads
    resources:
        mem_mb=scaled_by_attempt(8000),
        runtime=scaled_by_attempt(480),
        gpu=layout.gpus("text"),
    params:
        config=layout.config_argument,
    shell:
        "kairos text --config {params.config} 2>&1 | tee {log}"
