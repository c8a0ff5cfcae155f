# Conversion of a data set into one memory-mappable format, with a fixed split into training and held-out images.


rule prepare:
    input:
        layout.inputs("prepare"),
    output:
        update(layout.outputs("prepare")),
    log:
        f"{RESULTS}/logs/prepare.log",
    priority: layout.shared_priority
    conda:
        "../../envs/environment.yml"
    threads: 8  # decode images; at most the run's cores, and `set-threads` of a profile changes it
    resources:
        mem_mb=scaled_by_attempt(4000),
        runtime=scaled_by_attempt(120),
    params:
        **layout.params("prepare"),
    shell:
        "kairos prepare --config {params.config} 2>&1 | tee {log}"
