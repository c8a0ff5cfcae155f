"""Validation loss per timestep: fixed held-out images, noise and grid of timesteps, the same for all methods.

The timesteps are cut into strata, t = 0 and t = T-1 strata of their own, for the VLB's coefficient c_t is largest
there. In a stratum every image has a timestep of its own, evenly spread over it, so that the mean over images is one
over the stratum. The loss is the squared error of epsilon, whatever the network predicts.
"""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kairos.data.latents import Latents
from kairos.evaluation.settings import LossSettings
from kairos.randomness import generator

BATCH = 128


def strata_of(timesteps: int, strata: int) -> list[tuple[int, int]]:
    """Half-open intervals [t0, t1) that cover 0 ... T-1: the first and the last timestep alone, `strata` between.

    Fewer where there are not as many timesteps between.
    """
    inner = timesteps - 2
    edges = np.unique(np.round(np.linspace(1, timesteps - 1, min(strata, max(inner, 0)) + 1)).astype(int)).tolist()
    between = list(itertools.pairwise(edges))
    return [(0, 1), *between, (timesteps - 1, timesteps)]


def spread_over(stratum: tuple[int, int], count: int) -> torch.Tensor:
    """A timestep of the stratum for each of `count` images, evenly spread, int64 (count,)."""
    first, end = stratum
    return first + ((torch.arange(count) + 0.5) * (end - first) / count).long()


def validation_loss(milestone: Any, latents: Latents, settings: LossSettings, device: Any = "cpu") -> dict[str, Any]:
    """The loss of a milestone's network on held-out images.

    Args:
        milestone: ``model``, ``process`` and ``record`` of an opened milestone.
        latents: what it was trained on; the held-out images are used.
        settings: number of images and strata, and the seed of images and noise.
        device: where the network is.

    Returns:
        ``loss`` (mean over timesteps), ``vlb`` (mean over timesteps of c times loss), ``vlb_without_last`` (the same
        without the last stratum's part) and ``per_timestep``, a row per stratum.
    """
    process, names = milestone.process, list(milestone.record["conditions"])
    order = torch.randperm(len(latents.heldout), generator=generator(settings.seed, "validation images"))
    chosen = latents.heldout[order[: settings.images].numpy()]
    shape = (len(chosen), *latents.shape)
    x0 = latents.batch(chosen, noise=torch.randn(shape, generator=generator(settings.seed, "validation latents")))
    conditions = {name: latents.conditions(chosen)[name] for name in names}
    rows = []
    for number, stratum in enumerate(strata_of(process.timesteps, settings.strata)):
        noise = torch.randn(shape, generator=generator(settings.seed, "validation noise", number))
        t = spread_over(stratum, len(chosen))
        losses = [
            _squared_error(
                milestone, x0[part], noise[part], t[part], {k: v[part] for k, v in conditions.items()}, device
            )
            for part in (slice(start, start + BATCH) for start in range(0, len(chosen), BATCH))
        ]
        c = float(process.schedule.vlb[slice(*stratum)].mean())
        middle = (stratum[0] + stratum[1] - 1) // 2
        rows.append({"t": middle, "stratum": list(stratum), "c": c, "loss": float(torch.cat(losses).mean())})
    return {**summary(rows, process.timesteps), "images": len(chosen), "per_timestep": rows}


def summary(rows: list[dict[str, Any]], timesteps: int) -> dict[str, float]:
    """Means over all timesteps of the loss and of c times the loss, each stratum counted by its size."""
    sizes = [row["stratum"][1] - row["stratum"][0] for row in rows]
    plain = [size * row["loss"] / timesteps for size, row in zip(sizes, rows)]
    vlb = [size * row["c"] * row["loss"] / timesteps for size, row in zip(sizes, rows)]
    return {"loss": sum(plain), "vlb": sum(vlb), "vlb_without_last": sum(vlb[:-1])}


@torch.inference_mode()
def _squared_error(
    milestone: Any,
    x0: torch.Tensor,
    noise: torch.Tensor,
    t: torch.Tensor,
    conditions: dict[str, torch.Tensor],
    device: Any,
) -> torch.Tensor:
    """Mean squared error of epsilon per image, float64 (batch,)."""
    x0, noise, t = x0.to(device), noise.to(device), t.to(device)
    x_t = milestone.process.noised(x0, noise, t)
    there = {name: values.to(device) for name, values in conditions.items()}
    output = milestone.process.predict(milestone.model, x_t, t, there)
    epsilon = milestone.process.epsilon(output, x_t, t)
    return (epsilon - noise).double().square().flatten(1).mean(1).cpu()


def latents_folder(milestone: Path) -> Path:
    """Where the latents are, seen from a milestone: ``results/<experiment>/latents``."""
    return milestone / "../../../../latents"
