"""Validation loss by time: fixed held-out images, noise and times, the same for all methods.

The process is cut into strata of fractions, its first and last cell (of a discrete process: timestep) strata of their
own, for the VLB's coefficient c is largest there. In a stratum every image has a fraction of its own, evenly spread
over it, so that the mean over images is one over the stratum. The loss is the squared error of epsilon, whatever the
network predicts.
"""

import itertools
from typing import Any

import numpy as np
import torch

from kairos import compute
from kairos.data.latents import Latents
from kairos.evaluation.settings import LossSettings
from kairos_timesteps.randomness import Stream
from kairos_timesteps.validation import ValidationLoss, spread_over


def build_strata(cells: int, strata: int) -> list[tuple[float, float]]:
    """Half-open intervals of fractions that cover [0, 1): the first and the last cell alone, `strata` between.

    Fewer where there are not as many cells between; all begin and end with a cell.
    """
    edges = np.unique(np.round(np.linspace(1, cells - 1, min(strata, max(cells - 2, 0)) + 1)))
    return list(itertools.pairwise((np.concatenate([[0], edges, [cells]]) / cells).tolist()))


def validation_loss(milestone: Any, latents: Latents, settings: LossSettings, device: Any = "cpu") -> dict[str, Any]:
    """The loss of a milestone's network on held-out images.

    Args:
        milestone: ``model``, ``process`` and ``record`` of an opened milestone.
        latents: what it was trained on; the held-out images are used.
        settings: number of images and strata, the seed of images and noise, the network's precision.
        device: where the network is.

    Returns:
        ``loss`` (mean over fractions), ``vlb`` (that of c times the loss of each image), ``vlb_without_last`` (the same
        without the last stratum's part) and ``per_timestep``, a row per stratum: its fractions ``u``, the process' own
        time ``t`` at its centre, ``loss`` and ``vlb``.
    """
    process, c = milestone.process, torch.from_numpy(milestone.process.schedule.vlb)
    fixed, rows = build_fixed_loss(milestone, latents, settings, device), []
    count = len(fixed.images)
    for number, stratum in enumerate(build_strata(len(c), settings.strata)):
        u = spread_over(stratum, count)
        with compute.precision(settings.precision, torch.device(device)):
            loss = fixed.errors(milestone.model, number, u, "epsilon")
        row = {"u": list(stratum), "t": process.times(torch.tensor(sum(stratum) / 2, dtype=torch.float64)).item()}
        vlb = c[(u * len(c)).long()] * loss
        rows.append({**row, "loss": float(loss.mean()), "vlb": float(vlb.mean())})
    sizes = [row["u"][1] - row["u"][0] for row in rows]  # each stratum counts by it
    mean, vlb = ([size * row[name] for size, row in zip(sizes, rows)] for name in ("loss", "vlb"))
    found = {"loss": sum(mean), "vlb": sum(vlb), "vlb_without_last": sum(vlb[:-1])}
    return {**found, "images": count, "per_timestep": rows}


def mlperf8(milestone: Any, latents: Latents, settings: LossSettings, device: Any = "cpu") -> dict[str, Any]:
    """The loss at eight equidistant times, 0/8 to 7/8 of the process, in turn over the images; arguments as above.

    After the validation of MLPerf Training's Flux.1: the plain squared error of what the network predicts.

    Returns:
        ``mlperf8``, the mean over images.
    """
    fixed = build_fixed_loss(milestone, latents, settings, device, kind="mlperf8")
    found = fixed(milestone.model, compute.precision(settings.precision, torch.device(device)))
    return {"mlperf8": found["loss"]}


def build_fixed_loss(
    milestone: Any, latents: Latents, settings: LossSettings, device: Any, **named: Any
) -> ValidationLoss:
    """The loss on the held-out images, the same for all methods: as many as the settings say, or all."""
    order = Stream(settings.seed, "validation images").permutation(len(latents.heldout))
    chosen = latents.heldout[order[: settings.images].numpy()]
    latent_noise = Stream(settings.seed, "validation latents").normal(0, range(len(chosen)), latents.shape)
    images, known = latents.load_x0(chosen, noise=latent_noise), latents.load_conditions(chosen)
    told = {name: known[name] for name in milestone.record["conditions"]}
    return ValidationLoss(images, milestone.process, seed=settings.seed, conditions=told, device=device, **named)
