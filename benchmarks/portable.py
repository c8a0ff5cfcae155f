"""Measure the time of a training step with portable CPU kernels compared with plain kernels, for two networks.

    python benchmarks/portable.py --rounds 5 --out benchmarks/results/portable.csv

Portable kernels are set for a whole process. One process of each kind therefore runs, and their rounds alternate, so
that a drift of the machine's speed affects both equally. The networks are the demo's (params.yaml, batch 64) and a UNet
of 35.7 M parameters on 32x32 pixels (batch 8, dominated by attention and convolutions). Columns: median milliseconds of
a step; ratio of the medians; its range over rounds.
"""

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from result_file import write_rows

CASES = {"demo": 20, "unet": 1}  # steps of a round


def worker(case: str, kind: str) -> None:
    """Run a round of training steps for every line of standard input, and print the seconds of each step.

    `case` is a network of `CASES`, and `kind` is ``portable`` or ``plain``. One step before the first round warms up.
    """
    from kairos import portable

    if kind == "portable":
        portable.set_variables()
    import torch

    from kairos import compute, models
    from kairos.config import load

    compute.setup(1, "cpu", "portable" if kind == "portable" else True)
    torch.manual_seed(0)
    if case == "demo":
        network, x = models.build(load("params.yaml").model, (4, 4, 4), {}), torch.randn(64, 4, 4, 4)
        predict = lambda: network(x, torch.arange(len(x)), {})  # noqa: E731
    else:
        from diffusers import UNet2DModel

        network = UNet2DModel(
            sample_size=32,
            block_out_channels=(128, 256, 256, 256),
            down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
        )
        x = torch.randn(8, 3, 32, 32)
        predict = lambda: network(x, torch.arange(len(x))).sample  # noqa: E731
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4)

    def step() -> float:
        begun = time.perf_counter()
        optimizer.zero_grad()
        (predict() - x).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        return time.perf_counter() - begun

    step()
    for _ in sys.stdin:
        print(*(step() for _ in range(CASES[case])), flush=True)


def measure(case: str, rounds: int) -> dict[str, object]:
    """Run a process of each kind, whose rounds alternate, and return the row of a network."""
    kinds = ("plain", "portable")
    workers = {
        kind: subprocess.Popen(
            [sys.executable, __file__, "--worker", case, kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for kind in kinds
    }
    seconds: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for kind, process in workers.items():
            assert process.stdin and process.stdout
            process.stdin.write("go\n")
            seconds[kind].append([float(value) for value in process.stdout.readline().split()])
    for process in workers.values():
        process.communicate()
    round_ratios = []
    for plain_round, portable_round in zip(seconds["plain"], seconds["portable"]):
        round_ratios.append(statistics.median(portable_round) / statistics.median(plain_round))
    plain_ms, portable_ms = (1e3 * statistics.median(itertools.chain(*seconds[kind])) for kind in kinds)
    return {
        "network": case,
        "plain_ms": f"{plain_ms:.1f}",
        "portable_ms": f"{portable_ms:.1f}",
        "ratio": f"{portable_ms / plain_ms:.2f}",
        "ratio_range": f"{min(round_ratios):.2f}-{max(round_ratios):.2f}",
        "rounds": rounds,
    }


def main() -> None:
    """Measure both networks, write the table and print it; with --worker, run as the process of one kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/portable.csv"))
    parser.add_argument("--worker", nargs=2, metavar=("CASE", "KIND"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(*arguments.worker)
        return
    from kairos import portable

    rows = [{**measure(case, arguments.rounds), "processor": portable.machine()["processor"]} for case in CASES]
    write_rows(arguments.out, rows)
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
