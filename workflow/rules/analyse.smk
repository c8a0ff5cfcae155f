# Analyses of the experiment, one table and one figure each. An analysis reads measurements at snapshots, which are one
# job each, or records of training runs. The measurement at a training run's last snapshot waits for the end of the
# training run, which writes the optimizer's state.


for name in layout.analyses:
    for is_measurement in [True, False] if layout.measurement_files(name) else [False]:
        rule_name = f"measure_{name}" if is_measurement else f"analyse_{name}"

        rule:
            name:
                rule_name
            input:
                milestone=f"{TRAINING}/milestones/{{step}}/milestone.json" if is_measurement else [],
                end=layout.training_end if is_measurement else [],
                latents=f"{RESULTS}/latents/manifest.json" if is_measurement else [],
                read=[] if is_measurement else layout.analysis_inputs(name),
            output:
                table=(
                    f"{TRAINING}/analyses/{name}.{{step}}.csv" if is_measurement else f"{RESULTS}/analyses/{name}.csv"
                ),
                figure=[] if is_measurement else report(f"{RESULTS}/analyses/{name}.png", category="Analyses"),
            log:
                f"{RESULTS}/logs/"
                + (f"measure_{name}_{{method}}_seed{{seed}}_{{step}}.log" if is_measurement else f"analyse_{name}.log"),
            wildcard_constraints:
                step=r"\d{7}",
            localrule: not is_measurement
            conda:
                "../../envs/environment.yml"
            threads: layout.experiment.training.threads if is_measurement else 1
            resources:
                mem_mb=scaled_by_attempt(6000 if is_measurement else 2000),
                runtime=scaled_by_attempt(240 if is_measurement else 30),
                gpu=layout.gpus_per_job if is_measurement else 0,
            params:
                **layout.rule_params(rule_name),
                analysis=name,
                results=RESULTS,
                of=repeat_option("--milestone", folders_of("milestone")),
                out=repeat_option("--out", paths_of("table")) if is_measurement else "",
            shell:
                "kairos analyse --config {params.config} --analysis {params.analysis} --results {params.results}"
                " {params.of} {params.out} --timing {params.timing} 2>&1 | tee {log}"
