# Import into MLflow. An import that fails is reported and does not fail the run; the next run repeats it.


localrules:
    track,


rule track:
    input:
        layout.inputs("track"),
    output:
        update(layout.outputs("track")),
    log:
        layout.log_file("track"),
    conda:
        "../../envs/environment.yml"
    resources:
        mem_mb=2000,
        runtime=60,
    params:
        config=layout.config_argument,
    shell:
        "kairos track --config {params.config} 2>&1 | tee {log}"
