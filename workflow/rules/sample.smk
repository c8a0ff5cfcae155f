# Images from all milestones of a segment of a training, and a grid picture of each. On a cluster one job with what
# evaluates them. Where sampling.shards asks for it, parts are drawn in jobs of their own, and here they are joined.


for segment in layout.segments:

    rule:
        name:
            f"sample{segment.name}"
        input:
            milestones=[f"{TRAINING}/milestones/{step}/milestone.json" for step in segment.names],
            autoencoder=f"{RESULTS}/autoencoder/manifest.json",
            latents=f"{RESULTS}/latents/manifest.json",
            parts=[
                layout.part("sample", f"{TRAINING}/.parts/{step}", shard) + ".npz"
                for step in segment.names
                for shard in layout.shards("sample")
            ],
        output:
            images=[f"{TRAINING}/samples/{step}.npz" for step in segment.names],
            grids=report(
                [f"{TRAINING}/samples/{step}.png" for step in segment.names],
                caption="../report/samples.rst",
                category="Samples",
                labels={"method": "{method}", "seed": "{seed}"},
            ),
            sums=layout.sums("sample", "{method}", "{seed}", segment),
        log:
            f"{RESULTS}/logs/sample_{{method}}_seed{{seed}}{segment.name}.log",
        group:
            layout.images(segment)
        conda:
            "../../envs/environment.yml"
        threads: layout.threads
        resources:
            mem_mb=growing(6000),
            runtime=growing(240),
            gpu=layout.gpus,
        params:
            **layout.params("sample", segment),
            options=layout.sampling_options,
            milestones=repeated("--milestone", folders("milestones")),
            out=repeated("--out", files("images")),
            grid=repeated("--grid", files("grids")),
            parts=repeated("--part", files("parts")),
            autoencoder=folder("autoencoder"),
            latents=folder("latents"),
        shell:
            "kairos sample {params.milestones} {params.out} {params.grid} {params.parts} --num {params.num} {params.options}"
            " --autoencoder {params.autoencoder} --latents {params.latents} --timing {params.timing} 2>&1 | tee {log}"
            " && cksum {output.images} {output.grids} > {output.sums}"


if layout.shards("sample"):

    for segment in layout.segments:

        rule:
            name:
                f"sample_parts{segment.name}"
            input:
                milestones=[f"{TRAINING}/milestones/{step}/milestone.json" for step in segment.names],
                autoencoder=f"{RESULTS}/autoencoder/manifest.json",
                latents=f"{RESULTS}/latents/manifest.json",
            output:
                images=[temp(layout.part("sample", f"{TRAINING}/.parts/{step}") + ".npz") for step in segment.names],
            log:
                layout.part("sample", f"{RESULTS}/logs/sample_{{method}}_seed{{seed}}{segment.name}") + ".log",
            conda:
                "../../envs/environment.yml"
            threads: layout.threads
            resources:
                mem_mb=growing(6000),
                runtime=growing(240),
                gpu=layout.gpus,
            params:
                **layout.params("sample", segment, part=True),
                options=layout.sampling_options,
                milestones=repeated("--milestone", folders("milestones")),
                out=repeated("--out", files("images")),
                of=len(layout.shards("sample")),
                autoencoder=folder("autoencoder"),
                latents=folder("latents"),
            shell:
                "kairos sample {params.milestones} {params.out} --shard {wildcards.shard}/{params.of}"
                " --num {params.num} {params.options} --autoencoder {params.autoencoder} --latents {params.latents}"
                " --timing {params.timing} 2>&1 | tee {log}"
