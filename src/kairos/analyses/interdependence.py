"""Interdependence of parts of the process: the effect of training on one part on the loss of all parts."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from kairos.analyses.noise_levels import TableRow, load_optimizer_state
from kairos.analyses.registries import InterdependenceOptions
from kairos.data.latents import Latents
from kairos.evaluation.settings import LossSettings
from kairos.evaluation.validation import build_fixed_loss
from kairos.milestones import Snapshot, open_milestone
from kairos.training.loop import train_steps
from kairos.training.state import TrainingState
from kairos_timesteps.validation import spread_over

# settings of a short training in one process, with a learning rate that does not depend on the snapshot's step
_TRAINING_SETTINGS: dict[str, Any] = {
    "start_from": None,
    "probes": [],
    "compile": False,
    "schedule": {"name": "constant"},
}


def measure_interdependence(
    options: InterdependenceOptions, folder: Path, latents: Latents, device: Any
) -> list[TableRow]:
    """Train on each part of the process from a snapshot, and measure how the loss on every part changes.

    Training continues with the snapshot's weights, loss and weighting, at a constant learning rate. Times are uniform
    in the trained part. The optimiser's state is that of the snapshot if available (at the last one), or else new.
    Losses are squared errors of the prediction on held-out images, with equal noise and times before and after the
    training (Kim et al. 2025, figure 4).

    Args:
        options: options of the analysis.
        folder: folder of the snapshot.
        latents: data that the snapshot was trained on.
        device: device of the computation.

    Returns:
        A row per trained part, or ``all`` for the whole process as a control, and measured part. Column ``error`` is
        the standard error of the mean change over images.
    """
    snapshot = open_milestone(folder, "raw", device)
    optimizer_state = load_optimizer_state(folder, snapshot, device)
    fixed_loss = build_fixed_loss(snapshot, latents, LossSettings(options.images, 1, options.seed), device)
    cells = snapshot.process.schedule.timesteps
    parts = list(pairwise(np.linspace(0, cells, options.parts + 1).round().astype(int).tolist()))
    fractions = [spread_over((start / cells, end / cells), len(fixed_loss.images)) for start, end in parts]

    def compute_losses(network: Any) -> list[Tensor]:
        """Compute the loss of each image on every part, (images,) each."""
        return [fixed_loss.errors(network, part, u, "prediction") for part, u in enumerate(fractions)]

    losses_before = compute_losses(snapshot.model)
    rows = []
    for trained_part, (start, end) in [*enumerate(parts), ("all", (0, cells))]:
        training = _prepare_training(snapshot, optimizer_state, start, end, latents, device)
        for _ in train_steps(training, snapshot.record["step"] + options.steps):
            pass
        losses_after = compute_losses(training.model)
        for columns in _compare_losses(losses_before, losses_after, parts, cells):
            rows.append({"trained": trained_part, **columns})
    return rows


def _prepare_training(
    snapshot: Snapshot, optimizer_state: dict[str, Any] | None, start: int, end: int, latents: Latents, device: Any
) -> TrainingState:
    """Prepare a training that continues from a snapshot, with times uniform from cell `start` to cell `end`."""
    record = snapshot.record
    sampler = {"name": "uniform", "start": start, "end": end}
    method = snapshot.config["methods"][record["method"]] | {"sampler": sampler}
    settings = snapshot.config["training"] | _TRAINING_SETTINGS
    config = snapshot.config | {"methods": {record["method"]: method}, "training": settings}
    training = TrainingState(config, record["method"], record["seed"], latents, device)
    training.model.load_weights(snapshot.model.weights())
    if optimizer_state is not None:
        training.optimizer.load_state_dict(optimizer_state)
    training.step = training.strategy.step = record["step"]
    return training


def _compare_losses(
    losses_before: list[Tensor], losses_after: list[Tensor], parts: list[tuple[int, int]], cells: int
) -> Iterator[TableRow]:
    """Yield a row per part with its fractions of the process, the mean losses, and their change with standard error."""
    for part, (before, after) in enumerate(zip(losses_before, losses_after)):
        start, end = parts[part]
        change = after - before
        yield {
            "part": part,
            "u_low": start / cells,
            "u_high": end / cells,
            "before": before.mean().item(),
            "after": after.mean().item(),
            "change": change.mean().item(),
            "error": (change.std() / len(before) ** 0.5).item(),
        }
