"""Probes: measurements on a training, such as gradient variance or loss per timestep.

A probe is called in steps that log, after the backward pass and before the optimiser step, with a `Moment`; what it
returns is written to the step's line of metrics.jsonl under its name. It draws from its own random stream and must
leave the model as it is, so that a training's trajectory does not depend on its probes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from kairos.diffusion.losses import Prediction
from kairos.randomness import Stream


@dataclass(frozen=True)
class Moment:
    """What a probe may look at in one step.

    Attributes:
        step: number of the step, from 0.
        model: the network, with the step's gradients.
        prediction: batch, noise, timesteps and output of the step.
        losses: per-sample loss before weighting, (batch,).
        weights: the strategy's weights, (batch,).
        error: as `strategies.Observation.error`.
        random: for what is random in the measurement, at this step.
    """

    step: int
    model: nn.Module
    prediction: Prediction
    losses: Tensor
    weights: Tensor
    error: Callable[[Tensor, Tensor, Tensor], Tensor]
    random: Stream


Probe = Callable[[Moment], dict[str, Any] | None]
