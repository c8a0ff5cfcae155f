# Stages that all training runs share: the autoencoder, which is none, trained here or pretrained; the encoded captions,
# if the model is conditioned on them; the feature extractor; and the reference that samples are compared with.

CODING_GPUS = layout.gpus_per_job if layout.experiment.autoencoder.kind != "none" else 0
SHARED = {  # inputs and resources of each stage
    "autoencoder": (
        ["dataset"],
        {"mem_mb": scaled_by_attempt(6000), "runtime": scaled_by_attempt(480), "gpu": CODING_GPUS},
    ),
    "text": (
        ["dataset"],
        {"mem_mb": scaled_by_attempt(8000), "runtime": scaled_by_attempt(480), "gpu": layout.gpus_per_job},
    ),
    "extractor": (["dataset"], {"mem_mb": scaled_by_attempt(4000), "runtime": scaled_by_attempt(120)}),
    "reference": (
        ["dataset", "autoencoder", "latents", "extractor"],
        {"mem_mb": scaled_by_attempt(6000), "runtime": scaled_by_attempt(120), "gpu": layout.gpus_per_job},
    ),
}


for name, (read, resources_of_stage) in ((name, SHARED[name]) for name in SHARED if name in layout.shared_stages):

    rule:
        name:
            name
        input:
            layout.rerun_if_invalid(name),
            layout.records(*(f"{RESULTS}/{folder}/record.json" for folder in read)),
        output:
            update(f"{RESULTS}/{name}/record.json"),
        log:
            f"{RESULTS}/logs/{name}.log",
        priority: layout.shared_priority
        conda:
            "../../envs/environment.yml"
        threads: layout.feature_threads if name == "reference" else layout.experiment.training.threads
        resources:
            **resources_of_stage,
        params:
            **layout.params(name),
            stage=name,
        shell:
            "kairos {params.stage} --config {params.config} 2>&1 | tee {log}"
