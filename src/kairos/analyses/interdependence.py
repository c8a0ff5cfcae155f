"""Interdependence of the process' parts: trained on one of them for a while, what happens to the loss on all."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from kairos.analyses.noise_levels import Row, optimizer_state
from kairos.analyses.registries import InterdependenceOptions
from kairos.data.latents import Latents
from kairos.evaluation.settings import LossSettings
from kairos.evaluation.validation import build_fixed_loss
from kairos.milestones import open_milestone
from kairos.training.loop import train_steps
from kairos.training.state import TrainingState
from kairos_timesteps.validation import spread_over

# what a few steps on one process need, and a rate that does not depend on how far the training went
_HERE: dict[str, Any] = {"start_from": None, "probes": [], "compile": False, "schedule": {"name": "constant"}}


def interdependence(options: InterdependenceOptions, folder: Path, latents: Latents, device: Any) -> list[Row]:
    """A row per part that was trained on, and the whole process as a control, and part that the loss is measured on.

    After Kim et al. 2025, figure 4. The training goes on from the milestone with its weights, loss and weighting, at a
    constant learning rate and with times drawn evenly from the part alone; the optimiser's state is the milestone's
    where it is kept (of the last one), else it begins anew. Losses are the squared error of what is predicted on
    held-out images, each with the same noise and times before and after; ``error`` is the standard error of the mean
    change over images.

    Args:
        options: of the analysis.
        folder: of the milestone.
        latents: what it was trained on.
        device: where it is computed.
    """
    opened = open_milestone(folder, "raw", device)
    record, state, rows = opened.record, optimizer_state(folder, opened, device), []
    fixed = build_fixed_loss(opened, latents, LossSettings(options.images, 1, options.seed), device)
    cells = opened.process.schedule.timesteps
    parts = list(pairwise(np.linspace(0, cells, options.parts + 1).round().astype(int).tolist()))
    spread = [spread_over((start / cells, end / cells), len(fixed.images)) for start, end in parts]

    def losses(network: Any) -> list[Tensor]:
        return [fixed.errors(network, part, u, "prediction") for part, u in enumerate(spread)]

    before = losses(opened.model)
    for trained, (start, end) in [*enumerate(parts), ("all", (0, cells))]:
        sampler = {"name": "uniform", "start": start, "end": end}
        method = opened.config["methods"][record["method"]] | {"sampler": sampler}
        plain = {"methods": {record["method"]: method}, "training": opened.config["training"] | _HERE}
        training = TrainingState(opened.config | plain, record["method"], record["seed"], latents, device)
        training.model.load_weights(opened.model.weights())
        if state is not None:
            training.optimizer.load_state_dict(state)
        training.step = training.strategy.step = record["step"]
        for _ in train_steps(training, record["step"] + options.steps):
            pass
        for part, (old, new) in enumerate(zip(before, losses(training.model))):
            row = {"trained": trained, "part": part, "u_low": parts[part][0] / cells, "u_high": parts[part][1] / cells}
            row |= {"before": old.mean().item(), "after": new.mean().item(), "change": (new - old).mean().item()}
            rows.append(row | {"error": ((new - old).std() / len(old) ** 0.5).item()})
    return rows
