"""Samplers made of others, or of numbers: a range, a shift, a mixture, a schedule over training, a table, a list."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from kairos_timesteps.base import NOTHING, Sampler
from kairos_timesteps.components import SAMPLERS
from kairos_timesteps.coordinates import Place
from kairos_timesteps.diffusion.schedule import NoiseSchedule
from kairos_timesteps.errors import ConfigError
from kairos_timesteps.numeric import Array, Values, bisect, interp, like, of, spline
from kairos_timesteps.registry import split


def _component(named: dict[str, Any], schedule: NoiseSchedule, seed: int, *extra: str) -> Sampler:
    """The sampler that a dictionary of name and options states, without the keys `extra`."""
    sampler: Sampler = SAMPLERS.build(*split({k: v for k, v in named.items() if k not in extra}), schedule, seed)
    return sampler


class OfOne(Sampler):
    """Base of samplers that change one density, `part`, whose uniform floor belongs to it."""

    def __init__(self, options: Any, schedule: NoiseSchedule, seed: int = 0):
        super().__init__(options, schedule, seed)
        self.part = _component(options.density, schedule, seed)
        self.moving, self.asks = self.part.moving, self.part.asks
        self.split = self.part.split or self.part.floor > 0  # `transform` draws the floor apart from the rest

    def uniforms(self, place: Place) -> Any:
        """Uniform numbers of this sampler; of a mixture with ``per: batch`` the mixture's."""
        per_batch = getattr(self.part.options, "per", "sample") == "batch"
        return self.part.uniforms(place) if per_batch else super().uniforms(place)

    def inverse(self, probability: Values, place: Place) -> Values:
        """Inverse of the part's distribution function, floor included; it does not fall with the probability."""
        if self.part.split or self.part.floor:
            return bisect(lambda u: self.part.cdf_with_floor(u, place), probability)
        return self.part.quantile(probability, place)


class Range(OfOne):
    r"""A density between two fractions of the process: what lies outside is cut off, or all of it is scaled into it.

    $$p(u) = \frac{q(u)}{\int_{\mathrm{low}}^{\mathrm{high}} q(v) \, dv} \text{ on } \mathrm{low} \le u < \mathrm{high},
    \quad \text{or} \quad p(u) = \frac{1}{\mathrm{high} - \mathrm{low}} \,
    q\left(\frac{u - \mathrm{low}}{\mathrm{high} - \mathrm{low}}\right)$$

    Raises:
        ValueError: nothing of the density is left.
    """

    def __init__(self, options: Any, schedule: NoiseSchedule, seed: int = 0):
        super().__init__(options, schedule, seed)
        self.split = self.split and not options.cut
        if options.cut and not self.asks:
            first, last = self.part.cdf_with_floor(np.array([options.low, options.high]))
            if not last > first:
                raise ValueError(
                    f"low and high: got {options.low:g} and {options.high:g}, where the density has no mass"
                )

    def cdf(self, fraction: Values, place: Place = NOTHING) -> Values:
        """Of the density, cut off or scaled."""
        low, high = self.options.low, self.options.high
        cdf = self.part.cdf_with_floor
        if not self.options.cut:
            return cdf(((fraction - low) / (high - low)).clip(0, 1), place)
        first, last = (cdf(0 * fraction + end, place) for end in (low, high))
        return (cdf(fraction.clip(low, high), place) - first) / (last - first)

    def quantile(self, probability: Values, place: Place = NOTHING) -> Values:
        """The inverse."""
        low, high = self.options.low, self.options.high
        if not self.options.cut:
            return low + (high - low) * self.part.transform(probability, place)
        first, last = (self.part.cdf_with_floor(0 * probability + end, place) for end in (low, high))
        return self.inverse(first + (last - first) * probability, place).clip(low, high)


class Shift(OfOne):
    r"""A density q of u = t/T shifted, alpha a number or a function of the images' size.

    $$u = \frac{\alpha v}{1 + (\alpha - 1) v}, \qquad v \sim q$$

    ``constant``: alpha itself (SD3, section 5.3.2). ``exponential``: alpha = e^mu, mu linear through (`first`, `low`)
    and (`last`, `high`) in the number of tokens (Flux). ``linear``: alpha itself so, times the root of the number of
    frames, where the call says it (Open-Sora 2). ``root``: alpha times the root of tokens over `last`, at least `low`.
    """

    def __init__(self, options: Any, schedule: NoiseSchedule, seed: int = 0):
        super().__init__(options, schedule, seed)
        self.asks = self.asks or options.law != "constant"

    def alpha(self, place: Place) -> Any:
        """The shift of each sample."""
        options = self.options
        if options.law == "constant":
            return options.alpha
        tokens = place.said("tokens", "shift")
        if isinstance(tokens, (int, float)) and not tokens > 0:
            raise ConfigError(f"shift: tokens: got {tokens}, allowed: a number above 0")
        if options.law == "root":
            alpha = options.alpha * (tokens / options.last) ** 0.5
            return max(alpha, options.low) if isinstance(alpha, float) else alpha.clip(options.low, None)
        line = options.low + (options.high - options.low) * (tokens - options.first) / (options.last - options.first)
        if options.law == "exponential":
            return math.e**line
        frames = 1 if place.context.get("frames") is None else place.said("frames", "shift")
        return line * frames**0.5

    def cdf(self, fraction: Values, place: Place = NOTHING) -> Values:
        """The density's, with the shift taken back."""
        alpha = self.alpha(place)
        return self.part.cdf_with_floor(fraction / (alpha - (alpha - 1) * fraction), place)

    def quantile(self, probability: Values, place: Place = NOTHING) -> Values:
        """The density's, shifted."""
        alpha, drawn = self.alpha(place), self.part.transform(probability, place)
        return alpha * drawn / (1 + (alpha - 1) * drawn)


class Mixture(Sampler):
    r"""Several densities, each with its share of the draws; with ``per: batch`` a whole batch is drawn from one.

    $$p(u) = \frac{\sum_i \mathrm{share}_i \, p_i(u)}{\sum_i \mathrm{share}_i}$$

    A number in [0, 1) chooses the part and, stretched, draws from it, so even points are even in every part.
    """

    split = True
    key = "share"

    def __init__(self, options: Any, schedule: NoiseSchedule, seed: int = 0):
        super().__init__(options, schedule, seed)
        self.parts = [_component(part, schedule, seed, self.key) for part in options.parts]
        self.numbers = [part[self.key] for part in options.parts]
        self.moving = self.moving or any(part.moving for part in self.parts)
        self.asks = self.asks or any(part.asks for part in self.parts)

    def shares(self, place: Place) -> list[Any]:
        """Of the parts, each a number or what broadcasts with the times of the place; they sum to 1."""
        return [number / sum(self.numbers) for number in self.numbers]

    def cdf(self, fraction: Values, place: Place = NOTHING) -> Values:
        """Sum of the components' distribution functions, floors included, times their shares."""
        shares = self.shares(place)
        return sum(share * part.cdf_with_floor(fraction, place) for part, share in zip(self.parts, shares))

    def uniforms(self, place: Place) -> Any:
        """Numbers whose first choice is one for the whole batch, where that is asked for."""
        drawn = super().uniforms(place)
        if getattr(self.options, "per", "sample") == "sample":
            return drawn
        one, below = place.uniform("part", index=range(1)), 0.0
        for share in self.shares(place):
            drawn = of(drawn).where((one >= below) & (one < below + share), below + share * drawn.clip(0, 1), drawn)
            below += share
        return drawn

    def quantile(self, probability: Values, place: Place = NOTHING) -> Values:
        """A draw: the number less the shares before its part, over the part's share."""
        drawn, below = 0.0 * probability, 0.0
        for part, share in zip(self.parts, self.shares(place)):
            inside = ((probability - below) / (share + 1e-300)).clip(0.0, 1.0 - 2**-53)
            drawn = of(probability).where(probability >= below, part.transform(inside, place), drawn)
            below = below + share
        return drawn


class ByGroup(Mixture):
    r"""A density for each group of the data set; the call says the samples' ``group``: a name, or numbers (n,).

    $$p(u \mid \mathrm{group} = g) = p_g(u)$$
    """

    key = "group"

    def __init__(self, options: Any, schedule: NoiseSchedule, seed: int = 0):
        super().__init__(options, schedule, seed)
        self.asks = self.asks or len(self.parts) > 1

    def shares(self, place: Place) -> list[Any]:
        """1 for the group's part; the only one of all samples."""
        if len(self.parts) == 1:
            return [1.0]
        group = place.said("group", "by_group")
        if isinstance(group, str):
            if group not in self.numbers:
                raise ConfigError(f"group: got {group!r}, allowed: {', '.join(map(str, self.numbers))}")
            group = self.numbers.index(group)
        chosen = [group == number for number in range(len(self.parts))]
        return [float(one) if isinstance(one, bool) else one.double() for one in chosen]


class Schedule(Mixture):
    r"""Densities over training: each from its `start` on, at once or blended over `ramp` before the next begins.

    $$p_k(u) = \sum_i b_i(k) \, (1 - b_{i + 1}(k)) \, p_i(u), \qquad
    b_i(k) = \min\left(1, \max\left(0, \, \frac{k - \mathrm{start}_i}{\mathrm{ramp}} + 1\right)\right)$$

    Starts count steps, or with ``of: progress`` shares of the training, which the call says as ``progress``.
    """

    key, moving = "start", True

    def __init__(self, options: Any, schedule: NoiseSchedule, seed: int = 0):
        super().__init__(options, schedule, seed)
        self.asks = self.asks or options.of == "progress"

    def shares(self, place: Place) -> list[Any]:
        """What the ramps at the place's step say."""
        now = place.now if self.options.of == "steps" else place.said("progress", "schedule")
        ramp = self.options.ramp
        begun = [1.0]
        for start in self.numbers[1:]:
            up = (now - start) / ramp + 1 if ramp else 1.0 * (now >= start)
            begun.append(min(max(up, 0.0), 1.0) if isinstance(up, (int, float)) else up.clip(0.0, 1.0))
        return [this * (1 - after) for this, after in zip(begun, [*begun[1:], 0.0])]


class Table(Sampler):
    r"""A density by numbers evenly spread over the process: of equal cells, or knots with lines or a spline between.

    $$p(u) = \frac{f(u)}{\int_0^1 f(v) \, dv}, \qquad f \text{ through the numbers}$$
    """

    def __init__(self, options: Any, schedule: NoiseSchedule, seed: int = 0):
        super().__init__(options, schedule, seed)
        count = 64 * schedule.timesteps
        below = np.concatenate([[0.0], tabled(options, (np.arange(count) + 0.5) / count).cumsum()])
        self._nodes = below / below[-1], np.arange(count + 1) / count

    def cdf(self, fraction: Values, place: Place = NOTHING) -> Values:
        """Of the nodes."""
        return interp(fraction, *self.nodes(fraction)[::-1])


def tabled(options: Any, places: Array) -> Array:
    """What a table of `values` or a `file` of numbers holds at places in [0, 1), elementwise.

    Raises:
        ValueError: it holds no numbers, or none above 0, or some below.
    """
    values = np.asarray(options.values, np.float64)
    if options.file:
        try:
            values = np.loadtxt(Path(options.file), delimiter=",", ndmin=1).ravel()
        except (OSError, ValueError) as error:
            raise ValueError(f"file: got {options.file}, allowed: a file of numbers ({error})") from None
    least = 1 if options.between == "cells" else 2
    if len(values) < least or not np.isfinite(values).all() or values.min() < 0 or values.max() <= 0:
        found = f"{len(values)} numbers from {min(values, default=0):g} to {max(values, default=0):g}"
        raise ValueError(f"values: got {found}, allowed: {least} or more, none below 0 and one above")
    if options.between == "cells":
        return np.asarray(values[(places * len(values)).astype(np.int64).clip(0, len(values) - 1)])
    if options.between == "lines":
        return np.asarray(np.interp(places, np.linspace(0, 1, len(values)), values))
    return spline(places, values)


class Listed(Sampler):
    r"""Times of a list alone, as fractions of the process, one as often as another; in turn with ``in_turn``.

    $$p(u) = \frac{1}{n} \sum_{i=1}^n \delta(u - u_i)$$
    """

    def __init__(self, options: Any, schedule: NoiseSchedule, seed: int = 0):
        super().__init__(options, schedule, seed)
        if not options.times or min(options.times) < 0 or max(options.times) > 1:
            raise ValueError(f"times: got {options.times}, allowed: one or more numbers from 0 to 1")
        self._times = np.minimum(np.sort(options.times), 1 - 2**-53)

    def uniforms(self, place: Place) -> Any:
        """With ``in_turn`` each time of each sample is the next of the list."""
        if not self.options.in_turn:
            return super().uniforms(place)
        import torch

        index = place.index
        if isinstance(index, range):
            index = torch.arange(index.start, index.stop, device=place.device)
        before = place.steps * place.total if place.before is None else place.before
        count = math.prod(place.shape)  # times of one sample
        sample = before + index.reshape(-1, *[1] * len(place.shape))
        number = sample * count + torch.arange(count, device=place.device).view(place.shape)
        return ((number % len(self._times) + 0.5) / len(self._times)).double()

    def cdf(self, fraction: Values, place: Place = NOTHING) -> Values:
        """Steps at the times."""
        return of(fraction).searchsorted(like(self._times, fraction), fraction, side="left") / len(self._times)

    def quantile(self, probability: Values, place: Place = NOTHING) -> Values:
        """The next time of the list."""
        number = of(probability).floor(probability * len(self._times)).clip(0, len(self._times) - 1)
        return like(self._times, probability)[number.astype(np.int64) if of(number) is np else number.long()]
