"""Strategies in diffusers' training scripts of flow matching: SD3, Flux, Qwen-Image and others.

The scripts call two functions of ``diffusers.training_utils``. `flow_functions` returns replacements with equal
signatures, for a strategy that `attach` attached to the script's optimizer. Scripts with ``torch.randint`` need
`attach` alone.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kairos_timesteps.attached import Attached
from kairos_timesteps.base import MeasuresNetwork
from kairos_timesteps.errors import demand


def flow_functions(strategy: Attached) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Return ``compute_density_for_timestep_sampling`` and ``compute_loss_weighting_for_sd3`` of a strategy.

    Both ignore the options of the script's densities and weightings. A strategy that learns from losses also needs
    ``strategy.loss(errors)`` in place of the script's loss, and does not use the second function.

    Args:
        strategy: attached strategy, with ``time="index"``; for the Ideogram 4 script ``time="noise_is_one"``.

    Raises:
        ConfigError: the strategy needs latents, which the script does not pass to these functions.
    """
    sampler = strategy.strategy.sampler
    needs_latents = isinstance(sampler, MeasuresNetwork) or sampler.per_image
    allowed = "a strategy that needs no latents; use strategy(latents) in the script, an index of scheduler.timesteps"
    demand(not needs_latents, "flow_functions: strategy", strategy.strategy.name, allowed)

    def compute_density_for_timestep_sampling(
        weighting_scheme: str,
        batch_size: int,
        logit_mean: float | None = None,
        logit_std: float | None = None,
        mode_scale: float | None = None,
        device: Any = "cpu",
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return u, (batch_size,): the script trains on ``scheduler.timesteps[floor(1000 u)]``, or on u itself."""
        t = strategy(torch.empty(batch_size, device=device))
        return t if t.is_floating_point() else (t + 0.5) / strategy.time.count

    def compute_loss_weighting_for_sd3(weighting_scheme: str, sigmas: Tensor) -> Tensor:
        """Return the factors of the samples' losses, float32 (batch_size, 1, ...), with the dimensions of sigmas."""
        return strategy.weights.view(-1, *[1] * (sigmas.ndim - 1)).to(sigmas.device)

    return compute_density_for_timestep_sampling, compute_loss_weighting_for_sd3
