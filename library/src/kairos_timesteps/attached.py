"""Timesteps in an existing trainer: three lines, and hooks on its optimizer.

    timesteps = kairos_timesteps.attach("loss_rms", noise_scheduler, optimizer, network=model)
    t = timesteps(latents)                       # instead of torch.randint
    loss = timesteps.loss(per_sample_error)      # instead of per_sample_error.mean()

A *micro-batch* is a call of ``timesteps`` and its loss. A *step* of the strategy is a step that the optimizer takes,
and its micro-batches are those whose gradients the optimizer applies:

- Micro-batches of an accumulated step add up. A micro-batch whose loss is never backpropagated does not count.
- If GradScaler skips a step, its losses are dropped and the step keeps its number; its next draws are further draws
  of the step. An empty ``.grad`` at the beginning of a backward pass shows that earlier gradients were dropped, which
  needs ``zero_grad(set_to_none=True)``, PyTorch's default.
- GradScaler calls a fused optimizer also in a skipped step. The next draw reads ``found_inf`` of that call, which is
  known once the backward pass has ended.
- In evaluation mode of the network, ``t`` comes from a validation stream, and the state does not change.
- A copy of the optimizer (``copy.deepcopy``, ``pickle``, a trainer that builds its optimizer again) has no hooks. A
  hook on all optimizers of the process detects steps of the copy, and a later draw raises ConfigError.

Step numbers, draws and losses equal those of the explicit form, `Strategy.draw`, `loss` and `observe`.
"""

import copy
import logging
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from kairos_timesteps import distributed
from kairos_timesteps.base import Learned, MeasuresNetwork
from kairos_timesteps.coordinates import RandomCoordinates, points
from kairos_timesteps.diffusion.adapters import as_process
from kairos_timesteps.errors import ConfigError, demand, rejection
from kairos_timesteps.meter import demand_unsharded
from kairos_timesteps.strategy import Draw, Strategy, demand_one_time
from kairos_timesteps.time_convention import TimeConvention

LOG = logging.getLogger("kairos_timesteps")
_EXPLICIT_ADVICE = "use the explicit form instead: Strategy.draw, Strategy.loss, and Strategy.observe around the step"
_COPIES_ADVICE = (
    "A copy of the optimizer (copy.deepcopy, pickle, a trainer that builds its optimizer again) has no hooks: call "
    "attach with the optimizer that the loop steps, after the trainer has prepared it"
)
_MAX_VANISHED_STEPS = 200  # successive steps whose gradients vanish; GradScaler needs 165 to go from 65536 to 0
# successive training draws after which another optimizer took a step and the attached one did not
_MAX_STEPS_OF_SHARING_OPTIMIZER = 3  # the other optimizer has parameters of the attached one: an error
_MAX_STEPS_OF_UNRELATED_OPTIMIZER = 200  # it has none of them: a warning


class _OtherOptimizer(NamedTuple):
    """Optimizer that took a step after a training draw, while the attached one took none."""

    name: str
    shares_parameters: bool


def attach(
    name: str,
    process: Any,
    optimizer: Any,
    network: nn.Module | None = None,
    *,
    time: str | None = None,
    predict: Callable[..., Tensor] | None = None,
    accelerator: Any = None,
    seed: int = 0,
    sampler: Mapping[str, Any] | None = None,
    weighting: Mapping[str, Any] | None = None,
    prediction: str | None = None,
    timesteps: int = 1000,
    process_group: Any = None,
) -> "Attached":
    """Attach a strategy to the optimizer of a training loop.

    Two lines of logger ``kairos_timesteps`` report what t = 0.1 means, and which noise levels are drawn.

    Args:
        name: name of the strategy, as for `Strategy`.
        process: forward process or noise scheduler, as for `Strategy`.
        optimizer: optimizer that the loop steps, after the trainer has prepared it; its steps count. Wrappers of
            accelerate and Lightning are removed. Attach again if the trainer builds or copies its optimizer later.
        network: network that is trained. A draw belongs to a validation if ``network.training`` of this very object is
            False, with or without gradients. In training mode it is a training draw, also under ``torch.no_grad()``;
            its loss is then ignored. Without an ``nn.Module``, a draw belongs to a validation if gradients are
            disabled.
        time: what the trainer's t is. ``noise_is_one``: 0 is data, 1 is noise. ``data_is_one``: the opposite.
            ``index``: index of a discrete schedule, with 0 the least noise; for a flow-matching scheduler of diffusers
            an index of ``scheduler.timesteps``, with 0 the most noise. ``sigma``: noise level of EDM. None: the only
            convention of the process; rectified flow and VP have several.
        predict: ``predict(x_t, t, **conditions)``, for strategies that measure the network: its output at the trainer's
            t, as the loss takes it (for EDM the denoised image). It must call the module inside a
            DistributedDataParallel wrapper, in the trainer's precision.
        accelerator: Accelerator of accelerate, whose checkpoints then contain the state.
        seed: seed of all random numbers.
        sampler: options of the sampler.
        weighting: options of the weighting.
        prediction: what the network predicts, ``epsilon`` (also None), ``x0`` or ``v``, for processes that leave it
            open. The ``prediction_type`` of a scheduler of diffusers is read once, here; a later change is an error.
        timesteps: T, for a schedule given by name.
        process_group: ranks that share the global batch, or one dimension of a DeviceMesh; None: all ranks.

    Raises:
        ConfigError: hooks cannot follow the optimizer, or a value is not allowed. Or the strategy measures the network,
            and `predict` is missing, the network is sharded or the optimizer steps copies of its parameters.
    """
    scheduler, convention = process, TimeConvention(as_process(process, timesteps, prediction), time)
    optimizer = _inner_optimizer(optimizer, network, accelerator)
    process = process_with_predict(predict, convention)
    strategy = Strategy(
        name, process, seed=seed, sampler=sampler, weighting=weighting, process_group=process_group
    )  # fmt: skip
    if isinstance(strategy.sampler, MeasuresNetwork):
        arguments = {"network": isinstance(network, nn.Module), "predict": predict is not None}
        missing = " and no ".join(argument for argument, is_present in arguments.items() if not is_present)
        allowed = (
            "network=model and predict=, a function (x_t, t, **conditions) that calls the network as the trainer does, "
            "or the network itself; pass conditions to timesteps(latents, conditions={name: tensor})"
        )
        demand(not missing, f"strategy {name} measures the network: attach", f"no {missing}", allowed)
        demand_unsharded(network)
        _demand_shared_parameters(optimizer, network)
    attached = Attached(strategy, optimizer, network, convention, scheduler)
    if accelerator is not None:
        accelerator.register_for_checkpointing(attached)
    return attached


class Attached:
    """Strategy whose steps are those of an optimizer; see `attach`.

    Attributes:
        strategy: the strategy.
        time: convention of the trainer's t.
    """

    def __init__(
        self,
        strategy: Strategy,
        optimizer: torch.optim.Optimizer,
        network: Any,
        time: TimeConvention,
        scheduler: Any = None,
    ):
        self.strategy, self.optimizer, self.network, self.time = strategy, optimizer, network, time
        strategy.is_attached = True
        self._scheduler, self._prediction_type = scheduler, _prediction_type(scheduler)
        self._measures = isinstance(strategy.sampler, MeasuresNetwork)
        self._learns = any(isinstance(component, Learned) for component in (strategy.sampler, strategy.weighting))
        self._reset()
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        self._is_detached = False
        _watch_all_optimizers()
        _ATTACHED.add(self)
        LOG.info("%s: %s", strategy.name, time.describe())
        self._reported = False
        if not strategy.sampler.requires_context:
            self._report({})

    def _reset(self) -> None:
        """Clear the state of the current step."""
        self._draw: Any = None  # last training draw of the step
        self._conditions: Mapping[str, Tensor] | None = None  # of the last training draw
        # draws of the step whose backward pass has begun, with their conditions
        self._micro_batches: list[tuple[Draw, Mapping[str, Tensor] | None]] = []
        self._backward_pass_id: int | None = None  # id of the last backward pass
        self._vanished_steps = 0  # successive steps whose gradients vanished without a call of the optimizer
        self._validation_sample_count = 0  # samples drawn in the current validation
        self._evaluating = False  # the last draw was that of a validation
        self._validation_ndim = 1  # number of dimensions of t in the last validation draw
        self._measurement: AbstractContextManager[None] | None = None  # open during the optimizer's step
        self._read_skipped: Callable[[], bool] | None = None  # returns True if GradScaler skipped the step
        self._step_pending = False  # True from the optimizer's call until `_finish_step`
        self._is_creating_state = False  # the optimizer is called only to create its state
        self._other_optimizer: _OtherOptimizer | None = None  # optimizer that took a step since the last draw
        self._steps_of_sharing_optimizer = self._steps_of_unrelated_optimizer = 0

    def __call__(self, x0: Tensor, *, conditions: Mapping[str, Tensor] | None = None, **arguments: Any) -> Tensor:
        """Draw the trainer's t for a batch, (batch,): int64 for an index, otherwise float32.

        In evaluation mode t covers the process evenly, and begins anew after each training draw: every validation that
        follows a training draw has the same times.

        A training draw first finishes the optimizer's last step.

        Args:
            x0: latents or images, (batch, ...), of any floating-point type.
            conditions: conditions of the samples, each (batch, ...), for strategies that measure the network. All
                micro-batches of a step have conditions of the same names.
            arguments: arguments of `Strategy.draw`: ``times``, ``shared_time``, ``index``, ``total``, or context of the
                sampler, such as ``tokens``.

        Raises:
            ConfigError: this object is a copy or was detached, another optimizer takes the steps, or `Strategy.draw`
                rejects the arguments.
        """
        self._evaluating = not self._is_training()
        if self._evaluating:
            t = self._validation_times(x0, **arguments)
            self._validation_ndim = t.ndim
            return self.time.to_trainer(t)
        self._demand_hooks()
        self._check_other_optimizer()
        self._finish_step()
        if not self._reported:
            self._report(arguments)
        self._validation_sample_count = 0
        if self._measures:
            demand_one_time(self.strategy, arguments.get("times", ()))
            self._check_conditions({} if conditions is None else conditions, len(x0))
        self._draw, self._conditions = self.strategy.draw(x0, **arguments), conditions if self._measures else None
        return self.time.to_trainer(self._draw.t)

    def _check_conditions(self, conditions: Mapping[str, Tensor], count: int) -> None:
        """Raise ConfigError unless the conditions are tensors with a row per sample, of the shape of earlier ones.

        Earlier ones are those of the step's micro-batches, with which they are joined.
        """
        rows = f"a tensor with {count} rows, one for each sample"
        demand(isinstance(conditions, Mapping), "conditions", type(conditions).__name__, "a dictionary of tensors")
        # without gradients, the next backward pass drops the earlier micro-batches
        accumulates = bool(self._micro_batches) and not self._without_gradients()
        _, earlier = self._micro_batches[-1] if accumulates else (None, None)
        for name, values in conditions.items():
            where = f"conditions.{name}"
            demand(isinstance(values, Tensor), where, type(values).__name__, rows)
            shape = tuple(values.shape)
            demand(shape[:1] == (count,), where, f"shape {shape}", rows)
            if earlier is not None and name in earlier:
                allowed = f"rows of shape {tuple(earlier[name].shape[1:])}, as before in this step; pad them"
                demand(shape[1:] == earlier[name].shape[1:], where, f"shape {shape}", allowed)

    def loss(self, errors: Tensor, *, weights: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Return the mean of weighting x `weights` x error over the samples of the last draw: call ``backward`` on it.

        `weights` change the gradient and never the statistics, `mask` the statistics and never the gradient. So
        regularisation images train with ``mask=is_regular``. Padding has weight 0 and mask False; multiply the other
        weights by n / (n - padding) for a mean over real samples. In evaluation mode the result is the mean of
        `weights` x error, which is comparable between strategies. Errors without a gradient change no statistics.

        Args:
            errors: unweighted squared errors of the samples, (batch,) or shape of t. With one t per sample, further
                dimensions are averaged; with several, errors of elements are rejected, since channels may precede
                frames.
            weights: further factors of the samples, (batch,) or shape of t.
            mask: samples that learned samplers and weightings learn from, bool (batch,); None: all. A mask on the CPU
                needs no synchronisation. All ranks pass one, or none does. The factor that ``edm2`` trains is updated
                by the gradient, so it ignores the mask.

        Raises:
            ConfigError: ``timesteps(latents)`` was not called before, the last draw is of a validation and this loss
                is not, or a shape does not match.
        """
        demand(isinstance(errors, Tensor), "errors", type(errors).__name__, "a tensor, one unweighted error per sample")
        if self._evaluating:
            allowed = "in training mode, a training draw after the last draw of the validation"
            demand(not self._is_training(), "loss", "the draw of a validation", allowed)
            return multiply(average_to_times(errors, self._validation_ndim), weights).mean()
        draw = self._training_draw("loss")
        with nullcontext() if errors.requires_grad else torch.no_grad():  # a loss for the log is no micro-batch
            losses = self.strategy.weighted(draw, average_to_times(errors, draw.t.ndim), mask)
        loss = multiply(losses, weights).mean()
        if loss.requires_grad:
            loss.register_hook(partial(self._count_micro_batch, draw, self._conditions))
        return loss

    @property
    def weights(self) -> Tensor:
        """Factors of the losses of the last draw, float32, shape of t; in evaluation mode a single 1.

        For trainers that compute a weighted loss themselves. `loss` includes them; the factor that ``edm2`` learns is
        only part of `loss`.

        Raises:
            ConfigError: there is no draw of this step, or the scheduler's prediction type has changed.
        """
        return torch.ones(()) if self._evaluating else self._training_draw("weights").weights

    def _is_training(self) -> bool:
        return bool(self.network.training) if isinstance(self.network, nn.Module) else torch.is_grad_enabled()

    def _training_draw(self, where: str) -> Draw:
        if self._draw is None:
            raise rejection(where, "no draw of this step", "after timesteps(latents)")
        now, before = _prediction_type(self._scheduler), self._prediction_type
        allowed = f"{before}, as attach has read it; set it before attach"
        demand(now == before, "prediction_type of the scheduler", now, allowed)
        draw: Draw = self._draw
        return draw

    def check(self, x0: Tensor, noise: Tensor, x_t: Tensor, t: Tensor, tolerance: float = 0.01) -> None:
        """Compare the signal-to-noise ratio of the trainer's x_t with that of the process at t.

        Call it once, with t of several noise levels: at t = 1/2 conventions do not differ. See `TimeConvention.check`.

        Raises:
            ConfigError: the ratios differ, or x_t is no combination of x0 and noise.
        """
        self.time.check(x0, noise, x_t, t, tolerance)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a resume needs.

        Save the state between two optimizer steps: the resumed run then equals an uninterrupted one. Within gradient
        accumulation, the state is that of the last complete step. A resume repeats the step with new random draws.
        torch.distributed.checkpoint needs `kairos_timesteps.integrations.distributed_checkpoint.PackedState`.
        """
        self._finish_step()
        state = self.strategy.state_dict()
        return {"time": self.time.name, "strategy": state, "keys": _paths(state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned, on the device of the optimizer's parameters.

        The draws of the current step are dropped.

        Raises:
            ConfigError: the state is from another strategy, process, prediction, seed, convention of time, or other
                options, or values of it are missing.
        """
        demand(state.get("time") == self.time.name, "state: time", repr(state.get("time")), repr(self.time.name))
        missing = sorted({*state.get("keys", [])} - {*_paths(state["strategy"])})
        allowed = (
            "all values that were saved; torch.distributed.checkpoint restores only those that exist before the load: "
            "save and load kairos_timesteps.integrations.distributed_checkpoint.PackedState(timesteps)"
        )
        demand(not missing, "state", f"no {', '.join(missing)}", allowed)
        self.strategy.load_state_dict(state["strategy"], self._parameters()[0].device)
        self._reset()

    def detach(self) -> None:
        """Remove the hooks from the optimizer; later training draws raise ConfigError, those of a validation work."""
        self._finish_step()
        _ATTACHED.discard(self)
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._is_detached = [], True

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for a copy, which has no hooks and rejects training draws."""
        self._finish_step()
        return {**vars(self), "_hooks": []}

    def _demand_hooks(self) -> None:
        """Raise ConfigError after `detach`, or if this is a copy, whose hooks stayed with the original."""
        if self._is_detached:
            raise ConfigError(
                "attach: this strategy was detached from its optimizer, whose steps no longer count: call attach "
                "again, then load_state_dict with the state of this object"
            )
        if not self._hooks:
            raise ConfigError(
                "attach: this is a copy of an attached strategy, without hooks on its optimizer: call attach with the "
                "optimizer that the loop steps, then load_state_dict with the state of the original"
            )

    def _check_other_optimizer(self) -> None:
        """Raise ConfigError or log a warning if another optimizer takes the steps in place of the attached one.

        Each training draw calls it. The error follows 3 draws, if the other optimizer has attached parameters.
        Otherwise the warning follows 200 draws during which the attached parameters have no gradients.
        """
        other, self._other_optimizer = self._other_optimizer, None
        if other is None:
            return
        if other.shares_parameters:
            self._steps_of_sharing_optimizer += 1
            if self._steps_of_sharing_optimizer == _MAX_STEPS_OF_SHARING_OPTIMIZER:
                raise ConfigError(
                    f"attach: the attached optimizer took no step after the last {_MAX_STEPS_OF_SHARING_OPTIMIZER} "
                    f"draws, but another {other.name} took steps of its parameters. {_COPIES_ADVICE}"
                )
        elif not self._without_gradients():  # the attached parameters are trained
            self._steps_of_unrelated_optimizer = 0
        else:
            self._steps_of_unrelated_optimizer += 1
            if self._steps_of_unrelated_optimizer == _MAX_STEPS_OF_UNRELATED_OPTIMIZER:
                LOG.warning(
                    "attach: the attached optimizer took no step after the last %d draws, but %s took steps of other "
                    "parameters. %s.", _MAX_STEPS_OF_UNRELATED_OPTIMIZER, other.name, _COPIES_ADVICE,
                )  # fmt: skip

    def _after_step_of(self, other: torch.optim.Optimizer) -> None:
        """Record a step of another optimizer after a training draw, unless the attached one also took a step.

        Steps of other parameters count only while the attached parameters have no gradients.
        """
        if other is self.optimizer or self._draw is None or self._step_pending:
            return
        parameters = {id(parameter) for parameter in self._parameters()}
        shared = any(id(parameter) in parameters for group in other.param_groups for parameter in group["params"])
        if not shared and not self._without_gradients():  # the attached parameters are trained: no copy
            self._steps_of_unrelated_optimizer = 0
        elif self._other_optimizer is None or shared:
            self._other_optimizer = _OtherOptimizer(type(other).__name__, shared)

    def _count_micro_batch(self, draw: Draw, conditions: Mapping[str, Tensor] | None, _: Tensor) -> None:
        """Count a micro-batch at the beginning of its backward pass, and drop those whose gradients were dropped.

        Raises:
            ConfigError: the gradients of 200 successive steps were dropped, and the optimizer was not called.
        """
        current = torch._C._current_graph_task_id()  # equal for all losses of one backward pass
        # a new backward pass without accumulated gradients: those of earlier passes were dropped
        if current != self._backward_pass_id and self._without_gradients():
            self._vanished_steps += bool(self._micro_batches)
            if self._vanished_steps > _MAX_VANISHED_STEPS:
                raise ConfigError(
                    f"attach: the gradients of {_MAX_VANISHED_STEPS} steps vanished, and the optimizer was not called. "
                    f"{_COPIES_ADVICE}. Hooks do not see steps within the backward pass; {_EXPLICIT_ADVICE}"
                )
            self._drop()
        self._backward_pass_id = current
        if not any(earlier_draw.is_same(draw) for earlier_draw, _ in self._micro_batches):
            self._micro_batches.append((draw if self._measures else draw.without_images(), conditions))

    def _without_gradients(self) -> bool:
        """Return True if no gradient is accumulated; FSDP2 may accumulate where this cannot be seen."""
        for parameter in self._parameters():
            if parameter.grad is not None or hasattr(parameter, "full_tensor"):
                return False
        return True

    def _drop(self) -> None:
        """Drop the micro-batches of the step so far; its number stays."""
        self._micro_batches = []
        self.strategy.weighting.zero_grad()

    def _before_step(self, optimizer: torch.optim.Optimizer, positional: Any, keywords: Any) -> Any:
        """Begin the measurement of the step; if there is a closure, after the backward pass in the closure.

        Returns:
            None, or the arguments of the optimizer's step with a closure that also begins the measurement.
        """
        self._is_creating_state = _is_step_to_create_state()
        if self._is_creating_state:
            return None
        self._measurement = self._read_skipped = None
        # positional[0] is the optimizer, positional[1] the closure
        closure = keywords.get("closure", positional[1] if len(positional) > 1 else None)
        if closure is None or not self._measures:
            self._begin_step(optimizer)
            return None

        def closure_with_measurement() -> Any:
            allowed = f"one: the strategy measures the network before and after the step; {_EXPLICIT_ADVICE}"
            demand(self._measurement is None, "step of the optimizer", "several calls of its closure", allowed)
            loss = closure()
            self._begin_step(optimizer)
            return loss

        return positional[:1], {**keywords, "closure": closure_with_measurement}

    def _begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Begin the measurement of the step after its last backward pass; do nothing without a training draw.

        `found_inf` of a fused optimizer is kept for `_finish_step`, which also begins steps that are not measured.
        """
        if self._draw is None:
            return
        overflow = getattr(optimizer, "found_inf", None)  # set by GradScaler for the call of a fused optimizer
        self._read_skipped = None if overflow is None else _deferred_read(overflow)
        if self._measures and not (self._read_skipped and self._read_skipped()):
            self._measurement = self._open_observation()
            self._measurement.__enter__()

    def _after_step(self, *_: Any) -> None:
        """Finish the step, or leave it to the next draw if a fused optimizer under GradScaler would synchronise.

        Raises:
            ConfigError: only validation draws were made since the last step.
        """
        if self._is_creating_state:
            return
        self._other_optimizer = None
        self._steps_of_sharing_optimizer = self._steps_of_unrelated_optimizer = 0
        if self._draw is None:
            allowed = "a training draw: network.train(), or enabled gradients if attach was given no network"
            demand(not self._validation_sample_count, "step of the optimizer", "draws of a validation alone", allowed)
            return  # not a training step
        self._step_pending = True
        # several ranks learn together, so they finish here: `state_dict` may be called on one rank alone
        learns_together = self._learns and distributed.ranks(self.strategy.group) > 1
        if self._read_skipped is None or self._measures or learns_together:
            self._finish_step()

    def _finish_step(self) -> None:
        """Finish the optimizer's last step, unless it is finished; if it was skipped, drop its micro-batches.

        The next training draw of a skipped step is a further draw of that step.
        """
        if not self._step_pending:
            return
        self._step_pending = False
        skipped, self._read_skipped = self._read_skipped, None
        if skipped and skipped():
            self._drop()
            return
        if not self._measures:
            self._measurement = self._open_observation()
            self._measurement.__enter__()
        if self._measurement is not None:
            self._measurement.__exit__(None, None, None)
        self._measurement, self._draw, self._micro_batches, self._vanished_steps = None, None, [], 0
        self._other_optimizer = None  # the strategy may have optimizers too

    def _open_observation(self) -> AbstractContextManager[None]:
        """Return the strategy's context around the step, for the micro-batches whose gradients are applied.

        Raises:
            ConfigError: the strategy learns, and no loss of the step had a backward pass. Or the strategy measures the
                network, and the micro-batches of the step have conditions of different names.
        """
        allowed = "the backward pass of timesteps.loss(errors), from which the strategy learns"
        learnable = self._micro_batches or not self._learns
        demand(learnable, f"strategy {self.strategy.name}: losses of a step", "none", allowed)
        draws = [draw for draw, _ in self._micro_batches] or [self._draw]
        conditions = [conditions for _, conditions in self._micro_batches]
        all_conditions = join_conditions(conditions, "timesteps(conditions=)") if self._measures else None
        return self.strategy.observe(draws, self.network, self.optimizer, all_conditions)

    def _validation_times(
        self,
        x0: Tensor,
        *,
        times: tuple[int, ...] = (),
        shared_time: bool = False,
        index: Any = None,
        total: int | None = None,
        **_: Any,
    ) -> Tensor:
        """Return times of the process that cover it evenly, continued over the batches of a validation.

        The times are (batch, *times). Context of the sampler is ignored.

        Raises:
            ConfigError: a range `index` is not within the global batch of `total` samples.
        """
        total = total or len(x0) * distributed.ranks(self.strategy.group)
        coordinates = RandomCoordinates(self.strategy.seed, 0, 0, self._validation_sample_count, index, total, times)
        coordinates = coordinates.for_batch(x0, self.strategy.group)
        self._validation_sample_count += coordinates.batch_size
        if shared_time:
            coordinates = coordinates.replace(sample_indices=range(1), batch_size=1)
        return self.strategy.process.times(points("sobol", coordinates)).expand(len(x0), *times)

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _report(self, context: Mapping[str, Any]) -> None:
        """Log the noise levels of 80 % of the draws and the mean weight, for the context of the first sample."""
        names = [name for name in self.strategy.sampler.context_names if name in context]
        table = self.strategy.table(**{name: _first_sample_value(context[name]) for name in names})
        levels, below = np.log(self.strategy.process.schedule.snr), np.cumsum(table["p"])
        high, low = levels[np.searchsorted(below, [0.1, 0.9]).clip(None, len(levels) - 1)]
        mean = float((table["p"] * np.where(table["p"] > 0, table["w"], 0)).sum())
        LOG.info(
            "%s: 80 %% of the draws have ln SNR %.3g to %.3g, mean weight %.3g", self.strategy.name, low, high, mean
        )
        self._reported = True


_ATTACHED: weakref.WeakSet[Attached] = weakref.WeakSet()  # without those that were detached


@cache
def _watch_all_optimizers() -> None:
    """Register the hook that reports the steps of all optimizers of this process to the attached strategies."""

    def report_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for attached in list(_ATTACHED):
            attached._after_step_of(optimizer)

    register_optimizer_step_post_hook(report_step)


def _inner_optimizer(optimizer: Any, network: Any, accelerator: Any) -> torch.optim.Optimizer:
    """Return the optimizer inside wrappers of accelerate or Lightning.

    Raises:
        ConfigError: it is not one `torch.optim.Optimizer`, or hooks do not see its steps: with DeepSpeed, or with steps
            within the backward pass.
    """
    inner = getattr(optimizer, "optimizer", optimizer)  # wrapped by accelerate or Lightning
    deepspeed = type(network).__module__.startswith("deepspeed") or type(inner).__module__.startswith("deepspeed")
    deepspeed = deepspeed or str(getattr(accelerator, "distributed_type", "")).endswith("DEEPSPEED")
    where = "attach: optimizer"
    demand(not deepspeed, where, "DeepSpeed, which bypasses hooks", f"a torch.optim.Optimizer; {_EXPLICIT_ADVICE}")
    if not isinstance(inner, torch.optim.Optimizer):
        several = isinstance(optimizer, (list, tuple, dict))
        got = f"{len(optimizer)} optimizers" if several else type(optimizer).__name__
        raise rejection(where, got, f"one torch.optim.Optimizer; {_EXPLICIT_ADVICE}")
    parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
    fused = any(getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in parameters)
    demand(not fused, where, "steps within the backward pass (register_post_accumulate_grad_hook)", _EXPLICIT_ADVICE)
    return inner


def _demand_shared_parameters(optimizer: torch.optim.Optimizer, network: Any) -> None:
    """Raise ConfigError if the optimizer steps copies of the parameters: the network then changes after its step."""
    of_network = {id(parameter) for parameter in network.parameters()}
    of_optimizer = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    allowed = f"the optimizer of the network that is measured, without master copies; {_EXPLICIT_ADVICE}"
    demand(of_network & {*of_optimizer}, "attach: optimizer", "no parameter of the network", allowed)


def _prediction_type(scheduler: Any) -> Any:
    """Return option ``prediction_type`` of a scheduler of diffusers; None for any other object."""
    return getattr(getattr(scheduler, "config", None), "prediction_type", None)


def process_with_predict(predict: Callable[..., Tensor] | None, time: TimeConvention) -> Any:
    """Return a copy of the process whose `predict` is the trainer's, called at the trainer's t.

    The result is the process itself if `predict` is None. With ``data_is_one`` the sign of a velocity is changed.
    """
    if predict is None:
        return time.process
    process: Any = copy.copy(time.process)  # its method is replaced
    sign = -1 if time.name == "data_is_one" and process.prediction == "flow" else 1  # the velocity is x0 - noise

    def predict_at_trainer_time(
        _: Any, x_t: Tensor, t: Tensor, conditions: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        output = predict(x_t, time.to_trainer(t), **(conditions or {}))
        return sign * getattr(output, "sample", output)

    process.predict = predict_at_trainer_time
    return process


def _deferred_read(overflow: Tensor) -> Callable[[], bool]:
    """Return a function that reads `overflow` and waits for no kernel that is launched after this call."""
    if overflow.device.type != "cuda":
        value = overflow.clone()
        return lambda: bool(value)
    value, event = overflow.to("cpu", non_blocking=True), torch.cuda.Event()
    event.record()

    def read() -> bool:
        event.synchronize()
        return bool(value)

    return read


def _is_step_to_create_state() -> bool:
    """Return True if torch.distributed.checkpoint takes this step, only to create the optimizer's state.

    That step has zero gradients and a learning rate of 0, and so may the first step of a training run. The call stack
    is the only difference that is present on every rank.
    """
    if torch.compiler.is_compiling():  # the compiler would warn that it cannot trace frames
        return False
    frame = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if frame.f_code.co_name == "_init_optim_state" and module.startswith("torch.distributed."):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _paths(state: Any) -> list[str]:
    """Return the paths of all values in nested dictionaries, sorted and joined by dots."""
    if not isinstance(state, Mapping):
        return [""]
    return sorted(f"{key}.{path}".strip(".") for key, value in state.items() for path in _paths(value))


def average_to_times(errors: Tensor, dimensions: int) -> Tensor:
    """Average errors over all but the first `dimensions` dimensions, those of t.

    Raises:
        ConfigError: t has several times per sample, and the errors have more dimensions.
    """
    if errors.ndim <= dimensions:
        return errors
    allowed = "one error per t: average those of elements before, such as errors.mean((1, 3, 4)) for frames in axis 2"
    demand(dimensions == 1, "errors", f"shape {tuple(errors.shape)}", allowed)
    return errors.flatten(1).mean(-1)


def _first_sample_value(value: Any) -> Any:
    """Return a context value, of the first sample if it is one per sample, as a plain number or string."""
    if np.ndim(value):
        value = value[0]
    return value.item() if hasattr(value, "item") else value


def join_conditions(conditions: Sequence[Mapping[str, Tensor] | None], where: str) -> dict[str, Tensor] | None:
    """Concatenate the conditions of a step's micro-batches, each (batch, ...); None if there are none.

    Raises:
        ConfigError: they have different names; the message begins with `where`.
    """
    names = {", ".join(sorted(of_batch or {})) or "none" for of_batch in conditions}
    got = " and ".join(f"({of_batch})" for of_batch in sorted(names))
    demand(len(names) <= 1, where, got, "conditions of the same names in all micro-batches of a step")
    if not conditions or not conditions[0]:
        return None
    return {name: torch.cat([(of_batch or {})[name] for of_batch in conditions]) for name in conditions[0]}


def multiply(terms: Tensor, weights: Tensor | None) -> Tensor:
    """Multiply terms of a loss, (batch, ...), by weights of their first dimensions.

    Raises:
        ConfigError: the weights have another shape.
    """
    if weights is None:
        return terms
    demand(isinstance(weights, Tensor), "weights", type(weights).__name__, f"a tensor ({len(terms)},)")
    shape = tuple(terms.shape[: weights.ndim])
    demand(tuple(weights.shape) == shape, "weights", f"shape {tuple(weights.shape)}", str(shape))
    return terms * weights.view(*shape, *[1] * (terms.ndim - weights.ndim))
