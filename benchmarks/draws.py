"""Measure the microseconds of `Strategy.draw` and `Strategy.observe` on one CPU thread, for every sampler.

    python benchmarks/draws.py > benchmarks/results/draws.csv

Batch 256, weighting min_snr, cosine schedule. Samplers that measure the network are in overhead.py.

Columns:
    mean: microseconds of a draw, averaged over all steps. Fixed strategies draw a prefetch block of 16 steps at once;
        the mean includes the steps that compute a block.
    median: median microseconds of a draw; for fixed strategies, of a draw from an existing prefetch block.
    observe_median: microseconds of `observe`, in which samplers that follow losses update their density.
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
    """Return the microseconds of every `draw` and of every `observe` of a sampler, after 32 warm-up steps."""
    options = {"start": 1} if "start" in SAMPLERS[name].component.options and "loss" in name else {}
    strategy = kairos_timesteps.Strategy(f"{name}+min_snr", "cosine", prediction="v", sampler=options)
    x0, losses = torch.zeros(256, 3, 32, 32), torch.rand(256)
    draws, observed = [], []
    for _ in range(32 + STEPS):
        begun = time.perf_counter()
        draw = strategy.draw(x0)
        end_of_draw = time.perf_counter()
        strategy.weighted(draw, losses)
        start_of_observe = time.perf_counter()
        with strategy.observe(draw):
            pass
        draws.append(1e6 * (end_of_draw - begun))
        observed.append(1e6 * (time.perf_counter() - start_of_observe))
    return draws[32:], observed[32:]


def main() -> None:
    """Print a row for each sampler that does not measure the network."""
    torch.set_num_threads(1)
    print(f"# python {platform.python_version()}, torch {torch.__version__}, cpu {platform.machine()}, {STEPS} steps")
    print("sampler,mean,median,observe_median")
    for name in SAMPLERS:
        if not issubclass(SAMPLERS[name].component, MeasuresNetwork):  # for these: benchmarks/overhead.py
            draws, observed = microseconds(name)
            print(
                f"{name},{statistics.mean(draws):.0f},{statistics.median(draws):.0f},{statistics.median(observed):.0f}"
            )


if __name__ == "__main__":
    main()
