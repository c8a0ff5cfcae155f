"""Compare four strategies on one GPU for some minutes: CIFAR-10 at 32x32, the U-Net of 35.7 M parameters.

    python studies/gpu.py prepare --images data/cifar10/train-00000-of-00001.parquet   # on any machine with kairos
    python studies/gpu.py run --seconds 240                                            # on the GPU machine
    python studies/gpu.py table                                                        # studies/results/gpu.csv

All strategies train at the same time on one GPU, one process each, because one process leaves the GPU idle more than
half of the time. After `--seconds` the processes are stopped. The last snapshot that all strategies have reached is
sampled and evaluated. studies/gpu.yaml is the experiment, with data of the first 14,000 images.
"""

import argparse
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import yaml

HERE = Path(__file__).parent
CONFIG = HERE / "gpu.yaml"
EXPERIMENT = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
RESULTS = HERE.parent / "results" / EXPERIMENT["experiment"]
METHODS, MILESTONES = [*EXPERIMENT["methods"]], EXPERIMENT["training"]["milestones"]
IMAGES = 14_000


def kairos(*arguments: object) -> list[str]:
    """Return a command of kairos with this interpreter, which need not have kairos installed."""
    return [sys.executable, "-m", "kairos", *map(str, arguments)]


def prepare(images: Path) -> None:
    """Cut the data set, and run all stages before training by Snakemake; a GPU machine may lack their packages."""
    import pyarrow.parquet

    RESULTS.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.parquet.read_table(images).slice(0, IMAGES), RESULTS / "cifar10.parquet")
    target = RESULTS.relative_to(HERE.parent) / "reference" / "reference.json"
    command = [sys.executable, "-m", "snakemake", str(target), "--cores", "2", "--configfile", str(CONFIG)]
    subprocess.run(command, cwd=HERE.parent, check=True)


def run(seconds: float, out: Path) -> None:
    """Train all strategies at the same time for `seconds`; sample and evaluate their last common snapshot.

    Writes ``<method>.json`` (evaluation), ``<method>.jsonl`` (metrics of the steps) and ``<method>.png`` (samples) to
    the folder `out`.

    Raises:
        SystemExit: a command failed, or the strategies have no snapshot in common.
    """
    trainings = {}
    for method in METHODS:
        command = kairos("train", "--config", CONFIG, "--method", method, "--seed", 0, "--out", training_folder(method))
        trainings[method] = subprocess.Popen([*command, "--latents", RESULTS / "latents"])
    deadline = time.monotonic() + seconds
    for training in trainings.values():
        try:
            training.wait(max(deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            training.send_signal(signal.SIGKILL)  # only snapshots are needed
            training.wait()
    reached = [step for step in MILESTONES if all(snapshot(method, step).exists() for method in METHODS)]
    if not reached:
        raise SystemExit(f"{seconds:g} s: not enough for {MILESTONES[0]} steps of each strategy")

    step = reached[-1]
    out.mkdir(parents=True, exist_ok=True)
    sampling, count = EXPERIMENT["sampling"], EXPERIMENT["evaluation"]["num_samples"]
    wait_for(
        kairos(
            "sample", "--milestone", snapshot(method, step).parent, "--out", training_folder(method) / "samples.npz",
            "--grid", out / f"{method}.png", "--grid-images", 64, "--num", count, "--seed", 0, "--weights", "ema",
            "--scheduler", sampling["scheduler"], "--steps", sampling["steps"], "--precision", "bf16",
            "--batch-size", sampling["batch_size"], "--latents", RESULTS / "latents",
            "--autoencoder", RESULTS / "autoencoder",
        )
        for method in METHODS
    )  # fmt: skip
    wait_for(
        kairos(
            "evaluate", "--samples", training_folder(method) / "samples.npz", "--milestone", snapshot(method, step).parent,
            "--out", out / f"{method}.json", "--reference", RESULTS / "reference" / "reference.json",
            "--extractor", RESULTS / "extractor", "--latents", RESULTS / "latents",
        )
        for method in METHODS
    )  # fmt: skip
    for method in METHODS:
        shutil.copy(training_folder(method) / "metrics.jsonl", out / f"{method}.jsonl")


def snapshot(method: str, step: int) -> Path:
    """Return the record of a snapshot, which is written last."""
    return training_folder(method) / "milestones" / f"{step:07d}" / "milestone.json"


def training_folder(method: str) -> Path:
    """Return the folder of a training run, as in the pipeline."""
    return RESULTS / method / "seed0"


def wait_for(commands: Iterable[list[str]]) -> None:
    """Run commands at the same time; SystemExit if one of them fails."""
    processes = [subprocess.Popen(command) for command in commands]
    failed = [process.args for process in processes if process.wait()]
    if failed:
        raise SystemExit(f"{len(failed)} commands failed, the first is {failed[0]}")


def main() -> None:
    """Run a command of this study."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["prepare", "run"])
    parser.add_argument("--images", type=Path, help="parquet file of CIFAR-10's training set")
    parser.add_argument("--seconds", type=float, default=240, help="time of the training runs, start-up included")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "gpu", help="folder of the results")
    arguments = parser.parse_args()
    if arguments.command == "prepare":
        prepare(arguments.images)
    else:
        run(arguments.seconds, arguments.out)


if __name__ == "__main__":
    main()
