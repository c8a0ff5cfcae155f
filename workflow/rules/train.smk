# One job per method, seed and segment; it resumes from the training run's checkpoint. Schedulers end a job by a signal
# to all of its processes: the shell and tee ignore it until the training run has written a checkpoint.


for segment in layout.segments:

    rule:
        name:
            f"train{segment.suffix}"
        input:
            latents=f"{RESULTS}/latents/manifest.json",
            start=layout.start_weights,
            before=[f"{TRAINING}/milestones/{step}/milestone.json" for step in segment.previous],
        output:
            milestones=[f"{TRAINING}/milestones/{step}/milestone.json" for step in segment.snapshots],
            end=[f"{TRAINING}/{name}" for name in ("training.json", "metrics.jsonl") if segment.is_last],
            sums=layout.checksum_file("train", "{method}", "{seed}", segment),
        log:
            f"{RESULTS}/logs/train_{{method}}_seed{{seed}}{segment.suffix}.log",
        priority: layout.priority("train")
        group:
            controller.training_group(workflow, layout, segment)
        conda:
            "../../envs/environment.yml"
        threads: layout.experiment.training.threads * processes_per_node(layout.experiment)
        resources:
            **training_resources(layout.experiment),
        params:
            **layout.rule_params("train"),  # config, and what makes the job run again: fields and code
            segment=segment.number,
            steps=list(segment.steps),  # other steps run the job again
        shell:
            "trap '' HUP; trap : TERM INT; kairos train --config {params.config} --method {wildcards.method}"
            " --seed {wildcards.seed} --segment {params.segment} 2>&1 | (trap '' TERM INT; exec tee {log})"
            " && cksum {output.milestones} {output.end} > {output.sums}"
