"""Weightings of SpeeD (Wang et al. 2025): the paper's, and that of its public code."""

from typing import Any

import numpy as np

from kairos_timesteps.base import Weighting
from kairos_timesteps.diffusion.schedule import (
    NoiseSchedule,
    check_published_form,
    linear_coefficients,
    start_of_convergence,
)
from kairos_timesteps.numeric import Array
from kairos_timesteps.options import option
from kairos_timesteps.registry import weighting


@weighting("change_aware", "SpeeD, section 2.4")
class ChangeAware(Weighting):
    r"""Change-aware weights (Wang et al. 2025, section 2.4): the derivative of the process' variance, rescaled.

    $$w(t) = (1 - \lambda) + (2 \lambda - 1) \frac{\Psi'_t - \min \Psi'}{\max \Psi' - \min \Psi'}, \qquad
    \Psi_t = 1 - \bar\alpha_t$$

    Linear schedule: the paper's closed form of Psi'_t, t from 1. Other schedules: the central difference of
    1 - alpha-bar. The smallest value (at least 0) becomes 1 - lambda, the largest (at most 1) lambda. The weights apply
    to whatever is predicted.
    """

    lam: float = option(0.6, "largest weight; 1 - lambda is the smallest", ge=0.5, le=1, alias="lambda")

    def weights(self, step: Any = 0) -> Array:
        """Return the derivative of the process' variance at every timestep, rescaled to 1 - lambda ... lambda, (T,)."""
        schedule, timesteps = self.schedule, self.schedule.timesteps
        if schedule.name == "linear":
            delta_beta, beta_0 = linear_coefficients(schedule)
            t = np.arange(1, timesteps + 1)
            alpha_bar = np.exp(-(beta_0 + delta_beta * t / (2 * timesteps)) * t)
            derivative = 2 * (beta_0 + delta_beta * t / timesteps) * alpha_bar
        else:
            derivative = np.gradient(1 - schedule.alphas_cumprod)
        low, high = max(derivative.min(), 0.0), min(derivative.max(), 1.0)
        share = np.clip((derivative - low) / (high - low), 0.0, 1.0)
        return np.asarray((1 - self.lam) + (2 * self.lam - 1) * share)


@weighting("change_aware_official", "SpeeD's public code: 1 from tau on")
class ChangeAwareOfficial(ChangeAware):
    r"""Change-aware weights of SpeeD's public code: 1 from tau on, which is more than any weight before it.

    $$w(t) = \begin{cases} w_{\mathrm{change\ aware}}(t) & t < \tau \\ 1 & t \ge \tau \end{cases}$$
    """

    tau: int | None = option(None, "timestep from which the weight is 1; null: 0.7 T", ge=1)

    def __init__(self, options: Any, schedule: NoiseSchedule, prediction: str = "epsilon"):
        super().__init__(options, schedule, prediction)
        self.start = start_of_convergence(options.tau, None, schedule)  # timestep from which the weight is 1

    @staticmethod
    def check_process(options: Any, timesteps: int, schedule: str) -> None:
        """Reject continuous processes, whose increments the public code does not define."""
        check_published_form(options.tau, timesteps, schedule)

    def weights(self, step: Any = 0) -> Array:
        """Return the weights of `ChangeAware` before tau, 1 from tau on, (T,)."""
        return np.where(np.arange(self.schedule.timesteps) < self.start, super().weights(step), 1.0)
