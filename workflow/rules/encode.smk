# Latent moments of every image; in pixel space only a record that points to the data set.


rule encode:
    input:
        dataset=f"{RESULTS}/dataset/manifest.json",
        autoencoder=f"{RESULTS}/autoencoder/manifest.json",
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
        gpu=layout.gpus if layout.experiment.autoencoder.kind != "none" else 0,
    params:
        **layout.params("encode"),
        dataset=folder("dataset"),
        autoencoder=folder("autoencoder"),
        out=folder("record"),
    shell:
        "kairos encode --config {params.config} --dataset {params.dataset} --autoencoder {params.autoencoder}"
        " --out {params.out} --timing {params.timing} 2>&1 | tee {log}"
