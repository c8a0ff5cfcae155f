"""What each method's strategy costs: time per training step beside uniform's, interleaved in one process.

    python benchmarks/overhead.py --config params.yaml --rounds 5

Every round takes each method through the same number of steps in turn (a whole period of the adaptive sampler), so that
a drift of the machine's speed meets all alike. Printed: the median over rounds of the ratio to uniform in the same
round, and its range. Needs the latents of the experiment (`make demo`).
"""

import argparse
import statistics
import time
from pathlib import Path

from kairos import compute
from kairos.config import load
from kairos.data.latents import open_latents
from kairos.training.loop import Trainer


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=Path("params.yaml"))
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    experiment = load(arguments.config)
    plain = experiment.plain()
    device = compute.setup(plain["training"]["threads"], plain["training"]["device"])
    latents = open_latents(Path("results") / experiment.experiment / "latents")
    trainers = {name: Trainer(plain, name, 0, latents, device) for name in plain["methods"]}
    periods = [method["sampler"].get("frequency", 1) for method in plain["methods"].values()]
    steps = max(periods)
    for trainer in trainers.values():
        for _ in range(4 * steps):  # past the adaptive sampler's first rows, which cost less
            trainer.advance()
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    for _ in range(arguments.rounds):
        for name, trainer in trainers.items():
            begun = time.perf_counter()
            for _ in range(steps):
                trainer.advance()
            seconds[name].append((time.perf_counter() - begun) / steps)
    baseline = "uniform" if "uniform" in seconds else next(iter(seconds))
    print(f"{arguments.rounds} rounds of {steps} steps, device {device}, threads {plain['training']['threads']}")
    print(f"{'method':<16} {'ms/step':>8}  ratio to {baseline} (range)")
    for name, values in seconds.items():
        ratios = [value / base for value, base in zip(values, seconds[baseline], strict=True)]
        low, high = min(ratios), max(ratios)
        print(
            f"{name:<16} {1e3 * statistics.median(values):8.2f}  {statistics.median(ratios):.3f} ({low:.3f}-{high:.3f})"
        )


if __name__ == "__main__":
    main()
