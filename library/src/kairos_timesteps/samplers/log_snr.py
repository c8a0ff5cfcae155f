"""Densities of the log signal-to-noise ratio, lambda = -2 ln sigma: of any process that has one."""

import math
from typing import Any

import numpy as np

from kairos_timesteps.base import Tabled
from kairos_timesteps.diffusion.schedule import NoiseSchedule
from kairos_timesteps.numeric import Values, bisect, levels, logit, normal_cdf, normal_quantile, of, sigmoid


def _laplace_cdf(x: Values) -> Values:
    return 0.5 + 0.5 * of(x).sign(x) * (1 - of(x).exp(-abs(x)))


def _laplace_quantile(p: Values) -> Values:
    return -of(p).sign(p - 0.5) * of(p).log1p(-2 * abs(p - 0.5))


# distribution function of location 0 and scale 1, and its inverse
LAWS: dict[str, tuple[Any, Any]] = {
    "normal": (normal_cdf, normal_quantile),
    "laplace": (_laplace_cdf, _laplace_quantile),
    "logistic": (sigmoid, logit),
    "cauchy": (lambda x: 0.5 + of(x).arctan(x) / math.pi, lambda p: of(p).tan(math.pi * (p - 0.5))),
    "secant": (
        lambda x: 2 / math.pi * of(x).arctan(of(x).exp(x / 2)),
        lambda p: 2 * of(p).log(of(p).tan(math.pi / 2 * p)),
    ),
}


class OfLogSnr(Tabled):
    """Base: on a process a timestep has the mass of its cell in lambda.

    Borders of cells are half-way to their neighbours; the tails go to the first and the last.
    """

    def __init__(self, options: Any, schedule: NoiseSchedule, seed: int = 0):
        super().__init__(options, schedule, seed)
        below, above = self.shares(levels(schedule))
        inner = np.where(below[:-1] < 0.5, -np.diff(below), np.diff(above))  # exact in both tails
        self.set_masses(np.concatenate([above[:1], inner, below[-1:]]))

    def shares(self, level: Values) -> tuple[Values, Values]:
        """Probability of lambda below and above `level`, elementwise."""
        raise NotImplementedError

    def level(self, probability: Values) -> Values:
        """The quantile of lambda, on no process, elementwise."""
        raise NotImplementedError


class LogSnr(OfLogSnr):
    r"""lambda = ln SNR by a symmetric law with a location m and a scale s: Laplace (Hang et al. 2025) or another.

    $$p(\lambda) = \frac{1}{s} f\left(\frac{\lambda - m}{s}\right), \qquad
    f_{\mathrm{laplace}}(x) = \frac{1}{2} e^{-|x|}$$

    $$f_{\mathrm{normal}} = \frac{e^{-x^2/2}}{\sqrt{2 \pi}}, \quad
    f_{\mathrm{logistic}} = \frac{e^{-x}}{(1 + e^{-x})^2},
    \quad f_{\mathrm{cauchy}} = \frac{1}{\pi (1 + x^2)}, \quad f_{\mathrm{secant}} = \frac{1}{2 \pi \cosh(x / 2)}$$

    ``secant`` with scale 1 and location 0 is that of a uniform angle, tan(angle) = sigma (v-diffusion). With
    `scale_above` another scale holds above the location, with as much more or less of the mass: the density is
    continuous (k-diffusion's split normal).
    """

    def __init__(self, options: Any, schedule: NoiseSchedule, seed: int = 0):
        self._cdf, self._quantile = LAWS[options.law]
        self._place, self._low = options.location, options.scale
        self._high = options.scale_above or self._low
        self._share = self._low / (self._low + self._high)
        super().__init__(options, schedule, seed)

    def shares(self, level: Values) -> tuple[Values, Values]:
        """Of each side of the location."""
        off, where = level - self._place, of(level).where
        low = 2 * self._share * self._cdf(-abs(off) / self._low)
        high = 2 * (1 - self._share) * self._cdf(-abs(off) / self._high)
        return where(off < 0, low, 1 - high), where(off < 0, 1 - low, high)

    def level(self, probability: Values) -> Values:
        """Of each side of the location."""
        below = probability < self._share
        side = of(probability).where(below, probability / self._share, (1 - probability) / (1 - self._share)) / 2
        off = self._quantile(side)
        return self._place + of(probability).where(below, self._low * off, -self._high * off)


class CosineInterpolated(OfLogSnr):
    r"""Cosine schedules of lambda, shifted for two resolutions and interpolated (Hoogeboom et al. 2023; k-diffusion).

    $$\lambda = (1 - v) \, \lambda_{\mathrm{high}}(v) + v \, \lambda_{\mathrm{low}}(v), \qquad v \sim U(0, 1)$$

    $$\lambda_r(v) = -2 \ln \frac{\tan\left(a_r + v (b_r - a_r)\right)}{r / \mathrm{image}}, \qquad
    \tan a_r = \sigma_{\min} \frac{r}{\mathrm{image}}, \quad \tan b_r = \sigma_{\max} \frac{r}{\mathrm{image}}$$
    """

    def level(self, probability: Values) -> Values:
        """From clean, 1 - probability of 0, to noise."""
        options, u = self.options, 1 - probability

        def cosine(side: float) -> Any:
            shift = 2 * math.log(side / options.image)
            first, last = (math.atan(s * math.exp(shift / 2)) for s in (options.sigma_min, options.sigma_max))
            return shift - 2 * of(u).log(of(u).tan(first + u * (last - first)))

        clean, noisy = cosine(options.high), cosine(options.low)
        return clean + u * (noisy - clean)

    def shares(self, level: Values) -> tuple[Values, Values]:
        """The inverse, by bisection."""
        below = bisect(self.level, level)
        return below, 1 - below
