"""Timestep sampler for AnimaLoraStudio with the methods of its TimestepSamplerProtocol; see docs/trainers.

Copy the file to ``runtime/training/timestep_samplers/kairos.py`` and add its `build` to ``BUILDERS``.
"""

from typing import Any

import torch
from torch import Tensor

import kairos_timesteps


class KairosSampler:
    """Strategy of kairos whose weights are 1, because the protocol returns times alone.

    Args:
        name: name of a sampler.
        seed: seed of all random numbers.
        device: device of the training run, for a restored state.
        options: options of the sampler.
    """

    def __init__(self, name: str, seed: int = 0, device: str = "cuda", **options: Any):
        self.strategy, self.device = (
            kairos_timesteps.Strategy(f"{name}+none", "flow", seed=seed, sampler=options),
            device,
        )
        if self.strategy.sampler.importance:
            raise ValueError(f"{name} has importance weights, which the protocol cannot return")
        self.requires_token_counts = "tokens" in self.strategy.sampler.requires_context
        self.recorded = False

    def sample(self, bs: int, device: Any, *, token_counts: Tensor | None = None) -> Tensor:
        """Draw times of a micro-batch, float32 (bs,); 1 is noise."""
        context = {} if token_counts is None else {"tokens": token_counts}
        self.draw = self.strategy.draw(torch.empty(bs, 1, device=device), **context)
        return self.draw.t.float()

    def record(self, t: Tensor, raw_mse: Tensor) -> None:
        """Record errors (n,) at times t (n,), of those samples of the last draw that the strategy learns from."""
        mask = torch.isin(self.draw.t.float(), t)
        errors = torch.zeros(len(mask), device=t.device).masked_scatter(mask, raw_mse.float())
        self.strategy.weighted(self.draw, errors, mask)
        self.recorded = True

    def maybe_refresh(self, global_step: int) -> None:
        """End a step of the optimizer."""
        if not self.recorded:  # the step consists of regularisation images
            nothing = torch.zeros(len(self.draw.t), dtype=torch.bool)
            self.strategy.weighted(self.draw, torch.zeros_like(self.draw.t), nothing)
        with self.strategy.observe(self.draw):
            self.recorded = False

    def status(self) -> dict[str, Any]:
        """Return values to log."""
        return {"kind": "kairos", **self.strategy.sampler.statistics()}

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a resume needs."""
        return self.strategy.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        self.strategy.load_state_dict(state, self.device)


def build(args: Any, total_steps: int) -> KairosSampler:
    """Return the sampler of the configuration's fields `kairos_sampler` and `seed`."""
    return KairosSampler(args.kairos_sampler, seed=args.seed or 0)
