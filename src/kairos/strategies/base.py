"""What every sampler and weighting is.

A sampler draws fractions of the process, u in [0, 1): timestep floor(u T) of a discrete process, or the same share of a
continuous one. A weighting gives a factor for each sample's loss. The two know nothing of each other.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kairos import distributed
from kairos.diffusion.schedule import NoiseSchedule, error_ratio
from kairos.strategies.points import Place, points

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Observation:
    """What a sampler that learns may look at around one optimiser step. Batches are this rank's part of the global one.

    Attributes:
        step: number of the step, from 0.
        x0: the batch, (batch, ...).
        fractions: what the sampler drew for it, float64 (batch,).
        losses: per-sample loss of the step, times the weighting's weight but without importance weights, (batch,).
        meter: a `Meter`, losses and gradients of the network as it now is, for samplers that measure.
        place: where the step stands in everything random, for what is random in a measurement.
    """

    step: int
    x0: "Tensor"
    fractions: "Tensor"
    losses: "Tensor | None"
    meter: Any
    place: Place


@dataclass(frozen=True)
class Cost:
    """What a sampler asks of the network beside the training step itself, and keeps.

    Attributes:
        forward: samples per step, on average, without a gradient.
        gradient: the same, forward and backward.
        state: bytes of the sampler's own state, where they matter.
        known: whether the sampler says so.
    """

    forward: float = 0.0
    gradient: float = 0.0
    state: int = 0
    known: bool = True


class Part:
    """Base of samplers and weightings: those that learn say what a resume needs.

    `kept` are the attributes, numbers and arrays of numpy, that are the state, and `restored` follows from them.
    """

    kept: tuple[str, ...] = ()
    learned = False  # whether it depends on what was observed
    now = 0  # the step

    def __init__(self, options: Any, schedule: NoiseSchedule):
        self.options = options
        self.schedule = schedule

    def begin(self, step: int) -> None:
        """Say which step comes next, from 0: what changes over training follows it."""
        self.now = step

    def state_dict(self) -> dict[str, Any]:
        """Everything a resume needs, arrays as tensors of their own."""
        import torch

        state = {name.lstrip("_"): getattr(self, name) for name in self.kept}
        return {name: torch.tensor(value) if isinstance(value, np.ndarray) else value for name, value in state.items()}

    def load_state_dict(self, state: dict[str, Any], device: "torch.device | str" = "cpu") -> None:
        """Restore what `state_dict` gave, tensors on `device`."""
        if state and not self.kept:
            raise ValueError(f"{type(self).__name__} keeps no state, got {sorted(state)}")
        for name in self.kept:
            value = state[name.lstrip("_")]
            setattr(self, name, value.cpu().numpy().copy() if hasattr(value, "cpu") else value)
        self.restored()

    def restored(self) -> None:
        """Follow from what has been restored."""


class Sampler(Part):
    """Base of all samplers: a density given by its cumulative distribution function and its inverse.

    Args:
        options: the sampler's options dataclass.
        schedule: the noise schedule, for samplers that look at it.
        seed: for samplers with initial weights or shifts of their own.
    """

    measures = False  # whether observing needs a meter
    corrected: bool = False  # whether draws have importance weights, where it is no option

    def __init__(self, options: Any, schedule: NoiseSchedule, seed: int = 0):
        super().__init__(options, schedule)
        self.seed = seed
        self.floor: float = getattr(options, "floor", 0.0)
        self.corrected = getattr(options, "importance", self.corrected)

    def cdf(self, fraction: Array) -> Array:
        """Probability of a draw below each fraction, without the uniform floor."""
        raise NotImplementedError

    def quantile(self, probability: Array) -> Array:
        """The inverse of `cdf`."""
        raise NotImplementedError

    def masses(self, x0: "Tensor | None" = None) -> Array:
        """Probability of every timestep without the floor, (T,): the exact mass F((t+1)/T) - F(t/T) of its cell."""
        edges = np.arange(self.schedule.timesteps + 1) / self.schedule.timesteps
        return np.diff(self.cdf(edges))

    def density(self, x0: "Tensor | None" = None) -> Array:
        """Probability of every timestep, (T,). Samplers that look at images average over `x0`."""
        return (1 - self.floor) * self.masses(x0) + self.floor / self.schedule.timesteps

    def fractions(self, x0: "Tensor", place: Place) -> "Tensor":
        """One draw per sample: float64 (batch,) in [0, 1), on the CPU.

        With several processes the draws of the global batch are made on each and this rank's part of them is returned,
        so they do not depend on the number of ranks.
        """
        import torch

        size, mine = distributed.share(len(x0))
        return torch.from_numpy(np.clip(self.drawn(size, place), 0.0, 1.0 - 2**-53)[mine])

    def drawn(self, count: int, place: Place) -> Array:
        """One draw for each sample of the global batch, (count,)."""
        return self.transform(self.uniforms(count, place))

    def uniforms(self, count: int, place: Place) -> Array:
        """Uniform numbers in [0, 1) to be transformed, (count,): random, stratified or Sobol points."""
        return points(getattr(self.options, "points", "random"), count, place)

    def transform(self, uniform: Array) -> Array:
        """Uniform numbers to draws: a share `floor` of them as they are, the others through the inverse of `cdf`."""
        if not self.floor:
            return self.quantile(uniform)
        rest = np.maximum(uniform - self.floor, 0.0) / (1 - self.floor)
        return np.where(uniform < self.floor, uniform / self.floor, self.quantile(rest))

    def importance(self, x0: "Tensor", fractions: "Tensor") -> "Tensor | None":
        """1/(T p(t)) of each draw, float32 (batch,) on the CPU: uniform's objective; None where it is not asked for."""
        if not self.corrected:
            return None
        import torch

        timesteps = self.schedule.timesteps
        cell = np.minimum((fractions.numpy() * timesteps).astype(np.int64), timesteps - 1)
        return torch.from_numpy(1 / (timesteps * self.density()[cell])).float()

    @contextmanager
    def observe(self, observation: Observation) -> Iterator[None]:
        """Surround the optimiser step; fixed samplers look at nothing."""
        yield

    def cost(self, batch: int, channels: int) -> Cost:
        """What observing costs with a global batch of x0 of so many channels; those that measure say it themselves."""
        return Cost(known=not self.measures)

    def statistics(self) -> dict[str, float]:
        """What is worth a curve, for the log; to be asked on all ranks or on none."""
        return {}


class Tabled(Sampler):
    """A sampler whose density is a table of cell masses that changes: linear within cells.

    Subclasses call `set_masses`; until then the density is uniform.
    """

    updates = 0  # how often it has changed, where it learns

    def __init__(self, options: Any, schedule: NoiseSchedule, seed: int = 0):
        super().__init__(options, schedule, seed)
        self.set_masses(np.ones(schedule.timesteps))

    def set_masses(self, masses: Array, normalised: bool = False) -> None:
        """Draw in proportion to `masses`, (T,), from now on; a `normalised` table is taken to the bit."""
        self._masses = masses.copy() if normalised else masses / masses.sum()
        self._cumulative = np.concatenate([[0.0], np.cumsum(self._masses)])
        self._cumulative /= self._cumulative[-1]

    def masses(self, x0: "Tensor | None" = None) -> Array:
        """The table."""
        return self._masses

    def statistics(self) -> dict[str, float]:
        """How often the density has changed."""
        return {"updates": self.updates} if self.learned else {}

    def cdf(self, fraction: Array) -> Array:
        """Linear between the edges of the cells."""
        return np.interp(fraction, np.linspace(0, 1, len(self._cumulative)), self._cumulative)

    def quantile(self, probability: Array) -> Array:
        """Linear between the edges of the cells; cells of no mass are never drawn."""
        cell = np.searchsorted(self._cumulative, probability, side="right") - 1
        cell = np.minimum(cell, len(self._masses) - 1)
        below, above = self._cumulative[cell], self._cumulative[cell + 1]
        inside = (probability - below) / np.where(above > below, above - below, 1.0)
        return (cell + np.minimum(inside, 1 - 1e-9)) / len(self._masses)


class Weighting(Part):
    """Base of all weightings: a factor on the squared error of what the network predicts.

    A weighting that depends on the signal-to-noise ratio alone states its formula in `of_snr`, for the error of
    epsilon, or of x0 where `stated` says so; it is converted by `diffusion.schedule.error_ratio`. Others override
    `weights`, which are then interpolated in the ratio's logarithm.
    """

    stated = "epsilon"

    def __init__(self, options: Any, schedule: NoiseSchedule, prediction: str = "epsilon"):
        super().__init__(options, schedule)
        self.prediction = prediction

    def of_snr(self, snr: Array) -> Array:
        """The factor on the error that the formula is stated for, elementwise."""
        raise NotImplementedError

    def at_snr(self, snr: Array) -> Array:
        """The factor on the error of what is predicted, at any signal-to-noise ratio, elementwise.

        Weightings that know only the schedule's timesteps are interpolated between them.
        """
        if type(self).of_snr is Weighting.of_snr:
            with np.errstate(divide="ignore"):
                return np.interp(-np.log(snr), -np.log(self.schedule.snr), self.weights())
        with np.errstate(divide="ignore", invalid="ignore"):  # infinite weights at SNR = 0, or 0/0 for the same error
            factor = error_ratio(snr, self.stated) / error_ratio(snr, self.prediction)
        return self.of_snr(snr) * np.where(self.stated == self.prediction, 1.0, factor)

    def weights(self) -> Array:
        """The factor of every timestep, float64 (T,)."""
        return self.at_snr(self.schedule.snr)

    def factors(self, snr: "Tensor", like: "Tensor") -> "Tensor":
        """`at_snr` as float32 on the device of `like`."""
        import torch

        values = np.ascontiguousarray(self.at_snr(snr.double().cpu().numpy()))
        return torch.from_numpy(values).to(like.device, torch.float32)

    def apply(self, losses: "Tensor", weights: "Tensor", importance: "Tensor", fractions: "Tensor") -> "Tensor":
        """What is minimised, (batch,).

        Args:
            losses: of the samples, (batch,).
            weights: the factors of a fixed weighting.
            importance: what a sampler's importance weights multiply the objective of each sample with.
            fractions: where they were drawn.
        """
        return weights * importance * losses

    def step(self) -> None:
        """Follow the optimiser step: weightings that learn take theirs."""


def normal_cdf(x: Array) -> Array:
    """Standard normal distribution function, elementwise."""
    return 0.5 * np.asarray(np.vectorize(math.erfc, otypes=[float])(-np.asarray(x) / math.sqrt(2)))
