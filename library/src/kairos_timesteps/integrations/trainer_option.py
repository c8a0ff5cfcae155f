"""Strategies behind an option of a trainer: four calls, and no import of kairos in the trainer.

`build` is the entry point ``kairos`` of the group ``timestep_strategies``; docs/trainers/for-maintainers.md describes
the trainer's side. The trainer calls `begin_step` and `refresh`, so no hooks are needed.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from kairos_timesteps.attached import average_to_times, join_conditions, multiply, process_with_predict
from kairos_timesteps.base import MeasuresNetwork
from kairos_timesteps.diffusion.adapters import as_process
from kairos_timesteps.errors import demand
from kairos_timesteps.strategy import Draw, Strategy
from kairos_timesteps.time_convention import TimeConvention


class _SkippedStep(Exception):
    """The optimizer did not step."""


class StepStrategy:
    """Strategy whose steps a trainer begins and ends.

    Attributes:
        strategy: the strategy.
        time: convention of the trainer's t.
        device: device of the training run, on which a state is restored.
    """

    def __init__(self, strategy: Strategy, time: TimeConvention, device: torch.device | str = "cpu"):
        self.strategy, self.time, self.device = strategy, time, device
        self._draw: Draw | None = None
        self._micro_batches: list[tuple[Draw, Mapping[str, Tensor]]] = []  # draws of the step with a loss
        self._conditions: Mapping[str, Tensor] = {}
        self._observation: AbstractContextManager[None] | None = None

    def sample(self, latents: Tensor, *, tokens: Any = None, conditions: Mapping[str, Tensor] | None = None) -> Tensor:
        """Draw the trainer's t of a micro-batch, (batch,): int64 for an index, otherwise float32.

        Args:
            latents: latents or images, (batch, ...).
            tokens: tokens of a sample in the network, a number or a tensor (batch,), for densities that depend on it.
            conditions: conditions of the samples, each (batch, ...), for strategies that measure the network.
        """
        self._draw = self.strategy.draw(latents, **({} if tokens is None else {"tokens": tokens}))
        self._conditions = conditions or {}
        return self.time.to_trainer(self._draw.t)

    def record(self, errors: Tensor, *, weights: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Return the loss of the micro-batch that was drawn last: call ``backward`` on it.

        Args:
            errors: unweighted squared errors of the samples, (batch, ...).
            weights: further factors of the samples, (batch,), that change the gradient alone.
            mask: samples that learned components learn from, bool (batch,); None: all. All ranks pass a mask in a step,
                or none does.

        Without gradients the loss is for a log, and belongs to no step.

        Raises:
            ConfigError: `sample` was not called before, or a shape does not match.
        """
        demand(self._draw is not None, "record", "no draw of this micro-batch", "after sample(latents)")
        assert self._draw is not None
        losses = self.strategy.weighted(self._draw, average_to_times(errors, 1), mask)
        if torch.is_grad_enabled():
            self._micro_batches.append((self._draw, self._conditions))
        self._draw = None
        return multiply(losses, weights).mean()

    def begin_step(self, network: Any = None, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Begin a step of the optimizer, after the last backward pass; strategies that measure the network need it.

        Raises:
            ConfigError: no loss was recorded, the strategy needs a network, or micro-batches have conditions of
                different names.
        """
        demand(self._micro_batches, "begin_step", "no loss in this step", "after record(errors)")
        if isinstance(self.strategy.sampler, MeasuresNetwork):
            demand(network is not None, "begin_step", "no network", "begin_step(network, optimizer), before the step")
        conditions = join_conditions([conditions for _, conditions in self._micro_batches], "sample(conditions=)")
        draws = [draw for draw, _ in self._micro_batches]
        self._observation = self.strategy.observe(draws, network, optimizer, conditions)
        self._observation.__enter__()

    def refresh(self, skipped: bool = False) -> None:
        """End a step of the optimizer: learn from it, and count it.

        Args:
            skipped: the optimizer did not step, such as under GradScaler. The losses are dropped, and the next draws
                are further draws of the step.

        Raises:
            ConfigError: no loss was recorded in the step.
        """
        if self._observation is None and not skipped:
            self.begin_step()
        observation, self._observation, self._micro_batches = self._observation, None, []
        if skipped:
            self.strategy.weighting.zero_grad()
        if observation is not None:
            error = _SkippedStep() if skipped else None  # in its context, so that it neither learns nor counts
            observation.__exit__(type(error) if error else None, error, None)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a resume needs, between two steps; one rank alone may call it."""
        return {"time": self.time.name, "strategy": self.strategy.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned.

        Raises:
            ConfigError: the state is from another strategy, process, prediction, seed, convention of time, or other
                options.
        """
        demand(state.get("time") == self.time.name, "state: time", repr(state.get("time")), repr(self.time.name))
        demand("strategy" in state, "state", f"keys {sorted(state)}", "what state_dict returned")
        self.strategy.load_state_dict(state["strategy"], self.device)
        self._draw, self._micro_batches, self._observation = None, [], None


def build(
    name: str,
    process: Any,
    *,
    time: str | None = None,
    prediction: str | None = None,
    predict: Callable[..., Tensor] | None = None,
    seed: int = 0,
    sampler: Mapping[str, Any] | None = None,
    weighting: Mapping[str, Any] | None = None,
    device: torch.device | str = "cpu",
    process_group: Any = None,
) -> StepStrategy:
    """Return the strategy of a trainer's option ``kairos:NAME``.

    Args:
        name: name of the strategy, as for `kairos_timesteps.Strategy`.
        process: forward process or noise scheduler, as for `kairos_timesteps.Strategy`.
        time: what the trainer's t is, as for `kairos_timesteps.attach`.
        prediction: what the network predicts, for processes that leave it open.
        predict: ``predict(x_t, t, **conditions)``, for strategies that measure the network.
        seed: seed of all random numbers, equal on all ranks.
        sampler: options of the sampler.
        weighting: options of the weighting.
        device: device of the training run, on which a state is restored.
        process_group: ranks that share the global batch, as for `kairos_timesteps.Strategy`.

    Raises:
        ConfigError: an unknown name or option, or a value that is not allowed; the message lists the allowed ones. Or
            the strategy measures the network, and `predict` is missing.
    """
    convention = TimeConvention(as_process(process, prediction=prediction), time)
    process = process_with_predict(predict, convention)
    strategy = Strategy(
        name, process, seed=seed, sampler=sampler, weighting=weighting, process_group=process_group
    )  # fmt: skip
    if isinstance(strategy.sampler, MeasuresNetwork):
        allowed = "predict=, a function (x_t, t, **conditions) that calls the network as the trainer does"
        demand(predict is not None, f"strategy {name} measures the network", "no predict", allowed)
    return StepStrategy(strategy, convention, device)
