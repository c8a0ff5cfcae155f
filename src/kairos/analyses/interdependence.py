"""Interdependence of parts of the process: the effect of training on one part on the loss of all parts."""

import copy
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kairos.analyses.noise_levels import TableRow, load_optimizer_state
from kairos.analyses.settings import InterdependenceOptions
from kairos.data.latents import Latents
from kairos.evaluation.settings import LossSettings
from kairos.evaluation.validation import build_fixed_loss
from kairos.models.backbone import Backbone
from kairos.shapes import PerSample
from kairos.snapshots import Snapshot, open_snapshot
from kairos.training.loop import train_steps
from kairos.training.settings import read_run_settings
from kairos.training.state import TrainingState
from kairos_timesteps.validation import spread_over

# settings that replace the snapshot's for a short training
_TRAINING_SETTINGS: dict[str, Any] = {
    "start_from": None,
    "probes": [],
    "compile": False,
    "schedule": {"name": "constant"},
}
# options of the snapshot's optimizer that are replaced: without warm-up the learning rate does not depend on the step
_OPTIMIZER_OPTIONS: dict[str, Any] = {"warmup_steps": 0}


def measure_interdependence(
    options: InterdependenceOptions, folder: Path, latents: Latents, device: torch.device
) -> list[TableRow]:
    """Train on each part of the process from a snapshot, and measure how the loss on every part changes.

    Every training begins with the snapshot's raw weights, and takes `options.steps` steps with its loss and weighting,
    at a constant learning rate. Times are uniform in the trained part. The optimizer's state is the snapshot's if
    available (at the last one), or else new. Losses are squared errors of the raw network's prediction, with equal
    noise and times before and after the training (Kim et al. 2025, figure 4). They are measured on `options.images`
    held-out images, or on all if there are fewer.

    `folder` is the folder of the snapshot, which was trained on `latents`. The caller ensures that they contain
    held-out images.

    Returns:
        A row for each pair of a trained and a measured part, grouped by trained part. Column ``trained`` is the number
        of the trained part from 0, or ``all`` for the whole process as a control, whose rows are the last. The other
        columns are the measured part and its losses before and after, see `_compare_losses`.

    Raises:
        DivergedError: a training diverges.
        DamagedError: the checkpoint of the run is damaged.
    """
    # the snapshot, and its loss on held-out images
    snapshot = open_snapshot(folder, "raw", device)
    optimizer_state = load_optimizer_state(folder, snapshot, device)
    loss_settings = LossSettings(images=options.images, strata=1, seed=options.seed)  # the strata are not used
    fixed_loss = build_fixed_loss(snapshot, latents, loss_settings, device)

    # parts of the process, with equal numbers of cells up to rounding
    cell_count = snapshot.process.schedule.timesteps
    edges = np.linspace(0, cell_count, options.parts + 1).round().astype(int).tolist()
    parts = list(pairwise(edges))  # first and end cell of each part
    image_fractions = []  # fractions of the process at which the images are noised, for each part
    for start, end in parts:
        image_fractions.append(spread_over((start / cell_count, end / cell_count), len(fixed_loss.images)))

    def compute_losses(network: Backbone) -> list[PerSample]:
        """Compute the loss of each image on every part, (images,) each."""
        # the index of a part of the process selects its noise, which is equal before and after the training
        return [fixed_loss.errors(network, part, u, of="prediction") for part, u in enumerate(image_fractions)]

    # train on each part, and measure all parts
    # A trained network may be in double precision. Its weights are therefore measured in a copy of the snapshot's
    # network.
    measured_network = copy.deepcopy(snapshot.model)
    losses_before = compute_losses(snapshot.model)
    rows = []
    trained_parts = [*enumerate(parts), ("all", (0, cell_count))]
    for trained_part, (start, end) in trained_parts:
        training = _prepare_training(snapshot, optimizer_state, start, end, latents, device)
        # up to this step, counted from the start of the snapshot's run
        for _ in train_steps(training, snapshot.record["step"] + options.steps):
            pass  # the generator trains; its metrics are not needed
        measured_network.load_weights(training.model.weights())
        losses_after = compute_losses(measured_network)
        for columns in _compare_losses(losses_before, losses_after, parts, cell_count):
            rows.append({"trained": trained_part, **columns})
    return rows


def _prepare_training(
    snapshot: Snapshot,
    optimizer_state: dict[str, Any] | None,
    start: int,
    end: int,
    latents: Latents,
    device: torch.device,
) -> TrainingState:
    """Prepare a training run that continues from a snapshot, with times uniform from cell `start` to before cell `end`.

    The run begins at the snapshot's step, with its raw weights. The sampler of its method is replaced, and so are the
    settings of `_TRAINING_SETTINGS` and `_OPTIMIZER_OPTIONS`. The snapshot's network is not changed. The optimizer is
    new if `optimizer_state` is None.
    """
    record = snapshot.record
    sampler = {"name": "uniform", "start": start, "end": end}
    method = snapshot.config["methods"][record["method"]] | {"sampler": sampler}
    optimizer = snapshot.config["training"]["optimizer"] | _OPTIMIZER_OPTIONS
    settings = snapshot.config["training"] | _TRAINING_SETTINGS | {"optimizer": optimizer}
    config = snapshot.config | {"methods": {record["method"]: method}, "training": settings}
    run = read_run_settings(config, record["method"], record["seed"])
    training = TrainingState(run, latents, device)
    training.model.load_weights(snapshot.model.weights())
    if optimizer_state is not None:
        training.optimizer.load_state_dict(optimizer_state)
    training.step = training.strategy.step = record["step"]
    return training


def _compare_losses(
    losses_before: list[PerSample], losses_after: list[PerSample], parts: list[tuple[int, int]], cell_count: int
) -> Iterator[TableRow]:
    """Yield a row per measured part with its mean losses over images before and after the training.

    The columns are ``part`` (number from 0), ``u_low`` and ``u_high`` (its fractions of the process), ``before``,
    ``after``, ``change`` and ``standard_error``. The last one is of the mean change over images, NaN with one image.
    Losses are (images,) for each part, and `parts` are first and end cells.
    """
    for part, (before, after) in enumerate(zip(losses_before, losses_after)):
        start, end = parts[part]
        change = after - before
        yield {
            "part": part,
            "u_low": start / cell_count,
            "u_high": end / cell_count,
            "before": before.mean().item(),
            "after": after.mean().item(),
            "change": change.mean().item(),
            "standard_error": (change.std() / len(before) ** 0.5).item(),
        }
