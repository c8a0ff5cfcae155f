"""Strategies in NeMo Automodel: the flow-matching pipeline, with times and loss of a strategy."""

from collections.abc import Mapping
from typing import Any

from nemo_automodel.components.flow_matching.pipeline import FlowMatchingPipeline
from torch import Tensor

from kairos_timesteps.attached import Attached


class StrategyPipeline(FlowMatchingPipeline):
    """Copy of a pipeline that draws sigma by a strategy, which replaces the pipeline's shift, clamps and weighting.

    Args:
        pipeline: the recipe's ``flow_matching_pipeline``.
        strategy: attached strategy on ``flow``, with ``time="noise_is_one"``.
        conditions: keys of the batch that `predict` of `kairos_timesteps.attach` takes, for strategies that measure.
    """

    def __init__(self, pipeline: FlowMatchingPipeline, strategy: Attached, conditions: tuple[str, ...] = ()):
        self.__dict__.update(vars(pipeline))
        self.strategy, self.conditions = strategy, conditions

    def step(self, model: Any, batch: Mapping[str, Any], *args: Any, **options: Any) -> Any:
        """Keep the batch for the draw, and run a training step."""
        self._batch = batch
        return super().step(model, batch, *args, **options)

    def sample_timesteps(self, batch_size: int, device: Any = None) -> tuple[Tensor, Tensor, str]:
        """Return sigma, timesteps sigma * 1000, each (batch_size,), and the name of the strategy."""
        latents = self._batch["video_latents" if "video_latents" in self._batch else "image_latents"]
        conditions = {name: self._batch[name].to(device) for name in self.conditions}
        sigma = self.strategy(latents.to(device), conditions=conditions or None)
        return sigma, sigma * self.num_train_timesteps, self.strategy.strategy.name

    def compute_loss(self, model_pred: Tensor, target: Tensor, sigma: Tensor, batch: Any = None) -> tuple[Any, ...]:
        """Return weighted errors, the loss, errors, their mean, weights and the batch's mask, as the pipeline does."""
        errors = self.model_adapter.compute_loss(model_pred, target)  # (batch, ...)
        weights = self.strategy.weights.to(errors.device).view(-1, *[1] * (errors.ndim - 1))
        mask = None if batch is None else batch.get("loss_mask")
        return errors * weights, self.strategy.loss(errors), errors, errors.mean(), weights, mask
