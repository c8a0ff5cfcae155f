"""Measure time and peak memory of every stage for 10,000 and for 50,000 images, each stage in a process of its own.

    python benchmarks/any_size.py --data data/cifar10/train-00000-of-00001.parquet --out benchmarks/results/any_size.csv

All images are prepared, encoded and part of the reference; none is held out. The number of samples is the number of
images. The networks are small and hardly trained, which changes the time but not the growth of memory. The last column
of the table is the peak memory for 50,000 images over the peak memory for 10,000.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow.parquet as pq
import yaml
from result_file import write_rows

SIZES = (10_000, 50_000)
STAGES = ("prepare", "autoencoder", "encode", "extractor", "reference", "train", "sample", "evaluate")


def experiment(size: int, metrics: list[str]) -> dict:
    """Return an experiment on `size` images, all of them in the reference, with `size` samples, as plain values."""
    return {
        "experiment": "size",
        "dataset": {"source": "parquet", "path": "images.parquet", "heldout": 0},
        "autoencoder": {"kind": "train", "channels": [8, 16, 16], "steps": 100, "encode_batch_size": 128},
        "model": {"name": "dit", "patch": 2, "width": 32, "depth": 1, "heads": 2},
        "training": {"milestones": [50], "batch_size": 64, "device": "cpu"},
        "methods": {"uniform": {}},
        "sampling": {"steps": 2, "batch_size": 250},
        "evaluation": {
            "extractor": {"name": "classifier", "features": 64, "channels": 8, "steps": 100},
            "reference": "all",
            "num_samples": size,
            "sets": 1,
            "metrics": metrics,
        },
    }


def run(folder: Path, size: int) -> dict[str, dict]:
    """Run every stage of the experiment in a folder; return the record of time and memory by stage."""
    shared = ["--config", folder / "x.yaml", "--dataset", "dataset"]
    options = {name: [f"--{name}", name] for name in ("autoencoder", "latents", "extractor")}
    snapshot = ["--snapshot", "methods/u/seed0/snapshots/0000050"]
    calls = {
        "prepare": ["--config", folder / "x.yaml", "--out", "dataset"],
        "autoencoder": [*shared, "--out", "autoencoder"],
        "encode": [*shared, *options["autoencoder"], "--out", "latents"],
        "extractor": [*shared, "--out", "extractor"],
        "reference": [*shared, *itertools.chain(*options.values()), "--out", "reference"],
        "train": [*shared[:2], "--method", "uniform", "--seed", "0", *options["latents"], "--out", "methods/u/seed0"],
        "sample": [*snapshot, "--num", str(size), *options["autoencoder"], "--out", "samples.npz"],
        "evaluate": ["--samples", "samples.npz", "--reference", "reference", *options["extractor"], "--out", "x.json"],
    }  # fmt: skip
    records = {}
    for stage, arguments in calls.items():
        command = [sys.executable, "-m", "kairos", stage, *map(str, arguments), "--timing", f"{stage}.json"]
        subprocess.run(command, cwd=folder, check=True)
        records[stage] = json.loads((folder / f"{stage}.json").read_text())
    return records


def main() -> None:
    """Run both sizes, print a table and write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="parquet file(s) of at least 50,000 images with labels")
    parser.add_argument("--metrics", default="frechet,kid,precision,recall", metavar="M,...")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = {stage: {"stage": stage} for stage in STAGES}
    for size in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            pq.write_table(
                pq.read_table(arguments.data).slice(0, size), Path(folder, "images.parquet"), row_group_size=1000
            )
            values = experiment(size, arguments.metrics.split(","))
            Path(folder, "x.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
            for stage, record in run(Path(folder), size).items():
                rows[stage][f"seconds_{size}"] = round(record["wall_seconds"], 1)
                rows[stage][f"mib_{size}"] = round(record["peak_rss_bytes"] / 2**20)
    small, large = (f"mib_{size}" for size in SIZES)
    print(f"{'stage':12}" + "".join(f"{f'{size:,} images':>24}" for size in SIZES) + f"{'ratio':>8}")
    for row in rows.values():
        row["ratio"] = round(row[large] / row[small], 3)
        cells = (f"{row[f'seconds_{size}']:10.1f} s {row[f'mib_{size}']:7} MiB" for size in SIZES)
        print(f"{row['stage']:12}" + "".join(cells) + f"{row['ratio']:8.3f}")
    if arguments.out:
        write_rows(arguments.out, list(rows.values()))


if __name__ == "__main__":
    main()
