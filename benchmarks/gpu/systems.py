"""Train every system of both papers at its published size for 20 steps: images per second and memory.

    make gpu PART=systems

The files are those of experiments/systems, the images random numbers. The batch is the published one, halved until it
fits. The precision is bf16. In addition to torch and numpy, PyYAML is needed, and diffusers for the U-Nets. $WHEELS
provides diffusers, without its dependencies.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_kit import Data, Part, Skipped, arguments, experiment, free, setup, synchronize, training_of

from kairos.training.loop import train_steps

sys.path.append(str(Path(__file__).resolve().parents[1]))
try:
    from papers import SYSTEMS, published

    missing = ""
except ImportError as error:
    SYSTEMS, missing = {}, f"{error}; WHEELS=folder brings it"
STEPS, SHORT_STEPS = 20, 5


class Systems:
    """Rows of the part `systems`."""

    def __init__(self, part: Part, data: Data):
        self.part, self.data = part, data

    def rows(self) -> dict[str, Callable[[], dict[str, Any]]]:
        """Return the function that measures each system, by name; one row that is skipped if a package is missing."""
        if missing:
            return {"systems": self.absent}
        return {name: lambda name=name: self.fitting(name) for name in SYSTEMS}

    def absent(self) -> dict[str, Any]:
        """Raise `Skipped`, which reports the missing package."""
        raise Skipped(missing)

    def fitting(self, name: str) -> dict[str, Any]:
        """Return the row of a system, see `measured`; the batch is halved until it fits.

        Raises:
            Skipped: not even a batch of one image fits.
        """
        batch = 8 if self.part.short else published(name)["training"]["batch_size"]
        while batch:
            try:
                return self.measured(name, batch)
            except torch.OutOfMemoryError:
                pass
            free(self.part.device)
            batch //= 2
        raise Skipped("not even a batch of 1 fits")

    def measured(self, name: str, batch: int) -> dict[str, Any]:
        """Train a system for some steps at a batch size, and return its row.

        Raises:
            torch.OutOfMemoryError: the batch does not fit.
            ValueError: the loss or a gradient is not finite.
        """
        device, values, system = self.part.device, published(name), SYSTEMS[name]
        model, shape, conditions = values["model"], system.shape, system.conditions
        if self.part.short:
            model, shape = model | system.small, (shape[0], 16, 16)
            conditions = {
                key: item | {"shape": shape} if item["kind"] == "image" else item for key, item in conditions.items()
            }
        setup(device, precision="bf16")
        pixels = values.get("autoencoder", {"kind": "none"})["kind"] == "none"
        latents = self.data.open(shape, 4 * batch, pixels=pixels, conditions=conditions)
        process = values["diffusion"]["process"]
        losses = [
            {"name": loss} if isinstance(loss, str) else loss for loss in values["diffusion"].get("losses", ["mse"])
        ]
        training_options = {
            key: value for key, value in values["training"].items() if key in ("augment", "condition_dropout")
        }
        prediction = values["diffusion"].get("prediction")
        plain = experiment(
            model, process, prediction, losses=losses, batch_size=batch, log_every=10**9, precision="bf16",
            **training_options,
        )  # fmt: skip
        training = training_of(plain, latents, device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        count = SHORT_STEPS if self.part.short else STEPS
        lines = train_steps(training, count + 3)
        for _ in range(3):
            next(lines)
        synchronize(device)
        begun = time.perf_counter()
        for _ in lines:
            pass
        synchronize(device)
        seconds = time.perf_counter() - begun
        if not training.is_finite():
            raise ValueError("the loss or a gradient is not finite")
        return {
            "parameters": sum(value.numel() for value in training.model.parameters()),
            "published": system.parameters, "batch": batch, "images_per_s": round(count * batch / seconds, 1),
            "ms_per_step": round(1e3 * seconds / count, 1),
            "memory_gib": round(torch.cuda.max_memory_allocated(device) / 2**30, 2) if device.type == "cuda" else None,
        }  # fmt: skip


def main() -> int:
    """Run the part; return 1 if a row fails, else 0."""
    command_line = arguments(__doc__ or "")
    part = Part("systems", "images a second and memory of every system at its published size", command_line)
    with Data() as data:
        return part.run(Systems(part, data).rows())


if __name__ == "__main__":
    raise SystemExit(main())
