# Import into MLflow. An import that fails is reported and does not fail the run; the next run repeats it.


localrules:
    track,


rule track:
    input:
        layout.report_inputs(),
        table=f"{RESULTS}/summary.csv",
        figures=f"{RESULTS}/figures",
    output:
        f"{RESULTS}/tracking.json",
    log:
        f"{RESULTS}/logs/track.log",
    conda:
        "../../envs/environment.yml"
    resources:
        mem_mb=2000,
        runtime=60,
    params:
        **layout.dependency_params("track"),
        config=layout.config_argument,
        results=folder_of("table"),
    shell:
        "kairos track --config {params.config} --results {params.results} --out {output}"
        " --timing {params.results}/logs/track.timing.json 2>&1 | tee {log}"
