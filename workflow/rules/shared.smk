# What all trainings share: the space that the diffusion model works in (pixels, our own autoencoder or a pretrained one),
# the states of captions where the model is told of them, the extractor of features, and the reference that samples are compared with.

CODING_GPUS = layout.gpus_per_job if layout.experiment.autoencoder.kind != "none" else 0
SHARED = {  # what each reads, and what it asks for
    "autoencoder": (["dataset"], {"mem_mb": scaled_by_attempt(6000), "runtime": scaled_by_attempt(480), "gpu": CODING_GPUS}),
    "text": (["dataset"], {"mem_mb": scaled_by_attempt(8000), "runtime": scaled_by_attempt(480), "gpu": layout.gpus_per_job}),
    "extractor": (["dataset"], {"mem_mb": scaled_by_attempt(4000), "runtime": scaled_by_attempt(120)}),
    "reference": (
        ["dataset", "autoencoder", "latents", "extractor"],
        {"mem_mb": scaled_by_attempt(6000), "runtime": scaled_by_attempt(120), "gpu": layout.gpus_per_job},
    ),
}


for name, (read, asked) in ((name, SHARED[name]) for name in SHARED if name in layout.shared_stages):

    rule:
        name:
            name
        input:
            **{stage: f"{RESULTS}/{stage}/manifest.json" for stage in read},
            outside=layout.external_reference if name == "reference" else [],
        output:
            record=f"{RESULTS}/{name}/{'reference' if name == 'reference' else 'manifest'}.json",
        log:
            f"{RESULTS}/logs/{name}.log",
        conda:
            "../../envs/environment.yml"
        threads: layout.experiment.training.threads
        resources:
            **asked,
        params:
            **layout.rule_params(name),
            stage=name,
            read=stage_options(*read),
            out=folder_of("record"),
        shell:
            "kairos {params.stage} --config {params.config} {params.read} --out {params.out}"
            " --timing {params.timing} 2>&1 | tee {log}"
