# Feature extractor, in whose features images are compared.


rule extractor:
    input:
        layout.inputs("extractor"),
    output:
        update(layout.outputs("extractor")),
    log:
        layout.log_file("extractor"),
    priority: layout.shared_priority
    conda:
        "../../envs/environment.yml"
    threads: layout.experiment.training.threads
    resources:
        mem_mb=scaled_by_attempt(4000),
        runtime=scaled_by_attempt(120),
        gpu=layout.gpus("extractor"),
    params:
        config=layout.config_argument,
    shell:
        "kairos extractor --config {params.config} 2>&1 | tee {log}"
