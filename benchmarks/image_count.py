"""Measure time and peak memory of every stage before sampling at several numbers of images of 8×8 pixels.

    python benchmarks/image_count.py --source zip --sizes 100000 1281167 --out benchmarks/results/image_count_zip.csv

The data set has 300 distinct images in ten classes, repeated to the number of images, in a zip with dataset.json or a
parquet file. With ``--autoencoder train`` a tiny autoencoder encodes them; otherwise training is in pixel space. Each
stage is a process of its own with one thread. All images are part of the reference, except 10 % that are held out.

Columns:
    source, autoencoder, images: the case.
    stage: name of the stage; train has 200 steps.
    seconds: wall time of the stage.
    mib: peak resident memory, MiB.
    microseconds_per_image: seconds over the number of images.
"""

import argparse
import csv
import io
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from PIL import Image

DISTINCT, CLASSES = 300, 10
FIELDS = ["source", "autoencoder", "images", "stage", "seconds", "mib", "microseconds_per_image"]


def encode_images() -> list[bytes]:
    """Return the bytes of 300 distinct PNG files, random images of 8×8 pixels."""
    random = np.random.default_rng(0)
    contents = []
    for _ in range(DISTINCT):
        buffer = io.BytesIO()
        Image.fromarray(random.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(buffer, "PNG")
        contents.append(buffer.getvalue())
    return contents


def write_zip(path: Path, count: int) -> None:
    """Write a zip of `count` images with their classes in dataset.json, as the tools of EDM do."""
    contents = encode_images()
    names = [f"{index // 1000:05d}/img{index:08d}.png" for index in range(count)]
    with zipfile.ZipFile(path, "w") as file:
        for index, name in enumerate(names):
            file.writestr(name, contents[index % DISTINCT])
        labels = [[name, index % CLASSES] for index, name in enumerate(names)]
        file.writestr("dataset.json", json.dumps({"labels": labels}))


def write_parquet(path: Path, count: int) -> None:
    """Write a parquet file of `count` images and their classes, in row groups of 1,000."""
    contents = encode_images()
    schema = pa.schema({"image": pa.struct({"bytes": pa.binary(), "path": pa.string()}), "label": pa.int64()})
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, count, 1000):
            indices = range(start, min(start + 1000, count))
            images = [{"bytes": contents[index % DISTINCT], "path": None} for index in indices]
            labels = [index % CLASSES for index in indices]
            writer.write_table(pa.table({"image": images, "label": labels}, schema=schema))


def experiment(source: str, autoencoder: str) -> dict:
    """Return an experiment whose networks are tiny, so that the number of images dominates, as plain values."""
    autoencoder_section = {"kind": "none"}
    if autoencoder == "train":
        autoencoder_section = {"kind": "train", "channels": [8, 8], "steps": 20, "encode_batch_size": 256}
    return {
        "experiment": "count",
        "dataset": {"source": source, "path": f"images.{source}"},
        "autoencoder": autoencoder_section,
        "model": {"name": "dit", "patch": 2, "width": 32, "depth": 1, "heads": 2},
        "training": {"milestones": [200], "batch_size": 64, "device": "cpu"},
        "methods": {"uniform": {}},
        "evaluation": {
            "extractor": {"name": "classifier", "features": 16, "channels": 8, "steps": 20},
            "num_samples": 1000,
            "sets": 1,
            "metrics": ["frechet"],
        },
        "tracking": {"enabled": False},
    }


def run(folder: Path) -> dict[str, dict]:
    """Run every stage of the experiment in a folder; return the record of time and memory by stage."""
    config = ["--config", "x.yaml"]
    shared = [*config, "--dataset", "dataset"]
    autoencoder, latents, extractor = ([f"--{name}", name] for name in ("autoencoder", "latents", "extractor"))
    calls = {
        "prepare": [*config, "--out", "dataset"],
        "autoencoder": [*shared, "--out", "autoencoder"],
        "encode": [*shared, *autoencoder, "--out", "latents"],
        "extractor": [*shared, "--out", "extractor"],
        "reference": [*shared, *autoencoder, *latents, *extractor, "--out", "reference"],
        "train": [*config, "--method", "uniform", "--seed", "0", *latents, "--out", "u/seed0"],
    }
    records = {}
    for stage, arguments in calls.items():
        command = [sys.executable, "-m", "kairos", stage, *arguments, "--timing", f"{stage}.json"]
        subprocess.run(command, cwd=folder, check=True)
        records[stage] = json.loads((folder / f"{stage}.json").read_text())
    return records


def main() -> None:
    """Run all sizes, print each row and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", choices=("zip", "parquet"), default="zip")
    parser.add_argument("--autoencoder", choices=("none", "train"), default="none")
    parser.add_argument("--sizes", type=int, nargs="+", default=[100_000, 1_281_167])
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with open(arguments.out, "w", newline="", encoding="utf-8") as file:
        file.write(f"# python {' '.join(sys.argv)}; {os.cpu_count()} CPUs\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(FIELDS)
        for size in arguments.sizes:
            with tempfile.TemporaryDirectory() as temporary:
                folder = Path(temporary)
                os.environ["HF_HOME"] = str(folder / "cache")  # of the table that `datasets` converts
                write = {"zip": write_zip, "parquet": write_parquet}[arguments.source]
                write(folder / f"images.{arguments.source}", size)
                values = experiment(arguments.source, arguments.autoencoder)
                (folder / "x.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
                for stage, record in run(folder).items():
                    seconds, mebibytes = record["wall_seconds"], record["peak_rss_bytes"] / 2**20
                    case = [arguments.source, arguments.autoencoder, size, stage]
                    row = [*case, f"{seconds:.1f}", round(mebibytes), f"{seconds / size * 1e6:.0f}"]
                    writer.writerow(row)
                    file.flush()
                    print(dict(zip(FIELDS, row)), flush=True)


if __name__ == "__main__":
    main()
