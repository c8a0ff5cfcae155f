"""Measure the step time of every strategy on a GPU, at the papers' setting: batch 128, T = 1000, |S| = 3, f_S = 40.

    make gpu PART=strategies

All strategies train one network, the CIFAR-10 U-Net in bf16 (DiT-S/2 if diffusers is not installed). Blocks of 40
steps of a strategy alternate with blocks of uniform. A block contains one measurement of the samplers that measure the
network; gradient samplers also measure every 40 steps here. All weightings except edm2 look up their factor in a table,
so only min_snr and edm2 are measured.

A row contains milliseconds per step and the ratio to uniform (median and range over rounds). ``draw_us`` is the
microseconds of draw() alone with the device idle. ``waits`` counts and locates the synchronisations of a step without
logging and measurement.
"""

import sys
import time
from typing import Any

from gpu_kit import (
    Data,
    Part,
    arguments,
    compare_alternately,
    experiment,
    no_unet,
    setup,
    synchronisations,
    synchronize,
    training_of,
)

from kairos.training.loop import train_steps
from kairos.training.state import TrainingState
from kairos_timesteps.components import SAMPLERS
from kairos_timesteps.strategy import Strategy

PERIOD = 40
MEASURING = ("adaptive", "adaptive_official", "gradient_norm", "gradient_variance", "first_order")
WEIGHTED = ("min_snr", "edm2")


class Strategies:
    """A training run, continued with each strategy in turn."""

    def __init__(self, part: Part, data: Data):
        self.device, self.short = part.device, part.short
        self.period = 4 if self.short else PERIOD
        setup(self.device, False, "fp32" if self.short else "bf16")
        if self.short:
            model, shape, batch = {"name": "dit", "width": 16, "depth": 1, "heads": 2}, (4, 8, 8), 8
        elif no_unet():
            model, shape, batch = {"name": "dit"}, (4, 32, 32), 128
        else:
            model, shape, batch = {"name": "unet"}, (3, 32, 32), 128
        self.model = model["name"]
        plain = experiment(
            model, process={"name": "discrete", "timesteps": 20 if self.short else 1000}, batch_size=batch,
            log_every=10**9, precision="fp32" if self.short else "bf16",
        )  # fmt: skip
        latents = data.open(shape, 64 if self.short else 4096, pixels=self.model == "unet")
        self.training: TrainingState = training_of(plain, latents, self.device)
        self.strategies = {name: self.strategy(name) for name in (*SAMPLERS, *WEIGHTED)}
        self.strategies["adaptive full features"] = self.strategy("adaptive", feature_timesteps=None)

    def strategy(self, name: str, **options: Any) -> Strategy:
        """Return a strategy whose sampler measures once in a block and starts to learn at once, if it does."""
        if name in MEASURING:
            options["frequency"] = self.period
        if name in ("gradient_norm", "gradient_variance", "first_order", "loss_rms"):
            options["start"] = 1
        return Strategy(name, self.training.process, sampler=options)

    def rows(self) -> dict[str, Any]:
        """Return the function that measures each strategy, by name; uniform comes first."""
        names = [name for name in self.strategies if name != "uniform"]
        rows = {name: lambda name=name: self.compared_with_uniform(name) for name in self._sorted(names)}
        return {"uniform": lambda: self.alone("uniform"), **rows}

    def _sorted(self, names: list[str]) -> list[str]:
        """Sort names: strategies that cost time come first."""
        return sorted(names, key=lambda name: not name.startswith((*MEASURING, "loss", "edm2")))

    def compared_with_uniform(self, name: str) -> dict[str, Any]:
        """Run blocks of steps of the strategy and of uniform alternately, and return the row of the strategy."""
        blocks = {}
        for strategy_name in ("uniform", name):
            blocks[strategy_name] = lambda count, strategy_name=strategy_name: self.block(strategy_name, count)
        for run in blocks.values():  # warm-up
            run(self.period)
        timing = compare_alternately(blocks, self.period, 1 if self.short else 3, base="uniform")
        return {**timing[name], "uniform_ms_per_step": timing["uniform"]["ms_per_step"], **self.alone(name)}

    def alone(self, name: str) -> dict[str, Any]:
        """Return the microseconds of draw() by itself, the synchronisations of a step, and the model's name.

        The state of the strategy is restored after the draws.
        """
        strategy, training = self.strategies[name], self.training
        x0 = next(training.batches.steps(0, 1)).x0
        step = strategy.step
        count = 5 if self.short else 100
        state = strategy.state_dict()
        strategy.draw(x0)
        synchronize(self.device)
        begun = time.perf_counter()
        for _ in range(count):
            strategy.draw(x0)
            strategy.step, strategy._samples[:] = strategy.step + 1, [0, (strategy.step + 1) * len(x0)]
        synchronize(self.device)
        draw = (time.perf_counter() - begun) / count
        strategy.load_state_dict(state, self.device)
        training.strategy = strategy
        lines = train_steps(training, training.step + 4)
        while strategy.step % self.period in (0, self.period - 1) or strategy.step == step:
            next(lines)  # past a measurement, and the first step of an iterator
        waits = synchronisations(self.device, lambda: next(lines))
        lines.close()
        return {"draw_us": round(1e6 * draw, 1), "waits": waits, "model": self.model}

    def block(self, name: str, count: int) -> float:
        """Return the seconds of `count` steps with a strategy, after one step that fills the queue of batches."""
        self.training.strategy = self.strategies[name]
        lines = train_steps(self.training, self.training.step + count + 1)
        next(lines)
        synchronize(self.device)
        begun = time.perf_counter()
        for _ in lines:
            pass
        synchronize(self.device)
        return time.perf_counter() - begun


def main() -> int:
    """Run the part; return 1 if a row fails, else 0."""
    part = Part("strategies", "time per step compared with uniform, at batch 128 and T = 1000", arguments(__doc__))
    with Data() as data:
        return part.run(Strategies(part, data).rows())


if __name__ == "__main__":
    sys.exit(main())
