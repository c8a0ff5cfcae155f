"""Measure the time of noise-image couplings, compared with a training step, and how they change the noise.

    python benchmarks/couplings.py --out benchmarks/results/couplings.csv

Batch 256 of 3x32x32 (random numbers with the mean square of natural images in [-1, 1], smoothed), a DiT of about 5 M
parameters on patches of 4. The couplings alternate step by step.

Columns:
    ms, ms_least: median and minimum of the milliseconds of `Strategy.couple`; row ``step``: of a training step.
    share_of_step: median over the median of a training step.
    distance: mean squared difference between an image and its noise, per element.
    square: mean square of the noise; 1 if the coupling keeps the noise standard normal.
"""

import argparse
import platform
import statistics
import time
from pathlib import Path

import torch
from result_file import write_rows

from kairos import compute, models
from kairos.models.settings import DiTOptions
from kairos_timesteps.randomness import Stream
from kairos_timesteps.strategy import Strategy

COUPLINGS = {
    "independent": "independent",
    "assignment": "assignment",
    **{f"nearest k={k}": {"name": "nearest", "k": k} for k in (2, 4, 8)},
}


def timed(device: torch.device, function) -> tuple[float, object]:
    """Call a function; return the milliseconds of the call, including its work on the device, and its result."""
    begun = time.perf_counter()
    result = function()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begun), result


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device, shape = compute.setup(1, "auto"), (3, 32, 32)
    torch.manual_seed(0)
    network = models.build(DiTOptions(patch=4, width=256, depth=6, heads=4), shape, {}).to(device)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-4)
    strategies = {name: Strategy("uniform", "linear", coupling=coupling) for name, coupling in COUPLINGS.items()}
    smooth = torch.nn.functional.interpolate(torch.randn(arguments.batch, 3, 4, 4), (32, 32), mode="bicubic")
    x0 = (0.5 * smooth / smooth.square().mean().sqrt()).to(device)
    times: dict[str, list[float]] = {name: [] for name in (*COUPLINGS, "step")}
    distance, square = dict.fromkeys(COUPLINGS, 0.0), dict.fromkeys(COUPLINGS, 0.0)
    for round_number in range(arguments.rounds + 1):
        independent_noise = Stream(0, "noise").normal(round_number, range(len(x0)), shape, device)
        for name, strategy in strategies.items():
            strategy.step = round_number
            draw = strategy.draw(x0)
            milliseconds, noise = timed(device, lambda: strategy.couple(draw, independent_noise))  # noqa: B023
            times[name].append(milliseconds)
            distance[name] += (x0 - noise).square().mean().item() / (arguments.rounds + 1)
            square[name] += noise.square().mean().item() / (arguments.rounds + 1)

        def step() -> None:
            loss = (network(strategy.process.noised(x0, noise, draw.t), draw.t, {}) - noise).square().mean()  # noqa: B023
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        milliseconds, _ = timed(device, step)
        times["step"].append(milliseconds)
    # the first round is a warm-up
    median = {name: statistics.median(times_of_rounds[1:]) for name, times_of_rounds in times.items()}
    size = sum(parameter.numel() for parameter in network.parameters())
    how = (
        f"median of {arguments.rounds} rounds, batch {arguments.batch} of 3x32x32, step: DiT of {size / 1e6:.1f} M "
        f"parameters, 1 thread, torch {torch.__version__}, {device.type} {platform.machine()}"
    )
    rows = [
        {
            "coupling": name,
            "ms": round(median[name], 3),
            "ms_least": round(min(times[name][1:]), 3),
            "share_of_step": round(median[name] / median["step"], 5),
            "distance": round(distance[name], 4) if name in distance else "",
            "square": round(square[name], 4) if name in square else "",
        }
        for name in times
    ]
    print(how, *rows, sep="\n")
    if arguments.out:
        write_rows(arguments.out, rows, f"python benchmarks/couplings.py: {how}")


if __name__ == "__main__":
    main()
