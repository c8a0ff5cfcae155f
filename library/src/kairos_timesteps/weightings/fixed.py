"""Loss weightings: a factor per timestep on the squared error of what the network predicts."""

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from kairos_timesteps.base import Weighting
from kairos_timesteps.diffusion.schedule import NoiseSchedule
from kairos_timesteps.numeric import Array, Values, interp, of, sigmoid
from kairos_timesteps.samplers.combined import tabled

if TYPE_CHECKING:
    from torch import Tensor


class Unweighted(Weighting):
    r"""Every timestep alike, for whatever is predicted.

    $$w = 1$$
    """

    stated = "predicted"

    def of_snr(self, snr: Values) -> Values:
        """Ones."""
        return of(snr).ones_like(snr)


class Vlb(Weighting):
    r"""The variational bound's own coefficient (Kim et al. 2025, eq. 7), mean 1/T sum as the bound has it.

    $$w_\epsilon(t) = \frac{\beta_t^2}{2 \sigma_t^2 (1 - \beta_t) (1 - \bar\alpha_t)}, \qquad \sigma_t^2 = \beta_t$$
    """

    def weights(self, step: Any = 0) -> Array:
        """c_t converted to the prediction."""
        return self.schedule.in_prediction(self.schedule.vlb, self.prediction)


class P2(Weighting):
    r"""Perception prioritised (Choi et al. 2022, eq. 8), on the error of epsilon; gamma 0 is no weighting.

    $$w_\epsilon = \frac{1}{(k + \mathrm{SNR})^\gamma}$$
    """

    def of_snr(self, snr: Values) -> Values:
        """The formula."""
        return (self.options.k + snr) ** -self.options.gamma


class MinSnr(Weighting):
    r"""Min-SNR-gamma (Hang et al. 2023, eq. 3 and appendix).

    $$w_\epsilon = \frac{\min(\mathrm{SNR}, \gamma)}{\mathrm{SNR}}, \qquad w_{x_0} = \min(\mathrm{SNR}, \gamma), \qquad
    w_v = \frac{\min(\mathrm{SNR}, \gamma)}{\mathrm{SNR} + 1}$$

    SNR = 0 gives 1, 0 and 0.
    """

    def of_snr(self, snr: Values) -> Values:
        """min(SNR, gamma)/SNR without the division by 0."""
        return self.options.gamma / snr.clip(self.options.gamma, None)


class SoftMinSnr(Weighting):
    r"""Min-SNR without the kink, on the error of epsilon (Crowson et al. 2024, section 3.4).

    $$w_\epsilon = \frac{\gamma}{\mathrm{SNR} + \gamma}$$
    """

    def of_snr(self, snr: Values) -> Values:
        """The formula."""
        return self.options.gamma / (snr + self.options.gamma)


class Debiased(Weighting):
    r"""Debiased estimation (Yu et al. 2023).

    $$w_\epsilon = \frac{1}{\sqrt{\min(\mathrm{SNR}, 1000)}}, \qquad w_v = \frac{1}{\mathrm{SNR} + 1}$$

    For v-prediction public trainers use 1/(SNR + 1), which is not the conversion of the epsilon form,
    sqrt(SNR)/(SNR + 1); ``convert: true`` asks for the latter. x0 is converted. SNR = 0 gives an infinite weight for
    epsilon, and 0 for x0.
    """

    stated = "x0"  # where it is finite

    def of_snr(self, snr: Values) -> Values:
        """SNR/sqrt(min(SNR, 1000))."""
        return (snr * snr.clip(1000.0, None) / 1000.0) ** 0.5

    def converted(self, factor: Values, snr: Values) -> Values:
        """The stated form of each prediction."""
        if self.prediction == "v" and not self.options.convert:
            return 1 / (snr + 1)
        return super().converted(factor, snr)


class Edm(Weighting):
    r"""EDM's, on the error of x0 (Karras et al. 2022, table 1), sigma² = 1/SNR.

    $$w_{x_0} = \frac{\sigma^2 + \sigma_{\mathrm{data}}^2}{(\sigma \, \sigma_{\mathrm{data}})^2}$$

    With a warm-up it is at most 5 * 100^(step/warmup) until that is 500, and free from then on (Wu et al. 2023). As the
    weight is never below 1/sigma_data² = 4, the first steps weigh almost alike.
    """

    stated = "x0"

    @property
    def moving(self) -> bool:  # type: ignore[override]
        """Where it warms up."""
        return self.options.warmup is not None

    def of_snr(self, snr: Values) -> Values:
        """The formula in SNR: 1/sigma_data² + SNR."""
        return 1 / (self.options.sigma_data or 0.5) ** 2 + snr

    def __call__(self, snr: Values, step: Any = 0) -> Values:
        """The formula and, in the warm-up, its cap; `step` is a number or a tensor that broadcasts with `snr`."""
        weight, warmup = self.of_snr(snr), self.options.warmup
        if warmup is None or (isinstance(step, int) and step >= warmup):
            return self.converted(weight, snr)
        capped = of(weight).minimum(weight, 5 * 100 ** (step / warmup) + 0 * weight)
        if not isinstance(step, int):
            capped = of(weight).where(step >= warmup, weight, capped)
        return self.converted(capped, snr)


class Sigmoid(Weighting):
    r"""A sigmoid on the error of epsilon (Kingma and Gao 2023; SiD2), of the integral over lambda = ln SNR.

    $$w_\epsilon = \frac{1}{1 + e^{\lambda - b}} \left|\frac{d \lambda}{d t}\right|$$

    The measure is |d ln SNR/dt| of the schedule, mean 1, so that uniform timesteps give that integral.
    """

    def of_snr(self, snr: Values) -> Values:
        """The formula, with its measure."""
        weight = sigmoid(self.options.bias - of(snr).log(snr))
        return weight * measure(snr, self.schedule.snr) if self.options.measure else weight


class Auto(Weighting):
    r"""The error of epsilon over all of ln SNR, less where little noise is left, whatever is predicted.

    $$w_\epsilon = \frac{1}{\sqrt{1 + \mathrm{SNR}}} \left|\frac{d \lambda}{d t}\right|$$

    Where noise prevails this is the error of epsilon in the measure of lambda = ln SNR; where the image does, that over
    sqrt(SNR), the error of v with every angle alike (tan(angle) = sigma), which v-prediction with a cosine schedule and
    a linear flow have without a weight (Kingma and Gao 2023, table 1). Ours.
    """

    def of_snr(self, snr: Values) -> Values:
        """The formula between the schedule's ends."""
        inside = snr.clip(self.schedule.snr.min(), self.schedule.snr.max())
        return (1 + inside) ** -0.5 * measure(inside, self.schedule.snr)

    def converted(self, factor: Values, snr: Values) -> Values:
        """Within the schedule's ends, too."""
        return super().converted(factor, snr.clip(self.schedule.snr.min(), self.schedule.snr.max()))


def measure(snr: Values, schedule: Array) -> Values:
    """|d ln SNR/dt| of a schedule, (T,), at any ratio; mean 1 over its timesteps."""
    level = -np.log(schedule)
    slope = np.gradient(level, edge_order=2)
    return interp(-of(snr).log(snr), level, slope / slope.mean())


class Snr(Weighting):
    r"""A power of the SNR within bounds, on the error of epsilon (Hang et al. 2023; Salimans and Ho 2022: x0).

    $$w_\epsilon = \mathrm{scale} \cdot \min(\max(\mathrm{SNR}, \mathrm{low}), \mathrm{high})^{\mathrm{power}}$$
    """

    def of_snr(self, snr: Values) -> Values:
        """The formula."""
        return self.options.scale * snr.clip(self.options.low, self.options.high) ** self.options.power


class OfSigma(Weighting):
    """Base of weights on the error of whatever is predicted, by sigma = 1/(1 + sqrt(SNR)), t of a linear flow."""

    stated = "predicted"

    def of_snr(self, snr: Values) -> Values:
        """`of_sigma` there."""
        return self.of_sigma(1 / (1 + snr**0.5))

    def of_sigma(self, sigma: Values) -> Values:
        """The formula, elementwise."""
        raise NotImplementedError


class Linear(OfSigma):
    r"""A line in sigma, t of a linear flow (NeMo: 1 and 3; OneTrainer's SIGMA: 0 and 1).

    $$w = \mathrm{offset} + \mathrm{slope} \cdot \sigma, \qquad \sigma = \frac{1}{1 + \sqrt{\mathrm{SNR}}}$$
    """

    def of_sigma(self, sigma: Values) -> Values:
        """The formula."""
        return self.options.offset + self.options.slope * sigma


class Power(OfSigma):
    r"""A power of sigma, t of a linear flow (diffusers' sigma_sqrt: -2).

    $$w = \sigma^{\mathrm{power}}, \qquad \sigma = \frac{1}{1 + \sqrt{\mathrm{SNR}}}$$
    """

    def of_sigma(self, sigma: Values) -> Values:
        """The formula."""
        return sigma.clip(self.options.least, None) ** self.options.power


class CosMap(OfSigma):
    r"""The density of a uniform angle as a weight, sigma as in `Linear` (Esser et al. 2024).

    $$w = \frac{2}{\pi (1 - 2 \sigma + 2 \sigma^2)}$$
    """

    def of_sigma(self, sigma: Values) -> Values:
        """The formula."""
        return 2 / (math.pi * (1 - 2 * sigma + 2 * sigma**2))


class Bell(OfSigma):
    r"""A bell less its ends, of mean 1 on [0, 1], sigma as in `Linear` (DiffSynth; NeMo's bsmntw).

    $$w \propto e^{-2 (\sigma - 1/2)^2} - e^{-1/2}$$
    """

    def of_sigma(self, sigma: Values) -> Values:
        """The formula; flat from the middle on where that is asked for (ai-toolkit's second)."""
        sigma = sigma.clip(0.5, None) if self.options.flat else sigma
        mean = math.sqrt(math.pi / 2) * math.erf(math.sqrt(0.5)) - math.exp(-0.5)
        return (of(sigma).exp(-2 * (sigma - 0.5) ** 2) - math.exp(-0.5)) / mean


class VLikeLoss(Weighting):
    r"""Some of the error of epsilon added to that of v (kohya's v_pred_like_loss); converted for others.

    $$w_v = 1 + c \, \frac{\mathrm{SNR} + 1}{\mathrm{SNR}}$$
    """

    stated = "v"

    def of_snr(self, snr: Values) -> Values:
        """The formula."""
        return 1 + self.options.c * (snr + 1) / snr


class Table(Weighting):
    r"""Numbers evenly spread over the process, on the error of whatever is predicted.

    $$w(t) = f(t / T), \qquad f \text{ through the numbers}$$

    Raises:
        ValueError: the numbers are none, not finite, below 0 or all 0.
    """

    def __init__(self, options: Any, schedule: NoiseSchedule, prediction: str = "epsilon"):
        super().__init__(options, schedule, prediction)
        middles = (np.arange(schedule.timesteps) + 0.5) / schedule.timesteps
        self._weights = tabled(options, middles)

    def weights(self, step: Any = 0) -> Array:
        """At the middles of the timesteps."""
        return self._weights


class Robust(Weighting):
    r"""A sample's own loss, through which no gradient goes (Geng et al. 2025, MeanFlow).

    $$w = \frac{1}{(L + c)^p}$$
    """

    stated = "predicted"

    def of_snr(self, snr: Values) -> Values:
        """Ones: it depends on the loss alone."""
        return of(snr).ones_like(snr)

    def apply(self, losses: "Tensor", weights: "Tensor", importance: "Tensor", fractions: "Tensor") -> "Tensor":
        """Each loss over its own power."""
        return importance * losses / (losses.detach() + self.options.c) ** self.options.p
