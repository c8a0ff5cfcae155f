"""Train the same network from a folder of PNG files by kairos, by lucidrains' Trainer and by a loop with accelerate.

    python benchmarks/other_trainers.py --out benchmarks/results/other_trainers.csv
    python benchmarks/other_trainers.py --only kills --out benchmarks/results/other_trainers_kills.csv

Packages of .ci/trainers.txt are installed without dependencies into a temporary folder. Architecture, optimizer (Adam),
batch size, averaged weights (decay 0.995), clipping, flips and forward process are equal; each process has one thread.

- ``kairos``: the commands prepare, autoencoder (``kind: none``), encode and train. Adam is fused.
- ``lucidrains``: denoising-diffusion-pytorch's Trainer, unmodified. It decodes in one process per CPU, and by default
  updates the averaged weights in every tenth step. A second row updates them in every step, as the others do.
- ``accelerate``: a loop with torch's DataLoader without workers; images are decoded by Pillow in every epoch.

Columns of the speed, medians over rounds in which the trainers alternate:
    case, trainer, parameters_m, steps: network and images; trainer; millions of parameters; steps of the run.
    images_per_cpu_s: images over CPU seconds of all processes, after the first 20 steps.
    images_per_s: images over wall seconds, after the first 20 steps.
    cpu_s: CPU seconds of all processes from the files to the last step.
    first_step_s: wall seconds from the files to the end of the first step.
    mib: largest memory at a time of all processes of a command, in MiB; shared pages count once.
    ratio, ratio_low, ratio_high: images_per_cpu_s of kairos over that of the trainer, median and range over rounds.

Columns of the kills (``--only kills``): training is killed with SIGKILL and started again.
    trainer, steps, save_every: trainer; steps of the run; steps between checkpoints.
    killed_after, steps_run, repeated: steps before the kill; steps of both processes; steps that were computed twice.
Intervals are the defaults over ten: 500 in kairos and 1,000 in lucidrains' Trainer, whose user calls `load` with the
newest checkpoint. The loop with accelerate saves nothing. The two kills are at mean distance
from checkpoints.
"""

import argparse
import csv
import dataclasses
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import yaml
from frechet import iterate_images
from PIL import Image
from result_file import write_rows
from trainer_process import BETAS, DECAY, RATE, TRAINERS, WARM_UP, Settings

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("accelerate", "denoising-diffusion-pytorch", "einops", "ema-pytorch")
INTERVAL = 0.1  # seconds between two measurements of memory
KILLS = {"kairos": 50, "lucidrains": 100, "accelerate": 0}  # steps between checkpoints
KILL_STEPS, KILLED_AFTER = 200, (75, 125)


@dataclass(frozen=True)
class Case:
    """Network and images.

    Attributes:
        model: section `model` of the experiment.
        channels, side: shape of an image.
        images: number of images.
        batch_size: images of a step; it divides the number of images.
        steps: length of a training run.
        flips: flip half of the images.
    """

    model: dict[str, Any]
    channels: int
    side: int
    images: int
    batch_size: int
    steps: int
    flips: bool


UNET = {"name": "unet", "blocks": 1, "attention": [], "dropout": 0.0, "norm_groups": 8}
CASES = {
    "digits, 8x8": Case({**UNET, "channels": 16, "multipliers": [1, 2]}, 1, 8, 1792, 32, 240, False),
    "CIFAR-10, 32x32": Case({**UNET, "channels": 32, "multipliers": [1, 2, 2]}, 3, 32, 9600, 32, 50, True),
}


def write_images(case: Case, folder: Path) -> None:
    """Write the images of a case as PNG files into a new folder: digits of 8 pixels, else `frechet.iterate_images`."""
    from sklearn.datasets import load_digits

    folder.mkdir()
    images = iter((load_digits().images * 15.9).astype(np.uint8)) if case.side == 8 else iterate_images()
    for index, image in enumerate(itertools.islice(images, case.images)):
        Image.fromarray(image).save(folder / f"{index:05d}.png")


def write_experiment(case: Case, settings: Settings, path: Path) -> None:
    """Write the experiment of kairos that corresponds to the settings."""
    values = {
        "experiment": "x",
        "dataset": {
            "source": "folder",
            "path": settings.images,
            "heldout": 0,
            "flips": case.flips,
            "color": "grey" if case.channels == 1 else "rgb",
        },
        "autoencoder": {"kind": "none"},
        "model": case.model,
        "diffusion": {"process": "discrete", "prediction": "epsilon"},
        "training": {
            "batch_size": case.batch_size,
            "milestones": [settings.steps],
            "checkpoint_every": settings.save_every,
            "optimizer": {"name": "adam", "lr": RATE, "betas": list(BETAS)},
            "ema": {"name": "decay", "decay": DECAY},
            "device": "cpu",
        },
        "methods": {"uniform": {}},
        "evaluation": {"extractor": "selfsupervised", "num_samples": 100, "sets": 1, "reference": "all"},
        "tracking": {"enabled": False},
    }
    path.write_text(yaml.safe_dump(values), encoding="utf-8")


def count_parameters(case: Case) -> float:
    """Return the number of parameters of the network, in millions."""
    from kairos import models
    from kairos.models.settings import BACKBONES

    network = models.build(BACKBONES.select(case.model), (case.channels, case.side, case.side), {})
    return sum(parameter.numel() for parameter in network.parameters()) / 1e6


def measure_memory(process: subprocess.Popen[bytes]) -> float:
    """Wait for the end of a process; return the largest memory at a time of it and its descendants, in MiB."""
    largest = 0
    while process.poll() is None:
        try:
            family = [psutil.Process(process.pid)]
            family += family[0].children(recursive=True)
            largest = max(largest, sum(member.memory_full_info().pss for member in family))
        except psutil.Error:  # a process of the family has ended
            pass
        time.sleep(INTERVAL)
    return largest / 2**20


class Runner:
    """Processes of the trainers in a folder, with the installed packages and one thread.

    Args:
        folder: folder of all files.
        packages: folder of the installed packages.
    """

    def __init__(self, folder: Path, packages: Path):
        self.folder = folder
        path = os.pathsep.join(filter(None, [str(packages), os.environ.get("PYTHONPATH")]))
        self.environment = {
            **os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore",
        }  # fmt: skip

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        """Start a command of Python in a process group of its own; its output goes to log.txt."""
        with open(self.folder / "log.txt", "ab") as log:
            return subprocess.Popen(
                [sys.executable, *command],
                cwd=self.folder,
                env=self.environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def check(self, process: subprocess.Popen[bytes]) -> None:
        """Wait for the end of a process and check its exit status.

        Raises:
            SystemExit: the process has failed; the message contains the end of its output.
        """
        if process.wait():
            output = (self.folder / "log.txt").read_text(errors="replace")
            raise SystemExit(f"{process.args}: status {process.returncode}\n{output[-3000:]}")

    def prepare(self) -> float:
        """Run the stages of kairos before training; return the largest memory of a stage, in MiB."""
        largest = 0.0
        for stage in ("prepare", "autoencoder", "encode"):
            process = self.start("-m", "kairos", stage, "--config", "x.yaml")
            largest = max(largest, measure_memory(process))
            self.check(process)
        return largest

    def start_training(self, trainer: str) -> subprocess.Popen[bytes]:
        """Start the training process of a trainer."""
        return self.start(str(ROOT / "benchmarks" / "trainer_process.py"), trainer, "settings.json")


def set_up(case: Case, runner: Runner, images: Path, steps: int, save_every: int) -> Settings:
    """Write settings.json and the experiment x.yaml of a run into the runner's new folder, and return the settings.

    `steps` is the length of the run, and `save_every` the number of steps between checkpoints.
    """
    settings = Settings(
        model=case.model,
        images=str(images),
        channels=case.channels,
        side=case.side,
        batch_size=case.batch_size,
        flips=case.flips,
        steps=steps,
        save_every=save_every,
        results=str(runner.folder / "training"),
        times=str(runner.folder / "times.jsonl"),
    )
    runner.folder.mkdir()
    (runner.folder / "settings.json").write_text(json.dumps(dataclasses.asdict(settings)), encoding="utf-8")
    write_experiment(case, settings, runner.folder / "x.yaml")
    return settings


def measure_speed(trainer: str, case: Case, runner: Runner, images: Path) -> dict[str, float]:
    """Train once with a trainer; return the measured columns.

    The stages of kairos before training count towards CPU seconds, memory and the time of the first step.
    """
    default_interval = 500 if trainer == "kairos" else 1000  # steps between checkpoints
    settings = set_up(case, runner, images, case.steps, default_interval)
    begun = time.monotonic()
    times_before = os.times()
    mebibytes = runner.prepare() if trainer == "kairos" else 0.0
    times_after = os.times()
    preparation_cpu = sum(times_after[2:4]) - sum(times_before[2:4])  # user and system time of ended children
    process = runner.start_training(trainer)
    mebibytes = max(mebibytes, measure_memory(process))
    runner.check(process)
    lines = Path(settings.times).read_text(encoding="utf-8").splitlines()
    first, warm_up, last = map(json.loads, lines)
    images_after_warm_up = (case.steps - WARM_UP) * case.batch_size
    return {
        "images_per_cpu_s": images_after_warm_up / (last["cpu"] - warm_up["cpu"]),
        "images_per_s": images_after_warm_up / (last["wall"] - warm_up["wall"]),
        "cpu_s": preparation_cpu + last["cpu"],
        "first_step_s": first["wall"] - begun,
        "mib": mebibytes,
    }


def speed_rows(folder: Path, packages: Path, names: list[str], rounds: int) -> list[dict[str, Any]]:
    """Measure the speed of all trainers in rounds; return a row of the table for each case and trainer.

    Args:
        folder: temporary folder for images and runs.
        packages: folder of the installed packages.
        names: names of cases.
        rounds: number of training runs of each trainer.
    """
    rows = []
    for name in names:
        case = CASES[name]
        images = folder / f"images{case.side}"
        write_images(case, images)
        results_by_trainer: dict[str, list[dict[str, float]]] = {trainer: [] for trainer in TRAINERS}
        order = list(TRAINERS)
        for number in range(rounds):
            first = number % len(order)  # every round starts with another trainer
            for trainer in order[first:] + order[:first]:
                with tempfile.TemporaryDirectory(dir=folder) as temporary:
                    runner = Runner(Path(temporary) / "run", packages)
                    result = measure_speed(trainer, case, runner, images)
                results_by_trainer[trainer].append(result)
                print(name, trainer, {key: round(value, 1) for key, value in result.items()}, flush=True)
        parameters = count_parameters(case)
        for trainer, results in results_by_trainer.items():
            row = {"case": name, "trainer": trainer, "parameters_m": f"{parameters:.2f}", "steps": case.steps}
            for column in results[0]:
                row[column] = f"{statistics.median(result[column] for result in results):.1f}"
            pairs = zip(results_by_trainer["kairos"], results)  # of one round each
            ratios = [kairos["images_per_cpu_s"] / other["images_per_cpu_s"] for kairos, other in pairs]
            row["ratio"] = f"{statistics.median(ratios):.2f}"
            row["ratio_low"], row["ratio_high"] = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
            rows.append(row)
    return rows


def measure_kill(trainer: str, case: Case, runner: Runner, images: Path, killed_after: int) -> dict[str, Any]:
    """Kill a training process after some steps, start it again, and return the row of the table."""
    save_every = KILLS[trainer]
    settings = set_up(case, runner, images, KILL_STEPS, save_every or KILL_STEPS)
    if trainer == "kairos":
        runner.prepare()
    step_file = Path(f"{settings.times}.steps")  # one byte for each step, see `StepTimes`
    process = runner.start_training(trainer)
    while not step_file.exists() or step_file.stat().st_size < killed_after:
        if process.poll() is not None:  # ended too early
            runner.check(process)
            raise SystemExit(f"{trainer}: ended before {killed_after} steps, so it cannot be killed there")
        time.sleep(0.001)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    steps_before = step_file.stat().st_size
    second_process = runner.start_training(trainer)
    runner.check(second_process)
    steps_run = step_file.stat().st_size
    return {
        "trainer": trainer,
        "steps": KILL_STEPS,
        "save_every": save_every or "never",
        "killed_after": steps_before,
        "steps_run": steps_run,
        "repeated": steps_run - KILL_STEPS,
    }


def kill_rows(folder: Path, packages: Path, case: Case) -> list[dict[str, Any]]:
    """Kill every trainer at several steps; return the rows of the table."""
    images = folder / "images_kills"
    rows = []
    write_images(case, images)
    for trainer in KILLS:
        for killed_after in KILLED_AFTER:
            with tempfile.TemporaryDirectory(dir=folder) as temporary:
                runner = Runner(Path(temporary) / "run", packages)
                rows.append(measure_kill(trainer, case, runner, images, killed_after))
            print(rows[-1], flush=True)
        repeated = [row["repeated"] for row in rows if row["trainer"] == trainer]
        print(f"{trainer}: {statistics.fmean(repeated):.0f} steps repeated on average", flush=True)
    return rows


def install_packages(folder: Path) -> None:
    """Install the trainers in the versions of .ci/trainers.txt, without their dependencies."""
    lines = (ROOT / ".ci" / "trainers.txt").read_text(encoding="utf-8").splitlines()
    requirements = [line for line in lines if line.partition("==")[0] in PACKAGES]
    uv = [str(Path(sys.executable).with_name("uv")), "pip", "install", "--quiet", "--no-deps"]
    subprocess.run([*uv, "--python", sys.executable, "--target", str(folder), *requirements], check=True)


def main() -> None:
    """Measure, print each run and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--only", choices=("speed", "kills"), default="speed")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kairos-trainers-") as temporary:
        folder = Path(temporary)
        packages = folder / "packages"
        install_packages(packages)
        if arguments.only == "speed":
            rows = speed_rows(folder, packages, arguments.cases, arguments.rounds)
        else:
            rows = kill_rows(folder, packages, CASES["digits, 8x8"])
    writer = csv.DictWriter(sys.stdout, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    if arguments.out:
        import torch

        from kairos import portable

        options = "--only kills" if arguments.only == "kills" else f"--rounds {arguments.rounds}"
        setting = f"1 thread, {os.cpu_count()} CPUs, torch {torch.__version__}, {portable.machine()['processor']}"
        write_rows(arguments.out, rows, f"python benchmarks/other_trainers.py {options}; {setting}")


if __name__ == "__main__":
    main()
