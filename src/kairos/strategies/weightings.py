"""Loss weightings: a factor per timestep on the squared error of what the network predicts."""

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from kairos.strategies.base import Weighting
from kairos.strategies.combined import tabled
from kairos.strategies.numeric import Array, Values, interp, of, sigmoid

if TYPE_CHECKING:
    from torch import Tensor


class Unweighted(Weighting):
    """1 for whatever is predicted."""

    stated = "predicted"

    def of_snr(self, snr: Values) -> Values:
        """Ones."""
        return of(snr).ones_like(snr)


class Vlb(Weighting):
    """c_t of the variational bound (Kim et al. 2025, eq. 7), mean 1/T sum as the bound has it."""

    def weights(self, step: Any = 0) -> Array:
        """c_t converted to the prediction."""
        return self.schedule.in_prediction(self.schedule.vlb, self.prediction)


class P2(Weighting):
    """(k + SNR)^-gamma on the error of epsilon (Choi et al. 2022, eq. 8); gamma 0 is no weighting."""

    def of_snr(self, snr: Values) -> Values:
        """The formula."""
        return (self.options.k + snr) ** -self.options.gamma


class MinSnr(Weighting):
    """Min-SNR-gamma (Hang et al. 2023, eq. 3 and appendix).

    epsilon: min(SNR, gamma)/SNR; x0: min(SNR, gamma); v: min(SNR, gamma)/(SNR + 1). SNR = 0 gives 1, 0 and 0.
    """

    def of_snr(self, snr: Values) -> Values:
        """min(SNR, gamma)/SNR without the division by 0."""
        return self.options.gamma / snr.clip(self.options.gamma, None)


class SoftMinSnr(Weighting):
    """gamma/(SNR + gamma) on the error of epsilon: Min-SNR without the kink (Crowson et al. 2024, section 3.4)."""

    def of_snr(self, snr: Values) -> Values:
        """The formula."""
        return self.options.gamma / (snr + self.options.gamma)


class Debiased(Weighting):
    """Debiased estimation (Yu et al. 2023): 1/sqrt(SNR) on the error of epsilon, SNR capped at 1000.

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
    """(sigma² + sigma_data²)/(sigma sigma_data)² on the error of x0 (Karras et al. 2022, table 1), sigma² = 1/SNR.

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
        """With its cap."""
        weight, warmup = self.of_snr(snr), self.options.warmup
        if warmup is not None:
            cap = 5 * 100 ** (step / warmup)
            weight = of(weight).where(step >= warmup, weight, of(weight).minimum(weight, cap + 0 * weight))
        return self.converted(weight, snr)


class Sigmoid(Weighting):
    """sigmoid(b - ln SNR) on the error of epsilon (Kingma and Gao 2023; SiD2), of the integral over ln SNR.

    The measure is |d ln SNR/dt| of the schedule, mean 1, so that uniform timesteps give that integral.
    """

    def of_snr(self, snr: Values) -> Values:
        """The formula, with its measure."""
        weight = sigmoid(self.options.bias - of(snr).log(snr))
        if not self.options.measure:
            return weight
        level = -np.log(self.schedule.snr)
        slope = np.gradient(level)
        return weight * interp(-of(snr).log(snr), level, slope / slope.mean())


class Snr(Weighting):
    """scale SNR^power on the error of epsilon, the SNR within bounds (Hang et al. 2023; Salimans and Ho 2022: x0)."""

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
    """offset + slope sigma (NeMo: 1 and 3; OneTrainer's SIGMA: 0 and 1)."""

    def of_sigma(self, sigma: Values) -> Values:
        """The formula."""
        return self.options.offset + self.options.slope * sigma


class Power(OfSigma):
    """sigma^power (diffusers' sigma_sqrt: -2)."""

    def of_sigma(self, sigma: Values) -> Values:
        """The formula."""
        return sigma.clip(self.options.least, None) ** self.options.power


class CosMap(OfSigma):
    """2/(pi (1 - 2 sigma + 2 sigma²)) (Esser et al. 2024)."""

    def of_sigma(self, sigma: Values) -> Values:
        """The formula."""
        return 2 / (math.pi * (1 - 2 * sigma + 2 * sigma**2))


class Bell(OfSigma):
    """exp(-2 (sigma - 1/2)²) - exp(-1/2), over its mean on [0, 1]: 0 at the ends (DiffSynth; NeMo's bsmntw)."""

    def of_sigma(self, sigma: Values) -> Values:
        """The formula; flat from the middle on where that is asked for (ai-toolkit's second)."""
        sigma = sigma.clip(0.5, None) if self.options.flat else sigma
        mean = math.sqrt(math.pi / 2) * math.erf(math.sqrt(0.5)) - math.exp(-0.5)
        return (of(sigma).exp(-2 * (sigma - 0.5) ** 2) - math.exp(-0.5)) / mean


class VLikeLoss(Weighting):
    """1 + c (SNR + 1)/SNR on the error of v (kohya's v_pred_like_loss); converted for others."""

    stated = "v"

    def of_snr(self, snr: Values) -> Values:
        """The formula."""
        return 1 + self.options.c * (snr + 1) / snr


class Table(Weighting):
    """Numbers evenly spread over the process, on the error of whatever is predicted."""

    def weights(self, step: Any = 0) -> Array:
        """At the middles of the timesteps."""
        timesteps = self.schedule.timesteps
        return tabled(self.options, (np.arange(timesteps) + 0.5) / timesteps)


class Robust(Weighting):
    """1/(loss + c)^p of a sample's own loss, through which no gradient goes (Geng et al. 2025, MeanFlow)."""

    stated = "predicted"

    def of_snr(self, snr: Values) -> Values:
        """Ones: it depends on the loss alone."""
        return of(snr).ones_like(snr)

    def apply(self, losses: "Tensor", weights: "Tensor", importance: "Tensor", fractions: "Tensor") -> "Tensor":
        """Each loss over its own power."""
        return importance * losses / (losses.detach() + self.options.c) ** self.options.p
