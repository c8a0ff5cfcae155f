# Latent moments of every image; in pixel space only a record that points to the data set. Where autoencoder.shards asks
# for it, parts are encoded in jobs of their own, and here they are joined.


rule encode:
    input:
        dataset=f"{RESULTS}/dataset/manifest.json",
        autoencoder=f"{RESULTS}/autoencoder/manifest.json",
        parts=[layout.part("encode", f"{RESULTS}/.parts/latents", shard) for shard in layout.shards("encode")],
    output:
        record=f"{RESULTS}/latents/manifest.json",
    log:
        f"{RESULTS}/logs/encode.log",
    conda:
        "../../envs/environment.yml"
    threads: layout.threads
    resources:
        mem_mb=growing(6000),
        runtime=growing(240),
        gpu=layout.gpus if layout.experiment.autoencoder.kind != "none" and not layout.shards("encode") else 0,
    params:
        **layout.params("encode"),
        dataset=folder("dataset"),
        autoencoder=folder("autoencoder"),
        parts=repeated("--part", files("parts")),
        out=folder("record"),
    shell:
        "kairos encode --config {params.config} --dataset {params.dataset} --autoencoder {params.autoencoder}"
        " {params.parts} --out {params.out} --timing {params.timing} 2>&1 | tee {log}"


if layout.shards("encode"):

    rule encode_parts:
        input:
            dataset=f"{RESULTS}/dataset/manifest.json",
            autoencoder=f"{RESULTS}/autoencoder/manifest.json",
        output:
            part=temp(directory(layout.part("encode", f"{RESULTS}/.parts/latents"))),
        log:
            layout.part("encode", f"{RESULTS}/logs/encode") + ".log",
        conda:
            "../../envs/environment.yml"
        threads: layout.threads
        resources:
            mem_mb=growing(6000),
            runtime=growing(240),
            gpu=layout.gpus,
        params:
            **layout.params("encode", part=True),
            dataset=folder("dataset"),
            autoencoder=folder("autoencoder"),
            of=len(layout.shards("encode")),
        shell:
            "kairos encode --config {params.config} --dataset {params.dataset} --autoencoder {params.autoencoder}"
            " --shard {wildcards.shard}/{params.of} --out {output.part} --timing {params.timing} 2>&1 | tee {log}"
