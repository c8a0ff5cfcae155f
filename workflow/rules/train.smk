# One job per method, seed and segment; it resumes from the training's own state by itself. Schedulers end a job by a
# signal to all of its processes: shell and tee stay until the training has written its state.


for segment in layout.segments:

    rule:
        name:
            f"train{segment.name}"
        input:
            latents=f"{RESULTS}/latents/manifest.json",
            start=[f"{start}/milestone.json" for start in [layout.experiment.training.start_from] if start],
            before=[f"{TRAINING}/milestones/{step}/milestone.json" for step in segment.before],
        output:
            milestones=[f"{TRAINING}/milestones/{step}/milestone.json" for step in segment.names],
            end=[f"{TRAINING}/{name}" for name in ("training.json", "metrics.jsonl") if segment.last],
            sums=layout.sums("train", "{method}", "{seed}", segment),
        log:
            f"{RESULTS}/logs/train_{{method}}_seed{{seed}}{segment.name}.log",
        group:
            controller.sharing(workflow, layout, segment)
        conda:
            "../../envs/environment.yml"
        threads: layout.experiment.training.threads * processes_per_node(layout.experiment)
        resources:
            **training_resources(layout.experiment),
        params:
            **layout.params("train", segment),
            steps=list(segment.steps),
            latents=folder_of("latents"),
            part=segment.part,
            out=f"{TRAINING}",
        shell:
            "trap '' HUP; trap : TERM INT; kairos train --config {params.config} --method {wildcards.method} --seed {wildcards.seed} --out {params.out}"
            " --latents {params.latents} --milestones {params.steps} {params.part} --wait --timing {params.timing} 2>&1"
            " | (trap '' TERM INT; exec tee {log})"
            " && cksum {output.milestones} {output.end} > {output.sums}"
