"""What a draw costs on the CPU, batch 256, one thread, with weighting min_snr on the cosine schedule; microseconds.

    python benchmarks/draws.py > benchmarks/results/draws.csv

`mean` counts the prefetch blocks of 16 steps of fixed strategies, `median` is a step within a block. Of samplers
that follow losses the draw alone; what they learn from is `observe`.
"""

import platform
import statistics
import time

import torch

import kairos_timesteps
from kairos_timesteps.base import MeasuresNetwork
from kairos_timesteps.components import SAMPLERS

STEPS = 320


def microseconds(name: str) -> tuple[list[float], list[float]]:
    """Of every draw, and of every observation, once the density follows."""
    options = {"start": 1} if "start" in SAMPLERS[name].options.__dataclass_fields__ and "loss" in name else {}
    strategy = kairos_timesteps.Strategy(f"{name}+min_snr", "cosine", prediction="v", sampler=options)
    x0, losses, draws, observed = torch.zeros(256, 3, 32, 32), torch.rand(256), [], []
    for _ in range(32 + STEPS):
        begun = time.perf_counter()
        draw = strategy.draw(x0)
        drawn = time.perf_counter()
        strategy.weighted(draw, losses)
        learning = time.perf_counter()
        with strategy.observe(draw):
            pass
        draws.append(1e6 * (drawn - begun))
        observed.append(1e6 * (time.perf_counter() - learning))
    return draws[32:], observed[32:]


def main() -> None:
    """A row for each sampler that measures nothing."""
    torch.set_num_threads(1)
    print(f"# python {platform.python_version()}, torch {torch.__version__}, cpu {platform.machine()}, {STEPS} steps")
    print("sampler,mean,median,observe_median")
    for name in SAMPLERS:
        if not issubclass(SAMPLERS[name].load(), MeasuresNetwork):  # for these: benchmarks/overhead.py
            draws, observed = microseconds(name)
            print(
                f"{name},{statistics.mean(draws):.0f},{statistics.median(draws):.0f},{statistics.median(observed):.0f}"
            )


if __name__ == "__main__":
    main()
