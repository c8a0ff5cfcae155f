"""Analyses of a milestone by levels of noise: gradient_variance, areas, agreement.

They look at two losses: ``training``, the experiment's own, weighted as the method weights it at the milestone
(importance weights included), and ``vlb``, the terms of the variational bound.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kairos.analyses.gradients import Loss, gradients
from kairos.analyses.registries import AgreementOptions, AreasOptions, GradientVarianceOptions, OfMilestones
from kairos.data.latents import Latents
from kairos.increments import increments
from kairos.losses.registries import LOSSES, LossOptions
from kairos.losses.terms import Prediction, vlb
from kairos.milestones import Snapshot, open_milestone
from kairos.strategy_file import parse_strategy_csv
from kairos.training import checkpoint
from kairos_timesteps.diffusion.schedule import Array
from kairos_timesteps.randomness import Stream
from kairos_timesteps.registry import split

Row = dict[str, Any]
_BOTH: Row = {"training": None, "vlb": None}  # losses, in no metric but the plain one
Level = tuple[Row, tuple[float, float]]  # what is to be said of it, and its fractions of the process


def even_levels(bins: int) -> list[Level]:
    """Equal fractions."""
    return [({}, ends) for ends in pairwise(np.linspace(0, 1, bins + 1).tolist())]


def area_levels(process: Any, r: float) -> list[Level]:
    """SpeeD's areas, on the process scaled to unit variance and cut into cells, with their names under ``area``."""
    area = increments("vp", process.schedule, r=r).area()
    area = np.append(area[1:], area[-1:])  # its x_t is our timestep t - 1, and the last one has no increment
    edges = np.flatnonzero(np.append(True, np.append(area[1:] != area[:-1], True)))
    count = len(area)
    return [({"area": str(area[start])}, (start / count, end / count)) for start, end in pairwise(edges.tolist())]


def log_snr_levels(process: Any, bins: int, least: float = -9.0, most: float = 9.0) -> list[Level]:
    """Equal ranges of ln SNR within the process' own, the cleanest first, with their middles under ``log_snr``."""
    log_snr = np.log(process.schedule.snr)
    edges = np.linspace(min(most, log_snr[0]), max(least, log_snr[-1]), bins + 1)
    u = np.interp(-edges, -log_snr, (np.arange(len(log_snr)) + 0.5) / len(log_snr)).tolist()
    return [({"log_snr": float(sum(ends) / 2)}, own) for ends, own in zip(pairwise(edges), pairwise(u))]


def gradient_variance(options: GradientVarianceOptions, folder: Path, latents: Latents, device: Any) -> list[Row]:
    """A row per loss and part of the process: density, loss and its variance, ||E g||² and the trace of g's covariance.

    After Kim et al. 2025, figures 2 and 6: the variance is that over images, noise and times of the part.

    Args:
        options: of the analysis.
        folder: of the milestone.
        latents: what it was trained on.
        device: where it is computed.
    """
    opened = open_milestone(folder, "raw", device)
    return _rows(options, folder, opened, latents, even_levels(options.bins), _BOTH)


def areas(options: AreasOptions, folder: Path, latents: Latents, device: Any) -> list[Row]:
    """Compute a row per loss and area of SpeeD, with the columns of `gradient_variance` (Wang et al. 2025, figure 1).

    Args:
        options: options of the analysis.
        folder: folder of the milestone.
        latents: the data that the milestone was trained on.
        device: device of the computation.
    """
    opened = open_milestone(folder, "raw", device)
    return _rows(options, folder, opened, latents, area_levels(opened.process, options.r), _BOTH)


def agreement(options: AgreementOptions, folder: Path, latents: Latents, device: Any) -> list[Row]:
    """The training loss by ln SNR, with the cosine of E g and that of every other level, ``cosine_0`` ...; as above.

    Where the optimiser's state is kept (at the last milestone), rows of loss ``preconditioned`` are the same in Adam's
    metric, g' D g with D = 1/(sqrt(v) + eps).
    """
    opened = open_milestone(folder, "raw", device)
    state, metrics = optimizer_state(folder, opened, device), Row(training=None)
    if state is not None:
        eps, moments = state["param_groups"][0]["eps"], [its["exp_avg_sq"] for _, its in sorted(state["state"].items())]
        metrics["preconditioned"] = [1 / (each.sqrt() + eps) for each in moments]
    levels = log_snr_levels(opened.process, options.bins, options.least, options.most)
    return _rows(options, folder, opened, latents, levels, metrics)


def optimizer_state(folder: Path, opened: Snapshot, device: Any) -> dict[str, Any] | None:
    """The optimiser's state at a milestone, from ``checkpoint.pt`` of its training, which is of the last step."""
    path = folder.parents[1] / "checkpoint.pt"
    content = checkpoint.read(path, device) if path.is_file() else {}
    same = all(content.get(name) == opened.record[name] for name in ("step", "identity"))
    return content["optimizer"] if same and content["optimizer"]["state"] else None


def _rows(options: OfMilestones, folder: Path, opened: Snapshot, latents: Latents, levels: Any, metrics: Row) -> Any:
    """A row per loss and level; each loss with the metric that its gradients are measured in."""
    columns, process = parse_strategy_csv((folder / "strategy.csv").read_text(encoding="utf-8")), opened.process
    which = range(len(levels) * options.images)
    images = latents.train[Stream(options.seed, "analysed images").integers(0, len(latents.train), which).numpy()]
    drawn = Stream(options.seed, "analysed latents").normal(0, which, latents.shape)
    device, known = next(opened.model.parameters()).device, latents.load_conditions(images)
    told = {name: known[name].to(device) for name in opened.record["conditions"]}
    x0 = latents.load_x0(images, noise=drawn).to(device)
    rows, cells, ends = list[Row](), len(columns["p"]), [ends for _, ends in levels]
    for loss, metric in metrics.items():
        measured = (lambda its: vlb(LossOptions(), its)) if loss == "vlb" else _training_loss(opened, columns["w"])
        found = gradients(opened.model, process, x0, ends, measured, told, metric, options.seed)
        for k, (facts, (low, high)) in enumerate(levels):
            inside = slice(int(low * cells), max(int(low * cells) + 1, round(high * cells)))
            middle = process.times(torch.tensor((low + high) / 2, dtype=torch.float64)).item()
            row = {"loss": loss, "level": k, **facts, "u_low": low, "u_high": high, "t": middle}
            row |= {"density": cells * columns["p"][inside].mean(), "loss_mean": found.losses[k].mean()}
            row |= {"loss_variance": found.losses[k].var(ddof=1), "variance": found.variance[k]}
            row |= {"squared_mean": found.squared_mean[k], "noise_scale": found.noise_scale[k]}
            rows.append(row | {f"cosine_{other}": value for other, value in enumerate(found.cosines[k])})
    return rows


def _training_loss(opened: Snapshot, weights: Array) -> Loss:
    """Return a function that computes each sample's contribution to the training objective, (batch,).

    `weights` are the loss weights by cell of the process, (T,).
    """
    named = [split(loss) for loss in opened.config["diffusion"]["losses"]]
    terms = [(LOSSES.parse(name, options), LOSSES.entry(name).load()) for name, options in named]

    def loss(prediction: Prediction) -> Tensor:
        cell = (opened.process.fractions(prediction.t) * len(weights)).long().clamp(0, len(weights) - 1)
        weight = torch.from_numpy(weights).to(cell.device, torch.float32)[cell]
        found = [its.scale * term(its, prediction) * (weight if its.weighted else 1) for its, term in terms]
        return torch.stack(found).sum(0)

    return loss
