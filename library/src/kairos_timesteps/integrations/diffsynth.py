"""Strategies in DiffSynth-Studio: loss functions of pipelines, with timesteps and weights of a strategy."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from kairos_timesteps.attached import Attached


class StrategyLoss:
    """Loss function of DiffSynth-Studio, such as ``FlowMatchSFTLoss``, at the timestep that a strategy draws.

    It is called like the loss function. The strategy replaces the random timestep and the weighting; everything else
    comes from the pipeline's scheduler.

    Args:
        loss: loss function of a pipeline and its inputs, which draws one timestep for the batch.
        strategy: attached strategy on ``flow``, with ``time="noise_is_one"``.
        conditions: names of inputs that `predict` of `kairos_timesteps.attach` takes, for strategies that measure.
    """

    def __init__(self, loss: Callable[..., Tensor], strategy: Attached, conditions: tuple[str, ...] = ()):
        self.loss, self.strategy, self.conditions = loss, strategy, conditions

    def __call__(self, pipe: Any, **inputs: Any) -> Tensor:
        """Return the weighted loss of a batch, whose samples share a timestep."""
        # the loss function draws one timestep for the batch, so the first sample represents it
        conditions = {name: inputs[name][:1] for name in self.conditions}
        sigma = self.strategy(inputs["input_latents"][:1], conditions=conditions or None)
        scheduler = pipe.scheduler
        pipe.scheduler = _Scheduler(scheduler, sigma)
        try:
            return self.strategy.loss(self.loss(pipe, **inputs).view(1))
        finally:
            pipe.scheduler = scheduler


class _Scheduler:
    """Scheduler whose only timestep is the training timestep of another scheduler that is nearest to 1000 sigma."""

    def __init__(self, scheduler: Any, sigma: Tensor):
        self._scheduler = scheduler
        timesteps = scheduler.timesteps
        nearest = (timesteps - 1000 * sigma.to(timesteps.device)).abs().argmin()
        self.timesteps = timesteps[nearest].expand(len(timesteps))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def training_weight(self, timestep: Tensor) -> float:
        """Return 1, because the strategy weights the loss."""
        return 1.0
