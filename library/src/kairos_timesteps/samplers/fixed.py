"""Samplers with a fixed density of u = t/T, 0 the image and 1 noise, given by its distribution function or its inverse.

Those that are densities of the log signal-to-noise ratio are in `laws`, those made of others in `combined`.
"""

import math
from typing import Any

import numpy as np

from kairos_timesteps.base import NOTHING, Sampler
from kairos_timesteps.coordinates import Place
from kairos_timesteps.diffusion.schedule import NoiseSchedule
from kairos_timesteps.incomplete_beta import beta_cdf
from kairos_timesteps.numeric import Array, Values, interp, logit, normal_cdf, normal_quantile, of, sigmoid


class Uniform(Sampler):
    r"""Every timestep alike (Ho et al. 2020), or those of a range: start ... end - 1, and no others.

    $$p(t) = \frac{1}{\mathrm{end} - \mathrm{start}}, \qquad \mathrm{start} \le t < \mathrm{end}$$

    Raises:
        ValueError: the range is not one of the process.
    """

    def __init__(self, options: Any, schedule: NoiseSchedule, seed: int = 0):
        super().__init__(options, schedule, seed)
        options.check_fits(schedule.timesteps, schedule.name)
        self._end = schedule.timesteps if options.end is None else options.end
        self._start = options.start / schedule.timesteps
        self._width = (self._end - options.start) / schedule.timesteps

    def cdf(self, fraction: Values, place: Place = NOTHING) -> Values:
        """Linear within the range."""
        return ((fraction - self._start) / self._width).clip(0.0, 1.0)

    def masses(self, x0: Any = None, place: Place = NOTHING) -> Array:
        """Exactly 0 outside of the range."""
        t = np.arange(self.schedule.timesteps)
        return np.where((t >= self.options.start) & (t < self._end), 1 / (self._end - self.options.start), 0.0)

    def quantile(self, probability: Values, place: Place = NOTHING) -> Values:
        """Linear."""
        return self._start + self._width * probability


class LogNormal(Sampler):
    r"""The logit-normal density of Esser et al. 2024 (Kim et al. 2025, appendix 10), u = t/T.

    $$p(u) = \frac{1}{s \sqrt{2 \pi} \, u (1 - u)} \exp\left(-\frac{(\ln\frac{u}{1 - u} - m)^2}{2 s^2}\right)$$

    It never reaches the ends of the process. With `low` and `high` the normal's quantiles below and above are cut off
    and what is left is stretched to the whole process (Sana).
    """

    def __init__(self, options: Any, schedule: NoiseSchedule, seed: int = 0):
        super().__init__(options, schedule, seed)
        self._ends = 0.0, 1.0
        if (options.low, options.high) != (0, 1):
            low, high = self._logits(np.array([options.low, options.high]))
            self._ends = float(sigmoid(low)), float(sigmoid(high))

    def _logits(self, probability: Values) -> Values:
        return self.options.m + self.options.s * normal_quantile(probability)

    def cdf(self, fraction: Values, place: Place = NOTHING) -> Values:
        """Phi((logit(fraction) - m) / s)."""
        (first, last), options = self._ends, self.options
        below = normal_cdf((logit(first + (last - first) * fraction) - options.m) / options.s)
        return (below - options.low) / (options.high - options.low)

    def quantile(self, probability: Values, place: Place = NOTHING) -> Values:
        """sigmoid(m + s Phi^-1(probability))."""
        (first, last), options = self._ends, self.options
        drawn = sigmoid(self._logits(options.low + (options.high - options.low) * probability))
        return (drawn - first) / (last - first)


class Mode(Sampler):
    r"""Mode sampling of SD3 (Esser et al. 2024, eq. 19): u = t/T is this function of a uniform v.

    $$u = 1 - v - m \left(\cos^2\frac{\pi v}{2} - 1 + v\right), \qquad v \sim U(0, 1)$$

    Monotone for -1 <= m <= 2/(pi - 2); m > 0 prefers the middle, m < 0 the ends.
    """

    def quantile(self, probability: Values, place: Place = NOTHING) -> Values:
        """The formula at u = 1 - probability: it falls with u."""
        bump = of(probability).cos(math.pi / 2 * (1 - probability)) ** 2 - probability
        return (probability - self.options.m * bump).clip(0.0, 1.0)


class Beta(Sampler):
    r"""u = t/T of a beta distribution (B-TTDM, Zheng et al. 2024; a = 0.8, b = 1 recommended).

    $$p(u) = \frac{u^{a - 1} (1 - u)^{b - 1}}{B(a, b)}$$

    With b = 1 or a = 1 the inverse is a power.
    """

    def cdf(self, fraction: Values, place: Place = NOTHING) -> Values:
        """The regularised incomplete beta function; of a tensor by the nodes, exact at the borders of timesteps."""
        if of(fraction) is np:
            return beta_cdf(fraction, np.array(self.options.a), np.array(self.options.b))
        return interp(fraction, *self.nodes(fraction)[::-1])

    def quantile(self, probability: Values, place: Place = NOTHING) -> Values:
        """Its inverse."""
        if self.options.b == 1:
            return probability ** (1 / self.options.a)
        if self.options.a == 1:
            return 1 - (1 - probability) ** (1 / self.options.b)
        return super().quantile(probability)


class CosMap(Sampler):
    r"""The angle of a linear flow is uniform (SD3, Esser et al. 2024), u = t/T.

    $$u = 1 - \frac{1}{\tan(\pi v / 2) + 1}, \quad v \sim U(0, 1) \qquad p(u) = \frac{2}{\pi (1 - 2 u + 2 u^2)}$$
    """

    def cdf(self, fraction: Values, place: Place = NOTHING) -> Values:
        """2/pi arctan(t/(1 - t)), without the division."""
        return 2 / math.pi * of(fraction).arctan2(fraction, 1 - fraction)

    def quantile(self, probability: Values, place: Place = NOTHING) -> Values:
        """sin/(sin + cos): the formula without an infinite tangent."""
        angle = math.pi / 2 * probability
        sine, cosine = of(angle).sin(angle), of(angle).cos(angle)
        return sine / (sine + cosine)


class Parabola(Sampler):
    r"""An inverted parabola of u = t/T (OneTrainer; Chroma: 7.7 and 0).

    $$p(u) \propto \max\left(0, \; 2 - \mathrm{weight} \, (u - \tfrac{1}{2} - \mathrm{bias})^2\right)$$
    """

    def cdf(self, fraction: Values, place: Place = NOTHING) -> Values:
        """The cubic between the parabola's roots."""
        centre, weight = 0.5 + self.options.bias, self.options.weight
        reach = math.sqrt(2 / weight) if weight else math.inf
        low, high = max(0.0, centre - reach), min(1.0, centre + reach)

        def area(x: Any) -> Any:
            return 2 * x - weight * (x - centre) ** 3 / 3

        return (area(fraction.clip(low, high)) - area(low)) / (area(high) - area(low))


class Slope(Sampler):
    r"""A sigmoid of u = t/T (OneTrainer).

    $$p(u) \propto \frac{1}{1 + \exp\left(-\mathrm{weight} \, (u - \tfrac{1}{2} - \mathrm{bias})\right)}$$
    """

    def cdf(self, fraction: Values, place: Place = NOTHING) -> Values:
        """Differences of softplus over the weight; of a weight of 0, the fraction itself.

        A falling density is computed as the mirror image of a rising one, which does not round to 0.
        """
        weight, bias = self.options.weight or 1e-9, self.options.bias
        if weight < 0:
            return 1 - self._rising(1 - fraction, -weight, -bias)
        return self._rising(fraction, weight, bias)

    def _rising(self, fraction: Values, weight: float, bias: float) -> Values:
        start = 1 / (1 + math.exp(weight * (0.5 + bias)))
        area = of(fraction).log1p(of(fraction).expm1(weight * fraction) * start)
        return area / math.log1p(math.expm1(weight) * start)


class UShape(Sampler):
    r"""The ends of u = t/T, more with a (Lee et al. 2024, rectified flow++).

    $$p(u) = \frac{a}{2 (e^a - 1)} \left(e^{a u} + e^{a (1 - u)}\right)$$
    """

    def cdf(self, fraction: Values, place: Place = NOTHING) -> Values:
        """1/2 + sinh(a (t - 1/2))/(2 sinh(a/2))."""
        a = self.options.a
        return 0.5 + of(fraction).sinh(a * (fraction - 0.5)) / (2 * math.sinh(a / 2))

    def quantile(self, probability: Values, place: Place = NOTHING) -> Values:
        """Its inverse."""
        a = self.options.a
        return 0.5 + of(probability).arcsinh((2 * probability - 1) * math.sinh(a / 2)) / a


class Clts(Sampler):
    r"""Curriculum of Xu et al. 2024 (CLTS): from uniform in u = t/T to a normal density, l rises with the step k.

    $$p_k(u) = (1 - l_k) + l_k \, N_{[0, 1]}(u; \, \mu, s^2), \qquad l_k = \min(k / \mathrm{length}, \, 1)$$

    No public code; the paper does not state s. The normal density is truncated to the process and l grows linearly over
    the first `length` steps, an option of its own: it does not follow the number of steps that a training is given.
    """

    moving = split = True

    def __init__(self, options: Any, schedule: NoiseSchedule, seed: int = 0):
        super().__init__(options, schedule, seed)
        self._low, self._high = normal_cdf((np.array([0.0, 1.0]) - options.mu) / options.s).tolist()

    def _progress(self, place: Place) -> Any:
        """The mixture's l at the place's step."""
        share = place.now / self.options.length
        return min(share, 1.0) if isinstance(share, float) else share.clip(None, 1.0)

    def cdf(self, fraction: Values, place: Place = NOTHING) -> Values:
        """The mixture at the place's step."""
        below = normal_cdf((fraction - self.options.mu) / self.options.s)
        truncated, progress = ((below - self._low) / (self._high - self._low)).clip(0.0, 1.0), self._progress(place)
        return (1 - progress) * fraction + progress * truncated

    def quantile(self, probability: Values, place: Place = NOTHING) -> Values:
        """A share 1 - l of the range goes to the uniform part, the rest to the normal one."""
        part = 1 - self._progress(place)
        uniform, rest = probability / (part + 1e-300), (probability - part).clip(0.0, None) / (1 - part + 1e-300)
        normal = self.options.mu + self.options.s * normal_quantile(self._low + rest * (self._high - self._low))
        return of(probability).where(probability < part, uniform, normal.clip(0.0, 1.0))
