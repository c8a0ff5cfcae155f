# One job per method, seed and segment; it resumes from the training run's checkpoint. Schedulers end a job by a signal
# to all of its processes: the shell and tee ignore it until the training run has written a checkpoint. The jobs of a group
# are one job of the cluster: runs that share a GPU (`training.trainings_per_gpu`).


for segment in layout.segments:

    rule:
        name:
            f"train{segment.suffix}"
        input:
            layout.inputs("train", segment),
        output:
            update(layout.outputs("train", segment)),
            update([f"{TRAINING}/{name}" for name in ("training.json", "metrics.jsonl")] if segment.is_last else []),
        log:
            layout.log_file("train", segment),
        priority: layout.priority("train")
        group:
            controller.training_group(workflow, layout, segment)
        conda:
            "../../envs/environment.yml"
        threads: layout.experiment.training.threads * processes_per_node(layout.experiment)
        resources:
            **training_resources(layout.experiment),
        params:
            config=layout.config_argument,
            segment=segment.number,
        shell:
            "trap '' HUP; trap : TERM INT; kairos train --config {params.config} --method {wildcards.method}"
            " --seed {wildcards.seed} --segment {params.segment} 2>&1 | (trap '' TERM INT; exec tee {log})"
