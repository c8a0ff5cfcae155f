"""Measure the time to draw noise and timesteps of a batch, compared with the training step that uses them.

    python benchmarks/randomness.py --rounds 3 --out benchmarks/results/randomness.csv

Three networks alternate on one thread. They are a DiT of 0.2 M parameters on 8x8 latents (batch 32), a DiT of 2.2 M
parameters on 4x4 latents (batch 64), and the CIFAR-10 UNet (batch 8). Each draws from `kairos_timesteps.randomness`
inside its step; equal draws from torch's generator are timed for comparison. Times are means, because small draws are
computed for a prefetch block of 16 steps at once; a DiT's round is three blocks. They are CPU time of the thread, or
wall-clock time on a GPU.
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
from kairos_timesteps.randomness import Stream

CASES = {  # model, shape of a sample, batch, steps in a round
    "dit": ({"name": "dit", "patch": 2, "width": 56, "depth": 3, "heads": 4}, (4, 8, 8), 32, 48),
    "demo": ({"name": "dit", "patch": 4, "width": 192, "depth": 3, "heads": 4}, (4, 4, 4), 64, 48),
    "unet": ({"name": "unet"}, (3, 32, 32), 8, 3),
}


class Case:
    """A training run with random data, and the seconds of its steps and draws.

    Attributes:
        warm: number of steps that are left out of the means, a prefetch block of 16.
        seconds: seconds of each step, of its draws by kairos, and of equal draws by torch.
    """

    def __init__(self, config: dict, shape: tuple[int, int, int], batch: int, steps: int, device: torch.device):
        torch.manual_seed(0)
        self.network = models.build(BACKBONES.select(config), shape, {}).to(device)
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=1e-4)
        self.shape, self.batch, self.steps, self.device = shape, batch, steps, device
        self.warm = steps // 3
        self.seconds: dict[str, list[float]] = {"step": [], "ours": [], "torch": []}

    def step(self, number: int) -> None:
        """Run training step `number`, draw equal numbers by torch, and record the seconds of both."""
        x0 = torch.zeros(self.batch, *self.shape, device=self.device)
        begun = self.now()
        noise = Stream(1, "noise").normal(number, range(self.batch), self.shape, self.device)
        t = (Stream(1, "timesteps").uniform(number, range(self.batch), device=self.device) * 1000).long()
        self.seconds["ours"].append(self.now() - begun)
        loss = ((self.network(x0 + noise, t, {}) - noise) ** 2).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.seconds["step"].append(self.now() - begun)
        begun = self.now()
        torch.randn(self.batch, *self.shape, device=self.device)
        (torch.rand(self.batch, dtype=torch.float64, device=self.device) * 1000).long()
        self.seconds["torch"].append(self.now() - begun)

    def now(self) -> float:
        """Return a time in seconds: wall-clock time after a synchronisation on a GPU, else CPU time of the thread."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.thread_time()  # other processes of the machine do not count

    def row(self, name: str) -> dict:
        """Return a row of the table, with means over the steps after the warm-up."""
        step, kairos_draws, torch_draws = (statistics.mean(values[self.warm :]) for values in self.seconds.values())
        size = sum(parameter.numel() for parameter in self.network.parameters())
        return {
            "network": name,
            "parameters_m": round(size / 1e6, 1),
            "batch": self.batch,
            "step_ms": round(1e3 * step, 2),
            "draws_us": round(1e6 * kairos_draws),
            "torch_draws_us": round(1e6 * torch_draws),
            "share": round(kairos_draws / step, 6),
        }


def main() -> None:
    """Measure, print a table and write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = compute.setup(1, "auto")
    cases = {name: Case(*settings, device) for name, settings in CASES.items()}
    for number in range(arguments.rounds):
        for case in cases.values():
            for step_of_round in range(case.steps):
                case.step(number * case.steps + step_of_round)
    rows = [case.row(name) for name, case in cases.items()]
    how = f"{arguments.rounds} rounds, 1 thread, torch {torch.__version__}, {device.type} {platform.machine()}"
    print(how)
    print(f"{'network':8} {'batch':>5} {'step':>10} {'draws':>9} {'torch':>9} {'share':>7}")
    for row in rows:
        print(
            f"{row['network']:8} {row['batch']:5} {row['step_ms']:7.1f} ms {row['draws_us']:6} us "
            f"{row['torch_draws_us']:6} us {row['share']:7.2%}"
        )
    if arguments.out:
        write_rows(arguments.out, rows, how)


if __name__ == "__main__":
    main()
