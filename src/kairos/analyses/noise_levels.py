"""Analyses of a snapshot by noise level: gradient_variance, areas, agreement.

They measure two losses. ``training`` is the experiment's loss, weighted as the method weights it at the snapshot,
importance weights included. ``vlb`` is the terms of the variational bound.
"""

from collections.abc import Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kairos.analyses.gradients import GradientMoments, Loss, compute_gradient_moments
from kairos.analyses.settings import AgreementOptions, AreasOptions, GradientVarianceOptions, SnapshotOptions
from kairos.data.latents import Latents
from kairos.increments import increments
from kairos.losses.settings import VlbOptions
from kairos.losses.terms import Prediction, vlb
from kairos.shapes import Images, PerSample, Rows
from kairos.snapshots import Snapshot, open_snapshot
from kairos.strategy_file import parse_strategy_csv
from kairos.training import checkpoint
from kairos_timesteps.diffusion.processes import Process
from kairos_timesteps.diffusion.schedule import Array
from kairos_timesteps.randomness import Stream

TableRow = dict[str, Any]
Level = tuple[TableRow, tuple[float, float]]  # columns that describe the level, and its fractions of the process
Metric = Sequence[Tensor] | None  # diagonal metric, a tensor per parameter; None: the Euclidean one
_LOSSES: dict[str, Metric] = {"training": None, "vlb": None}  # measured losses, each in the Euclidean metric


def even_levels(bins: int) -> list[Level]:
    """Return levels that are equal fractions of the process, without columns that describe them."""
    return [({}, ends) for ends in pairwise(np.linspace(0, 1, bins + 1).tolist())]


def area_levels(process: Process, r: float) -> list[Level]:
    """Return SpeeD's areas as levels, with their names in column ``area``.

    The areas are ``acceleration``, ``deceleration`` and ``convergence``, see `increments.Increments.area`. Area
    `convergence` has the times at which 1/alpha-bar exceeds `r`. The process is scaled to unit variance and divided
    into cells; a level consists of consecutive cells of one area.
    """
    increment_areas = increments("vp", process.schedule, r=r).area()
    # The increment from the paper's x_t, t = 1, 2, ..., belongs to cell t - 1; the one from t = 0 belongs to no cell.
    # The last cell has no increment, and receives the area of the cell before.
    cell_areas = [*increment_areas[1:].tolist(), str(increment_areas[-1])]
    cell_count = len(cell_areas)
    levels: list[Level] = []
    start = 0
    for area, cells in groupby(cell_areas):  # consecutive cells of one area
        end = start + len(list(cells))
        levels.append(({"area": area}, (start / cell_count, end / cell_count)))
        start = end
    return levels


def log_snr_levels(process: Process, bins: int, least: float = -9.0, most: float = 9.0) -> list[Level]:
    """Return `bins` equal ranges of ln SNR as levels, the cleanest first, with their centres in column ``log_snr``.

    The ranges cover `least` to `most`, as far as the process reaches them. The schedule contains the ln SNR at the
    middles of the cells; between middles it is interpolated linearly.
    """
    log_snr = np.log(process.schedule.snr)  # one value per cell, descending
    cell_middles = (np.arange(len(log_snr)) + 0.5) / len(log_snr)
    edges = np.linspace(min(most, log_snr[0]), max(least, log_snr[-1]), bins + 1)
    edge_fractions = np.interp(-edges, -log_snr, cell_middles).tolist()  # np.interp needs ascending values
    levels: list[Level] = []
    for (cleaner_end, noisier_end), fractions in zip(pairwise(edges), pairwise(edge_fractions)):
        centre = float((cleaner_end + noisier_end) / 2)
        levels.append(({"log_snr": centre}, fractions))
    return levels


def measure_gradient_variance(
    options: GradientVarianceOptions, folder: Path, latents: Latents, device: torch.device
) -> list[TableRow]:
    """Compute density, loss and moments of the gradient g by time, a row per loss and level.

    The losses are ``training`` and ``vlb``, each with the levels in order of time. Expectations are over training
    images (`options.images` random ones per level), noise and times of the level, for the raw weights. Source: Kim et
    al. 2025, figures 2 and 6.

    A level has the columns ``loss``, ``level``, ``u_low``, ``u_high``, ``t`` and ``density``. The moments are
    ``loss_mean``, ``loss_variance``, ``variance`` (tr Cov g), ``squared_mean`` (||E g||²), ``noise_scale``, and
    ``cosine_K`` with each level K. `folder` is the folder of the snapshot, which was trained on `latents`.
    """
    snapshot = open_snapshot(folder, "raw", device)
    return _measure_levels(options, folder, snapshot, latents, even_levels(options.bins), _LOSSES)


def measure_areas(options: AreasOptions, folder: Path, latents: Latents, device: torch.device) -> list[TableRow]:
    """Compute density, loss and moments of the gradient by SpeeD's areas, a row per loss and area.

    The losses are ``training`` and ``vlb``. The columns are those of `measure_gradient_variance`, and ``area``, the
    name of the area. Source: Wang et al. 2025, figure 1.
    """
    snapshot = open_snapshot(folder, "raw", device)
    return _measure_levels(options, folder, snapshot, latents, area_levels(snapshot.process, options.r), _LOSSES)


def measure_agreement(
    options: AgreementOptions, folder: Path, latents: Latents, device: torch.device
) -> list[TableRow]:
    """Compute density, loss and moments of the gradient by ranges of ln SNR, a row per loss and level.

    The columns are those of `measure_gradient_variance`, with the cosines between the E g of two levels, and
    ``log_snr``, the centre of the level. Rows of loss ``training`` contain the training loss. If the optimizer's state
    is available (at the last snapshot), rows of loss ``preconditioned`` follow. They contain the training loss too,
    with moments in Adam's metric, g' D g with D = 1/(sqrt(v) + eps).
    """
    snapshot = open_snapshot(folder, "raw", device)
    optimizer_state = load_optimizer_state(folder, snapshot, device)
    metrics: dict[str, Metric] = {"training": None}
    if optimizer_state is not None:
        eps = optimizer_state["param_groups"][0]["eps"]  # equal in all groups
        # sorted by key, the index of the parameter
        second_moments = [state["exp_avg_sq"] for _, state in sorted(optimizer_state["state"].items())]
        metrics["preconditioned"] = [1 / (moment.sqrt() + eps) for moment in second_moments]
    levels = log_snr_levels(snapshot.process, options.bins, options.least, options.most)
    return _measure_levels(options, folder, snapshot, latents, levels, metrics)


def load_optimizer_state(folder: Path, snapshot: Snapshot, device: torch.device) -> dict[str, Any] | None:
    """Load the optimizer's state at a snapshot, or return None if it is not available.

    It is in the run's ``checkpoint.pt``, which belongs to the last step. It is not available if this file is missing,
    at other steps, if the checkpoint is of another identity, or if the optimizer has taken no step. `folder` is the
    folder of the snapshot.

    Raises:
        DamagedError: the checkpoint is damaged.
    """
    run_folder = folder.parents[1]  # above snapshots/<step>
    path = run_folder / "checkpoint.pt"
    if not path.is_file():
        return None
    content = checkpoint.read(path, device)
    is_of_snapshot = all(content.get(name) == snapshot.record[name] for name in ("step", "identity"))
    if not is_of_snapshot or not content["optimizer"]["state"]:  # a new optimizer has an empty state
        return None
    optimizer_state: dict[str, Any] = content["optimizer"]
    return optimizer_state


def _measure_levels(
    options: SnapshotOptions,
    folder: Path,
    snapshot: Snapshot,
    latents: Latents,
    levels: Sequence[Level],
    metrics: dict[str, Metric],
) -> list[TableRow]:
    """Measure losses and gradients of a snapshot by level, and return a row per loss and level, in their order.

    The columns are ``loss``, ``level`` (number from 0), the fractions, time and density of `_describe_level`, and the
    moments of `_moments_of_level`. The density and the weights are read from the snapshot's strategy.csv. Levels have
    separate images, `options.images` each; all losses have equal images, noise and times. `metrics` contains the
    diagonal metric of each loss's gradients, or None; every name but ``vlb`` means the training loss.
    """
    strategy = parse_strategy_csv((folder / "strategy.csv").read_text(encoding="utf-8"))
    x0, conditions = _load_training_images(options, snapshot, latents, len(levels) * options.images)
    fractions = [ends for _, ends in levels]
    rows = []
    for loss_name, metric in metrics.items():
        loss = _vlb_loss if loss_name == "vlb" else _build_training_loss(snapshot, strategy["w"])
        moments = compute_gradient_moments(
            snapshot.model,
            snapshot.process,
            x0=x0,
            levels=fractions,
            loss=loss,
            conditions=conditions,
            metric=metric,
            seed=options.seed,
        )
        for index, level in enumerate(levels):
            row = {"loss": loss_name, "level": index}
            row |= _describe_level(level, snapshot.process, strategy["p"])
            rows.append(row | _moments_of_level(moments, index))
    return rows


def _load_training_images(
    options: SnapshotOptions, snapshot: Snapshot, latents: Latents, count: int
) -> tuple[Images, dict[str, Rows]]:
    """Return random training images in model space, drawn with replacement, and the conditions of the network.

    Both are (count, ...) and on the network's device. Conditions that the network lacks are left out.
    """
    sample_indices = range(count)
    positions = Stream(options.seed, "analysed images").integers(0, len(latents.train), sample_indices)
    image_indices = latents.train[positions.numpy()]  # indices in the data set
    latent_noise = Stream(options.seed, "analysed latents").normal(0, sample_indices, latents.shape)
    device = next(snapshot.model.parameters()).device
    all_conditions = latents.load_conditions(image_indices)
    conditions = {name: all_conditions[name].to(device) for name in snapshot.record["conditions"]}
    return latents.load_x0(image_indices, noise=latent_noise).to(device), conditions


def _describe_level(level: Level, process: Process, probabilities: Array) -> TableRow:
    """Return the columns that describe a level: its columns, ``u_low``, ``u_high``, ``t`` and ``density``.

    ``u_low`` and ``u_high`` are its fractions of the process, and ``t`` is the time at its middle. The density is the
    mean over the level's cells, relative to the uniform density. The first cell contains ``u_low``. The cells end at
    ``u_high``, rounded to a whole cell; there is at least one.
    """
    columns, (low, high) = level
    cell_count = len(probabilities)
    first_cell = int(low * cell_count)
    end_cell = max(first_cell + 1, round(high * cell_count))
    middle = process.times(torch.tensor((low + high) / 2, dtype=torch.float64)).item()
    # the uniform probability of a cell is 1 / cell_count
    density = cell_count * probabilities[first_cell:end_cell].mean()
    return {**columns, "u_low": low, "u_high": high, "t": middle, "density": density}


def _moments_of_level(moments: GradientMoments, level: int) -> TableRow:
    """Return the columns that contain the moments of losses and gradients at a level.

    ``variance`` is tr Cov g, and ``squared_mean`` is ||E g||². ``cosine_K`` is the cosine similarity between the E g of
    this level and of level K. A noise scale or cosine is NaN if the estimate of a ||E g||² is not positive.
    """
    row = {
        "loss_mean": moments.losses[level].mean(),
        "loss_variance": moments.losses[level].var(ddof=1),
        "variance": moments.variance[level],
        "squared_mean": moments.squared_mean[level],
        "noise_scale": moments.noise_scale[level],
    }
    return row | {f"cosine_{other}": cosine for other, cosine in enumerate(moments.cosines[level])}


def _vlb_loss(prediction: Prediction) -> PerSample:
    """Compute each sample's term of the variational bound, (batch,)."""
    return vlb(VlbOptions(), prediction)


def _build_training_loss(snapshot: Snapshot, weights: Array) -> Loss:
    """Return a function that computes each sample's contribution to the training objective, (batch,), differentiable.

    The contribution is the sum of the loss terms times their scales. `weights` multiply only terms with ``weighted``;
    they are (T,), one for each of T equal intervals of the process's fractions in [0, 1].
    """
    terms = [(options, options.load()) for options in snapshot.diffusion.losses]

    def loss(prediction: Prediction) -> PerSample:
        """Return the sum of the loss terms, each with its scale and, if it is weighted, the weight at time t."""
        # index of the weight at time t: `fractions` maps times to [0, 1], and 1 belongs to the last interval
        cells = (snapshot.process.fractions(prediction.t) * len(weights)).long().clamp(0, len(weights) - 1)
        weight = torch.from_numpy(weights).to(cells.device, torch.float32)[cells]  # (batch,)
        contributions = []
        for options, term in terms:
            factor = weight if options.weighted else 1
            contributions.append(options.scale * term(options, prediction) * factor)
        return torch.stack(contributions).sum(0)

    return loss
