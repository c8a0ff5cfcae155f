# Conversion of a data set into one memory-mappable format, with a fixed split into training and held-out images.


rule prepare:
    input:
        layout.inputs("prepare"),
    output:
        update(layout.outputs("prepare")),
    log:
        layout.log_file("prepare"),
    priority: layout.shared_priority
    conda:
        "../../envs/environment.yml"
    threads: 8  # decode images; at most the run's cores, and `set-threads` of a profile changes it
    resources:
        mem_mb=scaled_by_attempt(4000),
        runtime=scaled_by_attempt(120),
    params:
        config=layout.config_argument,
    shell:
        "kairos prepare --config {params.config} 2>&1 | tee {log}"
