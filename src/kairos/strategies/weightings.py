"""Loss weightings: a factor per timestep on the squared error of what the network predicts."""

import numpy as np

from kairos.strategies.base import Array, Weighting


class Unweighted(Weighting):
    """1 for whatever is predicted."""

    def at_snr(self, snr: Array) -> Array:
        """Ones."""
        return np.ones_like(snr)


class Vlb(Weighting):
    """c_t of the variational bound (Kim et al. 2025, eq. 7), mean 1/T sum as the bound has it."""

    def weights(self) -> Array:
        """c_t converted to the prediction."""
        return self.schedule.in_prediction(self.schedule.vlb, self.prediction)


class P2(Weighting):
    """(k + SNR)^-gamma on the error of epsilon (Choi et al. 2022, eq. 8); gamma 0 is no weighting."""

    def of_snr(self, snr: Array) -> Array:
        """The formula."""
        return np.asarray((self.options.k + snr) ** -self.options.gamma)


class MinSnr(Weighting):
    """Min-SNR-gamma (Hang et al. 2023, eq. 3 and appendix).

    epsilon: min(SNR, gamma)/SNR; x0: min(SNR, gamma); v: min(SNR, gamma)/(SNR + 1). SNR = 0 gives 1, 0 and 0.
    """

    def of_snr(self, snr: Array) -> Array:
        """min(SNR, gamma)/SNR without the division by 0."""
        return self.options.gamma / np.maximum(snr, self.options.gamma)


class SoftMinSnr(Weighting):
    """gamma/(SNR + gamma) on the error of epsilon: Min-SNR without the kink (Crowson et al. 2024, section 3.4)."""

    def of_snr(self, snr: Array) -> Array:
        """The formula."""
        return self.options.gamma / (snr + self.options.gamma)


class Debiased(Weighting):
    """Debiased estimation (Yu et al. 2023): 1/sqrt(SNR) on the error of epsilon, SNR capped at 1000.

    For v-prediction public trainers use 1/(SNR + 1), which is not the conversion of the epsilon form,
    sqrt(SNR)/(SNR + 1); ``convert: true`` asks for the latter. x0 is converted. SNR = 0 gives an infinite weight for
    epsilon, and 0 for x0.
    """

    stated = "x0"  # where it is finite

    def of_snr(self, snr: Array) -> Array:
        """SNR/sqrt(min(SNR, 1000))."""
        return np.sqrt(snr) * np.sqrt(np.maximum(snr, 1000.0) / 1000.0)

    def at_snr(self, snr: Array) -> Array:
        """The stated form of each prediction."""
        if self.prediction == "v" and not self.options.convert:
            return np.asarray(1 / (snr + 1))
        return super().at_snr(snr)


class Edm(Weighting):
    """(sigma² + sigma_data²)/(sigma sigma_data)² on the error of x0 (Karras et al. 2022, table 1), sigma² = 1/SNR.

    With a warm-up it is at most 5 * 100^(step/warmup) until that is 500, and free from then on (Wu et al. 2023). As the
    weight is never below 1/sigma_data² = 4, the first steps weigh almost alike.
    """

    stated = "x0"

    def of_snr(self, snr: Array) -> Array:
        """The formula in SNR: 1/sigma_data² + SNR, and its cap."""
        weight, warmup = 1 / (self.options.sigma_data or 0.5) ** 2 + snr, self.options.warmup
        if warmup is None or self.now >= warmup:
            return weight
        return np.minimum(weight, 5 * 100 ** (self.now / warmup))
