"""Measurements of a network around one optimizer step: losses and gradients at any timesteps, without side effects."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kairos_timesteps import distributed
from kairos_timesteps.base import Weighting
from kairos_timesteps.coordinates import RandomCoordinates
from kairos_timesteps.diffusion.processes import Process, per_sample
from kairos_timesteps.errors import demand, rejection
from kairos_timesteps.numeric import on_device
from kairos_timesteps.validation import evaluating


@dataclass(eq=False)
class Meter:
    """Losses and gradients of a network on the global batch of a step; results are equal on all ranks.

    Samples are indices in the global batch; noise is the name of the random stream that it is drawn from.

    Args:
        process: forward process.
        network: a module; a DistributedDataParallel wrapper is removed.
        x0: this rank's images of the step, (batch, ...).
        coordinates: random coordinates of the images.
        conditions: conditions of the images, each (batch, ...); None: the network is called as ``network(x_t, t)``.
        weighting: weighting of the losses whose gradients are measured.
        optimizer: optimizer of the network, for the metric of `metric`.
        autocast: context that the network is called in.
        group: process group of the ranks over which the batch is split; None: all ranks.
        pass_size: images in one forward pass of `errors`; None: all of `x0`.
    """

    process: Process
    network: Any
    x0: Tensor
    coordinates: RandomCoordinates
    conditions: dict[str, Tensor] | None = None
    weighting: Weighting | None = None
    optimizer: torch.optim.Optimizer | None = None
    autocast: AbstractContextManager[Any] | None = None
    group: distributed.Group = None
    pass_size: int | None = None

    def __post_init__(self) -> None:
        self.coordinates = self.coordinates.for_batch(self.x0, self.group)
        if isinstance(self.network, nn.parallel.DistributedDataParallel):
            self.network = self.network.module

    def errors(self, index: Tensor, fractions: Tensor, noise: str, dropout: bool = False) -> Tensor:
        """Measure the squared error of epsilon per sample, float64 (n,) on the CPU, without gradients.

        All ranks must call it.

        Args:
            index: samples, int64 (n,), not decreasing, on the CPU.
            fractions: of the process, float64 (n,).
            noise: name of its random stream.
            dropout: keep the network's modes, which are those of training.
        """
        errors = torch.zeros(len(index), dtype=torch.float64)
        size = self.pass_size or len(self.x0)
        positions, rows = self._locate_samples(index)
        if len(positions):
            local_errors = []
            for pass_positions, pass_rows in zip(positions.split(size), rows.split(size)):
                with torch.no_grad():
                    _, epsilon, t, x_t, output = self._predict(pass_positions, pass_rows, fractions, noise, dropout)
                    difference = self.process.epsilon(output, x_t, t) - epsilon.to(x_t.dtype)
                    local_errors.append(per_sample(difference**2).double())
            errors[positions] = torch.cat(local_errors).cpu()  # one synchronisation, not one per pass
        distributed.sum_tensors([errors], self.group)  # exact: one rank holds each sample, the others add 0
        return errors

    def gradient(self, index: Tensor, fractions: Tensor, noise: str, factors: Tensor) -> list[Tensor]:
        """Measure the gradient of the sum over samples of factor * weight * squared error of the prediction.

        The network is in evaluation mode. The ``grad`` of the parameters is unchanged. Returns a tensor for each of
        `parameters`, zeros for parameters that the losses do not depend on. All ranks must call it.

        Args:
            index: samples, int64 (n,), in any order, on the CPU.
            fractions: float64 (n,).
            noise: name of its random stream.
            factors: (n,).
        """
        positions, rows = self._locate_samples(index)
        parameters = self.parameters()
        gradients = [torch.zeros_like(parameter) for parameter in parameters]
        if len(positions):
            with torch.enable_grad():
                x0, epsilon, t, _, output = self._predict(positions, rows, fractions, noise, dropout=False)
                losses = per_sample((output - self.process.target(x0, epsilon, t)) ** 2)
                if self.weighting is not None:
                    losses = losses * self.weighting.at(self.process, t, self.coordinates.step)
                total = (losses * on_device(factors[positions], losses.device).to(losses.dtype)).sum()
                gradients = list(torch.autograd.grad(total, parameters, materialize_grads=True))
        distributed.sum_tensors(gradients, self.group)
        return gradients

    def copy_weights(self) -> list[Tensor]:
        """Return copies of all parameters and buffers of the network, for `weights`.

        Raises:
            ConfigError: the network is a function, and there is no optimizer.
        """
        return [tensor.detach().clone() for tensor in self._tensors()]

    @contextmanager
    def weights(self, copies: list[Tensor]) -> Iterator[None]:
        """Give the network the copied weights within the context; restore the present ones, also after an error."""
        present_weights = self.copy_weights()
        try:
            self._set_weights(copies)
            yield
        finally:
            self._set_weights(present_weights)

    def _set_weights(self, copies: list[Tensor]) -> None:
        with torch.no_grad():
            for tensor, copy in zip(self._tensors(), copies, strict=True):
                tensor.copy_(copy)

    def _tensors(self) -> list[Tensor]:
        if isinstance(self.network, nn.Module):
            return [*self.network.parameters(), *self.network.buffers()]
        return self.parameters()

    def noise(self, name: str, positions: Tensor) -> Tensor:
        """Return a measurement's noise at positions of its samples; it does not depend on the number of ranks."""
        shape, device = tuple(self.x0.shape[1:]), self.x0.device
        return self.coordinates.stream(name).normal(self.coordinates.step, on_device(positions, device), shape, device)

    def _locate_samples(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Find the samples of a measurement that this rank has.

        Args:
            index: indices of the measurement's samples in the global batch, int64 (n,).

        Returns:
            Positions of the samples in `index`, on the CPU; and rows of the samples in `x0`, on its device.
        """
        local_indices = self.coordinates.sample_indices
        if isinstance(local_indices, range):
            samples = torch.arange(local_indices.start, local_indices.stop, local_indices.step)
        else:
            samples = local_indices.cpu()
        row_of_sample = torch.full((self.coordinates.batch_size,), -1)  # -1: another rank has the sample
        row_of_sample[samples] = torch.arange(len(samples))
        rows = row_of_sample[index]
        positions = (rows >= 0).nonzero()[:, 0]
        return positions, on_device(rows[positions], self.x0.device)

    def _predict(
        self, positions: Tensor, rows: Tensor, fractions: Tensor, noise: str, dropout: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Call the network on samples of a measurement that this rank has.

        Args:
            positions: positions of the samples in the measurement, (m,).
            rows: rows of the samples in `x0`, (m,).
            fractions: fractions of the process of all samples in the measurement, (n,).
            noise: name of the noise's random stream.
            dropout: keep the network's modes, which are those of training.

        Returns:
            x0, noise, times, x_t and the prediction of the m samples. The prediction is float32, without the
            channels of a learned variance.
        """
        x0 = self.x0[rows]
        epsilon = self.noise(noise, positions)
        t = on_device(self.process.times(fractions[positions]), x0.device)
        x_t = self.process.noised(x0, epsilon.to(x0.dtype), t)
        conditions = None
        if self.conditions is not None:
            conditions = {name: values[rows] for name, values in self.conditions.items()}
        with nullcontext() if dropout else evaluating(self.network), self.autocast or nullcontext():
            output = self.process.predict(self.network, x_t, t, conditions)
            output = self.process.prediction_channels(output, x_t).float()
        return x0, epsilon, t, x_t, output

    def parameters(self) -> list[Tensor]:
        """Return the trained parameters of the network, or of its optimizer where the network is a function.

        Raises:
            ConfigError: the network is a function, and there is no optimizer.
        """
        if hasattr(self.network, "parameters"):
            parameters = list(self.network.parameters())
        elif self.optimizer is not None:
            parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        else:
            got = f"{type(self.network).__name__} without parameters"
            allowed = "an nn.Module, or a function together with optimizer=, whose parameters are then measured"
            raise rejection("observe: network", got, allowed)
        return [parameter for parameter in parameters if parameter.requires_grad]

    def metric(self) -> list[Tensor]:
        """Return the optimizer's preconditioner per parameter: Adam's 1/(sqrt(v) + eps), or 1 without moments.

        The preconditioner has the parameter's shape, or shape () without moments.
        """
        state, groups = ({}, []) if self.optimizer is None else (self.optimizer.state, self.optimizer.param_groups)
        eps = {parameter: group.get("eps", 0.0) for group in groups for parameter in group["params"]}
        metric = []
        for parameter in self.parameters():
            moments = state.get(parameter, {})
            if parameter in eps and "exp_avg_sq" in moments:
                metric.append(1 / (moments["exp_avg_sq"].sqrt() + eps[parameter]))
            else:
                metric.append(torch.ones((), device=parameter.device))
        return metric


def demand_independent_calls(
    process: Process,
    network: Any,
    x0: Tensor,
    conditions: dict[str, Tensor] | None,
    autocast: AbstractContextManager[Any] | None,
) -> None:
    """Raise ConfigError if calling the network on one rank alone would wait for other ranks.

    This happens if its parameters are sharded, or if `predict` calls a DistributedDataParallel wrapper. Ranks without
    samples in a measurement do not call the network, and the others would wait for them. All ranks must call this
    function: each of them calls the network once. A single process calls nothing.

    Args:
        process: forward process.
        network: a module or a function; a DistributedDataParallel wrapper around it is removed.
        x0: images, (batch, ...); a rank without images calls nothing.
        conditions: conditions of the images, each (batch, ...).
        autocast: context that the network is called in.
    """
    demand_unsharded(network)
    if distributed.ranks() == 1 or len(x0) == 0:
        return
    network = network.module if isinstance(network, nn.parallel.DistributedDataParallel) else network

    def reject(module: nn.Module, _: Any) -> None:
        allowed = "the module inside, such as model.module: ranks measure different numbers of samples"
        is_wrapper = isinstance(module, nn.parallel.DistributedDataParallel)
        demand(not is_wrapper, "predict", "a call of DistributedDataParallel", allowed)
        demand_unsharded(module)

    hook = nn.modules.module.register_module_forward_pre_hook(reject)
    try:
        t = process.times(torch.full((len(x0),), 0.5, dtype=torch.float64, device=x0.device))
        with torch.no_grad(), evaluating(network), autocast or nullcontext():
            process.predict(network, x0, t, conditions)
    finally:
        hook.remove()


def demand_unsharded(network: Any) -> None:
    """Raise ConfigError if the parameters of a network are split over several ranks.

    Every rank calls the network for its own samples of a measurement, in no common order. A sharded network gathers its
    parameters from all ranks in every call.
    """
    if distributed.ranks() == 1 or not isinstance(network, nn.Module):
        return
    class_names = {kind.__name__ for module in network.modules() for kind in type(module).__mro__}
    sharded = sorted(class_names & {"FSDPModule", "FullyShardedDataParallel", "DeepSpeedEngine"})
    allowed = "DistributedDataParallel, or a strategy that does not measure the network, such as loss_rms"
    demand(
        not sharded, "network", f"parameters sharded over {distributed.ranks()} ranks ({', '.join(sharded)})", allowed
    )
