# Images from all snapshots of a segment of a training run, and a picture of a grid of images for each snapshot. On a
# cluster this is one job together with the evaluation. With sampling.shards the rule sample_shards computes each shard in
# one job, and the rule sample merges the shards.


for segment in layout.segments:

    if layout.shards("sample"):

        rule:
            name:
                f"sample_shards{segment.suffix}"
            input:
                layout.input_paths("sample", segment),  # their age counts: a shard that is older than an input is computed again
            output:
                images=[
                    temp(layout.shard_path("sample", "{shard}", "{method}", "{seed}", snapshot))
                    for snapshot in segment.snapshots
                ],
            log:
                layout.log_file("sample", segment, is_shard=True),
            priority: layout.priority("sample")
            conda:
                "../../envs/environment.yml"
            threads: layout.experiment.training.threads
            resources:
                mem_mb=scaled_by_attempt(6000),
                runtime=scaled_by_attempt(240),
                gpu=layout.gpus("sample"),
            params:
                config=layout.config_argument,
                segment=segment.number,
            shell:
                "kairos sample --config {params.config} --method {wildcards.method} --seed {wildcards.seed}"
                " --segment {params.segment} --shard {wildcards.shard} 2>&1 | tee {log}"

    rule:
        name:
            f"sample{segment.suffix}"
        input:
            layout.inputs("sample", segment),
            shards=[
                layout.shard_path("sample", shard, "{method}", "{seed}", snapshot)
                for snapshot in segment.snapshots
                for shard in layout.shards("sample")
            ],
        output:
            update(layout.outputs("sample", segment)),
            report(
                update([f"{TRAINING}/samples/{snapshot}.png" for snapshot in segment.snapshots]),
                caption="../report/samples.rst",
                category="Samples",
                labels={"method": "{method}", "seed": "{seed}"},
            ),
        log:
            layout.log_file("sample", segment),
        priority: layout.priority("sample")
        group:
            layout.sampling_group(segment)
        conda:
            "../../envs/environment.yml"
        threads: layout.experiment.training.threads
        resources:
            mem_mb=scaled_by_attempt(6000),
            runtime=scaled_by_attempt(240),
            gpu=layout.gpus("sample"),
        params:
            config=layout.config_argument,
            segment=segment.number,
        shell:
            "kairos sample --config {params.config} --method {wildcards.method} --seed {wildcards.seed}"
            " --segment {params.segment} 2>&1 | tee {log}"
