# Table, figures and the self-contained report.


rule report:
    input:
        layout.inputs("report"),
    output:
        update(layout.outputs("report")),
        page=f"{RESULTS}/report.html",
        table=report(f"{RESULTS}/summary.csv", caption="../report/summary.rst", category="Table"),
        published=[f"{RESULTS}/published.csv"] if layout.experiment.published else [],
        figures=report(
            directory(f"{RESULTS}/figures"),
            patterns=["{name}.svg"],
            caption="../report/figures.rst",
            category="Figures",
            labels={"figure": "{name}"},
        ),
    log:
        layout.log_file("report"),
    conda:
        "../../envs/environment.yml"
    resources:
        mem_mb=2000,
        runtime=30,
    params:
        config=layout.config_argument,
    shell:
        "kairos report --config {params.config} 2>&1 | tee {log}"
