"""InfoNoise: a density of ln sigma that follows the gated rate of conditional entropy (Raya et al. 2026)."""

from typing import Any

import numpy as np

from kairos_timesteps.base import Observation
from kairos_timesteps.diffusion.schedule import NoiseSchedule, error_ratio
from kairos_timesteps.lazy import Tensor, torch
from kairos_timesteps.numeric import on_device
from kairos_timesteps.options import option, parse
from kairos_timesteps.registry import sampler
from kairos_timesteps.samplers.log_snr import EdmLogNormal
from kairos_timesteps.samplers.losses import FollowsErrors, neighbours


@sampler("info_noise", "InfoNoise: gated rate of conditional entropy, divided by the weight (Raya et al. 2026)")
class InfoNoise(FollowsErrors):
    r"""InfoNoise (Raya et al. 2026, arXiv:2602.18647, algorithm 1): density by the gated rate of conditional entropy.

    $$p(\ln \sigma) \propto \frac{1}{w(\sigma)} \, \frac{m(\sigma)}{\sigma^2} \,
    \frac{\sigma^n}{\sigma^n + c^n}, \qquad m(\sigma) = E\left[\|\hat x_0 - x_0\|^2 \mid \sigma\right], \quad
    \sigma^2 = \frac{1}{\mathrm{SNR}}$$

    $$c = \max \left\{\sigma : \frac{m(\sigma)}{\sigma^3} \ge p \, \max_{\sigma'}
    \frac{m(\sigma')}{\sigma'^3}\right\}, \qquad n = 3, \quad p = 0.002$$

    The rate m/sigma² is the mean error of epsilon (equations 13 and 61). The gate removes draws at low noise, where
    1/sigma² outweighs the estimate of m (equation 14). The pivot c follows the onset rule (equation 87) unless the
    option `pivot` fixes it; the paper reports 0.15 for CIFAR-10.

    The weight w on the error of x0 is divided out (equation 15), so that p w follows the gated rate under any
    weighting. It is computed from the weighting for every timestep, not estimated from losses. Factors that a weighting
    trains, or takes from a sample's own loss, are no part of it. Timesteps of weight 0 are drawn by the floor alone.
    A loss of epsilon without a weighting has w = 1/sigma², so that most draws are of high noise. `divide: false` omits
    the division, like the trainer AnimaLoraStudio.

    The paper fixes n and p alone. It leaves the following choices open. Most numbers are those of the public
    re-implementation asdf1434/noise-schedule-exp:

    - Warm-up: draws follow the prior of EDM, ln sigma ~ N(-1.2, 1.2²), for 2,000 steps. Shorter runs need a shorter
      warm-up; another re-implementation takes a fifth of the run.
    - Grid: 256 bins of ln sigma with even centres, from the smallest to the largest sigma of the process. The pivot
      depends on the smallest sigma, where m/sigma³ is largest.
    - Refresh: every 1,000 steps. A bin with 8 new errors starts with their mean. Later updates take 0.9 of the old
      mean and 0.1 of the new one. Bins with fewer errors keep collecting.
    - Gaps: bins without a mean are interpolated in ln sigma. Beyond the outermost means the error of v is constant,
      m (1 + sigma²)/sigma², which stays finite at both ends.
    - Smoothing: the error of v, by a Gaussian whose standard deviation is 2 bins. The stored means stay unsmoothed.
    - Floor: none.

    The statistic `pivot` is c. The gate has no effect if c is near the smallest sigma. Before a network learns, its
    error of epsilon is equal at all levels, and c is the smallest sigma over p, up to the largest sigma. The remedy is
    a longer warm-up or a fixed c. Errors that are not finite are left out.
    """

    floor: float = option(0.0, "share of draws that are uniform instead", ge=0, lt=1)
    exponent: float = option(3.0, "exponent n of the gate; 0: no gate", ge=0)
    pivot: float | None = option(None, "pivot c of the gate, a noise level sigma; null: the onset rule", ge=0)
    onset: float = option(0.002, "p of the onset rule: share of the largest m/sigma³", gt=0, lt=1)
    divide: bool = option(True, "divide by the weight on the error of x0; false: p follows the gated rate itself")
    start: int = option(2000, "warm-up: steps that draw from the prior", ge=1)
    frequency: int = option(1000, "steps between updates of the density", ge=1)
    decay: float = option(0.9, "decay of a bin's moving average, per update", ge=0, lt=1)
    bins: int = option(256, "bins of ln sigma that errors are averaged in", ge=2)
    min_count: int = option(8, "errors that a bin needs for a new mean", ge=1)
    smoothing: float = option(2.0, "standard deviation of the smoothing, in bins", gt=0)
    prior_mean: float = option(-1.2, "mean of ln sigma during the warm-up")
    prior_std: float = option(1.2, "standard deviation of ln sigma during the warm-up", gt=0)

    stated_for = "v"
    per_log_snr = False
    state_names = ("_sums", "_means", "_measured", "_pivot", "_taken", "updates", "_masses")

    def __init__(self, options: Any, schedule: NoiseSchedule, seed: int = 0):
        super().__init__(options, schedule, seed)
        prior = parse(EdmLogNormal, {"mean": self.prior_mean, "std": self.prior_std})
        self.set_masses(EdmLogNormal(prior, schedule).masses())
        self._sums = torch.zeros(2, self.bins, dtype=torch.float64)  # of new errors of v, and of their number
        self._means = torch.zeros(self.bins, dtype=torch.float64)  # errors of v
        self._measured = torch.zeros(self.bins, dtype=torch.bool)  # bins that have a mean
        self._pivot = torch.zeros((), dtype=torch.float64)
        self._taken = 0  # number of observed steps
        self._grid = {name: torch.from_numpy(values) for name, values in self.grid().items()}

    def grid(self) -> dict[str, Any]:
        """Return constants of the bins and of the timesteps.

        ``sigma_of_bins`` (bins,), ``smooth`` (bins, bins); ``sigma``, ``width`` in ln sigma, ``bin``, and the bin
        ``below`` with the ``share`` of the next one in the interpolation, each (T,).
        """
        log_sigma = -np.log(self.schedule.snr) / 2
        centres = np.linspace(log_sigma[0], log_sigma[-1], self.bins)
        distance = np.subtract.outer(np.arange(self.bins), np.arange(self.bins)) / self.smoothing
        kernel = np.exp(-(distance**2) / 2)
        position = (log_sigma - centres[0]) / (centres[-1] - centres[0]) * (self.bins - 1)
        below = position.astype(np.int64).clip(0, self.bins - 2)
        return {
            "sigma_of_bins": np.exp(centres),
            "smooth": kernel / kernel.sum(1, keepdims=True),
            "sigma": np.exp(log_sigma),
            "width": np.gradient(log_sigma),
            "bin": np.rint(position).astype(np.int64),
            "below": below,
            "share": position - below,
        }

    def learn(self, observation: Observation) -> None:
        """Learn from the errors of the step. After the warm-up, set the density every `frequency` steps."""
        super().learn(observation)
        if self._taken >= self.start and (self._taken - self.start) % self.frequency == 0:
            self.refresh(self.weights_of_x0(observation) if self.divide else None)

    def add_losses(self, cells: Tensor, losses: Tensor) -> None:
        """Add errors of v (batch,) at timesteps `cells` to the sums of their bins.

        Errors that are not finite are left out.
        """
        grid, finite = self.grid_on(losses.device), losses.isfinite()
        values = torch.stack([torch.where(finite, losses, 0.0), finite.to(losses.dtype)])
        rows = torch.arange(2, device=losses.device)[:, None]
        self._sums = self._sums.index_put((rows, grid["bin"][cells][None]), values, accumulate=True)
        self._taken = self._taken + 1

    def grid_on(self, device: "torch.device") -> dict[str, Tensor]:
        """Return `grid` as tensors on a device."""
        if self._grid["bin"].device != device:
            self._grid = {name: on_device(values, device) for name, values in self._grid.items()}
        return self._grid

    def weights_of_x0(self, observation: Observation) -> Tensor:
        """Return the weight of the next step on the squared error of x0 at every timestep, (T,), on the device."""
        weighting, snr = observation.weighting, self.schedule.snr
        weights = error_ratio(snr, observation.prediction)
        if weighting is not None:
            weights = weights * weighting.weights(int(observation.step) + 1 if weighting.depends_on_step else 0)
        return on_device(torch.from_numpy(weights), self._sums.device)

    def refresh(self, weights: Tensor | None = None) -> None:
        """Update the means of the bins, then set the density.

        The density and the pivot stay as they are if no bin has a mean, or the masses have no positive finite sum.

        Args:
            weights: weight that is divided out at every timestep, (T,); None: 1.
        """
        sums, counts = self._sums
        enough = counts >= self.min_count
        means = sums / counts.clamp(min=1)
        averaged = self.decay * self._means + (1 - self.decay) * means
        self._means = torch.where(enough, torch.where(self._measured, averaged, means), self._means)
        self._measured = self._measured | enough
        self._sums = torch.where(enough, 0.0, self._sums)
        rates, pivot = self.gated_rates()
        masses = rates * self._grid["width"]
        if weights is not None:
            masses = torch.where(weights > 0, masses / weights, 0.0)
        total = masses.sum()
        valid = self._measured.any() & total.isfinite() & (total > 0)
        self._pivot = torch.where(valid, pivot, self._pivot)
        earlier = torch.as_tensor(self._masses, device=masses.device)
        self.set_masses(torch.where(valid, masses / total, earlier), normalised=True)
        self.updates = self.updates + valid.long()

    def gated_rates(self) -> tuple[Tensor, Tensor]:
        """Return the gated rate per ln sigma at every timestep, (T,), and the pivot of the gate."""
        grid = self.grid_on(self._means.device)
        errors = grid["smooth"] @ interpolated(self._means, self._measured)
        sigma, sigma_of_bins = grid["sigma"], grid["sigma_of_bins"]
        pivot = torch.full_like(self._pivot, self.pivot or 0.0)
        if self.pivot is None:
            pivot = onset(errors / (1 + sigma_of_bins**2) / sigma_of_bins, sigma_of_bins, self.onset)
        below = grid["below"]
        # m/sigma² is the error of v over 1 + sigma²
        rate = torch.lerp(errors[below], errors[below + 1], grid["share"]) / (1 + sigma**2)
        return rate / (1 + (pivot / sigma) ** self.exponent), pivot

    def statistics(self) -> dict[str, float]:
        """Return the number of changes of the density, and the pivot of the gate once the density is set."""
        statistics = super().statistics()
        return {**statistics, "pivot": float(self._pivot)} if statistics["updates"] else statistics


def interpolated(values: Tensor, measured: Tensor) -> Tensor:
    """Fill the entries that are not measured: linear between neighbours, constant beyond the outermost ones.

    The result has no meaning if no entry is measured.
    """
    count = len(values)
    below, above = neighbours(measured)
    low = torch.where(below >= 0, below, above).clamp(max=count - 1)
    high = torch.where(above < count, above, below).clamp(min=0)
    share = (torch.arange(count, device=values.device) - low) / (high - low).clamp(min=1)
    return torch.lerp(values[low], values[high], share.to(values.dtype))


def onset(rate: Tensor, sigma: Tensor, threshold: float) -> Tensor:
    """Return the largest sigma whose rate is at least `threshold` times the largest rate.

    Args:
        rate: rate of conditional entropy per sigma, m/sigma³, (n,).
        sigma: noise levels, (n,), rising.
        threshold: p of the paper's onset rule.
    """
    return torch.where(rate >= threshold * rate.max(), sigma, sigma[0]).max()
