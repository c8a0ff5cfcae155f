"""How fast images are sampled: schemes, guidance and precisions, without decoding.

    make gpu PART=sample

Untrained networks, whose arithmetic costs what a trained one's does: the CIFAR-10 U-Net in pixels, DiT-S/2 and DiT-XL/2
with classes on 4x32x32 latents. A row takes turns between a whole scheme and the network alone, called as often on the
same batch. Columns: seconds of a batch and the ratio to the network alone (median and range over rounds), images a
second, network evaluations (``nfe``; guidance doubles their batch), and ``waits``: how often a batch waits for the
device, and where.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from common import Part, Skipped, arguments, experiment, free, named, setup, synchronisations, synchronize, take_turns

from kairos import compute, models
from kairos.diffusion.processes import build_process

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


class Sample:
    """The rows of the part."""

    def __init__(self, part: Part):
        self.device, self.short = part.device, part.short

    def rows(self) -> dict[str, Callable[[], dict[str, Any]]]:
        sizes = TINY if self.short else MODELS
        rows: dict[str, Callable[[], dict[str, Any]]] = {}
        for model, process, scheme, steps, guidance, precision in ROWS:
            if model in sizes:
                count = min(steps, 3) if self.short else steps
                label = f"{model} {process} {scheme} {count} guidance {guidance:g} {precision}"
                given = (*sizes[model], process, scheme, count, guidance, precision)
                rows[label] = lambda given=given: self.sample(*given)
        return rows

    def sample(self, model: dict[str, Any], shape: tuple[int, int, int], batch: int, *given: Any) -> dict[str, Any]:
        """A row: the batch is halved until it fits."""
        while batch:
            try:
                return self.measured(model, shape, batch, *given)
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
        try:
            from kairos.sampling.places import places

            from kairos.sampling.draw import estimate_of, guided, noise_of
            from kairos.sampling.registries import SCHEDULERS, resolved
        except ImportError as error:
            raise Skipped(f"the sampling schemes are not here yet ({error})") from None
        setup(self.device, False)
        plain = experiment(model, process={"name": process_name})
        process = build_process(plain["diffusion"], 0.5)
        network = models.build(plain["model"], shape, CLASSES, process.channels(shape[0])).to(self.device).eval()
        labels = torch.arange(batch, device=self.device) % 1000
        conditions = {name: labels for name in plain["model"]["conditions"]}
        scheduler = resolved(named(SCHEDULERS, scheme), plain["diffusion"]["process"])
        options = {name: value for name, value in scheduler.items() if name != "name"}
        grid = places(process, steps, scheduler)
        predict = guided(process, network, conditions, CLASSES, guidance)
        evaluations = 0

        def counted(x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            nonlocal evaluations
            evaluations += 1
            return predict(x_t, t)

        def whole() -> None:
            estimate, noise = (
                estimate_of(process, counted, False, precision),
                noise_of(0, range(batch), shape, self.device),
            )
            SCHEDULERS.build(scheme, options, process, grid, estimate, noise)

        whole()
        nfe = evaluations
        x_t = torch.randn(batch, *shape, device=self.device)
        t = process.times(torch.full((batch,), 0.5, dtype=torch.float64)).to(self.device)

        def alone() -> None:
            for _ in range(nfe):
                with compute.precision(precision, self.device):
                    predict(x_t, t)

        told = take_turns(
            {"network": lambda count: self.seconds(alone, count), "scheme": lambda count: self.seconds(whole, count)},
            steps=1, rounds=2 if self.short else 3, base="network",
        )["scheme"]  # fmt: skip
        seconds = told.pop("ms_per_step") / 1e3
        return {
            "batch": batch,
            "nfe": nfe,
            "seconds_of_a_batch": round(seconds, 4),
            "images_per_s": round(batch / seconds, 2),
            **told,
            "waits": synchronisations(self.device, whole),
        }

    def seconds(self, run: Callable[[], None], count: int) -> float:
        synchronize(self.device)
        begun = time.perf_counter()
        for _ in range(count):
            run()
        synchronize(self.device)
        return time.perf_counter() - begun


def main() -> int:
    part = Part("sample", "sampling schemes beside the network alone, taking turns", arguments(__doc__))
    return part.run(Sample(part).rows())


if __name__ == "__main__":
    sys.exit(main())
