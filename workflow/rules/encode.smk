# Latent moments of every image; in pixel space only a record that points to the data set. With autoencoder.shards the
# rule encode_shards computes each shard in one job, and the rule encode merges the shards.


if layout.shards("encode"):

    rule encode_shards:
        input:
            layout.input_paths("encode"),  # their age counts: a shard that is older than an input is computed again
        output:
            temp(directory(layout.shard_path("encode", "{shard}"))),
        log:
            layout.log_file("encode", is_shard=True),
        priority: layout.shared_priority
        conda:
            "../../envs/environment.yml"
        threads: layout.experiment.training.threads
        resources:
            mem_mb=scaled_by_attempt(6000),
            runtime=scaled_by_attempt(240),
            gpu=layout.gpus("encode", is_shard=True),
        params:
            config=layout.config_argument,
        shell:
            "kairos encode --config {params.config} --shard {wildcards.shard} 2>&1 | tee {log}"


rule encode:
    input:
        layout.inputs("encode"),
        shards=[layout.shard_path("encode", shard) for shard in layout.shards("encode")],
    output:
        update(layout.outputs("encode")),
    log:
        layout.log_file("encode"),
    priority: layout.shared_priority
    conda:
        "../../envs/environment.yml"
    threads: layout.experiment.training.threads
    resources:
        mem_mb=scaled_by_attempt(6000),
        runtime=scaled_by_attempt(240),
        gpu=layout.gpus("encode"),
    params:
        config=layout.config_argument,
    shell:
        "kairos encode --config {params.config} 2>&1 | tee {log}"
