# Metrics of every snapshot: distance of its samples to the reference, and validation loss of its weights on held-out latents.


for segment in layout.segments:

    rule:
        name:
            f"evaluate{segment.suffix}"
        input:
            layout.inputs("evaluate", segment),
        output:
            update(layout.outputs("evaluate", segment)),
        log:
            layout.log_file("evaluate", segment),
        priority: layout.priority("evaluate")
        group:
            layout.sampling_group(segment)
        conda:
            "../../envs/environment.yml"
        threads: layout.feature_threads
        resources:
            mem_mb=scaled_by_attempt(6000),
            runtime=scaled_by_attempt(120),
            gpu=layout.gpus("evaluate"),
        params:
            config=layout.config_argument,
            segment=segment.number,
        shell:
            "kairos evaluate --config {params.config} --method {wildcards.method} --seed {wildcards.seed}"
            " --segment {params.segment} 2>&1 | tee {log}"
