# Latent moments of every image; in pixel space only a record that points to the data set. With autoencoder.shards the
# rule encode_shards computes each shard in one job, and the rule encode merges the shards.


for name in layout.stage_rules("encode"):
    is_shard_rule = name != "encode"
    log_suffix = ".{shard}" if is_shard_rule else ""

    rule:
        name:
            name
        input:
            **{stage: f"{RESULTS}/{stage}/manifest.json" for stage in layout.text_stages},
            dataset=f"{RESULTS}/dataset/manifest.json",
            autoencoder=f"{RESULTS}/autoencoder/manifest.json",
            shards=[f"{RESULTS}/.shards/latents.{shard}" for shard in layout.shards("encode") if not is_shard_rule],
        output:
            record=(
                temp(directory(f"{RESULTS}/.shards/latents.{{shard}}"))
                if is_shard_rule
                else f"{RESULTS}/latents/manifest.json"
            ),
        log:
            f"{RESULTS}/logs/encode{log_suffix}.log",
        conda:
            "../../envs/environment.yml"
        threads: layout.experiment.training.threads
        resources:
            mem_mb=scaled_by_attempt(6000),
            runtime=scaled_by_attempt(240),
            gpu=CODING_GPUS if name == layout.stage_rules("encode")[-1] else 0,
        params:
            **layout.rule_params(name),
            **({"text": layout.text_stages} if layout.text_stages else {}),
            read=stage_options("dataset", "autoencoder", *layout.text_stages),
            out=paths_of("record") if is_shard_rule else folder_of("record"),
            shards=shard_options,
        shell:
            "kairos encode --config {params.config} {params.read} {params.shards} --out {params.out}"
            " --timing {params.timing} 2>&1 | tee {log}"
