"""Measure time and peak memory of every stage up to training at several numbers of images of 8×8 pixels.

    python benchmarks/image_count.py --autoencoder train --sizes 100000 1281167 --out train.csv

The data set has 300 distinct images in ten classes, repeated to the number of images, in a zip with dataset.json or a
parquet file. With ``--autoencoder train`` a tiny autoencoder encodes them, and DVC records the results; otherwise
training is in pixel space. All images are part of the reference, except 10 % that are held out.

Snakemake runs the experiment in a clone of the last commit, one job at a time with one thread. Jobs except
prepare are forks of a server that has imported torch: their memory includes these imports, their time does not.

Columns:
    source, autoencoder, images: the case.
    stage: name of the stage; train has 200 steps. ``record`` is ``dvc repro`` with complete results, and a new cache.
    seconds: wall time of the job.
    mib: peak resident memory, MiB.
    microseconds_per_image: seconds over the number of images.
"""

import argparse
import csv
import io
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
DISTINCT, CLASSES = 300, 10
STAGES = ("prepare", "autoencoder", "encode", "extractor", "reference", "train")
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


def experiment(source: str, images: Path, autoencoder: str) -> dict:
    """Return an experiment whose networks are tiny, so that the number of images dominates, as plain values."""
    autoencoder_section = {"kind": "none"}
    if autoencoder == "train":
        autoencoder_section = {"kind": "train", "channels": [8, 8], "steps": 20, "encode_batch_size": 256}
    return {
        "experiment": "count",
        "seeds": [0],
        "dataset": {"source": source, "path": str(images)},
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


def clone_with_experiment(clone: Path, values: dict) -> None:
    """Clone the last commit of this project, and commit the experiment as params.yaml, which DVC records."""
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    (clone / "params.yaml").write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    author = ["-c", "user.name=benchmark", "-c", "user.email=benchmark@localhost"]
    subprocess.run(["git", *author, "commit", "--quiet", "--all", "--message", "Experiment"], cwd=clone, check=True)


def measure_stages(clone: Path) -> dict[str, tuple[float, float]]:
    """Run the experiment with Snakemake; return seconds and MiB of each stage in `STAGES`."""
    subprocess.run(["snakemake", "--cores", "1", "--configfile", "params.yaml"], cwd=clone, check=True)
    timing = clone / "results" / "count" / "timing"
    files = {stage: timing / f"{stage}.json" for stage in STAGES}
    files["train"] = timing / "train" / "uniform_seed0" / "1.json"
    measurements = {}
    for stage, file in files.items():
        record = json.loads(file.read_text(encoding="utf-8"))
        measurements[stage] = record["wall_seconds"], record["peak_rss_bytes"] / 2**20
    return measurements


def measure_record(clone: Path) -> tuple[float, float]:
    """Record the results with DVC in the clone's own cache; return seconds and MiB.

    Memory is that of the largest process among kairos, Snakemake and DVC.
    """
    start = time.perf_counter()
    process = subprocess.Popen(["dvc", "repro"], cwd=clone)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    if status:
        raise RuntimeError(f"dvc repro failed in {clone}")
    return seconds, usage.ru_maxrss / 2**10


def main() -> None:
    """Run all sizes, print each row and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", choices=("zip", "parquet"), default="zip")
    parser.add_argument("--autoencoder", choices=("none", "train"), default="none")
    parser.add_argument("--sizes", type=int, nargs="+", default=[100_000, 1_281_167])
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with open(arguments.out, "w", newline="", encoding="utf-8") as file:
        file.write(f"# python {' '.join(sys.argv)}; {os.cpu_count()} CPUs\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(FIELDS)
        for size in arguments.sizes:
            for stage, (seconds, mebibytes) in measure(arguments.source, arguments.autoencoder, size).items():
                case = [arguments.source, arguments.autoencoder, size, stage]
                row = [*case, f"{seconds:.1f}", round(mebibytes), f"{seconds / size * 1e6:.0f}"]
                writer.writerow(row)
                file.flush()
                print(dict(zip(FIELDS, row)), flush=True)


def measure(source: str, autoencoder: str, size: int) -> dict[str, tuple[float, float]]:
    """Write a data set of `size` images and run the experiment; return seconds and MiB of each stage."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        os.environ["HF_HOME"] = str(folder / "cache")  # of the table that `datasets` converts
        images = folder / f"images.{source}"
        # in a separate process, because a child inherits the peak memory of its parent
        write = {"zip": write_zip, "parquet": write_parquet}[source]
        writing = multiprocessing.get_context("spawn").Process(target=write, args=(images, size))
        writing.start()
        writing.join()
        if writing.exitcode:
            raise RuntimeError(f"{images} could not be written")
        clone = folder / "clone"
        clone_with_experiment(clone, experiment(source, images, autoencoder))
        measurements = measure_stages(clone)
        if autoencoder == "train":  # dvc.yaml contains the stage of the autoencoder
            measurements["record"] = measure_record(clone)
    return measurements


if __name__ == "__main__":
    main()
