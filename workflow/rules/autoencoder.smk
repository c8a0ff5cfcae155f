# The space that the diffusion model works in: pixels, our own autoencoder or a pretrained one.


rule autoencoder:
    input:
        dataset=f"{RESULTS}/dataset/manifest.json",
    output:
        record=f"{RESULTS}/autoencoder/manifest.json",
    log:
        f"{RESULTS}/logs/autoencoder.log",
    conda:
        "../../envs/environment.yml"
    threads: layout.threads
    resources:
        mem_mb=growing(6000),
        runtime=growing(480),
        gpu=layout.gpus if layout.experiment.autoencoder.kind != "none" else 0,
    params:
        **layout.params("autoencoder"),
        dataset=folder("dataset"),
        out=folder("record"),
    shell:
        "kairos autoencoder --config {params.config} --dataset {params.dataset} --out {params.out}"
        " --timing {params.timing} 2>&1 | tee {log}"
