# Images from all snapshots of a segment of a training run, and a picture of a grid of images for each snapshot. On a
# cluster this is one job together with the evaluation. With sampling.shards the rule sample_shards computes each shard in
# one job, and the rule sample merges the shards.

SHARDS = f"{TRAINING}/.shards/batch{layout.experiment.sampling.batch_size}"  # shards consist of whole batches


for segment in layout.segments:
    for name in layout.stage_rules("sample"):
        is_shard_rule = name != "sample"
        log_suffix = segment.suffix + (".{shard}" if is_shard_rule else "")

        rule:
            name:
                f"{name}{segment.suffix}"
            input:
                milestones=[f"{TRAINING}/milestones/{step}/milestone.json" for step in segment.snapshots],
                autoencoder=f"{RESULTS}/autoencoder/manifest.json",
                latents=f"{RESULTS}/latents/manifest.json",
                shards=[
                    f"{SHARDS}/{step}.{shard}.npz"
                    for step in segment.snapshots
                    for shard in layout.shards("sample")
                    if not is_shard_rule
                ],
            output:
                images=[
                    temp(f"{SHARDS}/{step}.{{shard}}.npz") if is_shard_rule else f"{TRAINING}/samples/{step}.npz"
                    for step in segment.snapshots
                ],
                grids=report(
                    [f"{TRAINING}/samples/{step}.png" for step in segment.snapshots if not is_shard_rule],
                    caption="../report/samples.rst",
                    category="Samples",
                    labels={"method": "{method}", "seed": "{seed}"},
                ),
                sums=(
                    temp(f"{SHARDS}/{segment.number}.{{shard}}.txt")
                    if is_shard_rule
                    else layout.checksum_file("sample", "{method}", "{seed}", segment)
                ),
            log:
                f"{RESULTS}/logs/sample_{{method}}_seed{{seed}}{log_suffix}.log",
            group:
                None if is_shard_rule else layout.sampling_group(segment)
            conda:
                "../../envs/environment.yml"
            threads: layout.experiment.training.threads
            resources:
                mem_mb=scaled_by_attempt(6000),
                runtime=scaled_by_attempt(240),
                gpu=layout.gpus_per_job,
            params:
                **layout.rule_params(name, segment),
                num=layout.experiment.evaluation.num_samples * layout.experiment.evaluation.sets,
                options=layout.sampling_options,
                milestones=repeat_option("--milestone", folders_of("milestones")),
                out=repeat_option("--out", paths_of("images")),
                grid=repeat_option("--grid", paths_of("grids")),
                shards=shard_options,
                read=stage_options("autoencoder", "latents"),
            shell:
                "kairos sample {params.milestones} {params.out} {params.grid} {params.shards} --num {params.num}"
                " {params.options} {params.read} --timing {params.timing} 2>&1 | tee {log} && cksum {output.images} {output.grids} > {output.sums}"
