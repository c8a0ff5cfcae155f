# What images are compared with, and the comparison of every milestone's samples.


rule extractor:
    input:
        dataset=f"{RESULTS}/dataset/manifest.json",
    output:
        record=f"{RESULTS}/extractor/manifest.json",
    log:
        f"{RESULTS}/logs/extractor.log",
    conda:
        "../../envs/environment.yml"
    threads: layout.threads
    resources:
        mem_mb=growing(4000),
        runtime=growing(120),
    params:
        **layout.params("extractor"),
        dataset=folder("dataset"),
        out=folder("record"),
    shell:
        "kairos extractor --config {params.config} --dataset {params.dataset} --out {params.out}"
        " --timing {params.timing} 2>&1 | tee {log}"


rule reference:
    input:
        dataset=f"{RESULTS}/dataset/manifest.json",
        autoencoder=f"{RESULTS}/autoencoder/manifest.json",
        latents=f"{RESULTS}/latents/manifest.json",
        extractor=f"{RESULTS}/extractor/manifest.json",
        outside=layout.outside,
    output:
        record=f"{RESULTS}/reference/reference.json",
    log:
        f"{RESULTS}/logs/reference.log",
    conda:
        "../../envs/environment.yml"
    threads: layout.threads
    resources:
        mem_mb=growing(6000),
        runtime=growing(120),
        gpu=layout.gpus,
    params:
        **layout.params("reference"),
        dataset=folder("dataset"),
        autoencoder=folder("autoencoder"),
        latents=folder("latents"),
        extractor=folder("extractor"),
        out=folder("record"),
    shell:
        "kairos reference --config {params.config} --dataset {params.dataset} --autoencoder {params.autoencoder}"
        " --latents {params.latents} --extractor {params.extractor} --out {params.out}"
        " --timing {params.timing} 2>&1 | tee {log}"


for segment in layout.segments:

    rule:
        name:
            f"evaluate{segment.name}"
        input:
            images=[f"{TRAINING}/samples/{step}.npz" for step in segment.names],
            milestones=[f"{TRAINING}/milestones/{step}/milestone.json" for step in segment.names],
            latents=f"{RESULTS}/latents/manifest.json",
            extractor=f"{RESULTS}/extractor/manifest.json",
            reference=f"{RESULTS}/reference/reference.json",
        output:
            records=[f"{TRAINING}/evaluation/{step}.json" for step in segment.names],
            sums=layout.sums("evaluate", "{method}", "{seed}", segment),
        log:
            f"{RESULTS}/logs/evaluate_{{method}}_seed{{seed}}{segment.name}.log",
        group:
            layout.images(segment)
        conda:
            "../../envs/environment.yml"
        threads: layout.threads
        resources:
            mem_mb=growing(6000),
            runtime=growing(120),
            gpu=layout.gpus,
        params:
            **layout.params("evaluate", segment),
            images=repeated("--samples", files("images")),
            milestones=repeated("--milestone", folders("milestones")),
            out=repeated("--out", files("records")),
            latents=folder("latents"),
            extractor=folder("extractor"),
        shell:
            "kairos evaluate {params.images} {params.milestones} {params.out} --reference {input.reference}"
            " --latents {params.latents} --extractor {params.extractor} --timing {params.timing} 2>&1 | tee {log}"
            " && cksum {output.records} > {output.sums}"
