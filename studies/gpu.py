"""Compare four strategies on one GPU for some minutes: CIFAR-10 at 32x32, the U-Net of 35.7 M parameters.

    python studies/gpu.py prepare --images data/cifar10/train-00000-of-00001.parquet   # on any machine with kairos
    PYTHONPATH=src:library/src python studies/gpu.py run --steps 800   # on a GPU machine, with results/study_gpu

All strategies train at the same time on one GPU, in one process each. No measurement shows that this is faster than one
after the other. The snapshots after `--steps` steps are sampled and evaluated. studies/gpu.yaml is the experiment; its
data are the first 14,000 images. The folder results/study_gpu, which `prepare` writes, has to be on the GPU machine.
"""

import argparse
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import yaml

HERE = Path(__file__).parent
CONFIG = HERE / "gpu.yaml"
EXPERIMENT = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
RESULTS = HERE.parent / "results" / EXPERIMENT["experiment"]
METHODS = [*EXPERIMENT["methods"]]
IMAGE_COUNT = 14_000  # first images of the file: 12,600 for training, 1,400 held out


def kairos(*arguments: object) -> list[str]:
    """Return a command line of kairos for this interpreter; kairos is installed or on PYTHONPATH."""
    return [sys.executable, "-m", "kairos", *map(str, arguments)]


def prepare(images: Path) -> None:
    """Write the first images to a parquet file, and run all stages before training with Snakemake.

    A GPU machine may lack the packages of these stages.
    """
    import pyarrow.parquet

    RESULTS.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.parquet.read_table(images).slice(0, IMAGE_COUNT), RESULTS / "cifar10.parquet")
    target = RESULTS.relative_to(HERE.parent) / "reference" / "record.json"
    command = [sys.executable, "-m", "snakemake", str(target), "--cores", "2", "--configfile", str(CONFIG)]
    subprocess.run(command, cwd=HERE.parent, check=True)


def run(steps: int, out: Path) -> None:
    """Train all strategies at the same time; sample and evaluate their last snapshots.

    Writes ``<method>.json`` (evaluation), ``<method>.jsonl`` (metrics of the steps) and ``<method>.png`` (samples) to
    the folder `out`.

    Raises:
        SystemExit: a command failed.
    """
    out.mkdir(parents=True, exist_ok=True)
    wait_for(
        kairos(
            "train", "--config", CONFIG, "--method", method, "--seed", 0, "--out", training_folder(method),
            "--latents", RESULTS / "latents", "--milestones", steps,
        )
        for method in METHODS
    )  # fmt: skip
    for method in METHODS:
        shutil.copy(training_folder(method) / "metrics.jsonl", out / f"{method}.jsonl")
    sampling, count = EXPERIMENT["sampling"], EXPERIMENT["evaluation"]["num_samples"]
    wait_for(
        kairos(
            "sample", "--snapshot", snapshot(method, steps), "--out", training_folder(method) / "samples.npz",
            "--grid", out / f"{method}.png", "--grid-images", 64, "--num", count, "--seed", 0, "--weights", "ema",
            "--scheduler", sampling["scheduler"], "--steps", sampling["steps"], "--precision", "bf16",
            "--batch-size", sampling["batch_size"], "--latents", RESULTS / "latents",
            "--autoencoder", RESULTS / "autoencoder",
        )
        for method in METHODS
    )  # fmt: skip
    wait_for(
        kairos(
            "evaluate", "--samples", training_folder(method) / "samples.npz", "--snapshot", snapshot(method, steps),
            "--out", out / f"{method}.json", "--reference", RESULTS / "reference" / "record.json",
            "--extractor", RESULTS / "extractor", "--latents", RESULTS / "latents",
        )
        for method in METHODS
    )  # fmt: skip


def snapshot(method: str, step: int) -> Path:
    """Return the folder of a snapshot."""
    return training_folder(method) / "snapshots" / f"{step:07d}"


def training_folder(method: str) -> Path:
    """Return the folder of a training run, as in the pipeline."""
    return RESULTS / "methods" / method / "seed0"


def wait_for(commands: Iterable[list[str]]) -> None:
    """Run commands at the same time, and wait for all of them; raise SystemExit if one fails."""
    processes = [subprocess.Popen(command) for command in commands]
    failed = [process.args for process in processes if process.wait()]
    if failed:
        raise SystemExit(f"{len(failed)} commands failed, the first is {failed[0]}")


def main() -> None:
    """Run a command of this study."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["prepare", "run"])
    parser.add_argument("--images", type=Path, help="parquet file of CIFAR-10's training set")
    parser.add_argument("--steps", type=int, default=800, help="steps of each training run")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "gpu", help="folder of the results")
    arguments = parser.parse_args()
    if arguments.command == "prepare":
        if arguments.images is None or not arguments.images.exists():
            parser.error(f"--images: got {arguments.images}, allowed: a parquet file of CIFAR-10's training set")
        prepare(arguments.images)
    else:
        run(arguments.steps, arguments.out)


if __name__ == "__main__":
    main()
