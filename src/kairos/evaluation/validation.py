"""Validation loss by time: fixed held-out images, noise and times, the same for all methods.

The process is cut into strata of fractions, its first and last cell (of a discrete process: timestep) strata of their
own, for the VLB's coefficient c is largest there. In a stratum every image has a fraction of its own, evenly spread
over it, so that the mean over images is one over the stratum. The loss is the squared error of epsilon, whatever the
network predicts.
"""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kairos import compute
from kairos.data.latents import Latents
from kairos.evaluation.settings import LossSettings
from kairos.randomness import Stream

BATCH = 128
Errors = Callable[[int, Tensor, str], Tensor]  # see `errors_of`


def strata_of(cells: int, strata: int) -> list[tuple[float, float]]:
    """Half-open intervals of fractions that cover [0, 1): the first and the last cell alone, `strata` between.

    Fewer where there are not as many cells between; all begin and end with a cell.
    """
    edges = np.unique(np.round(np.linspace(1, cells - 1, min(strata, max(cells - 2, 0)) + 1)))
    return list(itertools.pairwise((np.concatenate([[0], edges, [cells]]) / cells).tolist()))


def spread_over(stratum: tuple[float, float], count: int) -> torch.Tensor:
    """A fraction in the stratum for each of `count` images, evenly spread, float64 (count,)."""
    first, end = stratum
    return first + (torch.arange(count, dtype=torch.float64) + 0.5) * (end - first) / count


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
    count, errors = errors_of(milestone, latents, settings, device)
    rows = []
    for number, stratum in enumerate(strata_of(len(c), settings.strata)):
        u = spread_over(stratum, count)
        loss = errors(number, u, "epsilon")
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
    count, errors = errors_of(milestone, latents, settings, device)
    u = torch.arange(count, dtype=torch.float64) % 8 / 8
    return {"mlperf8": float(errors(0, u, "prediction").mean())}


def errors_of(milestone: Any, latents: Latents, settings: LossSettings, device: Any) -> tuple[int, Errors]:
    """What tells a network's errors on the held-out images, the same for all methods, and how many those are.

    They are as many as the settings say, or all. ``errors(number, u, of)`` is the squared error of ``epsilon``, or of
    the ``prediction``, by image, float64 (n,): each at its own fraction u (n,), with the noise of draw `number`.
    """
    order = Stream(settings.seed, "validation images").permutation(len(latents.heldout))
    chosen = latents.heldout[order[: settings.images].numpy()]
    latent_noise = Stream(settings.seed, "validation latents").normal(0, range(len(chosen)), latents.shape)
    images, known = latents.batch(chosen, noise=latent_noise), latents.conditions(chosen)
    process, names = milestone.process, milestone.record["conditions"]

    def errors(number: int, u: Tensor, of: str) -> Tensor:
        noise = Stream(settings.seed, "validation noise").normal(number, range(len(u)), tuple(images.shape[1:]))
        found = []
        with compute.precision(settings.precision, torch.device(device)), torch.inference_mode():
            for part in (slice(start, start + BATCH) for start in range(0, len(u), BATCH)):
                told = {name: known[name][part].to(device) for name in names}
                x0, eps, fraction = (values[part].to(device) for values in (images, noise, u))
                t = process.times(fraction)
                x_t = process.noised(x0, eps, t)
                output = process.mean(process.predict(milestone.model, x_t, t, told), x_t).to(x_t.dtype)
                off = process.epsilon(output, x_t, t) - eps if of == "epsilon" else output - process.target(x0, eps, t)
                found.append(off.double().square().flatten(1).mean(1).cpu())  # (batch,)
        return torch.cat(found)

    return len(images), errors
