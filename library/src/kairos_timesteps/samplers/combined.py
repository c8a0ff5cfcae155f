"""Samplers made of other densities, or of numbers: range, shift, mixture, schedule over training, table, list."""

import math
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from kairos_timesteps.base import FixedDensity
from kairos_timesteps.coordinates import RandomCoordinates, required
from kairos_timesteps.diffusion.schedule import NoiseSchedule
from kairos_timesteps.errors import demand, rejection
from kairos_timesteps.lazy import torch
from kairos_timesteps.numeric import (
    Array,
    Tables,
    Values,
    bisect,
    integers,
    interp,
    logit,
    namespace,
    normal_cdf,
    normal_quantile,
    same_kind,
    sigmoid,
    spline,
)
from kairos_timesteps.options import dump, option, options_without_name, parse
from kairos_timesteps.registry import SAMPLERS, sampler, split


def checked_density(value: Any, where: str, *extra: str) -> dict[str, Any]:
    """Check and complete a fixed sampler given by its name, or by name and options.

    Options of the whole sampler alone are `importance`, `points` and `in_turn`.

    Args:
        value: a name, or a mapping with ``name`` and options.
        where: beginning of messages.
        extra: further keys, which are required and kept as they are.

    Returns:
        ``name``, all options with their values, and the keys `extra`.

    Raises:
        ConfigError: the sampler is unknown, learns, lacks a key, or has options that only the whole sampler can have.
    """
    component = {"name": value} if isinstance(value, str) else value
    if not isinstance(component, Mapping) or not isinstance(component.get("name"), str):
        raise rejection(where, repr(value), "a sampler's name, or its name and options")
    missing = [key for key in extra if key not in component]
    demand(not missing, f"{where}.{', '.join(missing)}", "nothing", "one for each component")
    sampler_class = SAMPLERS.entry(component["name"], where).component
    if not issubclass(sampler_class, FixedDensity):
        raise rejection(f"{where}.name", component["name"], "samplers of a fixed density")
    option_values = {key: value for key, value in options_without_name(dict(component)).items() if key not in extra}
    options = parse(sampler_class, option_values, where)
    demand(not options.importance, f"{where}.importance", "true", "false; set it for the whole sampler")
    allowed = "random; the whole sampler has points, its components do not"
    demand(options.points == "random", f"{where}.points", options.points, allowed)
    in_turn = getattr(options, "in_turn", False)
    demand(not in_turn, f"{where}.in_turn", "true", "false; a component is drawn at random")
    return {"name": component["name"], **dump(sampler_class, options), **{key: component[key] for key in extra}}


def density_option() -> Any:
    """Declare an option whose value is a fixed sampler."""
    help = "a fixed sampler: its name, or its name and options"
    return option({"name": "uniform"}, help, component=checked_density)


def components_option(key: str, kind: type, first: Any, meaning: str) -> Any:
    """Declare an option whose value is a list of fixed samplers, each with a number or name under `key`.

    * The list is not empty. Numbers are 0 or more. Names are texts.
    * Values of ``share`` have a sum above 0. Those of other keys differ from each other.
    * Values of ``start`` rise.

    Args:
        key: ``share``, ``group`` or ``start``.
        kind: `float` for numbers, `str` for names.
        first: value of the default, a list of one uniform sampler.
        meaning: rule of the values, for help and messages.
    """

    def check(value: Any, where: str) -> list[dict[str, Any]]:
        demand(isinstance(value, (list, tuple)) and value, where, repr(value), "a list of samplers, one or more")
        components = [checked_density(item, f"{where}[{number}]", key) for number, item in enumerate(value)]
        values = [component[key] for component in components]
        for item in values:
            is_number = isinstance(item, (int, float)) and not isinstance(item, bool) and item >= 0
            demand(is_number or kind is not float, f"{where}.{key}", repr(item), "a number, 0 or more")
            demand(isinstance(item, str) or kind is not str, f"{where}.{key}", repr(item), "a text")
        if key == "start":
            demand(values == sorted(values), f"{where}.{key}", values, meaning)
        if key == "share":
            demand(sum(values) > 0, f"{where}.share", values, "numbers of which one is above 0")
        else:
            demand(len({*map(str, values)}) == len(values), f"{where}.{key}", values, meaning)
        return components

    help = f"samplers with options, each with its {key}: {meaning}"
    return option([{"name": "uniform", key: first}], help, component=check)


class Composed(FixedDensity):
    """Base of samplers made of other densities, `components`: `Transformed` has one, `Combined` several.

    Each component keeps its floor. Draws need the context of this sampler and of the components.
    """

    def __init__(self, options: Any, schedule: NoiseSchedule, seed: int = 0):
        super().__init__(options, schedule, seed)
        self.components: list[FixedDensity] = [
            SAMPLERS.build(name, values, schedule, seed) for name, values in self.declared_components(options)
        ]
        self.per_batch = any(component.per_batch for component in self.components)
        inner = [name for component in self.components for name in component.context_names]
        self.context_names = tuple(dict.fromkeys([*self.context_names, *inner]))
        self.checked_steps = tuple({step for component in self.components for step in component.checked_steps})

    @classmethod
    def declared_components(cls, options: Any) -> list[tuple[str, dict[str, Any]]]:
        """Return names and options of the components."""
        raise NotImplementedError

    @classmethod
    def required_context(cls, options: Any) -> set[str]:
        """Return the context that the components require."""
        required: set[str] = set()
        for name, values in cls.declared_components(options):
            required |= SAMPLERS[name].component.required_context(SAMPLERS.parse(name, values))
        return required

    def check_context(self, context: Mapping[str, Any]) -> None:
        """Check the context of the components."""
        for component in self.components:
            component.check_context(context)

    def uniforms(self, coordinates: RandomCoordinates) -> Any:
        """Return uniform numbers; with ``per: batch`` all numbers of a batch select one component."""
        uniform = super().uniforms(coordinates)
        return self.select_component_with_floor(uniform, coordinates) if self.per_batch else uniform

    def select_component_with_floor(self, uniform: Any, coordinates: RandomCoordinates) -> Any:
        """Apply `select_component` to the uniform numbers that do not draw from the floor, see `draw_from_uniform`."""
        if not self.floor:
            return self.select_component(uniform, coordinates)
        rest = (uniform - self.floor).clip(0.0, None) / (1 - self.floor)
        mapped = self.floor + (1 - self.floor) * self.select_component(rest, coordinates)
        return namespace(uniform).where(uniform < self.floor, uniform, mapped)

    def select_component(self, uniform: Any, coordinates: RandomCoordinates) -> Any:
        """Map uniform numbers into the interval for which `map_uniform` draws from the component of the batch."""
        raise NotImplementedError


class Transformed(Composed):
    """Base of samplers that transform one density, `base`."""

    density: Any = density_option()

    def __init__(self, options: Any, schedule: NoiseSchedule, seed: int = 0):
        super().__init__(options, schedule, seed)
        (self.base,) = self.components

    @classmethod
    def declared_components(cls, options: Any) -> list[tuple[str, dict[str, Any]]]:
        """Return name and options of the density."""
        return [split(options.density)]

    def select_component(self, uniform: Any, coordinates: RandomCoordinates) -> Any:
        """Map uniform numbers so that `base` draws from the component of the batch."""
        assert isinstance(self.base, Composed)
        return self.base.select_component_with_floor(uniform, coordinates)

    def to_process(self, v: Values, **context: Any) -> Values:
        """Map fractions of the density to fractions of the process, without decreasing, elementwise."""
        raise NotImplementedError

    def from_process(self, u: Values, **context: Any) -> Values:
        """Map fractions of the process to fractions of the density, the inverse of `to_process`, elementwise."""
        raise NotImplementedError

    def cdf(self, u: Values, **context: Any) -> Values:
        """Return the distribution function of the density at the fraction before the map."""
        return self.base.cdf_with_floor(self.from_process(u, **context), **context)

    def quantile(self, p: Values, **context: Any) -> Values:
        """Return the quantile of the density, its floor included, after the map."""
        return self.to_process(self.base.quantile_with_floor(p, **context), **context)

    def map_uniform(self, uniform: Values, **context: Any) -> Values:
        """Map draws of the density."""
        return self.to_process(self.base.draw_from_uniform(uniform, **context), **context)

    def has_mass(self, low: float, high: float) -> bool:
        """Return True if the density has mass between the fractions before the map."""
        first, last = self.from_process(np.array([low, high])).tolist()
        return bool(self.floor) or (first < last and self.base.has_mass(first, last))


@sampler("range", "a density cut to, or scaled into, an interval of the process")
class Range(Transformed):
    r"""Density between two fractions of the process: cut off outside of them, or scaled into them.

    $$p(u) = \frac{q(u)}{\int_{\mathrm{low}}^{\mathrm{high}} q(v) \, dv} \text{ on } \mathrm{low} \le u < \mathrm{high},
    \quad \text{or} \quad p(u) = \frac{1}{\mathrm{high} - \mathrm{low}} \,
    q\left(\frac{u - \mathrm{low}}{\mathrm{high} - \mathrm{low}}\right)$$

    Raises:
        ConfigError: the density has no mass in the interval.
    """

    low: float = option(0.0, "t/T where the interval begins", ge=0, lt=1)
    high: float = option(1.0, "t/T where the interval ends", gt=0, le=1)
    cut: bool = option(True, "true: cut off what lies outside; false: scale the whole density into the interval")

    def __init__(self, options: Any, schedule: NoiseSchedule, seed: int = 0):
        super().__init__(options, schedule, seed)
        if self.cut:
            allowed = "an interval where the density has mass: in each group and at every step"
            has_mass = self.base.has_mass(self.low, self.high)
            demand(has_mass, "low and high", f"{self.low:g} and {self.high:g}", allowed)
            allowed = "false for a mixture with per: batch"
            demand(not self.per_batch, "cut", "true", allowed)
        if self.requires_context and self.importance and not self.floor:  # otherwise `build_pair` checks p(t)
            allowed = "false with a range, or a floor above 0"
            demand((self.low, self.high) == (0, 1), "importance", "true", allowed)

    @staticmethod
    def check(options: Any) -> None:
        """Reject an empty interval."""
        demand(options.low < options.high, "low and high", f"{options.low} and {options.high}", "low < high")

    def to_process(self, v: Values, **context: Any) -> Values:
        """Scale fractions of [0, 1] into the interval."""
        return self.low + (self.high - self.low) * v

    def from_process(self, u: Values, **context: Any) -> Values:
        """Scale the interval to [0, 1]; fractions outside of it become 0 or 1."""
        return ((u - self.low) / (self.high - self.low)).clip(0, 1)

    def cdf(self, u: Values, **context: Any) -> Values:
        """Return the distribution function of the density, cut off or scaled."""
        if not self.cut:
            return super().cdf(u, **context)
        first, last = self._ends(u, **context)
        return (self.base.cdf_with_floor(u.clip(self.low, self.high), **context) - first) / (last - first)

    def quantile(self, p: Values, **context: Any) -> Values:
        """Return the quantile of the density between the probabilities of the ends, or the scaled quantile."""
        if not self.cut:
            return super().quantile(p, **context)
        first, last = self._ends(p, **context)
        return self.base.quantile_with_floor(first + (last - first) * p, **context).clip(self.low, self.high)

    def map_uniform(self, uniform: Values, **context: Any) -> Values:
        """Draw from the scaled density; with `cut` from the truncated quantile function."""
        return self.quantile(uniform, **context) if self.cut else super().map_uniform(uniform, **context)

    def has_mass(self, low: float, high: float) -> bool:
        """Return True if the density has mass in the part of the interval between two fractions."""
        if not self.cut:
            return super().has_mass(low, high)
        first, last = max(low, self.low), min(high, self.high)
        return bool(self.floor) or (first < last and self.base.has_mass(first, last))

    def _ends(self, like: Values, **context: Any) -> list[Values]:
        """Return the probabilities of the density below the two ends of the interval, in the kind of `like`."""
        return [self.base.cdf_with_floor(0 * like + end, **context) for end in (self.low, self.high)]


@sampler("shift", "a density shifted by a number, or by resolution (SD3, Flux)")
class Shift(Transformed):
    r"""Density q of u = t/T, shifted by alpha: a number, or a function of the images' size.

    $$u = \frac{\alpha v}{1 + (\alpha - 1) v}, \qquad v \sim q$$

    ``constant``: alpha itself (SD3, section 5.3.2). ``exponential``: alpha = e^mu, mu linear through (`first`, `low`)
    and (`last`, `high`) in the number of tokens (Flux). ``linear``: alpha linear through these points, times the square
    root of the number of frames, if the call passes it (Open-Sora 2). ``root``: alpha times the square root of tokens
    over `last`, at least `low`.
    """

    law: str = option(
        "constant", "how alpha depends on the number of tokens", choices=("constant", "exponential", "linear", "root")
    )
    alpha: float = option(3.0, "for constant and root; above 1 it prefers noise", gt=0)
    first: float = option(256.0, "tokens at `low`", gt=0)
    last: float = option(4096.0, "tokens at `high`; for root the tokens where alpha is `alpha`", gt=0)
    low: float = option(0.5, "mu (exponential) or alpha (linear) at `first` tokens; the least alpha (root)")
    high: float = option(1.15, "mu (exponential) or alpha (linear) at `last` tokens")

    context_names = ("tokens", "frames")

    @staticmethod
    def check(options: Any) -> None:
        """Reject lines that are undefined, or whose alpha is not positive.

        Lines are those of exponential and linear. The line of linear must also not fall.
        """
        first, last, low, high = options.first, options.last, options.low, options.high
        if options.law in ("exponential", "linear"):
            demand(first != last, "first and last", f"{first:g} and {last:g}", "different numbers")
        if options.law == "linear":
            slope = (high - low) / (last - first)
            positive = slope >= 0 and low - slope * first > 0
            allowed = "an alpha that does not fall with the number of tokens and is above 0 for any number"
            demand(positive, "low and high", f"{low:g} and {high:g}", allowed)

    @classmethod
    def required_context(cls, options: Any) -> set[str]:
        """Return ``tokens``, unless alpha is constant, and the context of the density."""
        return super().required_context(options) | (set() if options.law == "constant" else {"tokens"})

    def shift(self, tokens: Any = None, frames: Any = None, **context: Any) -> Any:
        """Return alpha for images of `tokens` tokens and `frames` frames: a number, or a tensor if `tokens` is one.

        Frames change only the result of law ``linear``; None counts as 1 frame.

        Raises:
            ConfigError: the number of tokens is needed and missing, or not positive.
        """
        if self.law == "constant":
            return self.alpha
        tokens = required("tokens", tokens, "shift")
        if isinstance(tokens, (int, float)):
            demand(tokens > 0, "shift: tokens", tokens, "a number above 0")
        if self.law == "root":
            alpha = self.alpha * (tokens / self.last) ** 0.5
            return max(alpha, self.low) if isinstance(alpha, float) else alpha.clip(self.low, None)
        line = self.low + (self.high - self.low) * (tokens - self.first) / (self.last - self.first)
        if self.law == "exponential":
            return math.e**line
        return line * (1 if frames is None else frames) ** 0.5

    def to_process(self, v: Values, **context: Any) -> Values:
        """Apply the shift."""
        alpha = self.shift(**context)
        u: Values = alpha * v / (1 + (alpha - 1) * v)
        return u

    def from_process(self, u: Values, **context: Any) -> Values:
        """Invert the shift."""
        alpha = self.shift(**context)
        v: Values = u / (alpha - (alpha - 1) * u)
        return v

    def has_mass(self, low: float, high: float) -> bool:
        """Return True if the density has mass between two fractions, or if the shift depends on the sample."""
        return self.law != "constant" or super().has_mass(low, high)


@sampler("warp", "a density of ranks in a logit-normal distribution (ai-toolkit)")
class Warp(Transformed):
    r"""Quantile of a logit-normal distribution, at a probability v that follows the density q.

    $$u = \frac{1}{1 + e^{-(m + s \Phi^{-1}(v))}}, \qquad v \sim q$$

    ai-toolkit draws ranks in a sorted list of logit-normal times.
    """

    m: float = option(0.0, "mean of ln(u/(1 - u)) for uniform ranks; above 0 noise")
    s: float = option(1.0, "its standard deviation", gt=0)

    def to_process(self, v: Values, **context: Any) -> Values:
        """Return the quantiles of the logit-normal distribution."""
        return sigmoid(self.m + self.s * normal_quantile(v))

    def from_process(self, u: Values, **context: Any) -> Values:
        """Return the probabilities below u in the logit-normal distribution."""
        return normal_cdf((logit(u) - self.m) / self.s)


class Combined(Composed):
    """Base of samplers that combine several densities, each with a share of the draws.

    A uniform number picks the component by cumulative share and, rescaled to [0, 1) within it, draws from it. Even
    points are therefore even within every component. `by_group` is the exception: the points of a group's samples are
    a random part of the even points of the batch.
    """

    parts: Any
    key: str  # of the numbers or names of the components

    def __init__(self, options: Any, schedule: NoiseSchedule, seed: int = 0):
        super().__init__(options, schedule, seed)
        self.values = [component[self.key] for component in self.parts]
        got, allowed = "a mixture with per: batch", "densities; set per: batch for the whole sampler alone"
        demand(not any(component.per_batch for component in self.components), "parts", got, allowed)

    @classmethod
    def declared_components(cls, options: Any) -> list[tuple[str, dict[str, Any]]]:
        """Return names and options of the components, without the entry of `key`, such as the share."""
        return [split({key: value for key, value in part.items() if key != cls.key}) for part in options.parts]

    def shares(self, **context: Any) -> list[Any]:
        """Return the share of each component: numbers, or tensors that broadcast with draws; they sum to 1."""
        raise NotImplementedError

    def cdf(self, u: Values, **context: Any) -> Values:
        """Return the sum of the components' distribution functions, floors included, times their shares."""
        below = 0.0 * u
        for share, component in zip(self.shares(**context), self.components):
            below = below + share * component.cdf_with_floor(u, **context)
        return below

    def quantile(self, p: Values, **context: Any) -> Values:
        """Return the inverse of `cdf`, by bisection."""
        return bisect(lambda u: self.cdf(u, **context), p)

    def select_component(self, uniform: Any, coordinates: RandomCoordinates) -> Any:
        """Map uniform numbers into the share of one component, which is selected for the whole batch."""
        choice, below = coordinates.uniform("part", sample_indices=range(1)), 0.0
        for share in self.shares(**coordinates.arguments(self.context_names)):
            selected = (choice >= below) & (choice < below + share)
            # into the share of the selected component, so that `map_uniform` picks that component
            uniform = namespace(uniform).where(selected, below + share * uniform.clip(0, 1), uniform)
            below += share
        return uniform

    def has_mass(self, low: float, high: float) -> bool:
        """Return True if every component has mass between two fractions: a draw may come from any one alone."""
        return bool(self.floor) or all(component.has_mass(low, high) for component in self.components)

    def map_uniform(self, uniform: Values, **context: Any) -> Values:
        """Pick a component by cumulative share, then rescale the number to [0, 1) within the share."""
        draws, below = 0.0 * uniform, 0.0
        for component, share in zip(self.components, self.shares(**context)):
            inside = ((uniform - below) / (share + 1e-30)).clip(0.0, 1.0 - 2**-53)  # shares may be float32 zeros
            draws = namespace(uniform).where(uniform >= below, component.draw_from_uniform(inside, **context), draws)
            below = below + share
        return draws


@sampler("mixture", "several densities, each with its share")
class Mixture(Combined):
    r"""Mixture of densities, each with its share of the draws; with ``per: batch`` a whole batch is drawn from one.

    $$p(u) = \frac{\sum_i \mathrm{share}_i \, p_i(u)}{\sum_i \mathrm{share}_i}$$
    """

    parts: Any = components_option("share", float, 1.0, "fraction of the draws, any sum above 0")
    per: str = option("sample", "what is drawn from one component", choices=("sample", "batch"))
    key = "share"

    def __init__(self, options: Any, schedule: NoiseSchedule, seed: int = 0):
        super().__init__(options, schedule, seed)
        self.per_batch = self.per == "batch"

    def shares(self, **context: Any) -> list[Any]:
        """Return the shares over their sum."""
        return [value / sum(self.values) for value in self.values]

    def has_mass(self, low: float, high: float) -> bool:
        """Return True if a component with a share has mass; with ``per: batch``, if all of them do."""
        components = [component for component, share in zip(self.components, self.values) if share]
        has_mass = [component.has_mass(low, high) for component in components]
        return bool(self.floor) or (all(has_mass) if self.per_batch else any(has_mass))


@sampler("by_group", "a density for each group of the data set")
class ByGroup(Combined):
    r"""Density for each group of the data set; a call passes ``group``: a name, or numbers of groups (n,).

    $$p(u \mid \mathrm{group} = g) = p_g(u)$$

    Numbers of groups are the positions of the components, from 0. Numbers on a GPU or in a compiled graph are not
    checked, because reading them needs a synchronisation. If no group has the number, the draw is at the noise end.
    """

    parts: Any = components_option("group", str, "all", "names, each once")
    key = "group"
    context_names = ("group",)

    @classmethod
    def required_context(cls, options: Any) -> set[str]:
        """Return ``group`` if there are several, and the context of the components."""
        return super().required_context(options) | ({"group"} if len(options.parts) > 1 else set())

    def shares(self, *, group: Any = None, **context: Any) -> list[Any]:
        """Return the share of each component: 1 for the component of the sample's group, 0 for the others.

        The share is 1 for any group if there is one component.

        Raises:
            ConfigError: the group is missing, or there is no component of its name or number.
        """
        if len(self.components) == 1:
            return [1.0]
        group = required("group", group, "by_group")
        self._check_group(group)
        if isinstance(group, str):
            group = self.values.index(group)
        if isinstance(group, (list, tuple)):
            group = np.asarray(group)
        members = [group == number for number in range(len(self.components))]
        if isinstance(group, np.ndarray):
            return [item.astype(np.float64) for item in members]
        return [float(item) if isinstance(item, (bool, np.bool_)) else item.double() for item in members]

    def cdf(self, u: Values, *, group: Any = None, **context: Any) -> Values:
        """Return the distribution function of each element's group."""
        return super().cdf(u, group=_in_kind_of(group, u), **context)

    def map_uniform(self, uniform: Values, *, group: Any = None, **context: Any) -> Values:
        """Draw each element from the component of its group."""
        return super().map_uniform(uniform, group=_in_kind_of(group, uniform), **context)

    def check_context(self, context: Mapping[str, Any]) -> None:
        """Reject groups that do not exist, and check the context of the components."""
        super().check_context(context)
        if len(self.components) > 1 and context.get("group") is not None:
            self._check_group(context["group"])

    def _check_group(self, group: Any) -> None:
        """Raise ConfigError if there is no component of a name or number; numbers on a GPU are not read."""
        count = len(self.components)
        allowed = f"{', '.join(self.values)}, or integers from 0 to {count - 1}"
        if isinstance(group, str):
            demand(group in self.values, "group", repr(group), allowed)
            return
        if isinstance(group, int):
            demand(0 <= group < count, "group", group, allowed)
            return
        if torch.compiler.is_compiling():
            return
        if isinstance(group, torch.Tensor):
            demand(not group.is_floating_point(), "group", f"numbers of type {group.dtype}", allowed)
            if group.device.type != "cpu":
                return
        numbers = np.asarray(group).ravel()
        demand(numbers.dtype.kind in "iub" or not numbers.size, "group", group, allowed)
        unknown = numbers[(numbers < 0) | (numbers >= count)]
        demand(not unknown.size, "group", ", ".join(map(str, unknown[:3])), allowed)


def _in_kind_of(group: Any, values: Values) -> Any:
    """Convert numbers of groups (n,) to the kind and device of `values`; a name, one number or None is unchanged."""
    if group is None or isinstance(group, (str, int)):
        return group
    numbers = group if isinstance(group, torch.Tensor) else np.asarray(group)
    return same_kind(numbers, values)


@sampler("schedule", "densities one after the other over training")
class Schedule(Combined):
    r"""Densities over training: each from its `start` on, at once or blended over `ramp` before the next begins.

    $$p_k(u) = \sum_i b_i(k) \, (1 - b_{i + 1}(k)) \, p_i(u), \qquad
    b_i(k) = \min\left(1, \max\left(0, \, \frac{k - \mathrm{start}_i}{\mathrm{ramp}} + 1\right)\right)$$

    Starts count steps, or with ``of: progress`` fractions of the training run, which a call passes as ``progress``.
    """

    parts: Any = components_option("start", float, 0, "numbers that rise")
    of: str = option("steps", "what starts and ramp count", choices=("steps", "progress"))
    ramp: float = option(0.0, "how long a density is blended in before its start", ge=0)
    key = "start"
    context_names = ("step", "progress")

    def __init__(self, options: Any, schedule: NoiseSchedule, seed: int = 0):
        super().__init__(options, schedule, seed)
        if self.of == "steps":
            # each density is alone at its start: the next one is not blended in yet
            self.checked_steps = tuple({*self.checked_steps, *self.values})

    @staticmethod
    def check(options: Any) -> None:
        """Reject a ramp that is longer than the time between the starts of two densities that are blended in."""
        starts = [part["start"] for part in options.parts[1:]]  # the first density is there from the beginning
        gap = min((later - earlier for earlier, later in pairwise(starts)), default=math.inf)
        fits = options.ramp <= gap * (1 + 1e-9)  # decimal fractions are not exact
        demand(fits, "ramp", options.ramp, f"at most {gap:g}, the least difference of starts after the first")

    @classmethod
    def required_context(cls, options: Any) -> set[str]:
        """Return ``progress`` if starts are fractions, and the context of the components."""
        return super().required_context(options) | ({"progress"} if options.of == "progress" else set())

    def shares(self, *, step: Any = 0, progress: Any = None, **context: Any) -> list[Any]:
        """Return the share of each component at a step, or at `progress` if starts are fractions; see the class.

        Raises:
            ConfigError: starts are fractions, and `progress` is missing.
        """
        elapsed = step if self.of == "steps" else required("progress", progress, "schedule")
        onsets = [1.0]  # b_i of the class's formula: rises from 0 to 1 during `ramp`, and is 1 from start_i on
        for start in self.values[1:]:
            onset = (elapsed - start) / self.ramp + 1 if self.ramp else 1.0 * (elapsed >= start)
            onsets.append(min(max(onset, 0.0), 1.0) if isinstance(onset, (int, float)) else onset.clip(0.0, 1.0))
        # component i fades out while component i + 1 is blended in
        return [onset * (1 - next_onset) for onset, next_onset in zip(onsets, [*onsets[1:], 0.0])]


@sampler("table", "a density by tabulated values: cells, lines or a spline")
class Table(FixedDensity):
    r"""Density by numbers evenly spread over the process: of equal cells, or knots with lines or a spline between.

    $$p(u) = \frac{f(u)}{\int_0^1 f(v) \, dv}, \qquad f \text{ through the numbers}$$
    """

    values: list[float] = option([1.0, 1.0], "relative densities, t/T from 0 to 1")
    file: str | None = option(None, "a file of the values instead, comma or line separated")
    between: str = option(
        "lines",
        "interpolation: values of equal cells, or knots of lines or a spline",
        choices=("cells", "lines", "spline"),
    )

    def __init__(self, options: Any, schedule: NoiseSchedule, seed: int = 0):
        super().__init__(options, schedule, seed)
        count = 64 * schedule.timesteps
        below = np.concatenate([[0.0], evaluate_table(options, (np.arange(count) + 0.5) / count).cumsum()])
        self._nodes = Tables(below / below[-1], np.arange(count + 1) / count)

    @staticmethod
    def check(options: Any) -> None:
        """Reject a single knot."""
        enough = options.file or options.between == "cells" or len(options.values) > 1
        demand(enough, "values", options.values, "two knots or more")

    def cdf(self, u: Values, **context: Any) -> Values:
        """Return the distribution function, interpolated between the nodes."""
        return interp(u, *self.nodes(u)[::-1])


def evaluate_table(options: Any, positions: Array) -> Array:
    """Evaluate the numbers of a table or weighting by table at positions in [0, 1], elementwise.

    The numbers are `options.values`, or those in `options.file`. `options.between` selects how they are read: as values
    of equal cells, or as evenly spread knots of straight lines or of a spline. A file has priority over the values.

    Raises:
        ConfigError: there are too few numbers, none is above 0, or some are below 0 or not finite.
    """
    values = np.asarray(options.values, np.float64)
    if options.file:
        try:
            values = np.loadtxt(Path(options.file), delimiter=",", ndmin=1).ravel()
        except (OSError, ValueError) as error:
            raise rejection("file", options.file, f"a file of numbers ({error})") from None
    least = 1 if options.between == "cells" else 2
    valid = len(values) >= least and np.isfinite(values).all() and values.min() >= 0 and values.max() > 0
    if not valid:
        got = f"{len(values)} numbers from {min(values, default=0):g} to {max(values, default=0):g}"
        raise rejection("values", got, f"{least} or more, none below 0 and one above")
    if options.between == "cells":
        return np.asarray(values[(positions * len(values)).astype(np.int64).clip(0, len(values) - 1)])
    if options.between == "lines":
        return np.asarray(np.interp(positions, np.linspace(0, 1, len(values)), values))
    return spline(positions, values)


@sampler("listed", "only timesteps of a list")
class Listed(FixedDensity):
    r"""Times of a list, as fractions of the process, all equally often; with ``in_turn`` one after the other.

    $$p(u) = \frac{1}{n} \sum_{i=1}^n \delta(u - u_i)$$
    """

    times: list[float] = option([1.0, 0.75, 0.5, 0.25], "fractions t/T of the process")
    in_turn: bool = option(False, "true: sample after sample takes the next one")

    def __init__(self, options: Any, schedule: NoiseSchedule, seed: int = 0):
        super().__init__(options, schedule, seed)
        valid = self.times and min(self.times) >= 0 and max(self.times) <= 1
        demand(valid, "times", self.times, "one or more numbers from 0 to 1")
        self._times = Tables(np.minimum(np.sort(self.times), 1 - 2**-53))

    @staticmethod
    def check(options: Any) -> None:
        """Reject a floor with times in turn."""
        allowed = "0 with in_turn, which leaves nothing to chance"
        demand(not (options.in_turn and options.floor), "floor", options.floor, allowed)

    def uniforms(self, coordinates: RandomCoordinates) -> Any:
        """Return uniform numbers; with ``in_turn`` each of them selects the next time of the list.

        The list continues over the times of a sample, the samples and the steps.
        """
        if not self.in_turn:
            return super().uniforms(coordinates)
        shape, before = coordinates.times_shape, coordinates.earlier_samples
        count = math.prod(shape)  # times of one sample
        sample = before + coordinates.index_tensor().reshape(-1, *[1] * len(shape))
        number = sample * count + torch.arange(count, device=coordinates.device).view(shape)
        return ((number % len(self.times) + 0.5) / len(self.times)).double()

    def cdf(self, u: Values, **context: Any) -> Values:
        """Return the distribution function, a step at each time of the list."""
        (times,) = self._times.like(u)
        return namespace(u).searchsorted(times, u, side="left") / len(times)

    def quantile(self, p: Values, **context: Any) -> Values:
        """Return the time of the list that a probability selects."""
        (times,) = self._times.like(p)
        return times[integers(namespace(p).floor(p * len(times)).clip(0, len(times) - 1))]
