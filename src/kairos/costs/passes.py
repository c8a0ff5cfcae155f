"""What a strategy asks of the network beside the training step itself: passes of samples, and memory for its state.

The numbers follow from its options; tests/test_plan.py compares them with what each sampler really does.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Passes:
    """Samples that a strategy sends through the network per step, on average, beside the batch.

    Attributes:
        forward: without a gradient.
        gradient: forward and backward.
        state: bytes of the strategy's own state, where they matter.
        known: whether these are its numbers; those of a sampler that is not of this package are not.
    """

    forward: float = 0.0
    gradient: float = 0.0
    state: int = 0
    known: bool = True


def passes(plain: dict[str, Any], method: str, channels: int) -> Passes:
    """What the strategy of a method costs beside the step.

    Args:
        plain: the whole resolved experiment.
        method: name of the method.
        channels: of x0.
    """
    from kairos.strategies.registries import SAMPLERS

    sampler, batch = plain["methods"][method]["sampler"], plain["training"]["batch_size"]
    timesteps = plain["diffusion"]["process"].get("timesteps") or 1000
    if sampler["name"] in ("adaptive", "adaptive_official"):
        return _adaptive(sampler, batch, timesteps, channels)
    if sampler["name"] in _GRADIENTS:
        return Passes(gradient=_measured(sampler, batch, timesteps) / sampler["frequency"])
    return Passes(known=not getattr(SAMPLERS.entry(sampler["name"]).load(), "measures", False))


def _adaptive(options: dict[str, Any], batch: int, timesteps: int, channels: int) -> Passes:
    """Before and after one step of f_S: one image at the timesteps of the feature vector, the batch at each of S."""
    import torch

    from kairos.strategies.adaptive import Policy

    features = min(options["feature_timesteps"] or timesteps, timesteps)
    with torch.device("meta"):
        policy = sum(value.numel() for value in Policy(channels, options["width"], options["depth"]).parameters())
    state = 3 * 4 * policy + 8 * features * options["queue"]  # the policy and its Adam; the queue
    return Passes(forward=2 * (features + options["selected"] * batch) / options["frequency"], state=state)


def _measured(options: dict[str, Any], batch: int, timesteps: int) -> int:
    """Gradients of one measurement in bins of t."""
    bins = min(options["bins"], timesteps)
    per_bin = options["samples"] or max(2, round(batch / bins))
    if options["name"] == "first_order":  # in two halves
        per_bin = 2 * max(1, per_bin // 2)
    return int(_GRADIENTS[options["name"]] * bins * per_bin)


_GRADIENTS = {"gradient_norm": 1, "gradient_variance": 2, "first_order": 2}  # of every sample that is measured
