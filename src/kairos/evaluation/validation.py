"""Validation losses by time: fixed held-out images, noise and times, which are equal for all methods.

A fraction u in [0, 1) is a position in the forward process. Cells divide [0, 1) into equal intervals, each with a
coefficient c of the VLB; a discrete process has a cell per timestep. Strata consist of whole cells. The first and
the last cell are strata of one cell, because c is largest there. In a stratum, the fractions of the images are evenly
spread, so that the mean over images is a mean over the stratum.

A loss is a plain squared error, without weights. Its name states the quantity, such as ``loss_velocity`` or
``loss_epsilon``.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kairos import compute
from kairos.data.latents import Latents
from kairos.data.random_order import random_order
from kairos.evaluation.settings import LossSettings
from kairos.forward_process import prediction_name
from kairos_timesteps.randomness import Stream
from kairos_timesteps.validation import ValidationLoss, spread_over


def build_strata(cells: int, strata: int) -> list[tuple[float, float]]:
    """Return half-open intervals of fractions that cover [0, 1): the first cell, `strata` intervals, the last cell.

    The intervals between are nearly equal, and fewer if there are fewer cells. Every interval consists of whole cells.

    Args:
        cells: number of cells, two or more: the timesteps of a discrete process.
        strata: number of intervals between the first and the last cell.
    """
    inner_cells = max(cells - 2, 0)  # without the first and the last
    inner_strata = min(strata, inner_cells)
    inner_edges = np.unique(np.round(np.linspace(1, cells - 1, inner_strata + 1)))  # edges in cells, each once
    edges = np.concatenate([[0], inner_edges, [cells]]) / cells  # edges as fractions
    return list(itertools.pairwise(edges.tolist()))


def validation_loss(snapshot: Any, latents: Latents, settings: LossSettings, device: Any = "cpu") -> dict[str, Any]:
    """Compute the squared error of a snapshot's prediction on held-out images, by time.

    The means weight each stratum by its length. The network is in evaluation mode meanwhile.

    Args:
        snapshot: ``model``, ``process`` and ``record`` of an opened snapshot.
        latents: latents that the network was trained on; the held-out images are used.
        settings: number of images and strata, seed, precision.
        device: device that the caller has put the network on.

    Returns:
        ``loss_<prediction>``: mean over fractions, see `prediction_name`.
        ``vlb``: mean over fractions of the squared error of epsilon times the VLB's coefficient c of the cell that
            contains the fraction.
        ``vlb_without_last``: ``vlb`` without the contribution of the last stratum, which is the last cell. It exists
            only if that cell has more than a hundredth of the VLB's weight on the prediction. With the cosine schedule
            and epsilon it has nearly all.
        ``images``: number of images.
        ``per_timestep``: a row per stratum with its fractions ``u``, the time ``t`` of the process at its centre,
            ``loss_<prediction>`` and ``vlb``.
    """
    process = snapshot.process
    coefficients = torch.from_numpy(process.schedule.vlb)  # c of each cell, float64 (cells,) on the CPU
    cell_count = len(coefficients)
    loss_name = f"loss_{prediction_name(process.prediction)}"
    fixed_loss = build_fixed_loss(snapshot, latents, settings, device)
    rows = []
    lengths = []  # lengths of the strata, in fractions
    for (start, end), u, errors in _errors_by_stratum(snapshot, fixed_loss, settings, device):
        cells = (u * cell_count).long()  # cell that contains the fraction of each image, (images,)
        vlb = coefficients[cells] * _epsilon_error_ratio(process, u) * errors
        centre = process.times(torch.tensor((start + end) / 2, dtype=torch.float64)).item()
        rows.append({"u": [start, end], "t": centre, loss_name: float(errors.mean()), "vlb": float(vlb.mean())})
        lengths.append(end - start)
    # the lengths add up to 1, so that the sums are means
    vlb_contributions = [length * row["vlb"] for length, row in zip(lengths, rows)]
    losses = {
        loss_name: sum(length * row[loss_name] for length, row in zip(lengths, rows)),
        "vlb": sum(vlb_contributions),
    }
    prediction_weights = process.schedule.in_prediction(process.schedule.vlb, process.prediction)
    if prediction_weights[-1] > 0.01 * prediction_weights.sum():
        losses["vlb_without_last"] = sum(vlb_contributions[:-1])
    return losses | {"images": len(fixed_loss.images), "per_timestep": rows}


def epsilon_loss(snapshot: Any, latents: Latents, settings: LossSettings, device: Any = "cpu") -> dict[str, Any]:
    """Compute ``loss_epsilon``, the squared error of epsilon that a snapshot's prediction implies, mean over fractions.

    Networks with different prediction targets share this quantity. See `validation_loss` for the arguments.
    """
    fixed_loss = build_fixed_loss(snapshot, latents, settings, device)
    loss = 0.0
    for (start, end), u, errors in _errors_by_stratum(snapshot, fixed_loss, settings, device):
        loss += (end - start) * float((_epsilon_error_ratio(snapshot.process, u) * errors).mean())
    return {"loss_epsilon": loss}


def mlperf8(snapshot: Any, latents: Latents, settings: LossSettings, device: Any = "cpu") -> dict[str, Any]:
    """Compute the loss at eight equidistant times, fractions 0/8 to 7/8, assigned to the images in turn.

    The loss is the squared error of the network's prediction, as in the validation of MLPerf Training's Flux.1. The
    only field of the result, ``mlperf8_<prediction>``, is the mean over images. See `validation_loss` for the
    arguments; the number of strata is not used.
    """
    fixed_loss = build_fixed_loss(snapshot, latents, settings, device, kind="mlperf8")
    result = fixed_loss(snapshot.model, compute.precision(settings.precision, torch.device(device)))
    return {f"mlperf8_{prediction_name(snapshot.process.prediction)}": result["loss"]}


def _errors_by_stratum(
    snapshot: Any, fixed_loss: ValidationLoss, settings: LossSettings, device: Any
) -> Iterator[tuple[tuple[float, float], Tensor, Tensor]]:
    """Yield the fractions of each stratum, of its images, (images,), and the squared errors of the prediction there.

    Errors are float64 (images,) on the CPU.
    """
    for number, stratum in enumerate(build_strata(len(snapshot.process.schedule.vlb), settings.strata)):
        u = spread_over(stratum, len(fixed_loss.images))
        with compute.precision(settings.precision, torch.device(device)):
            # the number of the stratum selects the noise
            yield stratum, u, fixed_loss.errors(snapshot.model, number, u, of="prediction")


def _epsilon_error_ratio(process: Any, u: Tensor) -> Tensor:
    """Return the squared error of epsilon over the squared error of the prediction at fractions u, (images,)."""
    t = process.times(u)
    zeros = torch.zeros(len(u), 1, dtype=torch.float64)
    # epsilon is linear in the prediction, for x_t = 0 a multiple of it
    ratio: Tensor = process.epsilon(zeros + 1, zeros, t).square().squeeze(1)
    return ratio


def build_fixed_loss(
    snapshot: Any, latents: Latents, settings: LossSettings, device: Any, **options: Any
) -> ValidationLoss:
    """Build the loss on `settings.images` held-out images (or all, if there are fewer), equal for all methods.

    The images are a random choice by the seed. They and their conditions are in memory on the CPU. If latents have a
    variance, their noise is drawn by the seed too. The caller ensures that images are held out.

    Args:
        snapshot: opened snapshot, whose process and conditions are used.
        latents: latents that the network was trained on. The caller ensures that they have the conditions.
        settings: number of images, and the seed that selects them.
        device: device of the network.
        options: further arguments of `ValidationLoss`.
    """
    order = random_order(Stream(settings.seed, "validation images"), len(latents.heldout))
    indices = latents.heldout[order[: settings.images].numpy()]
    latent_noise = Stream(settings.seed, "validation latents").normal(0, range(len(indices)), latents.shape)
    images = latents.load_x0(indices, noise=latent_noise)
    available = latents.load_conditions(indices)
    conditions = {name: available[name] for name in snapshot.record["conditions"]}
    return ValidationLoss(images, snapshot.process, seed=settings.seed, conditions=conditions, device=device, **options)
