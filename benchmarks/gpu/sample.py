"""Measure how fast images are sampled with each solver, guidance and precision, without decoding.

    make gpu PART=sample

The networks are untrained, which does not change their arithmetic: the CIFAR-10 U-Net in pixels, DiT-S/2 and DiT-XL/2
with classes on 4x32x32 latents. A row alternates between a whole sampling run and the network alone, evaluated with
equal frequency on an equal batch.

Columns:
    seconds_of_a_batch, ratio, range: seconds of a batch, and the ratio to the network alone, over rounds.
    images_per_s: images per second.
    nfe: network evaluations; guidance doubles their batch.
    waits: number and location of a batch's synchronisations with the device.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from gpu_kit import (
    Part,
    Skipped,
    arguments,
    compare_alternately,
    experiment,
    free,
    move,
    setup,
    synchronisations,
    synchronize,
)

from kairos import compute, models
from kairos.forward_process import build_process, output_channels
from kairos.library_components import LibraryComponent
from kairos.models.settings import BACKBONES
from kairos.sampling.generate import DataPrediction, Guidance, build_guided_predictor, make_noise_source
from kairos.sampling.settings import SOLVERS, resolve_solver
from kairos.sampling.time_grids import build_time_grid
from kairos_timesteps.components import PROCESSES

DIT = {"name": "dit", "conditions": ["class"]}
MODELS = {
    "unet": ({"name": "unet"}, (3, 32, 32), 512),
    "dit-s/2": (DIT, (4, 32, 32), 512),
    "dit-xl/2": ({**DIT, "width": 1152, "depth": 28, "heads": 16}, (4, 32, 32), 128),
}
TINY = {
    "unet": (
        {"name": "unet", "channels": 8, "multipliers": [1, 2], "blocks": 1, "norm_groups": 4, "attention": []},
        (3, 8, 8),
        16,
    ),
    "dit-s/2": ({**DIT, "width": 16, "depth": 1, "heads": 2}, (4, 8, 8), 16),
}
CLASSES = {"class": {"kind": "class", "num_classes": 1000}}
ROWS = [  # model, process, scheme, steps, guidance, precision
    ("unet", "discrete", "ddim", 50, 1.0, "bf16"), ("dit-xl/2", "discrete", "ddim", 50, 4.0, "bf16"),
    ("unet", "edm", "heun", 18, 1.0, "bf16"), ("dit-s/2", "flow", "euler", 50, 1.0, "bf16"),
    ("dit-s/2", "discrete", "ddpm", 250, 1.5, "bf16"), ("unet", "discrete", "ddpm", 250, 1.0, "bf16"),
    ("unet", "discrete", "ddim", 50, 1.0, "tf32"), ("unet", "discrete", "ddim", 50, 1.0, "fp32"),
    ("dit-xl/2", "flow", "heun", 25, 1.0, "bf16"), ("dit-xl/2", "discrete", "ddim", 50, 4.0, "tf32"),
]  # fmt: skip


class SampledBatch:
    """A batch of images from an untrained network whose weights are perturbed by equal random numbers."""

    def __init__(
        self, plain: dict[str, Any], shape: tuple[int, int, int], batch: int, scheme: str, steps: int,
        guidance: float, precision: str, device: torch.device,
    ):  # fmt: skip
        process = LibraryComponent.select(PROCESSES, plain["diffusion"]["process"])
        self.process = build_process(process, plain["diffusion"]["prediction"], 0.5)
        self.precision, self.device = precision, device
        torch.manual_seed(0)
        outputs = output_channels(self.process, shape[0])
        network = models.build(BACKBONES.select(plain["model"]), shape, CLASSES, outputs)
        move(network.parameters())
        self.solver = resolve_solver(SOLVERS.select({"name": scheme}), process)
        self.grid = build_time_grid(self.process, steps, self.solver)
        conditions = {name: torch.arange(batch, device=device) % 10 for name in plain["model"]["conditions"]}
        self.predict = build_guided_predictor(
            self.process, network.to(device).eval(), conditions, CLASSES, Guidance(guidance)
        )
        self.noise = make_noise_source(0, range(batch), shape, device)
        self.x_t = self.noise(0).float()
        self.t = self.process.times(torch.full((batch,), 0.5, dtype=torch.float64)).to(device)
        self.evaluations = 0

    def _counted(self, x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """Evaluate the guided network, and count the evaluation."""
        self.evaluations += 1
        return self.predict(x_t, t)

    def images(self) -> torch.Tensor:
        """Sample the batch from its noise, and return the images; the noise is equal at every call."""
        estimate = DataPrediction(self.process, self._counted, False, self.precision)
        return self.solver.build(self.process, self.grid, estimate, self.noise)

    def network_alone(self, times: int) -> None:
        """Evaluate the guided network a number of times on one noisy batch."""
        for _ in range(times):
            with compute.precision(self.precision, self.device):
                self.predict(self.x_t, self.t)


class Sample:
    """Rows of the part `sample`."""

    def __init__(self, part: Part):
        self.device, self.short = part.device, part.short

    def rows(self) -> dict[str, Callable[[], dict[str, Any]]]:
        """Return the function that measures each row, by the label of the row; the short form has small models."""
        sizes = TINY if self.short else MODELS
        rows: dict[str, Callable[[], dict[str, Any]]] = {}
        for model, process, scheme, steps, guidance, precision in ROWS:
            if model in sizes:
                count = min(steps, 3) if self.short else steps
                label = f"{model} {process} {scheme} {count} guidance {guidance:g} {precision}"
                settings = (*sizes[model], process, scheme, count, guidance, precision)
                rows[label] = lambda settings=settings: self.sample(*settings)
        return rows

    def sample(self, model: dict[str, Any], shape: tuple[int, int, int], batch: int, *settings: Any) -> dict[str, Any]:
        """Return a row, see `measured`; the batch is halved until it fits.

        Raises:
            Skipped: not even a batch of one image fits.
        """
        while batch:
            try:
                return self.measured(model, shape, batch, *settings)
            except torch.OutOfMemoryError:
                pass
            free(self.device)
            batch //= 2
        raise Skipped("not even a batch of 1 fits")

    @torch.inference_mode()
    def measured(
        self, model: dict[str, Any], shape: tuple[int, int, int], batch: int, process_name: str, scheme: str,
        steps: int, guidance: float, precision: str,
    ) -> dict[str, Any]:  # fmt: skip
        """Sample batches and evaluate the network alone, alternately; return the row.

        `scheme` is the name of the solver, and `steps` its number of steps.

        Raises:
            torch.OutOfMemoryError: the batch does not fit.
        """
        setup(self.device, False)
        plain = experiment(model, process={"name": process_name})
        batch_of_images = SampledBatch(plain, shape, batch, scheme, steps, guidance, precision, self.device)
        batch_of_images.images()  # warm-up, which also counts the evaluations
        nfe = batch_of_images.evaluations
        timing = compare_alternately(
            {
                "network": lambda count: self.seconds(lambda: batch_of_images.network_alone(nfe), count),
                "scheme": lambda count: self.seconds(batch_of_images.images, count),
            },
            steps=1, rounds=1 if self.short else 3, base="network",
        )["scheme"]  # fmt: skip
        seconds = timing.pop("ms_per_step") / 1e3
        return {
            "batch": batch,
            "nfe": nfe,
            "seconds_of_a_batch": round(seconds, 4),
            "images_per_s": round(batch / seconds, 2),
            **timing,
            "waits": synchronisations(self.device, batch_of_images.images),
        }

    def seconds(self, run: Callable[[], None], count: int) -> float:
        """Return the seconds of `count` calls of `run`, including their work on the device."""
        synchronize(self.device)
        begun = time.perf_counter()
        for _ in range(count):
            run()
        synchronize(self.device)
        return time.perf_counter() - begun


def main() -> int:
    """Run the part; return 1 if a row fails, else 0."""
    part = Part("sample", "solvers compared with the network alone, in alternating blocks", arguments(__doc__))
    return part.run(Sample(part).rows())


if __name__ == "__main__":
    sys.exit(main())
