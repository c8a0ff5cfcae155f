# Analyses of the experiment, one table and one figure each. An analysis reads measurements at snapshots, which are one
# job each, or records of training runs. The measurement at a training run's last snapshot waits for the end of the
# training run, which writes the optimiser's state.


for name in layout.analyses:
    for part in [True, False] if layout.measurement_files(name) else [False]:

        rule:
            name:
                f"measure_{name}" if part else f"analyse_{name}"
            input:
                milestone=f"{TRAINING}/milestones/{{step}}/milestone.json" if part else [],
                end=layout.training_end if part else [],
                latents=f"{RESULTS}/latents/manifest.json" if part else [],
                read=[] if part else layout.analysis_inputs(name),
            output:
                table=f"{TRAINING}/analyses/{name}.{{step}}.csv" if part else f"{RESULTS}/analyses/{name}.csv",
                figure=[] if part else report(f"{RESULTS}/analyses/{name}.png", category="Analyses"),
            log:
                f"{RESULTS}/logs/"
                + (f"measure_{name}_{{method}}_seed{{seed}}_{{step}}.log" if part else f"analyse_{name}.log"),
            wildcard_constraints:
                step=r"\d{7}",
            localrule: not part
            conda:
                "../../envs/environment.yml"
            threads: layout.experiment.training.threads if part else 1
            resources:
                mem_mb=scaled_by_attempt(6000 if part else 2000),
                runtime=scaled_by_attempt(240 if part else 30),
                gpu=layout.gpus_per_job if part else 0,
            params:
                **layout.rule_params(f"measure_{name}" if part else f"analyse_{name}"),
                analysis=name,
                results=RESULTS,
                of=repeat_option("--milestone", folders_of("milestone")),
                out=repeat_option("--out", paths_of("table")) if part else "",
            shell:
                "kairos analyse --config {params.config} --analysis {params.analysis} --results {params.results}"
                " {params.of} {params.out} --timing {params.timing} 2>&1 | tee {log}"
