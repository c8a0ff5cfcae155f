"""Measure the CPU time of a training step of kairos, compared with a bare PyTorch loop of the same network.

    python benchmarks/step.py --out benchmarks/results/step.csv
    python benchmarks/step.py --networks demo --profile

One process with one thread runs blocks of steps of these variants alternately:

- ``kairos``: kairos.training.loop.train_steps with the default logging. It includes the work of a training job for a
  step: the lines of metrics.jsonl, the progress file and the progress line.
- ``bare``: noise and timesteps from torch's generator, forward pass, mean squared error, backward pass, clipping,
  AdamW in torch's default implementation, and the average of the weights by torch's `_foreach_lerp_`. The images are
  in memory.
- ``bare fused``: ``bare`` with ``AdamW(fused=True)``.

The data are random numbers. Columns:
    network, parameters_m, batch, steps: network, its parameters in millions, images of a step, steps of a block.
    kairos_ms, bare_ms, fused_ms: CPU milliseconds of the process for a step, median over blocks.
    ratio, ratio_low, ratio_high: kairos over bare, median and range over rounds.
    fused_ratio, fused_ratio_low, fused_ratio_high: kairos over bare fused.
With ``--profile``, the functions and operations that take most time in steps of kairos are printed instead.
"""

import argparse
import cProfile
import json
import pstats
import statistics
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from result_file import write_rows
from torch import nn

sys.path.insert(0, str(Path(__file__).parent / "gpu"))
from gpu_kit import Data, experiment, training_of

from kairos import compute
from kairos.progress import ProgressBar
from kairos.training.job import ProgressFile
from kairos.training.loop import train_steps
from kairos.training.state import TrainingState

CASES: dict[str, tuple[dict[str, Any], tuple[int, int, int], int, int]] = {  # model, x0, batch, steps of a block
    "demo": ({"name": "dit", "patch": 4, "width": 96, "depth": 3, "heads": 4}, (4, 4, 4), 64, 50),
    "dit": ({"name": "dit", "patch": 2, "width": 128, "depth": 5, "heads": 4}, (4, 8, 8), 64, 8),
    "unet": (
        {"name": "unet", "channels": 32, "multipliers": [1, 2], "blocks": 2, "attention": [8], "norm_groups": 8},
        (3, 16, 16), 32, 4,
    ),
    "cifar10": ({"name": "unet"}, (3, 32, 32), 4, 1),
}  # fmt: skip
RATE = 1e-3


class Kairos:
    """Steps of kairos, with what a training job does after each of them."""

    def __init__(self, training: TrainingState, folder: Path, log_every: int | None = None):
        training.settings = training.settings.model_copy(update={"log_every": log_every})
        self.lines = train_steps(training, 10**9)
        self.training = training
        self.metrics_file = (folder / "metrics.jsonl").open("a", encoding="utf-8")
        self.progress_file = ProgressFile(folder, 10**9)
        self.progress = ProgressBar(10**9, "train", "step")

    def steps(self, count: int) -> None:
        """Run `count` training steps, with the files and the progress line of a training job."""
        for metrics in islice(self.lines, count):
            if metrics is not None:
                self.metrics_file.write(json.dumps(metrics) + "\n")
            self.progress_file.update(self.training.step, 0.0)
            self.progress.advance()


class Bare:
    """Smallest training loop with the network, optimizer, clipping and average of a training run."""

    def __init__(self, training: TrainingState, fused: bool | None):
        self.network, self.batch_size = training.model, training.settings.batch_size
        self.parameters = training.parameters
        self.optimizer = torch.optim.AdamW(self.parameters, lr=RATE, weight_decay=0.0, fused=fused)
        self.average = [parameter.detach().clone() for parameter in self.parameters]
        self.x0 = training.latents.load_x0(training.latents.train)
        alphas_cumprod = torch.from_numpy(training.process.schedule.alphas_cumprod).float()
        self.signal = alphas_cumprod.sqrt()[:, None, None, None]
        self.noise = (1 - alphas_cumprod).sqrt()[:, None, None, None]
        self.network.train()

    def steps(self, count: int) -> None:
        """Run `count` training steps."""
        for _ in range(count):
            x0 = self.x0[torch.randint(len(self.x0), (self.batch_size,))]
            t = torch.randint(len(self.signal), (self.batch_size,))
            noise = torch.randn_like(x0)
            self.optimizer.zero_grad()
            output = self.network(self.signal[t] * x0 + self.noise[t] * noise, t, {})
            nn.functional.mse_loss(output, noise).backward()
            nn.utils.clip_grad_norm_(self.parameters, 1.0)
            self.optimizer.step()
            with torch.no_grad():
                torch._foreach_lerp_(self.average, self.parameters, 1e-4)


def build(name: str, data: Data) -> TrainingState:
    """Build the training state of a case, `name` of `CASES`, on the CPU."""
    model, shape, batch_size, _ = CASES[name]
    latents = data.open(shape, 2048, pixels=shape[0] == 3)
    plain = experiment(model, batch_size=batch_size, optimizer={"name": "adamw", "lr": RATE})
    return training_of(plain, latents, torch.device("cpu"))


def measure(name: str, data: Data, rounds: int) -> dict[str, Any]:
    """Time blocks of steps of all variants alternately, and return the row of case `name`."""
    trainings = [build(name, data) for _ in range(3)]
    kairos = Kairos(trainings[0], Path(tempfile.mkdtemp(dir=data.folder)))
    variants = {"kairos": kairos, "bare": Bare(trainings[1], None), "fused": Bare(trainings[2], True)}
    seconds: dict[str, list[float]] = {variant: [] for variant in variants}
    count = CASES[name][3]
    for loop in variants.values():  # warm-up
        loop.steps(3)
    for number in range(rounds):
        names = list(variants)
        for variant in names[number % 3 :] + names[: number % 3]:  # every round starts with another variant
            begun = time.process_time()
            variants[variant].steps(count)
            seconds[variant].append((time.process_time() - begun) / count)
    row: dict[str, Any] = {
        "network": name,
        "parameters_m": round(sum(parameter.numel() for parameter in trainings[0].parameters) / 1e6, 2),
        "batch": CASES[name][2],
        "steps": rounds * count,
    }
    for variant, values in seconds.items():
        row[f"{variant}_ms"] = round(1e3 * statistics.median(values), 3)
    for base, prefix in (("bare", "ratio"), ("fused", "fused_ratio")):
        ratios = [kairos / other for kairos, other in zip(seconds["kairos"], seconds[base], strict=True)]
        row[prefix] = round(statistics.median(ratios), 3)
        row[f"{prefix}_low"], row[f"{prefix}_high"] = round(min(ratios), 3), round(max(ratios), 3)
    return row


def profile(name: str, data: Data, count: int) -> None:
    """Print the functions, and the operations of torch, that take most time in steps of kairos."""
    loop = Kairos(build(name, data), Path(tempfile.mkdtemp(dir=data.folder)))
    loop.steps(20)
    profiler = cProfile.Profile()
    profiler.runcall(loop.steps, count)
    print(f"{name}: {count} steps, functions by their own time")
    pstats.Stats(profiler).sort_stats("tottime").print_stats(28)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as operations:
        loop.steps(count)
    print(operations.key_averages().table(sort_by="self_cpu_time_total", row_limit=28, max_name_column_width=40))


def main() -> None:
    """Measure, print a table and write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--networks", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    compute.setup(1, "cpu")
    with Data() as data:
        if arguments.profile:
            for name in arguments.networks:
                profile(name, data, 2 * CASES[name][3])
            return
        rows = []
        for name in arguments.networks:
            rows.append(measure(name, data, arguments.rounds))
            print(rows[-1], flush=True)
    if arguments.out:
        from kairos import portable

        processor = portable.machine()["processor"]
        setting = f"{arguments.rounds} rounds, 1 thread, torch {torch.__version__}, {processor}"
        write_rows(arguments.out, rows, setting)


if __name__ == "__main__":
    main()
