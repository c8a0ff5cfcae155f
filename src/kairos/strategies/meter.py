"""Measurements on a network around one optimiser step: losses and gradients at any timesteps, leaving no trace."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kairos import distributed
from kairos.diffusion.losses import per_sample

if TYPE_CHECKING:
    from kairos.strategies.base import Observation, Weighting


@dataclass(eq=False)
class Meter:
    """What can be asked about a network and the batch at hand (this rank's part of the global one).

    Args:
        process: forward process.
        network: a module; a wrapper of DistributedDataParallel is looked through.
        x0: the batch, (batch, ...).
        conditions: of its images, each (batch, ...); None: the network is called without, as ``network(x_t, t)``.
        weighting: weights of the losses whose gradients are measured.
        optimizer: of the network, for the metric of `metric`.
        autocast: context that the network is called in.
    """

    process: Any
    network: Any
    x0: Tensor
    conditions: dict[str, Tensor] | None = None
    weighting: "Weighting | None" = None
    optimizer: torch.optim.Optimizer | None = None
    autocast: AbstractContextManager[Any] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.network, nn.parallel.DistributedDataParallel):
            self.network = self.network.module

    def _predict(self, index: Tensor, fractions: Tensor, noise: Tensor, dropout: bool) -> tuple[Tensor, ...]:
        clean, t = self.x0[index], self.process.times(fractions).to(self.x0.device)
        x_t = self.process.noised(clean, noise.to(clean.dtype), t)
        given = self.conditions
        chosen = None if given is None else {name: values[index] for name, values in given.items()}
        with evaluating(self.network, dropout), self.autocast or nullcontext():
            output = self.process.mean(self.process.predict(self.network, x_t, t, chosen), x_t).float()
        return clean, t, x_t, output

    def error(self, index: Tensor, fractions: Tensor, noise: Tensor, dropout: bool = False) -> Tensor:
        """Per-sample squared error of epsilon, float32 (n,), in evaluation mode unless `dropout`, without gradients.

        Args:
            index: samples of the batch, int64 (n,).
            fractions: of the process, float64 (n,).
            noise: (n, ...).
            dropout: keep the network in training mode.
        """
        with torch.no_grad():
            _, t, x_t, output = self._predict(index, fractions, noise, dropout)
            return per_sample((self.process.epsilon(output, x_t, t) - noise.to(x_t.dtype)) ** 2)

    def gradient(self, index: Tensor, fractions: Tensor, noise: Tensor, factors: Tensor) -> list[Tensor]:
        """Gradient of sum over samples of factor x weight x squared error of what is predicted, a tensor a parameter.

        Evaluation mode; the parameters' own ``grad`` is not touched.

        Args:
            index: samples of the batch, int64 (n,); none give zeros.
            fractions: of the process, float64 (n,).
            noise: (n, ...).
            factors: (n,).
        """
        parameters = self.parameters()
        if not len(index):
            return [torch.zeros_like(parameter) for parameter in parameters]
        with torch.enable_grad():
            clean, t, _, output = self._predict(index, fractions, noise, False)
            losses = per_sample((output - self.process.target(clean, noise, t)) ** 2)
            if self.weighting is not None:
                losses = losses * self.weighting.factors(self.process.snr(t), losses)
            total = (losses * factors.to(losses)).sum()
            return list(torch.autograd.grad(total, parameters, materialize_grads=True))

    def parameters(self) -> list[Tensor]:
        """The network's trained parameters."""
        return [parameter for parameter in self.network.parameters() if parameter.requires_grad]

    def metric(self) -> list[Tensor]:
        """The optimiser's preconditioner, a tensor or the number 1 a parameter: Adam's 1/(sqrt(v) + eps)."""
        found = []
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        eps = {id(parameter): group.get("eps", 0.0) for group in groups for parameter in group["params"]}
        for parameter in self.parameters():
            state = self.optimizer.state.get(parameter, {}) if self.optimizer is not None else {}
            second = state.get("exp_avg_sq")
            one = torch.ones((), device=parameter.device)
            found.append(one if second is None else 1 / (second.sqrt() + eps[id(parameter)]))
        return found


def errors(observation: "Observation", index: Tensor, fractions: Tensor, noise: str, dropout: bool = False) -> Tensor:
    """`Meter.error` over the global batch: the same float64 (n,) on all ranks, on the CPU.

    Args:
        observation: of the step.
        index: samples of the global batch, int64 (n,), not decreasing, on the CPU.
        fractions: float64 (n,).
        noise: name of the random stream that it is drawn from.
        dropout: see `Meter.error`.
    """
    here, local = _here(observation, index)
    found = [torch.empty(0)]
    for part in here.split(len(observation.x0)) if len(here) else []:
        drawn = _noise(observation, noise, part)
        found.append(observation.meter.error(local(part), fractions[part], drawn, dropout).cpu())
    return distributed.gather(torch.cat(found).double())


def gradient(observation: "Observation", index: Tensor, fractions: Tensor, noise: str, factors: Tensor) -> list[Tensor]:
    """`Meter.gradient` over the global batch, summed over ranks; arguments as for `errors`, in any order."""
    here, local = _here(observation, index)
    drawn = _noise(observation, noise, here)
    found: list[Tensor] = observation.meter.gradient(local(here), fractions[here], drawn, factors[here])
    distributed.sum_tensors(found)
    return found


def _here(observation: "Observation", index: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Which of the samples `index` are this rank's, and where they are in its batch."""
    x0 = observation.x0
    _, mine = distributed.share(len(x0))
    here = ((index >= mine.start) & (index < mine.stop)).nonzero()[:, 0]
    return here, lambda part: index[part].to(x0.device) - mine.start


def _noise(observation: "Observation", name: str, rows: Tensor) -> Tensor:
    """Rows of a measurement's noise, each a function of the step and the row: alike on any number of ranks."""
    x0, place = observation.x0, observation.place
    return place.stream(name).normal(place.step, rows, tuple(x0.shape[1:]), x0.device)


@contextmanager
def evaluating(network: Any, dropout: bool = False) -> Iterator[None]:
    """Evaluation mode for a while (unless `dropout`), then each module as it was."""
    if not isinstance(network, nn.Module):
        yield
        return
    modes = [(module, module.training) for module in network.modules()]
    network.train(dropout)
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
