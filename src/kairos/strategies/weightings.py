"""Loss weightings: a factor per timestep on the squared error of what the network predicts.

Weights that papers state for epsilon-prediction are converted: MSE_epsilon = SNR MSE_x0 = alpha-bar MSE_v.
"""

import numpy as np

from kairos.diffusion.schedule import linear_coefficients
from kairos.strategies.base import Array, Weighting


class Unweighted(Weighting):
    """1 for whatever is predicted."""

    def weights(self) -> Array:
        """Ones."""
        return np.ones(self.schedule.timesteps)


class Vlb(Weighting):
    """c_t of the variational bound (Kim et al. 2025, eq. 7), mean 1/T sum as the bound has it."""

    def weights(self) -> Array:
        """c_t converted to the prediction."""
        return self.schedule.in_prediction(self.schedule.vlb, self.prediction)


class P2(Weighting):
    """(k + SNR)^-gamma on the error of epsilon (Choi et al. 2022, eq. 8); gamma 0 is no weighting."""

    def weights(self) -> Array:
        """The formula, converted to the prediction."""
        weight = (self.options.k + self.schedule.snr) ** -self.options.gamma
        return self.schedule.in_prediction(weight, self.prediction)


class MinSnr(Weighting):
    """Min-SNR-gamma (Hang et al. 2023, eq. 3 and appendix): min(SNR, gamma) over SNR, 1 or SNR + 1.

    Written so that SNR = 0 gives 1 for epsilon (not NaN) and 0 for x0 and v.
    """

    def weights(self) -> Array:
        """epsilon: min(1, gamma/SNR); x0: min(SNR, gamma); v: min(SNR, gamma)/(SNR + 1)."""
        snr, gamma = self.schedule.snr, self.options.gamma
        if self.prediction == "epsilon":
            return gamma / np.maximum(snr, gamma)
        capped = np.minimum(snr, gamma)
        return capped if self.prediction == "x0" else capped / (snr + 1)


class ChangeAware(Weighting):
    """SpeeD's change-aware weights (Wang et al. 2025, section 2.4): the derivative of the process' variance, rescaled.

    Linear schedule: the paper's closed form of Psi'_t, t from 1. Other schedules: the central difference of
    1 - alpha-bar. The smallest value (at least 0) becomes 1 - lambda, the largest (at most 1) lambda. The weights apply
    to whatever is predicted.
    """

    def weights(self) -> Array:
        """The rescaled change."""
        change = self._change()
        low, high = max(change.min(), 0.0), min(change.max(), 1.0)
        share = np.clip((change - low) / (high - low), 0.0, 1.0)
        lam = self.options.lam
        return (1 - lam) + (2 * lam - 1) * share

    def _change(self) -> Array:
        timesteps = self.schedule.timesteps
        if self.schedule.name != "linear":
            return np.gradient(1 - self.schedule.alphas_cumprod)
        slope, first = linear_coefficients(self.schedule)
        t = np.arange(1, timesteps + 1)
        return 2 * (first + slope * t / timesteps) * np.exp(-(first + slope * t / (2 * timesteps)) * t)
