"""Measure whether the primary metric that `kairos new` proposes can tell a better generator from a worse one.

    python benchmarks/metric_can_rank.py --data $DATA

For each number of images of CIFAR-10: the proposed experiment is prepared up to its reference rows, with the proposed
extractor and with one of 600 steps, the default. Distances separate if real held-out images score clearly below a
fitted Gaussian (`kairos.evaluation.separation`). The validation loss separates if it is lower after the last step than
after a quarter of the steps by two standard errors over seeds. The primary metric is the proposed one.
"""

import argparse
import math
import os
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
import yaml

from kairos.cli import main as kairos
from kairos.costs import new_experiment
from kairos.data.latents import open_latents
from kairos.evaluation.separation import reason_not_to_rank
from kairos.evaluation.settings import ClassifierOptions, LossSettings
from kairos.evaluation.validation import epsilon_loss
from kairos.files import read_json
from kairos.snapshots import open_snapshot, step_name

CIFAR10 = "cifar10/train-00000-of-00001.parquet"


def write_images(table: Any, folder: Path) -> None:
    """Write the images of a table with columns ``img`` and ``label`` as PNG files, into a folder per class."""
    for number, (image, label) in enumerate(zip(table["img"].to_pylist(), table["label"].to_pylist())):
        file = folder / str(label) / f"{number:05d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(image["bytes"])


def run(*words: object) -> None:
    """Run a command of kairos in this process; exit if it fails."""
    if kairos([str(word) for word in words]) != 0:
        raise SystemExit(f"kairos {words[0]} failed")


def proposed(images: Path, file: Path, steps: int) -> dict[str, Any]:
    """Write the experiment that `kairos new` proposes for the images to `file`, and return it as plain values.

    Its time is not measured, and `steps` is its number of steps.
    """
    text = new_experiment.render_experiment(new_experiment.collect_facts(images, file.stem, 10, ""), steps, seconds=0)
    values: dict[str, Any] = yaml.safe_load(text)
    file.write_text(yaml.safe_dump(values))
    return values


def reference_rows(file: Path, results: Path) -> tuple[str, bool]:
    """Train the extractor and measure the reference rows; return both rows as text, and True if the distance can rank.

    Args:
        file: experiment file.
        results: folder of its results, with data set, autoencoder and latents.
    """
    folders = {name: results / name for name in ("dataset", "autoencoder", "latents", "extractor")}
    run("extractor", "--config", file, "--dataset", folders["dataset"], "--out", folders["extractor"])
    folder_options = [word for name, folder in folders.items() for word in (f"--{name}", folder)]
    run("reference", "--config", file, *folder_options, "--out", results / "reference")
    record = read_json(results / "reference/record.json")
    metric, rows = record["metric"], record["rows"]
    texts = []
    for name in ("floor", "gaussian"):
        texts.append(f"{name} {rows[name][metric]:.4g} ± {rows[name][f'{metric}_spread']:.2g}")
    return ", ".join(texts), reason_not_to_rank(record) is None


def loss_differences(file: Path, results: Path, first: int, last: int, seeds: int) -> list[tuple[float, float]]:
    """Train with uniform timesteps; return the validation losses after `first` and after `last` steps, by seed."""
    latents = open_latents(results / "latents")
    losses = []
    settings = LossSettings(images=256, strata=32, seed=0)
    for seed in range(seeds):
        folder = results / "methods" / "uniform" / f"seed{seed}"
        run("train", "--config", file, "--method", "uniform", "--seed", seed, "--out", folder)
        snapshots = [open_snapshot(folder / "snapshots" / step_name(step), "ema", "cpu") for step in (first, last)]
        early, late = (epsilon_loss(snapshot, latents, settings)["loss_epsilon"] for snapshot in snapshots)
        losses.append((early, late))
    return losses


def measure(table: Any, work: Path, steps: int, seeds: int) -> None:
    """Measure the images of a table: print the reference rows of both extractors, the validation losses, and a verdict.

    Args:
        table: images and labels of CIFAR-10.
        work: folder for the images and the experiment file; results are written below the working directory.
        steps: steps of training for the validation loss.
        seeds: number of training runs.
    """
    count = len(table)
    images, file = work / f"images{count}", work / f"cifar{count}.yaml"
    results = Path("results") / file.stem
    write_images(table, images)
    values = proposed(images, file, steps)
    primary, extractor = values["evaluation"]["primary_metric"], values["evaluation"]["extractor"]
    print(f"{count} images: primary metric {primary}, extractor {extractor}", flush=True)
    for stage in ("prepare", "autoencoder", "encode"):
        run(stage, "--config", file)
    separates = {}
    for kind, length in (("default", ClassifierOptions().steps), ("proposed", extractor["steps"])):
        changed = values | {"evaluation": values["evaluation"] | {"extractor": extractor | {"steps": length}}}
        file.write_text(yaml.safe_dump(changed))
        rows, separates["distance"] = reference_rows(file, results)
        print(f"  distance, {kind} extractor ({length} steps): {rows}; separates: {separates['distance']}", flush=True)
    losses = loss_differences(file, results, steps // 4, steps, seeds)
    early, late = (statistics.fmean(column) for column in zip(*losses))
    falls = [first - last for first, last in losses]
    standard_error = statistics.stdev(falls) / math.sqrt(seeds)
    separates["validation"] = statistics.fmean(falls) > 2 * standard_error
    print(f"  validation loss: {early:.4f} after {steps // 4} steps, {late:.4f} after {steps}, fall ", end="")
    print(
        f"{statistics.fmean(falls):.4f} ± {standard_error:.4f} (standard error); separates: {separates['validation']}"
    )
    print(f"  the primary metric separates: {separates[primary]}", flush=True)


def main() -> None:
    """Draw nested subsets of CIFAR-10 and measure each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="folder with cifar10/")
    parser.add_argument("--images", type=int, nargs="+", default=[100, 400, 2000], metavar="N", help="data set sizes")
    parser.add_argument("--steps", type=int, default=1000, metavar="N", help="training steps for the validation loss")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="seeds of the training, 2 or more")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    table = pq.read_table(arguments.data / CIFAR10)
    order = np.random.default_rng(0).permutation(len(table))
    with TemporaryDirectory() as work:
        os.chdir(work)
        for count in arguments.images:
            measure(table.take(order[:count]), Path(work), arguments.steps, arguments.seeds)


if __name__ == "__main__":
    main()
