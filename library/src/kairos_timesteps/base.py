"""What every sampler and weighting is.

A sampler draws fractions of the process, u in [0, 1): timestep floor(u T) of a discrete process, or the same share of a
continuous one. A weighting gives a factor for each sample's loss. The two know nothing of each other.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kairos_timesteps.coordinates import Place, points
from kairos_timesteps.diffusion.schedule import NoiseSchedule, error_ratio
from kairos_timesteps.numeric import Array, Values, bisect, interp, like, of, quiet

if TYPE_CHECKING:
    import torch
    from torch import Tensor

NOTHING = Place()  # where the context of a call does not matter


@dataclass(frozen=True)
class Observation:
    """Everything a sampler that learns may use around one optimiser step.

    Tensors hold this rank's samples of the step: those of all micro-batches, where gradients are accumulated.

    Attributes:
        step: number of the step, from 0.
        x0: the images, (batch, ...).
        fractions: the sampler's draws for `x0`, float64 (batch,) or (batch, times).
        losses: losses of the draws times the weighting's weights, without importance weights, shape of `fractions`;
            None: `Strategy.loss` was not called.
        errors: unweighted per-sample errors of the draws, shape of `fractions`; None: `Strategy.loss` was not called.
        prediction: prediction type of the network, whose squared errors they are.
        meter: a `Meter`, losses and gradients of the network in its present state, for samplers that measure.
        place: random coordinates of the step's samples: seed, step, their indices in the global batch and its size.
    """

    step: int
    x0: "Tensor"
    fractions: "Tensor"
    losses: "Tensor | None"
    meter: Any
    place: Place
    errors: "Tensor | None" = None
    prediction: str = "epsilon"


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

    `kept` are the attributes, numbers, arrays of numpy and tensors, that are the state; `restored` follows from them.
    """

    kept: tuple[str, ...] = ()
    learned = False  # whether it depends on what was observed
    moving = False  # whether it depends on the step
    group: Any = None  # process group of the ranks over which the batch is split; None: all ranks

    def __init__(self, options: Any, schedule: NoiseSchedule):
        self.options = options
        self.schedule = schedule

    def state_dict(self) -> dict[str, Any]:
        """Everything a resume needs, arrays as tensors of their own."""
        import torch

        state = {name.lstrip("_"): getattr(self, name) for name in self.kept}
        return {
            name: torch.as_tensor(value).clone() if hasattr(value, "shape") else value for name, value in state.items()
        }

    def load_state_dict(self, state: dict[str, Any], device: "torch.device | str" = "cpu") -> None:
        """Restore what `state_dict` gave, tensors on `device`."""
        if state and not self.kept:
            raise ValueError(f"{type(self).__name__} keeps no state, got {sorted(state)}")
        for name in self.kept:
            value, now = state[name.lstrip("_")], getattr(self, name)
            if hasattr(value, "cpu"):
                value = value.cpu().numpy().copy() if isinstance(now, np.ndarray) else value.to(device, copy=True)
            setattr(self, name, value)
        self.restored()

    def restored(self) -> None:
        """Follow from what has been restored."""


class Sampler(Part):
    """Base of all samplers: a density given by its cumulative distribution function, its inverse, or both.

    What takes fractions or probabilities is elementwise in float64, of numpy or a tensor, and gives the same kind.

    Args:
        options: the sampler's options dataclass.
        schedule: the noise schedule, for samplers that look at it.
        seed: for samplers with initial weights or shifts of their own.
    """

    measures = False  # whether observing needs a meter
    corrected: bool = False  # whether draws have importance weights, where it is no option
    asks = False  # whether it needs the context of a call
    per_image = False  # whether each image has a density of its own
    split = False  # whether `quantile` gives each part of the probabilities to a part of the density, in no order

    def __init__(self, options: Any, schedule: NoiseSchedule, seed: int = 0):
        super().__init__(options, schedule)
        self.seed = seed
        self.floor: float = getattr(options, "floor", 0.0)
        self.corrected = getattr(options, "importance", self.corrected)
        self._nodes: tuple[Array, Array] | None = None

    def cdf(self, fraction: Values, place: Place = NOTHING) -> Values:
        """Probability of a draw below each fraction, without the uniform floor; the place has step and context."""
        return bisect(lambda p: self.quantile(p, place), fraction)

    def quantile(self, probability: Values, place: Place = NOTHING) -> Values:
        """The inverse of `cdf`: of 64 nodes per timestep, exact in the mass of every timestep."""
        return interp(probability, *self.nodes(probability))

    def nodes(self, other: Values) -> tuple[Any, Any]:
        """`cdf` at 64 fractions per timestep, and these, of the kind of `other` and where it is."""
        if self._nodes is None:
            edges = np.arange(64 * self.schedule.timesteps + 1) / (64 * self.schedule.timesteps)
            self._nodes = np.asarray(self.cdf(edges)), edges
        if of(other) is not np:  # where the draws are, from the first on
            self._nodes = like(self._nodes[0], other), like(self._nodes[1], other)
        return like(self._nodes[0], other), like(self._nodes[1], other)

    def pdf(self, fraction: Values, place: Place = NOTHING) -> Values:
        """Probability density at each fraction, without the floor: the difference quotient of `cdf` over 1e-6."""
        low, high = (fraction - 5e-7).clip(0, 1), (fraction + 5e-7).clip(0, 1)
        return (self.cdf(high, place) - self.cdf(low, place)) / (high - low)

    def sample(
        self, shape: int | tuple[int, ...], seed: int = 0, step: Any = 0, device: Any = "cpu", **context: Any
    ) -> "Tensor":
        """Draws without a training: float64 `shape` in [0, 1), a function of seed and step; see `Place`."""
        count, *times = (shape,) if isinstance(shape, int) else shape
        return self.drawn(Place(seed, step, 0, None, range(count), count, tuple(times), device, context))

    def cdf_with_floor(self, fraction: Values, place: Place = NOTHING) -> Values:
        """Probability of a draw below each fraction, the uniform floor included: what `transform` draws from."""
        return (1 - self.floor) * self.cdf(fraction, place) + self.floor * fraction

    def masses(self, x0: "Tensor | None" = None, place: Place = NOTHING) -> Array:
        """Probability of every timestep without the floor, (T,): the exact mass F((t+1)/T) - F(t/T) of its cell."""
        edges = np.arange(self.schedule.timesteps + 1) / self.schedule.timesteps
        return np.diff(self.cdf(edges, place))

    def density(self, x0: "Tensor | None" = None, place: Place = NOTHING) -> Array:
        """Probability of every timestep, (T,). Samplers that look at images average over `x0`."""
        return (1 - self.floor) * self.masses(x0, place) + self.floor / self.schedule.timesteps

    def fractions(self, x0: "Tensor", place: Place) -> "Tensor":
        """Draws for a batch, float64 (batch, *place.shape) in [0, 1), where the batch is; see `Place.of`."""
        return self.drawn(place.of(x0))

    def drawn(self, place: Place) -> "Tensor":
        """One draw for each time of each sample of a place."""
        return self.transform(self.uniforms(place), place).clip(0.0, 1.0 - 2**-53)

    def uniforms(self, place: Place) -> "Tensor":
        """Uniform numbers in [0, 1) to be transformed: random ones, or even points."""
        return points(getattr(self.options, "points", "random"), place)

    def transform(self, uniform: Values, place: Place = NOTHING) -> Values:
        """Uniform numbers to draws: a share `floor` of them as they are, the others through the inverse of `cdf`."""
        if not self.floor:
            return self.quantile(uniform, place)
        rest = (uniform - self.floor).clip(0.0, None) / (1 - self.floor)
        return of(uniform).where(uniform < self.floor, uniform / self.floor, self.quantile(rest, place))

    def importance(self, x0: "Tensor", fractions: "Tensor", place: Place = NOTHING) -> "Tensor | None":
        """1/(T p(t)) of each draw, float32: uniform's objective; None where it is not asked for."""
        if not self.corrected:
            return None
        timesteps = self.schedule.timesteps
        cell = (fractions * timesteps).floor().clip(0, timesteps - 1)
        mass = self.cdf((cell + 1) / timesteps, place) - self.cdf(cell / timesteps, place)
        return (1 / (timesteps * (1 - self.floor) * mass + self.floor)).float()

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
    """A sampler whose density is a table of cell masses that may change: linear within cells.

    Subclasses call `set_masses`; until then the density is uniform. The table is of numpy, or a tensor where it follows
    what is on a device; it goes where draws are made once.
    """

    updates: Any = 0  # how often it has changed, where it learns

    def __init__(self, options: Any, schedule: NoiseSchedule, seed: int = 0):
        super().__init__(options, schedule, seed)
        self.set_masses(np.ones(schedule.timesteps))

    def set_masses(self, masses: Any, normalised: bool = False) -> None:
        """Draw in proportion to `masses`, (T,), from now on; a `normalised` table is taken to the bit."""
        self._masses = (
            masses.copy() if normalised and of(masses) is np else masses / (1 if normalised else masses.sum())
        )
        if of(masses) is np or masses.device.type == "cpu":
            below = self._masses.cumsum(0)
        else:  # whose cumsum may add up in any order
            below = self._masses.expand(len(masses), -1).tril().sum(1)
        below = below / below[-1]
        self._below = np.concatenate([[0.0], below]) if of(masses) is np else of(masses).cat([0 * below[:1], below])
        self._moved: Any = None

    def _tables(self, other: Any) -> tuple[Any, Any]:
        """Masses, and what is below each edge, of the kind of `other` and where it is."""
        if of(other) is np:
            return like(self._masses, other), like(self._below, other)
        if self._moved is None or self._moved[0].device != other.device:
            self._moved = like(self._masses, other), like(self._below, other)
        return self._moved

    def masses(self, x0: "Tensor | None" = None, place: Place = NOTHING) -> Array:
        """The table."""
        return self._tables(np.ones(1))[0]

    def statistics(self) -> dict[str, float]:
        """How often the density has changed."""
        return {"updates": int(self.updates)} if self.learned else {}

    def cdf(self, fraction: Values, place: Place = NOTHING) -> Values:
        """Linear between the edges of the cells."""
        masses, below = self._tables(fraction)
        scaled = fraction * len(masses)
        cell = of(scaled).floor(scaled).clip(0, len(masses) - 1)
        at = cell.astype(np.int64) if of(cell) is np else cell.long()
        return below[at] + (scaled - cell) * (below[at + 1] - below[at])

    def quantile(self, probability: Values, place: Place = NOTHING) -> Values:
        """Linear between the edges of the cells; cells of no mass are never drawn."""
        masses, cumulative = self._tables(probability)
        cell = (of(probability).searchsorted(cumulative, probability, side="right") - 1).clip(0, len(masses) - 1)
        below, above = cumulative[cell], cumulative[cell + 1]
        inside = (probability - below) / (above - below).clip(1e-300, None)
        return (cell + inside.clip(None, 1 - 1e-9)) / len(masses)

    def importance(self, x0: "Tensor", fractions: "Tensor", place: Place = NOTHING) -> "Tensor | None":
        """From the table, 1/(T p(t))."""
        if not self.corrected:
            return None
        timesteps = self.schedule.timesteps
        mass = self._tables(fractions)[0][(fractions * timesteps).long().clip(0, timesteps - 1)]
        return (1 / (timesteps * (1 - self.floor) * mass + self.floor)).float()


class Weighting(Part):
    """Base of all weightings: a factor on the squared error of what the network predicts.

    A weighting that depends on the signal-to-noise ratio alone states its formula in `of_snr`, for the error of
    epsilon or x0, or of whatever is predicted, as `stated` says; it is converted by `diffusion.schedule.error_ratio`.
    Others override `weights`, which are then interpolated in the ratio's logarithm. Formulas take numpy and tensors.
    """

    stated = "epsilon"  # or x0, predicted

    def __init__(self, options: Any, schedule: NoiseSchedule, prediction: str = "epsilon"):
        super().__init__(options, schedule)
        self.prediction = prediction
        self._tables: dict[Any, Any] = {}

    def of_snr(self, snr: Values) -> Values:
        """The factor on the error that the formula is stated for, elementwise."""
        raise NotImplementedError

    def __call__(self, snr: Values, step: Any = 0) -> Values:
        """The factor on the error of what is predicted, at any signal-to-noise ratio, elementwise.

        Weightings that know only the schedule's timesteps are interpolated between them.
        """
        if type(self).of_snr is Weighting.of_snr:
            with quiet(snr):
                return interp(-of(snr).log(snr), -np.log(self.schedule.snr), self.weights(step))
        return self.converted(self.of_snr(snr), snr)

    def converted(self, factor: Values, snr: Values) -> Values:
        """A factor on the error that the formula is stated for, as one on the error of what is predicted."""
        if self.stated in ("predicted", self.prediction):
            return factor
        with quiet(snr):  # infinite weights at SNR = 0
            return factor * (error_ratio(snr, self.stated) / error_ratio(snr, self.prediction))

    def weights(self, step: Any = 0) -> Array:
        """The factor of every timestep, float64 (T,)."""
        return np.asarray(self(self.schedule.snr, step))

    def restored(self) -> None:
        """Forget the weights that `at` has cached. Weightings that learn call this after every change."""
        self._tables.clear()

    def at(self, process: Any, t: "Tensor", step: Any = 0) -> "Tensor":
        """The factors at times of a process, float32, where the times are."""
        if t.is_floating_point() or self.moving:
            return self(process.snr(t).double(), step).float()
        if t.device not in self._tables:  # of a discrete process
            self._tables[t.device] = like(self.weights(), t).float()
        return self._tables[t.device][t]

    def apply(self, losses: "Tensor", weights: "Tensor", importance: "Tensor", fractions: "Tensor") -> "Tensor":
        """What is minimised, (batch,).

        Args:
            losses: of the samples, (batch,).
            weights: the factors of a fixed weighting.
            importance: what a sampler's importance weights multiply the objective of each sample with.
            fractions: where they were drawn.
        """
        return weights * importance * losses

    def step(self, observation: Observation) -> None:
        """Follow the optimiser step, after it: weightings that learn take theirs."""
