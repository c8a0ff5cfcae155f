"""Measure how fast a training step is, compared with a bare loop of the model, and how much of the device it uses.

    make gpu PART=step

The models are the CIFAR-10 U-Net on 3x32x32, and DiT-S/2, B/2 and XL/2 (with classes) on 4x32x32 latents. The batch is
128 or 256, halved until it fits. In one process, blocks of steps of these variants alternate:

- ``kairos``: kairos.training.loop.train_steps, with data from memory maps and a logged line every 100 steps.
- ``every step logged``: ``kairos`` with a logged line every step.
- ``deterministic``: ``kairos`` with deterministic algorithms only, the default of an experiment. It is left out for a
  compiled model, which would be compiled again.
- ``bare``: the smallest loop that trains the model with equal optimizer objects. Latents are on the device; torch draws
  noise and timesteps there; gradients are clipped; the average uses foreach. Nothing is logged, weighted or exact.

Columns:
    ms_per_step, ratio, range: milliseconds per step, and the ratio to bare (median and range over rounds).
    images_per_s: images per second.
    share_of_bf16_peak: achieved share of the bf16 peak of a large matrix product in the same process. Operations are
        those of forward and backward passes by torch.utils.flop_counter, without the optimizer.
    idle: share of some steps' time without a running kernel, by torch.profiler.
    host: share of a block's time in which the host issued work; 1 if the device waits for the host.
    waits: number and location of the synchronisations of a step that logs nothing.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from gpu_kit import (
    Data,
    Part,
    Skipped,
    arguments,
    compare_alternately,
    experiment,
    free,
    idle_share,
    setup,
    synchronisations,
    synchronize,
    training_of,
)
from torch import nn

from kairos.training.loop import train_steps
from kairos.training.state import TrainingState

LATENT, CLASSES = (4, 32, 32), 1000
SIZES = {
    "unet": ({"name": "unet"}, (3, 32, 32), 128),
    "dit-s/2": ({"name": "dit", "conditions": ["class"]}, LATENT, 256),
    "dit-b/2": ({"name": "dit", "width": 768, "depth": 12, "heads": 12, "conditions": ["class"]}, LATENT, 256),
    "dit-xl/2": ({"name": "dit", "width": 1152, "depth": 28, "heads": 16, "conditions": ["class"]}, LATENT, 128),
}  # fmt: skip
TINY = {
    "unet": (
        {"name": "unet", "channels": 8, "multipliers": [1, 2], "blocks": 1, "norm_groups": 4, "attention": []},
        (3, 8, 8),
        4,
    ),
    "dit-s/2": ({"name": "dit", "width": 16, "depth": 1, "heads": 2, "conditions": ["class"]}, (4, 8, 8), 4),
}
ROWS = [
    ("unet", "bf16", False), ("dit-s/2", "bf16", False), ("dit-xl/2", "bf16", False), ("dit-b/2", "bf16", False),
    ("dit-xl/2", "bf16", True), ("unet", "bf16", True), ("dit-s/2", "bf16", True), ("unet", "tf32", False),
    ("dit-b/2", "tf32", False), ("dit-b/2", "bf16", True), ("dit-s/2", "tf32", False), ("dit-xl/2", "tf32", False),
]  # fmt: skip


class Step:
    """Rows of the part `step`."""

    def __init__(self, part: Part, data: Data):
        self.part, self.data, self.device = part, data, part.device
        self.peaks: dict[str, float] = {}  # operations per second by precision, from `peak`
        self.host = 0.0  # share of the last block in which the host was issuing work

    def rows(self) -> dict[str, Callable[[], dict[str, Any]]]:
        """Return the function that measures each row, by the label of the row; the short form compiles no model."""
        sizes = TINY if self.part.short else SIZES
        rows: dict[str, Callable[[], dict[str, Any]]] = {"peak": self.peak}
        for name, precision, compiled in ROWS:
            if name in sizes and not (self.part.short and compiled):
                label = f"{name} {precision}{' compiled' if compiled else ''}"
                rows[label] = lambda settings=(*sizes[name], precision, compiled): self.step(*settings)
        return rows

    def peak(self) -> dict[str, Any]:
        """Measure and keep the operations per second of a large matrix product, in bf16 and tf32; return the row."""
        size = 128 if self.part.short else 8192
        for precision, dtype in (("bf16", torch.bfloat16), ("tf32", torch.float32)):
            setup(self.device, False, precision)
            a, b = (torch.randn(size, size, device=self.device, dtype=dtype) for _ in range(2))
            rates = []
            for _ in range(5):
                synchronize(self.device)
                begun = time.perf_counter()
                for _ in range(10):
                    a @ b
                synchronize(self.device)
                rates.append(10 * 2 * size**3 / (time.perf_counter() - begun))
            self.peaks[precision] = max(rates)
        return {f"{name} tflops": round(value / 1e12, 2) for name, value in self.peaks.items()}

    def step(
        self, model: dict[str, Any], shape: tuple[int, int, int], batch: int, precision: str, compiled: bool
    ) -> dict[str, Any]:
        """Return a row, see `measured`; the batch is halved until it fits.

        Raises:
            Skipped: not even a batch of one image fits.
        """
        while True:
            try:
                return self.measured(model, shape, batch, precision, compiled)
            except torch.OutOfMemoryError:
                pass
            free(self.device)
            batch //= 2
            if not batch:
                raise Skipped("not even a batch of 1 fits")

    def measured(
        self, model: dict[str, Any], shape: tuple[int, int, int], batch: int, precision: str, compiled: bool
    ) -> dict[str, Any]:
        """Run blocks of steps of all variants alternately, and return the columns of each variant.

        Without a GPU, or if the operations of the model cannot be counted, columns that need them are None or left out.
        """
        setup(self.device, False, precision)
        pixels = model["name"] == "unet"
        latents = self.data.open(shape, 64 if self.part.short else 4096, CLASSES, pixels=pixels)
        plain = experiment(model, batch_size=batch, log_every=100, precision=precision, compile=compiled)
        training = training_of(plain, latents, self.device)
        bare = Bare(training)
        variants = {
            "bare": bare.block,
            "kairos": lambda count: self.block(training, count, 100),
            "every step logged": lambda count: self.block(training, count, 1),
        }
        if not compiled:
            variants["deterministic"] = lambda count: self.block(training, count, 100, deterministic=True)
        begun = time.perf_counter()
        for run in variants.values():  # warm-up: selects kernels, fills queues, compiles models
            run(2)
        seconds_of_first_steps = time.perf_counter() - begun
        seconds_of_block = 0.02 if self.part.short else 1.5
        count = max(3, round(seconds_of_block / (bare.block(3) / 3)))
        timing = compare_alternately(variants, count, 1 if self.part.short else 4, base="bare")
        for row in timing.values():
            row["images_per_s"] = round(1e3 * batch / row["ms_per_step"], 1)
        timing["kairos"] |= self.watched(training)
        timing["bare"] |= {
            "waits": synchronisations(self.device, lambda: bare.steps(1)),
            "idle": idle_share(self.device, lambda: bare.steps(5)),
            "host": bare.host,
        }
        flops = self.flops(training)
        for row in timing.values():
            if flops is not None and "bf16" in self.peaks:
                row["share_of_bf16_peak"] = round(flops * row["images_per_s"] / self.peaks["bf16"], 4)
        return {
            "model": f"{sum(p.numel() for p in training.parameters) / 1e6:.1f} M parameters",
            "batch": batch,
            "steps_of_a_block": count,
            "first_steps_s": round(seconds_of_first_steps, 1),
            "gflops_per_image": None if flops is None else round(flops / 1e9, 2),
            "memory_gib": self._memory(),
            **timing,
        }

    def block(self, training: TrainingState, count: int, log_every: int, deterministic: bool = False) -> float:
        """Return the seconds of `count` steps of kairos, after one step that fills the queue of batches.

        The host's share of the time is kept in `self.host`.
        """
        setup(self.device, deterministic, training.settings.precision)
        training.settings = training.settings.model_copy(update={"log_every": log_every})
        lines = train_steps(training, training.step + count + 1)
        next(lines)
        synchronize(self.device)
        begun = time.perf_counter()
        for _ in lines:
            pass
        host_seconds = time.perf_counter() - begun  # the host has issued all work
        synchronize(self.device)
        seconds = time.perf_counter() - begun
        self.host = host_seconds / seconds
        if deterministic:
            setup(self.device, False, training.settings.precision)
        return seconds

    def watched(self, training: TrainingState) -> dict[str, Any]:
        """Return synchronisations and idle time of steps that log nothing, and the host's share."""
        self.block(training, 10, 10**9)  # sets `self.host`
        host = round(self.host, 3)
        lines = train_steps(training, training.step + 20)
        next(lines)
        usage = {
            "waits": synchronisations(self.device, lambda: next(lines)),
            "idle": idle_share(self.device, lambda: [next(lines) for _ in range(5)]),
            "host": host,
        }
        lines.close()
        return usage

    def _memory(self) -> float | None:
        """Return the peak memory of the GPU since the last call, in GiB, and reset it; None without a GPU."""
        if self.device.type != "cuda":
            return None
        used = torch.cuda.max_memory_allocated(self.device) / 2**30
        torch.cuda.reset_peak_memory_stats(self.device)
        return round(used, 2)

    def flops(self, training: TrainingState) -> float | None:
        """Return the operations of a forward and a backward pass of one image; None if they cannot be counted."""
        from torch.utils.flop_counter import FlopCounterMode

        batch = next(training.batches.steps(0, 1))
        x0, conditions = batch.x0[:2], {name: values[:2] for name, values in batch.conditions.items()}
        t = training.process.times(torch.full((len(x0),), 0.5, dtype=torch.float64)).to(self.device)
        try:
            with FlopCounterMode(display=False) as counter:
                with training.autocast():
                    output = training.process.predict(training.model, x0, t, conditions)
                output.float().square().mean().backward()
        except Exception as error:  # an operation that the counter cannot run
            print(f"flops: {error}", file=sys.stderr)
            return None
        finally:
            training.optimizer.zero_grad(set_to_none=True)
        return counter.get_total_flops() / len(x0)


class Bare:
    """Smallest training loop of the model: data and random numbers on the device, nothing logged."""

    def __init__(self, training: TrainingState):
        self.training, self.device, self.host = training, training.device, 0.0
        latents = training.latents
        self.x0 = latents.load_x0(latents.train).to(self.device)  # the means
        self.labels = {name: values.to(self.device) for name, values in latents.load_conditions(latents.train).items()}
        self.labels = {name: self.labels[name] for name in training.conditions}
        alphas_cumprod = torch.from_numpy(training.process.schedule.alphas_cumprod).float().to(self.device)
        self.signal = alphas_cumprod.sqrt()[:, None, None, None]
        self.noise = (1 - alphas_cumprod).sqrt()[:, None, None, None]
        weights, average = training.model.weights(), training.average.weights
        averaged_names = [name for name, value in average.items() if value.is_floating_point()]
        self.live = [weights[name] for name in averaged_names]
        self.average = [average[name] for name in averaged_names]

    def steps(self, count: int) -> None:
        """Run `count` training steps."""
        training, size = self.training, self.training.settings.batch_size
        training.model.train()
        for _ in range(count):
            index = torch.randint(len(self.x0), (size,), device=self.device)
            x0, conditions = self.x0[index], {name: values[index] for name, values in self.labels.items()}
            t = torch.randint(len(self.signal), (size,), device=self.device)
            noise = torch.randn_like(x0)
            training.optimizer.zero_grad(set_to_none=True)
            with training.autocast():
                output = training.network(self.signal[t] * x0 + self.noise[t] * noise, t, conditions)
            (output.float() - noise).square().mean().backward()
            nn.utils.clip_grad_norm_(training.parameters, 1.0)
            training.optimizer.step()
            torch._foreach_lerp_(self.average, self.live, 1e-4)

    def block(self, count: int) -> float:
        """Return the seconds of `count` steps; the host's share of the time is kept in `self.host`."""
        synchronize(self.device)
        begun = time.perf_counter()
        self.steps(count)
        host_seconds = time.perf_counter() - begun  # the host has issued all work
        synchronize(self.device)
        seconds = time.perf_counter() - begun
        self.host = round(host_seconds / seconds, 3)
        return seconds


def main() -> int:
    """Run the part; return 1 if a row fails, else 0."""
    part = Part(
        "step", "a training step compared with a bare loop of the same model, in alternating blocks", arguments(__doc__)
    )
    with Data() as data:
        return part.run(Step(part, data).rows())


if __name__ == "__main__":
    sys.exit(main())
