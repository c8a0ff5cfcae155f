# Autoencoder of the latents: none, trained here or pretrained.


rule autoencoder:
    input:
        layout.inputs("autoencoder"),
    output:
        update(layout.outputs("autoencoder")),
    log:
        layout.log_file("autoencoder"),
    priority: layout.shared_priority
    conda:
        "../../envs/environment.yml"
    threads: layout.experiment.training.threads
    resources:
        mem_mb=scaled_by_attempt(6000),
        runtime=scaled_by_attempt(480),
        gpu=layout.gpus("autoencoder"),
    params:
        config=layout.config_argument,
    shell:
        "kairos autoencoder --config {params.config} 2>&1 | tee {log}"
