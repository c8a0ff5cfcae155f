# Metrics of every snapshot: distance of its samples to the reference, and validation loss of its weights on held-out latents.


for segment in layout.segments:

    rule:
        name:
            f"evaluate{segment.suffix}"
        input:
            layout.rerun_if_invalid("evaluate", segment),
            layout.records(*(f"{TRAINING}/samples/{step}.json" for step in segment.snapshots)),
            layout.records(*(f"{TRAINING}/snapshots/{step}/snapshot.json" for step in segment.snapshots)),
            layout.records(f"{RESULTS}/latents/record.json"),
            layout.records(f"{RESULTS}/extractor/record.json"),
            layout.records(f"{RESULTS}/reference/record.json"),
        output:
            update([f"{TRAINING}/evaluation/{step}.json" for step in segment.snapshots]),
        log:
            f"{RESULTS}/logs/evaluate_{{method}}_seed{{seed}}{segment.suffix}.log",
        priority: layout.priority("evaluate")
        group:
            layout.sampling_group(segment)
        conda:
            "../../envs/environment.yml"
        threads: layout.feature_threads
        resources:
            mem_mb=scaled_by_attempt(6000),
            runtime=scaled_by_attempt(120),
            gpu=layout.gpus_per_job,
        params:
            **layout.params("evaluate"),
            segment=segment.number,
        shell:
            "kairos evaluate --config {params.config} --method {wildcards.method} --seed {wildcards.seed}"
            " --segment {params.segment} 2>&1 | tee {log}"
