# Analyses of the experiment, one table and one figure each. An analysis reads measurements at snapshots, which are one
# job each, or records of training runs. The measurement at a training run's last snapshot reads the optimizer's state
# in the last checkpoint, which the training run publishes with this snapshot.


for name in layout.analyses:

    if f"measure_{name}" in layout.stages:

        rule:
            name:
                f"measure_{name}"
            input:
                layout.inputs(f"measure_{name}"),
            output:
                update(layout.outputs(f"measure_{name}")),
                update(f"{TRAINING}/analyses/{name}.{{step}}.csv"),
            log:
                layout.log_file(f"measure_{name}"),
            wildcard_constraints:
                step=r"\d{7}",
            priority: layout.priority("measure")
            conda:
                "../../envs/environment.yml"
            threads: layout.experiment.training.threads
            resources:
                mem_mb=scaled_by_attempt(6000),
                runtime=scaled_by_attempt(240),
                gpu=layout.gpus(f"measure_{name}"),
            params:
                config=layout.config_argument,
                name=name,
            shell:
                "kairos analyse --config {params.config} --analysis {params.name} --method {wildcards.method}"
                " --seed {wildcards.seed} --step {wildcards.step} 2>&1 | tee {log}"

    rule:
        name:
            f"analyse_{name}"
        input:
            layout.inputs(f"analyse_{name}"),
        output:
            update(layout.outputs(f"analyse_{name}")),
            update(f"{RESULTS}/analyses/{name}.csv"),
            report(update(f"{RESULTS}/analyses/{name}.png"), category="Analyses"),
        log:
            layout.log_file(f"analyse_{name}"),
        localrule: True
        conda:
            "../../envs/environment.yml"
        resources:
            mem_mb=scaled_by_attempt(2000),
            runtime=scaled_by_attempt(30),
            gpu=0,
        params:
            config=layout.config_argument,
            name=name,
        shell:
            "kairos analyse --config {params.config} --analysis {params.name} 2>&1 | tee {log}"
