"""Measure the time of a training step with every strategy compared with uniform, and the share of the strategy in it.

    python benchmarks/overhead.py --rounds 3 --out benchmarks/results/overhead.csv

The setting is the adaptive paper's: T = 1000, batch 128, |S| = 3, f_S = 40, and a DiT of more than 5 M parameters on
8x8 latents. The strategies alternate step by step in one process, so that a drift of the machine's speed affects all of
them equally. A round is one period of 40 steps of each strategy. The data are random numbers.

Columns:
    ms_per_step: mean milliseconds of a step.
    ratio, ratio_low, ratio_high: time over uniform, over all rounds, and its range over single rounds.
    own_share: time of draw, loss and observe as a share of a step of uniform.
    forwards_per_step: forward passes of a batch per step; a backward pass counts two, a step of uniform is 3.
"""

import argparse
import platform
import statistics
import time
from pathlib import Path

import torch
from result_file import write_rows

from kairos import compute, models
from kairos.models.settings import BACKBONES
from kairos.progress import ProgressBar
from kairos_timesteps.components import SAMPLERS, WEIGHTINGS
from kairos_timesteps.strategy import Strategy

NAMES = [*(name for name in SAMPLERS), *(name for name in WEIGHTINGS if name != "none"), "adaptive full features"]
PERIOD = 40


class Case:
    """A training run with one strategy: its own network and optimizer, and random data that all cases share."""

    def __init__(self, name: str, config: dict, shape: tuple[int, int, int], batch: int, device: torch.device):
        torch.manual_seed(0)
        self.network = models.build(BACKBONES.select(config), shape, {}).to(device)
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=1e-4)
        strategy_name, _, full_features = name.partition(" ")  # such as "adaptive full features"
        measuring = {"adaptive", "adaptive_official", "gradient_norm", "gradient_variance", "first_order"}
        options = {}
        if strategy_name in measuring:
            options["frequency"] = PERIOD  # each round contains one measurement
        if strategy_name.startswith(("gradient", "first")):
            options["start"] = 1
        if full_features:
            options["feature_timesteps"] = None
        self.strategy = Strategy(strategy_name, "linear", sampler=options)
        self.x0 = torch.randn(batch, *shape, device=device)
        self.samples = 0  # through the network, forward; a backward pass counts twice
        self.network.register_forward_hook(self._count)

    def _count(self, module: torch.nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        """Count the samples of a forward pass, three times if a backward pass follows."""
        self.samples += len(inputs[0]) * (3 if torch.is_grad_enabled() else 1)

    def step(self) -> float:
        """Run a training step, and return the seconds of the strategy's draw, loss and observe.

        The time of the optimizer, which runs inside `observe`, is not included.
        """
        strategy, x0 = self.strategy, self.x0
        begun = time.perf_counter()
        draw = strategy.draw(x0)
        strategy_seconds = time.perf_counter() - begun
        noise = torch.randn_like(x0)
        x_t = strategy.process.noised(x0, noise, draw.t)
        error = ((self.network(x_t, draw.t, {}) - noise) ** 2).flatten(1).mean(1)
        begun = time.perf_counter()
        loss = strategy.loss(draw, error)
        strategy_seconds += time.perf_counter() - begun
        self.optimizer.zero_grad()
        loss.backward()
        begun = time.perf_counter()
        with strategy.observe(draw, self.network, self.optimizer, {}):
            stepping = time.perf_counter()
            self.optimizer.step()
            stepping = time.perf_counter() - stepping
        if x0.is_cuda:
            torch.cuda.synchronize()
        return strategy_seconds + time.perf_counter() - begun - stepping


def main() -> None:
    """Measure, print a table and write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--patch", type=int, default=4, help="of the DiT on 8x8 latents: 2 costs four times as much")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--strategies", nargs="*", default=NAMES)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = compute.setup(1, "auto")
    config = {
        "name": "dit", "patch": arguments.patch, "width": arguments.width, "depth": arguments.depth, "heads": 4,
    }  # fmt: skip
    names = list(dict.fromkeys(["uniform", *arguments.strategies]))
    cases = {name: Case(name, config, (4, 8, 8), arguments.batch, device) for name in names}
    for case in cases.values():  # warm-up: first steps, and measurements that fill queues
        case.strategy.step = 0
        for step in range(3):
            case.strategy.step = step * PERIOD
            case.step()
        case.strategy.step = 3 * PERIOD
    seconds: dict[str, list[float]] = {name: [] for name in names}
    strategy_seconds: dict[str, list[float]] = {name: [] for name in names}
    for case in cases.values():
        case.samples = 0
    for number in range(arguments.rounds):
        for name in names:
            seconds[name].append(0.0)
            strategy_seconds[name].append(0.0)
        progress = ProgressBar(PERIOD, f"round {number + 1} of {arguments.rounds}", "step")
        for _ in range(PERIOD):
            for name, case in cases.items():
                begun = time.perf_counter()
                strategy_seconds[name][-1] += case.step() / PERIOD
                seconds[name][-1] += (time.perf_counter() - begun) / PERIOD
            progress.advance()
        progress.close()
    steps = arguments.rounds * PERIOD
    base = seconds["uniform"]
    size = sum(parameter.numel() for parameter in cases["uniform"].network.parameters())
    how = (
        f"{arguments.rounds} interleaved rounds of {PERIOD} steps, batch {arguments.batch}, T 1000, DiT of "
        f"{size / 1e6:.1f} M parameters, 1 thread, torch {torch.__version__}, {device.type} {platform.machine()}"
    )
    rows = []
    for name in names:
        ratios = [value / one for value, one in zip(seconds[name], base, strict=True)]
        rows.append(
            {
                "strategy": name,
                "ms_per_step": round(1e3 * statistics.mean(seconds[name]), 2),
                "ratio": round(sum(seconds[name]) / sum(base), 4),
                "ratio_low": round(min(ratios), 4),
                "ratio_high": round(max(ratios), 4),
                "own_share": round(sum(strategy_seconds[name]) / sum(base), 5),
                "forwards_per_step": round(cases[name].samples / steps / arguments.batch, 4),
            }
        )
    print(how)
    print(f"{'strategy':<24} {'ms/step':>8} {'ratio (range)':>22} {'own time':>9} {'forwards':>9}")
    for row in rows:
        span = f"{row['ratio']:.3f} ({row['ratio_low']:.3f}-{row['ratio_high']:.3f})"
        print(
            f"{row['strategy']:<24} {row['ms_per_step']:8.1f} {span:>22} {row['own_share']:9.2%} "
            f"{row['forwards_per_step']:9.3f}"
        )
    if arguments.out:
        write_rows(arguments.out, rows, how)


if __name__ == "__main__":
    main()
