"""Base classes of samplers and weightings.

A sampler draws fractions u of the process in [0, 1), 0 the image and 1 noise. A fraction is timestep floor(u T) of a
discrete process. A weighting gives a factor for each sample's loss. Neither depends on the other.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kairos_timesteps import distributed
from kairos_timesteps.coordinates import POINTS, RandomCoordinates, points
from kairos_timesteps.diffusion.schedule import PREDICTIONS, NoiseSchedule, error_ratio
from kairos_timesteps.errors import ConfigError, demand
from kairos_timesteps.lazy import Tensor, torch
from kairos_timesteps.numeric import (
    Array,
    Tables,
    Values,
    below_one,
    bisect,
    in_type_of_argument,
    interp,
    namespace,
    without_warnings,
)
from kairos_timesteps.options import Component, option
from kairos_timesteps.randomness import Device, Step

if TYPE_CHECKING:
    from kairos_timesteps.diffusion.processes import Process


@dataclass(frozen=True)
class Observation:
    """Observed quantities of one training step, for components that learn.

    Tensors hold this rank's samples of the step. With gradient accumulation they hold those of all micro-batches.

    Attributes:
        step: training step from 0.
        x0: images, (batch, ...), for samplers that measure the network; None for others.
        fractions: draws for `x0`, float64 (batch,) or (batch, times).
        losses: losses of the draws times the weighting's weights, shape of `fractions`. They are without importance
            weights, and without factors that are trained or depend on a sample's own loss (``edm2``, ``robust``).
            None if `Strategy.loss` was not called.
        errors: unweighted squared errors of the draws, shape of `fractions`; None if `Strategy.loss` was not called.
        meter: a `Meter` that measures losses and gradients of the network; None for components that do not need one.
        coordinates: random coordinates of the step's samples.
        prediction: prediction type of the network, whose squared errors are given.
        weighting: fixed part of the strategy's weighting, without factors that are trained; None: all weights are 1.
    """

    step: int
    x0: Tensor | None
    fractions: Tensor
    losses: Tensor | None
    meter: Any
    coordinates: RandomCoordinates
    errors: Tensor | None = None
    prediction: str = "epsilon"
    weighting: "Weighting | None" = None


@dataclass(frozen=True)
class Cost:
    """Cost of a sampler beyond the training step.

    Attributes:
        forward: average number of further samples per step in forward passes without a gradient.
        gradient: average number of further samples per step in forward and backward passes.
        state: bytes of the sampler's state, where they matter.
        known: False if the sampler does not report its cost.
    """

    forward: float = 0.0
    gradient: float = 0.0
    state: int = 0
    known: bool = True


class Stateful(Component):
    """Base of components with state.

    Attributes:
        state_names: names of the attributes that are the state: numbers, numpy arrays and tensors. Without leading
            underscores they are the keys of stored states.
        group: process group of the ranks that share the global batch; None: all ranks.
    """

    state_names: tuple[str, ...] = ()
    group: distributed.Group = None

    def __init__(self, options: Any, schedule: NoiseSchedule):
        super().__init__(options)
        self.schedule = schedule

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a resume needs, by names without leading underscores; empty without state.

        Arrays become tensors. Tensors are copies, on their device.
        """
        state = {name.lstrip("_"): getattr(self, name) for name in self.state_names}
        return {
            name: torch.as_tensor(value).clone() if hasattr(value, "shape") else value for name, value in state.items()
        }

    def load_state_dict(self, state: dict[str, Any], device: "torch.device | str" = "cpu") -> None:
        """Restore a state that `state_dict` returned, with its tensors on `device`, and call `restored`.

        Attributes that are numpy arrays now stay numpy arrays.

        Raises:
            ConfigError: the component has no state, and `state` is not empty.
            KeyError: `state` lacks a value.
        """
        demand(self.state_names or not state, f"{type(self).__name__}: state", sorted(state), "none: it has no state")
        for name in self.state_names:
            value, present = state[name.lstrip("_")], getattr(self, name)
            if hasattr(value, "cpu"):
                value = value.cpu().numpy().copy() if isinstance(present, np.ndarray) else value.to(device, copy=True)
            setattr(self, name, value)
        self.restored()

    def restored(self) -> None:
        """Recompute derived values after `load_state_dict`."""


class Learned:
    """Mixin of samplers and weightings that change with what they observe."""


class MeasuresNetwork(Learned):
    """Mixin of samplers that measure the network around a step: `Strategy.observe` needs the network."""

    def measures_in_step(self, step: int) -> bool:
        """Return True if the sampler measures the network in this step. The default is every step.

        Samplers that measure every n-th step override it.
        """
        return True


class Sampler(Stateful):
    """Base of all samplers: a density of u in [0, 1), given by its distribution function, its inverse, or both.

    A subclass overrides `cdf`, `quantile` or both; each is derived from the other if only one is given. They are
    elementwise, and get float64, as numpy arrays or tensors. Callers may pass any floating type: the result has the
    same, and quantiles are below 1.

    Keyword arguments of a density are its context: ``step``, the training step, and properties of the samples such as
    ``tokens``. `context_names` lists the names that a density uses.

    Args:
        options: the sampler's checked options.
        schedule: noise schedule, for samplers that depend on it.
        seed: seed of initial weights and random shifts.

    Attributes:
        requires_context: context names that every draw must pass.
        checked_steps: steps at which a density that depends on the step is checked, such as the starts of its phases.
    """

    floor: float = option(0.0, "share of draws that are uniform instead", ge=0, lt=1)
    importance: bool = option(
        False,
        "multiply losses by 1/(T p(t)): keeps the objective of uniform timesteps, changes the noise of its gradient",
    )

    context_names: tuple[str, ...] = ()
    checked_steps: tuple[float, ...] = (0, 10**9)  # the second is after the end of every curriculum
    points: str = "random"
    per_image = False  # each image has its own density
    decorator: Any  # of `density`

    def __init__(self, options: Any, schedule: NoiseSchedule, seed: int = 0):
        super().__init__(options, schedule)
        self.seed = seed
        self.requires_context = self.required_context(options)
        self._nodes: Tables | None = None
        kind = type(self)
        defined = kind.cdf is not Sampler.cdf or kind.quantile is not Sampler.quantile
        demand(defined, kind.__name__, "neither cdf nor quantile", "a class that defines cdf, quantile or both")

    def __init_subclass__(cls) -> None:
        """Wrap `cdf` and `quantile` of a subclass, so that they get float64 and return the type of their argument."""
        super().__init_subclass__()
        for name, convert in (("cdf", in_type_of_argument), ("quantile", below_one)):
            if name in vars(cls):
                setattr(cls, name, convert(vars(cls)[name]))

    @classmethod
    def required_context(cls, options: Any) -> set[str]:
        """Return the context names that every draw must pass, given the options."""
        return set()

    def __call__(self, function: Any) -> Any:
        """Raise ConfigError: the name of this sampler is taken, so it cannot decorate a function."""
        raise ConfigError(f"{type(self).__name__}: a sampler of kairos has this name; choose another for your function")

    @in_type_of_argument
    def cdf(self, u: Values, **context: Any) -> Values:
        """Return the probability of a draw below u, without the floor, elementwise."""
        return bisect(lambda p: self.quantile(p, **context), u)

    @below_one
    def quantile(self, p: Values, **context: Any) -> Values:
        """Return the inverse of `cdf`, elementwise.

        By default it is interpolated between 64 nodes per timestep, exact in the mass of timesteps. A density that
        depends on context is inverted by bisection instead.
        """
        if self.context_names:
            return bisect(lambda u: self.cdf(u, **context), p)
        return interp(p, *self.nodes(p))

    def pdf(self, u: Values, **context: Any) -> Values:
        """Return the probability density at u, without the floor: the difference quotient of `cdf` over 1e-6."""
        low, high = (u - 5e-7).clip(0, 1), (u + 5e-7).clip(0, 1)
        difference: Values = (self.cdf(high, **context) - self.cdf(low, **context)) / (high - low)
        return difference

    def nodes(self, other: Values) -> tuple[Values, ...]:
        """Return `cdf` at 64 fractions per timestep, and these fractions, of the kind and on the device of `other`.

        Both are (64 T + 1,). They are computed once, without context.
        """
        if self._nodes is None:
            edges = np.arange(64 * self.schedule.timesteps + 1) / (64 * self.schedule.timesteps)
            self._nodes = Tables(np.asarray(self.cdf(edges)), edges)
        return self._nodes.like(other)

    def cdf_with_floor(self, u: Values, **context: Any) -> Values:
        """Return the probability of a draw below u, floor included."""
        return (1 - self.floor) * self.cdf(u, **context) + self.floor * u

    def quantile_with_floor(self, p: Values, **context: Any) -> Values:
        """Return the inverse of `cdf_with_floor`."""
        if self.floor:
            return bisect(lambda u: self.cdf_with_floor(u, **context), p)
        return self.quantile(p, **context)

    def draw_from_uniform(self, uniform: Values, **context: Any) -> Values:
        """Map uniform numbers to draws: a share `floor` of them stays uniform, the others go through `map_uniform`."""
        if not self.floor:
            return self.map_uniform(uniform, **context)
        rest = (uniform - self.floor).clip(0.0, None) / (1 - self.floor)
        return namespace(uniform).where(uniform < self.floor, uniform / self.floor, self.map_uniform(rest, **context))

    def map_uniform(self, uniform: Values, **context: Any) -> Values:
        """Map uniform numbers to draws, without the floor. Mixtures override it: their map is not the quantile."""
        return self.quantile(uniform, **context)

    def masses(self, x0: Tensor | None = None, **context: Any) -> Array:
        """Return the exact probability of every timestep without the floor, F((t+1)/T) - F(t/T), (T,)."""
        edges = np.arange(self.schedule.timesteps + 1) / self.schedule.timesteps
        return np.diff(self.cdf(edges, **context))

    def probabilities(self, x0: Tensor | None = None, **context: Any) -> Array:
        """Return the probability of every timestep, floor included, (T,).

        Samplers of a density per image average over the images `x0`.
        """
        return (1 - self.floor) * self.masses(x0, **context) + self.floor / self.schedule.timesteps

    def sample(
        self, shape: int | tuple[int, ...], seed: int = 0, step: Step = 0, device: Device = "cpu", **context: Any
    ) -> Tensor:
        """Draw fractions without a batch, float64 `shape`; a function of seed and step.

        Raises:
            ConfigError: the density depends on images, or the context lacks a value.
        """
        count, *times = (shape,) if isinstance(shape, int) else shape
        return self.draw(RandomCoordinates(seed, step, 0, None, range(count), count, tuple(times), device, context))

    def draw(self, coordinates: RandomCoordinates, x0: Tensor | None = None) -> Tensor:
        """Draw a fraction for each time of each sample, float64 (n, *times_shape).

        Args:
            coordinates: random coordinates of the samples.
            x0: their images, (n, ...), for samplers of a density per image.
        """
        self.check_context(coordinates.context)
        context = coordinates.arguments(self.context_names)
        return self.draw_from_uniform(self.uniforms(coordinates), **context).clip(0.0, 1.0 - 2**-53)

    def checked_contexts(self) -> list[dict[str, Any]]:
        """Return the context of each of the `checked_steps`; a single empty one if the density ignores the step."""
        return [{"step": step} for step in self.checked_steps] if "step" in self.context_names else [{}]

    def check_context(self, context: Mapping[str, Any]) -> None:
        """Check context as the caller passes it; samplers that restrict its values override it.

        Values on a GPU are not read, because that would need a synchronisation.

        Raises:
            ConfigError: a value is not allowed.
        """

    def uniforms(self, coordinates: RandomCoordinates) -> Tensor:
        """Return the uniform numbers in [0, 1) that draws are made from, float64 (n, *times_shape)."""
        return points(self.points, coordinates)

    def importance_weights(self, x0: Tensor, fractions: Tensor, coordinates: RandomCoordinates) -> Tensor | None:
        """Return 1/(T p(t)) of each draw, which restores uniform's objective; None without `importance`.

        p(t) includes the floor. The weights are float32, in the shape of `fractions`.
        """
        if not self.importance:
            return None
        mass = self.mass(fractions, **coordinates.arguments(self.context_names))
        return (1 / (self.schedule.timesteps * (1 - self.floor) * mass + self.floor)).float()

    def mass(self, fractions: Tensor, **context: Any) -> Tensor:
        """Return the probability of each fraction's timestep without the floor, shape of `fractions`."""
        timesteps, cell = self.schedule.timesteps, self.schedule.cells(fractions).double()
        return self.cdf((cell + 1) / timesteps, **context) - self.cdf(cell / timesteps, **context)

    @contextmanager
    def observe(self, observation: Observation) -> Iterator[None]:
        """Surround the optimizer step; samplers that learn override it."""
        yield

    def cost(self, batch: int, channels: int) -> Cost:
        """Return the cost of observing a global batch of images with `channels` channels."""
        return Cost(known=not isinstance(self, MeasuresNetwork))

    def statistics(self) -> dict[str, float]:
        """Return numbers for the log. It must not communicate: one rank alone may call it."""
        return {}


class FixedDensity(Sampler):
    """Base of samplers whose density does not learn."""

    points: str = option("random", "uniform numbers that draws are made from", choices=POINTS)
    per_batch = False  # True if all draws of a batch come from one component of a mixture

    def has_mass(self, low: float, high: float) -> bool:
        """Return True if the density has mass between two fractions, at each of the `checked_steps`.

        True is also the result if the density requires further context.
        """
        if self.floor or self.requires_context:
            return True
        for context in self.checked_contexts():
            first, last = self.cdf_with_floor(np.array([low, high]), **context)
            if not last > first:
                return False
        return True


class TableDensity(Sampler):
    """Base of samplers whose density is a table of timestep probabilities, constant within a timestep.

    The density is uniform until `set_masses` is called. The table is a numpy array, or a tensor if it follows values on
    a device; it moves to the device of the draws once.
    """

    updates: Any = 0  # number of changes of a learned density

    def __init__(self, options: Any, schedule: NoiseSchedule, seed: int = 0):
        super().__init__(options, schedule, seed)
        self.set_masses(np.ones(schedule.timesteps))

    def set_masses(self, masses: Any, normalised: bool = False) -> None:
        """Set the density to be proportional to `masses`, (T,).

        The masses are a numpy array, or a tensor on the device that the table should be on. They are not checked: the
        caller passes no negative mass and a positive sum.

        `normalised` masses sum to 1 and are not divided again, so that a restored state is bit-identical.
        """
        self._masses = masses / (1 if normalised else masses.sum())
        if namespace(masses) is np or masses.device.type == "cpu":
            below = self._masses.cumsum(0)  # mass below the upper edge of each cell
        else:  # cumsum on a GPU adds in any order; here row i of a (T, T) matrix contains the masses 0 to i
            below = self._masses.expand(len(masses), -1).tril().sum(1)
        below = below / below[-1]  # the last is exactly 1
        edges = namespace(masses).concatenate([0 * below[:1], below])
        self._tables = Tables(self._masses, edges)  # masses, and cumulative masses at the edges of the cells

    def masses(self, x0: Tensor | None = None, **context: Any) -> Array:
        """Return the table, (T,)."""
        return self._tables.like(np.ones(1))[0]

    def statistics(self) -> dict[str, float]:
        """Return the number of changes of the density."""
        return {"updates": int(self.updates)} if isinstance(self, Learned) else {}

    def cdf(self, u: Values, **context: Any) -> Values:
        """Return the distribution function, interpolated linearly between the edges of the cells."""
        masses, below = self._tables.like(u)
        cell = self.schedule.cells(u)
        return below[cell] + (u * len(masses) - cell) * (below[cell + 1] - below[cell])

    def quantile(self, p: Values, **context: Any) -> Values:
        """Return the quantile, interpolated linearly between the edges of the cells; never in a cell without mass."""
        masses, cumulative = self._tables.like(p)
        cell = (namespace(p).searchsorted(cumulative, p, side="right") - 1).clip(0, len(masses) - 1)
        below, above = cumulative[cell], cumulative[cell + 1]
        inside: Values = ((p - below) / (above - below).clip(1e-300, None)).clip(None, 1 - 1e-9)
        return (cell + inside) / len(masses)

    def mass(self, fractions: Tensor, **context: Any) -> Tensor:
        """Return the probability of each fraction's timestep in the table, shape of `fractions`."""
        return self._tables.like(fractions)[0][self.schedule.cells(fractions)]


class Weighting(Stateful):
    """Base of all weightings: a factor on the squared error of what the network predicts.

    A weighting that depends on the signal-to-noise ratio alone overrides `formula`, stated for the error that
    `stated_for` names, and is converted to the network's prediction. Other weightings override `weights`, which are
    interpolated in the logarithm of the ratio. Formulas take numpy arrays and tensors.
    """

    decorator: Any  # of `weighting`
    stated_for = "epsilon"  # or x0, v; predicted: the error of whatever the network predicts
    depends_on_step = False

    def __init__(self, options: Any, schedule: NoiseSchedule, prediction: str = "epsilon"):
        super().__init__(options, schedule)
        self.prediction = prediction
        self._table: Tables | None = None
        kind, allowed = type(self), ", ".join((*PREDICTIONS, "flow", "predicted"))
        demand(self.stated_for in allowed.split(", "), f"{kind.__name__}.stated_for", repr(self.stated_for), allowed)
        overridden = (kind.formula, kind.weights) != (Weighting.formula, Weighting.weights)
        demand(overridden, kind.__name__, "neither formula nor weights", "a class that defines formula or weights")

    def formula(self, snr: Values) -> Values:
        """Return the factor on the error that the formula is stated for, elementwise."""
        raise NotImplementedError

    def __call__(self, snr: Values, step: Any = 0) -> Values:
        """Return the factor on the error of the network's prediction, at any signal-to-noise ratio, elementwise."""
        snr = np.float64(snr) if isinstance(snr, (int, float)) else snr
        if type(self).formula is Weighting.formula:
            with without_warnings(snr):
                return interp(-namespace(snr).log(snr), -np.log(self.schedule.snr), self.weights(step))
        return self.converted(self.formula(snr), snr)

    def converted(self, factor: Values, snr: Values) -> Values:
        """Convert a factor on the error that the formula is stated for to one on the prediction's error.

        The factor is unchanged if the formula is stated for the prediction, or for whatever is predicted.
        """
        if self.stated_for in ("predicted", self.prediction):
            return factor
        with without_warnings(snr):  # infinite weights at SNR = 0
            return factor * (error_ratio(snr, self.stated_for) / error_ratio(snr, self.prediction))

    def weights(self, step: Any = 0) -> Array:
        """Return the factor of every timestep, float64 (T,)."""
        return np.asarray(self(self.schedule.snr, step))

    def restored(self) -> None:
        """Drop the table of weights after `load_state_dict`."""
        self.invalidate_table()

    def invalidate_table(self) -> None:
        """Drop the table of weights that `at` keeps. Weightings that learn call this after every change."""
        self._table = None

    def at(self, process: "Process", t: Tensor, step: Any = 0) -> Tensor:
        """Return the factors at times of a process, float32, on the device of the times.

        Factors of a discrete process are kept in a table until `invalidate_table` is called, unless they depend on the
        step.
        """
        if t.is_floating_point() or self.depends_on_step:
            return self(process.snr(t).double(), step).float()
        if self._table is None:  # of a discrete process
            self._table = Tables(self.weights().astype(np.float32))
        return self._table.like(t)[0][t]

    @property
    def is_factor(self) -> bool:
        """True if `apply` is not overridden: it multiplies losses by factors that do not depend on the losses."""
        return type(self).apply is Weighting.apply

    def apply(self, losses: Tensor, weights: Tensor, importance: Tensor, fractions: Tensor) -> Tensor:
        """Return weights x importance x losses; learned weightings override it to add their terms.

        Args:
            losses: unweighted losses, (batch,), or (batch, *times).
            weights: factors of the fixed part of the weighting.
            importance: importance weights of the sampler.
            fractions: fractions of the process that the losses are measured at.
        """
        return weights * importance * losses

    def step(self, observation: Observation) -> None:
        """Update after the optimizer step; weightings that learn override it."""

    def zero_grad(self) -> None:
        """Clear the gradients of a trained weighting, for example after a step that GradScaler skipped."""
