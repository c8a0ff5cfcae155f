"""Samplers with a fixed density of the log signal-to-noise ratio, lambda = -2 ln sigma, on any process."""

import math
from typing import Any

import numpy as np

from kairos_timesteps.base import FixedDensity, TableDensity
from kairos_timesteps.diffusion.schedule import NoiseSchedule
from kairos_timesteps.numeric import Values, bisect, logit, namespace, normal_cdf, normal_quantile, sigmoid
from kairos_timesteps.options import option
from kairos_timesteps.registry import sampler


def _laplace_cdf(x: Values) -> Values:
    return 0.5 + 0.5 * namespace(x).sign(x) * (1 - namespace(x).exp(-abs(x)))


def _laplace_quantile(p: Values) -> Values:
    return -namespace(p).sign(p - 0.5) * namespace(p).log1p(-2 * abs(p - 0.5))


# distribution function with location 0 and scale 1, and its inverse
DISTRIBUTIONS: dict[str, tuple[Any, Any]] = {
    "normal": (normal_cdf, normal_quantile),
    "laplace": (_laplace_cdf, _laplace_quantile),
    "logistic": (sigmoid, logit),
    "cauchy": (lambda x: 0.5 + namespace(x).arctan(x) / math.pi, lambda p: namespace(p).tan(math.pi * (p - 0.5))),
    "secant": (
        lambda x: 2 / math.pi * namespace(x).arctan(namespace(x).exp(x / 2)),
        lambda p: 2 * namespace(p).log(namespace(p).tan(math.pi / 2 * p)),
    ),
}


class LogSnrDensity(TableDensity, FixedDensity):
    """Base of densities of lambda: a timestep has the probability of its cell in lambda.

    Borders of cells are half-way between neighbours. The tails belong to the first and the last cell.
    """

    def __init__(self, options: Any, schedule: NoiseSchedule, seed: int = 0):
        super().__init__(options, schedule, seed)
        level = np.log(schedule.snr)
        below, above = self.tails((level[1:] + level[:-1]) / 2)
        inner = np.where(below[:-1] < 0.5, -np.diff(below), np.diff(above))  # exact in both tails
        self.set_masses(np.concatenate([above[:1], inner, below[-1:]]))

    def tails(self, level: Values) -> tuple[Values, Values]:
        """Return the probabilities of lambda below and above `level`, elementwise."""
        raise NotImplementedError

    def log_snr_quantile(self, p: Values) -> Values:
        """Return the p-quantile of lambda, elementwise; it does not depend on the process."""
        raise NotImplementedError


class SymmetricLogSnr(LogSnrDensity):
    """Base of densities of lambda by a symmetric distribution, with a location and a scale on each side of it."""

    distribution: str
    location: float
    scale: float
    scale_above: float | None = None

    def _sides(self) -> tuple[float, float, float]:
        """Return the scale below the location, the scale above it, and the probability below it."""
        above = self.scale_above or self.scale
        return self.scale, above, self.scale / (self.scale + above)

    def tails(self, level: Values) -> tuple[Values, Values]:
        """Return the probabilities of lambda below and above `level`, elementwise."""
        cdf, _ = DISTRIBUTIONS[self.distribution]
        scale_below, scale_above, share_below = self._sides()
        distance = abs(level - self.location)
        # probability beyond `level` on its side of the location, if that side is below or above; precise near 0
        beyond_below = 2 * share_below * cdf(-distance / scale_below)
        beyond_above = 2 * (1 - share_below) * cdf(-distance / scale_above)
        is_below = level < self.location
        where = namespace(level).where
        below = where(is_below, beyond_below, 1 - beyond_above)
        above = where(is_below, 1 - beyond_below, beyond_above)
        return below, above

    def log_snr_quantile(self, p: Values) -> Values:
        """Return the p-quantile of lambda, elementwise."""
        _, quantile = DISTRIBUTIONS[self.distribution]
        scale_below, scale_above, share_below = self._sides()
        where = namespace(p).where
        is_below = p < share_below
        # both sides use the lower half of the symmetric distribution, where the quantile is negative
        unscaled = quantile(where(is_below, p / share_below, (1 - p) / (1 - share_below)) / 2)
        return self.location + where(is_below, scale_below * unscaled, -scale_above * unscaled)


@sampler("log_snr", "ln SNR by Laplace's distribution (Hang et al. 2025) or another")
class LogSnr(SymmetricLogSnr):
    r"""Symmetric density of lambda = ln SNR, location m and scale s: Laplace (Hang et al. 2025) or another.

    $$p(\lambda) = \frac{1}{s} f\left(\frac{\lambda - m}{s}\right), \qquad
    f_{\mathrm{laplace}}(x) = \frac{1}{2} e^{-|x|}$$

    $$f_{\mathrm{normal}} = \frac{e^{-x^2/2}}{\sqrt{2 \pi}}, \quad
    f_{\mathrm{logistic}} = \frac{e^{-x}}{(1 + e^{-x})^2},
    \quad f_{\mathrm{cauchy}} = \frac{1}{\pi (1 + x^2)}, \quad f_{\mathrm{secant}} = \frac{1}{2 \pi \cosh(x / 2)}$$

    ``secant`` with scale 1 and location 0 is the density of a uniform angle, tan(angle) = sigma (v-diffusion). With
    `scale_above` another scale holds above the location, and the density stays continuous (k-diffusion's split normal).
    """

    distribution: str = option(
        "laplace", "distribution of ln SNR", choices=("normal", "laplace", "logistic", "cauchy", "secant")
    )
    location: float = option(0.0, "middle of ln SNR")
    scale: float = option(0.5, "scale of the distribution (normal: standard deviation)", gt=0)
    scale_above: float | None = option(None, "scale above the location; null: equal to `scale`", gt=0)


@sampler("edm_log_normal", "ln sigma ~ N(-1.2, 1.2²) (EDM)")
class EdmLogNormal(SymmetricLogSnr):
    r"""Normal density of ln sigma, sigma² = 1/SNR (Karras et al. 2022, table 1).

    $$\ln \sigma \sim N(\mathrm{mean}, \mathrm{std}^2), \qquad
    p(\sigma) = \frac{1}{\mathrm{std} \sqrt{2 \pi} \, \sigma}
    \exp\left(-\frac{(\ln \sigma - \mathrm{mean})^2}{2 \, \mathrm{std}^2}\right)$$
    """

    mean: float = option(-1.2, "mean of ln sigma, sigma² = 1/SNR")
    std: float = option(1.2, "standard deviation of ln sigma", gt=0)
    distribution = "normal"

    @property
    def location(self) -> float:  # type: ignore[override]  # computed from an option, not set
        """Mean of ln SNR."""
        return -2 * self.mean

    @property
    def scale(self) -> float:  # type: ignore[override]  # computed from an option, not set
        """Standard deviation of ln SNR."""
        return 2 * self.std


@sampler("cosine_interpolated", "shifted cosines of ln SNR")
class CosineInterpolated(LogSnrDensity):
    r"""Cosine schedules of lambda, shifted for two resolutions and interpolated (Hoogeboom et al. 2023; k-diffusion).

    $$\lambda = (1 - v) \, \lambda_{\mathrm{high}}(v) + v \, \lambda_{\mathrm{low}}(v), \qquad v \sim U(0, 1)$$

    $$\lambda_r(v) = -2 \ln \frac{\tan\left(a_r + v (b_r - a_r)\right)}{r / \mathrm{image}}, \qquad
    \tan a_r = \sigma_{\min} \frac{r}{\mathrm{image}}, \quad \tan b_r = \sigma_{\max} \frac{r}{\mathrm{image}}$$
    """

    image: float = option(64.0, "side of the images", gt=0)
    low: float = option(32.0, "side that the schedule is shifted to at the end of noise", gt=0)
    high: float = option(64.0, "side that the schedule is shifted to at the image's end", gt=0)
    sigma_min: float = option(1e-3, "smallest noise level, over the data's standard deviation", gt=0)
    sigma_max: float = option(1e3, "largest noise level, over the data's standard deviation", gt=0)

    def log_snr_quantile(self, p: Values) -> Values:
        """Return the p-quantile of lambda; p = 1 is the clean end, p = 0 the noisy one."""
        u = 1 - p

        def cosine(side: float) -> Values:
            shift = 2 * math.log(side / self.image)
            first, last = (math.atan(s * math.exp(shift / 2)) for s in (self.sigma_min, self.sigma_max))
            return shift - 2 * namespace(u).log(namespace(u).tan(first + u * (last - first)))

        clean, noisy = cosine(self.high), cosine(self.low)
        return clean + u * (noisy - clean)

    def tails(self, level: Values) -> tuple[Values, Values]:
        """Return the probabilities of lambda below and above `level`, by bisection of the quantile function."""
        below = bisect(self.log_snr_quantile, level)
        return below, 1 - below
