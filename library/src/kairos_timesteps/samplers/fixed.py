"""Samplers with a fixed density of u = t/T, 0 the image and 1 noise.

Densities of the log signal-to-noise ratio are in `log_snr`, those made of other densities in `combined`.
"""

import math
from typing import Any

import numpy as np

from kairos_timesteps.base import FixedDensity
from kairos_timesteps.diffusion.schedule import NoiseSchedule
from kairos_timesteps.errors import demand
from kairos_timesteps.incomplete_beta import beta_cdf
from kairos_timesteps.numeric import (
    Array,
    Values,
    interp,
    is_numpy,
    logit,
    namespace,
    normal_cdf,
    normal_quantile,
    sigmoid,
)
from kairos_timesteps.options import option
from kairos_timesteps.registry import sampler


@sampler("uniform", "uniform over all timesteps (DDPM), or a range of them")
class Uniform(FixedDensity):
    r"""Uniform timesteps (Ho et al. 2020), or those of a range: start ... end - 1, and no others.

    $$p(t) = \frac{1}{\mathrm{end} - \mathrm{start}}, \qquad \mathrm{start} \le t < \mathrm{end}$$

    Raises:
        ConfigError: the range does not fit the process.
    """

    start: int = option(0, "first timestep drawn", ge=0)
    end: int | None = option(None, "timestep after the last one drawn; null: T", ge=1)

    def __init__(self, options: Any, schedule: NoiseSchedule, seed: int = 0):
        super().__init__(options, schedule, seed)
        self.check_process(options, schedule.timesteps, schedule.name)
        self._end = schedule.timesteps if self.end is None else self.end
        self._first = self.start / schedule.timesteps
        self._width = (self._end - self.start) / schedule.timesteps

    @staticmethod
    def check(options: Any) -> None:
        """Reject an empty range."""
        start, end = options.start, options.end
        demand(end is None or start < end, "start and end", f"{start} and {end}", "start < end")

    @staticmethod
    def check_process(options: Any, timesteps: int, schedule: str) -> None:
        """Reject a range outside of the process."""
        demand(options.start < timesteps, "start", options.start, f"0 to T - 1 = {timesteps - 1}")
        demand((options.end or 0) <= timesteps, "end", options.end, f"start + 1 to T = {timesteps}")

    def cdf(self, u: Values, **context: Any) -> Values:
        """Return the distribution function, linear within the range."""
        return ((u - self._first) / self._width).clip(0.0, 1.0)

    def masses(self, x0: Any = None, **context: Any) -> Array:
        """Return the probability of every timestep, (T,), exactly 0 outside of the range."""
        t = np.arange(self.schedule.timesteps)
        return np.where((t >= self.start) & (t < self._end), 1 / (self._end - self.start), 0.0)

    def quantile(self, p: Values, **context: Any) -> Values:
        """Return the quantile, linear in p."""
        return self._first + self._width * p


@sampler("log_normal", "logit-normal, middle timesteps (SD3)")
class LogNormal(FixedDensity):
    r"""Logit-normal density of u = t/T (Esser et al. 2024; Kim et al. 2025, appendix 10).

    $$p(u) = \frac{1}{s \sqrt{2 \pi} \, u (1 - u)} \exp\left(-\frac{(\ln\frac{u}{1 - u} - m)^2}{2 s^2}\right)$$

    It never reaches the ends of the process. `low` and `high` cut off the normal's quantiles below and above; the rest
    is stretched to the whole process (Sana).
    """

    m: float = option(0.0, "mean of logit(t/T)")
    s: float = option(1.0, "standard deviation of logit(t/T)", gt=0)
    low: float = option(0.0, "lower truncation quantile of the normal; the rest is rescaled to the process", ge=0, lt=1)
    high: float = option(1.0, "upper truncation quantile of the normal", gt=0, le=1)

    def __init__(self, options: Any, schedule: NoiseSchedule, seed: int = 0):
        super().__init__(options, schedule, seed)
        self._ends = 0.0, 1.0
        if (self.low, self.high) != (0, 1):
            low, high = self._logits(np.array([self.low, self.high]))
            self._ends = float(sigmoid(low)), float(sigmoid(high))

    @staticmethod
    def check(options: Any) -> None:
        """Reject an empty interval of quantiles."""
        demand(options.low < options.high, "low and high", f"{options.low} and {options.high}", "low < high")

    def _logits(self, p: Values) -> Values:
        return self.m + self.s * normal_quantile(p)

    def cdf(self, u: Values, **context: Any) -> Values:
        """Return Phi((logit(u) - m) / s), rescaled between `low` and `high`."""
        first, last = self._ends
        below = normal_cdf((logit(first + (last - first) * u) - self.m) / self.s)
        return (below - self.low) / (self.high - self.low)

    def quantile(self, p: Values, **context: Any) -> Values:
        """Return sigmoid(m + s Phi^-1(p)), with p between `low` and `high`, rescaled to the whole process."""
        first, last = self._ends
        u = sigmoid(self._logits(self.low + (self.high - self.low) * p))
        return (u - first) / (last - first)


@sampler("mode", "SD3's mode sampling")
class Mode(FixedDensity):
    r"""Mode sampling of SD3 (Esser et al. 2024, eq. 19): u = t/T is this function of a uniform v.

    $$u = 1 - v - m \left(\cos^2\frac{\pi v}{2} - 1 + v\right), \qquad v \sim U(0, 1)$$

    Monotone for -1 <= m <= 2/(pi - 2); m > 0 prefers the middle, m < 0 the ends.
    """

    m: float = option(1.29, "scale of the bump: > 0 the middle, < 0 the ends; at most 2/(pi - 2)", ge=-1, le=1.7519)

    def quantile(self, p: Values, **context: Any) -> Values:
        """Return the formula at v = 1 - p, because the formula falls with v."""
        bump = namespace(p).cos(math.pi / 2 * (1 - p)) ** 2 - p
        return (p - self.m * bump).clip(0.0, 1.0)


@sampler("cosmap", "a uniform angle on a linear flow (SD3)")
class CosMap(FixedDensity):
    r"""Uniform angle of a linear flow (SD3, Esser et al. 2024), u = t/T.

    $$u = 1 - \frac{1}{\tan(\pi v / 2) + 1}, \quad v \sim U(0, 1) \qquad p(u) = \frac{2}{\pi (1 - 2 u + 2 u^2)}$$
    """

    def cdf(self, u: Values, **context: Any) -> Values:
        """Return 2/pi arctan(u/(1 - u)), without the division."""
        return 2 / math.pi * namespace(u).arctan2(u, 1 - u)

    def quantile(self, p: Values, **context: Any) -> Values:
        """Return sin/(sin + cos), the formula without an infinite tangent."""
        angle = math.pi / 2 * p
        sine, cosine = namespace(angle).sin(angle), namespace(angle).cos(angle)
        return sine / (sine + cosine)


@sampler("parabola", "an inverted parabola (OneTrainer, Chroma)")
class Parabola(FixedDensity):
    r"""Inverted parabola of u = t/T (OneTrainer; Chroma: 7.7 and 0).

    $$p(u) \propto \max\left(0, \; 2 - \mathrm{weight} \, (u - \tfrac{1}{2} - \mathrm{bias})^2\right)$$
    """

    weight: float = option(7.7, "factor of the square; 0 is uniform", ge=0)
    bias: float = option(0.0, "offset of the middle", gt=-0.5, lt=0.5)

    def cdf(self, u: Values, **context: Any) -> Values:
        """Return the distribution function, a cubic between the parabola's roots."""
        centre, weight = 0.5 + self.bias, self.weight
        reach = math.sqrt(2 / weight) if weight else math.inf
        low, high = max(0.0, centre - reach), min(1.0, centre + reach)

        def area(x: Any) -> Any:
            return 2 * x - weight * (x - centre) ** 3 / 3

        below: Values = (area(u.clip(low, high)) - area(low)) / (area(high) - area(low))
        return below


@sampler("slope", "rising or falling by a sigmoid (OneTrainer)")
class Slope(FixedDensity):
    r"""Sigmoid of u = t/T (OneTrainer).

    $$p(u) \propto \frac{1}{1 + \exp\left(-\mathrm{weight} \, (u - \tfrac{1}{2} - \mathrm{bias})\right)}$$
    """

    weight: float = option(4.0, "steepness; above 0 it prefers noise", ge=-100, le=100)
    bias: float = option(0.0, "where the sigmoid is 1/2, from the middle", ge=-5, le=5)

    def cdf(self, u: Values, **context: Any) -> Values:
        """Return the distribution function: differences of softplus over the weight; u itself for a weight of 0.

        A falling density is computed as the mirror image of a rising one, which does not round to 0.
        """
        weight, bias = self.weight or 1e-9, self.bias
        if weight < 0:
            return 1 - self._rising(1 - u, -weight, -bias)
        return self._rising(u, weight, bias)

    def _rising(self, u: Values, weight: float, bias: float) -> Values:
        start = 1 / (1 + math.exp(weight * (0.5 + bias)))
        area = namespace(u).log1p(namespace(u).expm1(weight * u) * start)
        return area / math.log1p(math.expm1(weight) * start)


@sampler("u_shape", "U-shaped, prefers both ends (rectified flow++)")
class UShape(FixedDensity):
    r"""U-shaped density of u = t/T, the more at the ends the larger a is (Lee et al. 2024, rectified flow++).

    $$p(u) = \frac{a}{2 (e^a - 1)} \left(e^{a u} + e^{a (1 - u)}\right)$$
    """

    a: float = option(4.0, "how much the ends are preferred", gt=0, le=100)

    def cdf(self, u: Values, **context: Any) -> Values:
        """Return 1/2 + sinh(a (u - 1/2))/(2 sinh(a/2))."""
        return 0.5 + namespace(u).sinh(self.a * (u - 0.5)) / (2 * math.sinh(self.a / 2))

    def quantile(self, p: Values, **context: Any) -> Values:
        """Return the quantile by the inverse of the hyperbolic sine."""
        return 0.5 + namespace(p).arcsinh((2 * p - 1) * math.sinh(self.a / 2)) / self.a


@sampler("beta", "t/T ~ Beta(0.8, 1) (B-TTDM)")
class Beta(FixedDensity):
    r"""Beta distribution of u = t/T (B-TTDM, Zheng et al. 2024; a = 0.8, b = 1 recommended).

    $$p(u) = \frac{u^{a - 1} (1 - u)^{b - 1}}{B(a, b)}$$

    With b = 1 or a = 1 the inverse is a power.
    """

    a: float = option(0.8, "first parameter; below 1 it prefers small t", gt=0)
    b: float = option(1.0, "second parameter; below 1 it prefers large t", gt=0)

    def cdf(self, u: Values, **context: Any) -> Values:
        """Return the regularised incomplete beta function; tensors are interpolated, exact at borders of timesteps."""
        if is_numpy(u):
            return beta_cdf(u, np.array(self.a), np.array(self.b))
        return interp(u, *self.nodes(u)[::-1])

    def quantile(self, p: Values, **context: Any) -> Values:
        """Return the inverse of the incomplete beta function; a power if a or b is 1."""
        if self.b == 1:
            return p ** (1 / self.a)
        if self.a == 1:
            return 1 - (1 - p) ** (1 / self.b)
        return super().quantile(p)


@sampler("clts", "curriculum from uniform to a normal density at 0.3 T (CLTS)")
class Clts(FixedDensity):
    r"""Curriculum of Xu et al. 2024 (CLTS): from uniform in u = t/T to a normal density; l rises with the step k.

    $$p_k(u) = (1 - l_k) + l_k \, N_{[0, 1]}(u; \, \mu, s^2), \qquad l_k = \min(k / \mathrm{length}, \, 1)$$

    There is no public code, and the paper does not state s. Here the normal density is truncated to the process, and l
    grows linearly over the first `length` steps, whatever the number of training steps.
    """

    context_names = ("step",)

    mu: float = option(0.3, "mean of t/T at the end of the curriculum", ge=0, le=1)
    s: float = option(0.2, "standard deviation of t/T; not published, a choice of kairos", gt=0)
    length: int = option(50_000, "steps until the density is normal alone", ge=1)

    def __init__(self, options: Any, schedule: NoiseSchedule, seed: int = 0):
        super().__init__(options, schedule, seed)
        self.checked_steps = (0, self.length)
        self._low, self._high = normal_cdf((np.array([0.0, 1.0]) - self.mu) / self.s).tolist()

    def progress(self, step: Any) -> Any:
        """Return the share l of the normal density at a step."""
        share = step / self.length
        return min(share, 1.0) if isinstance(share, float) else share.clip(None, 1.0)

    def cdf(self, u: Values, *, step: Any = 0, **context: Any) -> Values:
        """Return the distribution function of the mixture at a step."""
        below = normal_cdf((u - self.mu) / self.s)
        truncated, progress = ((below - self._low) / (self._high - self._low)).clip(0.0, 1.0), self.progress(step)
        mixed: Values = (1 - progress) * u + progress * truncated
        return mixed

    def map_uniform(self, uniform: Values, *, step: Any = 0, **context: Any) -> Values:
        """Map uniform numbers to draws: a share 1 - l of them stays uniform, the rest follow the normal density."""
        share = 1 - self.progress(step)
        # 1e-300 avoids 0/0 at both ends of the curriculum
        even, rest = uniform / (share + 1e-300), (uniform - share).clip(0.0, None) / (1 - share + 1e-300)
        normal = self.mu + self.s * normal_quantile(self._low + rest * (self._high - self._low))
        return namespace(uniform).where(uniform < share, even, normal.clip(0.0, 1.0))
