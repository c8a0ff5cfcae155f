"""Measurements of a network around one optimiser step: losses and gradients at any timesteps, without side effects."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kairos_timesteps import distributed
from kairos_timesteps.base import Weighting
from kairos_timesteps.coordinates import RandomCoordinates
from kairos_timesteps.diffusion.processes import Process, per_sample
from kairos_timesteps.errors import rejection
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

        Args:
            index: samples, int64 (n,), not decreasing, on the CPU.
            fractions: of the process, float64 (n,).
            noise: name of its random stream.
            dropout: keep the network in training mode.
        """
        errors = torch.zeros(len(index), dtype=torch.float64)
        size = self.pass_size or len(self.x0)
        here, held = self._here(index)
        if len(here):
            errors_here = []
            for rows, local in zip(here.split(size), held.split(size)):
                with torch.no_grad():
                    _, noise_rows, t, x_t, output = self._predict(rows, local, fractions, noise, dropout)
                    off = self.process.epsilon(output, x_t, t) - noise_rows.to(x_t.dtype)
                    errors_here.append(per_sample(off**2).double())
            errors[here] = torch.cat(errors_here).cpu()  # one synchronisation, not one per pass
        distributed.sum_tensors([errors], self.group)  # exact: one rank holds each sample, the others add 0
        return errors

    def gradient(self, index: Tensor, fractions: Tensor, noise: str, factors: Tensor) -> list[Tensor]:
        """Measure the gradient of the sum over samples of factor * weight * squared error of the prediction.

        The network is in evaluation mode. The ``grad`` of the parameters is unchanged. Returns a tensor per parameter.

        Args:
            index: samples, int64 (n,), in any order, on the CPU.
            fractions: float64 (n,).
            noise: name of its random stream.
            factors: (n,).
        """
        (rows, local), parameters = self._here(index), self.parameters()
        gradients = [torch.zeros_like(parameter) for parameter in parameters]
        if len(rows):
            with torch.enable_grad():
                clean, noise_rows, t, _, output = self._predict(rows, local, fractions, noise, False)
                losses = per_sample((output - self.process.target(clean, noise_rows, t)) ** 2)
                if self.weighting is not None:
                    losses = losses * self.weighting.at(self.process, t, self.coordinates.step)
                total = (losses * on_device(factors[rows], losses.device).to(losses.dtype)).sum()
                gradients = list(torch.autograd.grad(total, parameters, materialize_grads=True))
        distributed.sum_tensors(gradients, self.group)
        return gradients

    def noise(self, name: str, rows: Tensor) -> Tensor:
        """Return rows of a measurement's noise, each a function of step and row, independent of the number of ranks."""
        shape, device = tuple(self.x0.shape[1:]), self.x0.device
        return self.coordinates.stream(name).normal(self.coordinates.step, on_device(rows, device), shape, device)

    def _here(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows of `index` whose samples this rank holds, on the CPU, and their rows in `x0`."""
        held = self.coordinates.sample_indices
        samples = torch.arange(held.start, held.stop) if isinstance(held, range) else held.cpu()
        row_of_sample = torch.full((self.coordinates.batch_size,), -1)
        row_of_sample[samples] = torch.arange(len(samples))
        wanted = row_of_sample[index]
        rows = (wanted >= 0).nonzero()[:, 0]
        return rows, on_device(wanted[rows], self.x0.device)

    def _predict(self, rows: Tensor, local: Tensor, fractions: Tensor, noise: str, dropout: bool) -> tuple[Tensor, ...]:
        """Return x0, noise, times, x_t and output of this rank's samples `local`, which are `rows` of the request."""
        clean, noise_rows = self.x0[local], self.noise(noise, rows)
        t = on_device(self.process.times(fractions[rows]), clean.device)
        x_t = self.process.noised(clean, noise_rows.to(clean.dtype), t)
        conditions = self.conditions and {name: values[local] for name, values in self.conditions.items()}
        with evaluating(self.network, dropout), self.autocast or nullcontext():
            output = self.process.predict(self.network, x_t, t, conditions)
            output = self.process.prediction_channels(output, x_t).float()
        return clean, noise_rows, t, x_t, output

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
        """Return the optimiser's preconditioner per parameter: Adam's 1/(sqrt(v) + eps), or 1 without moments."""
        state, groups = ({}, []) if self.optimizer is None else (self.optimizer.state, self.optimizer.param_groups)
        eps = {each: group.get("eps", 0.0) for group in groups for each in group["params"]}
        moments = {each: state[each]["exp_avg_sq"] for each in eps if "exp_avg_sq" in state.get(each, {})}
        return [
            1 / (moments[each].sqrt() + eps[each]) if each in moments else torch.ones((), device=each.device)
            for each in self.parameters()
        ]
