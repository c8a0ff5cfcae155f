"""Samplers that measure gradients by bins of t, rarely: one further batch of forward and backward passes a measurement.

The second moment of a sample's gradient is had from a whole batch at once: with random signs s_i, the mean of
|| (1/m) sum s_i g_i ||² over the signs is (1/m) mean ||g_i||². Gradients are those of the weighted loss, in evaluation
mode; with several processes they are summed over the ranks, so that the density does not depend on their number.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kairos_timesteps import component_options as every
from kairos_timesteps.base import Cost, Observation, Sampler, Tabled
from kairos_timesteps.diffusion.schedule import NoiseSchedule
from kairos_timesteps.numeric import Array
from kairos_timesteps.samplers.fixed import Uniform
from kairos_timesteps.samplers.log_snr import LogSnr


class FromGradients(Tabled):
    """A density that follows a number measured in each bin of t, smoothed over bins and in time.

    Bins have equal shares of the draws of a `prior`, uniform unless a subclass says otherwise, and what is measured is
    the loss as it counts there: weighted by 1/(T p(t)) of the prior.
    """

    learned = measures = True
    gradients = 1  # of every sample that is measured
    kept = ("_values", "updates")

    def __init__(self, options: Any, schedule: NoiseSchedule, seed: int = 0, prior: Sampler | None = None):
        super().__init__(options, schedule, seed)
        self.bins = min(options.bins, schedule.timesteps)
        self.prior = prior or Uniform(every.Uniform(), schedule)
        self.set_masses(self.prior.masses())
        self._values = np.zeros(self.bins)

    @contextmanager
    def observe(self, observation: Observation) -> Iterator[None]:
        """Measure before the optimiser step, every `frequency` steps."""
        if observation.step % self.options.frequency == 0:
            new = self.measure(observation)
            decay = self.options.decay if self.updates else 0.0
            self._values = decay * self._values + (1 - decay) * new
            self.updates += 1
            self.restored()
        yield

    def measure(self, observation: Observation) -> Array:
        """The number of every bin, (bins,)."""
        raise NotImplementedError

    def relative(self, values: Array) -> Array:
        """Relative masses from smoothed values, elementwise: their positive part."""
        return np.maximum(values, 0.0)

    def restored(self) -> None:
        """Set the density that follows from the values of the bins, once there are enough."""
        if self.updates < self.options.start:
            return
        edged = np.concatenate([self._values[:1], self._values, self._values[-1:]])
        smooth = (edged[:-2] + 2 * edged[1:-1] + edged[2:]) / 4
        centres = (np.arange(self.bins) + 0.5) / self.bins
        shares = self.prior.cdf((np.arange(self.schedule.timesteps) + 0.5) / self.schedule.timesteps)
        masses = self.relative(np.interp(shares, centres, smooth)) * self.prior.masses()
        self.set_masses(masses if masses.sum() > 0 else self.prior.masses())

    def samples(self, observation: Observation, per_bin: int) -> tuple[Tensor, Tensor]:
        """Indices of images in the global batch, and fractions, each (bins, per_bin)."""
        place, count = observation.place, self.bins * per_bin
        start = place.stream("measured images").integers(place.step, place.total, range(1))
        index = ((start + torch.arange(count)) % place.total).view(per_bin, self.bins).T
        inside = place.stream("measured times").uniform(place.step, range(self.bins), (per_bin,))
        return index, self.prior.quantile((torch.arange(self.bins)[:, None] + inside) / self.bins)

    def signs(self, observation: Observation, per_bin: int) -> Tensor:
        """Random signs divided by their number, (bins, per_bin)."""
        place = observation.place
        drawn = place.stream("measured signs").integers(place.step, 2, range(self.bins), (per_bin,))
        return (2.0 * drawn - 1) / per_bin

    def squares(self, observation: Observation, factors: Tensor, roots: list[Tensor] | None = None) -> Array:
        """Squared norm, (bins,), of the sum of gradients times `factors`, (bins, per_bin).

        `roots` are the square roots of a diagonal metric, where it is not the Euclidean one.
        """
        index, fractions = self.samples(observation, factors.shape[1])
        timesteps, squares = self.schedule.timesteps, []
        masses = torch.from_numpy(self.prior.masses())
        factors = factors / (timesteps * masses[(fractions * timesteps).long()])
        for k, (i, u, f) in enumerate(zip(index, fractions, factors)):
            found = observation.meter.gradient(i, u, f"measurement {k}", f)
            for each, root in zip(found, roots or []):
                each.mul_(root)
            squares.append(torch.stack([torch.linalg.vector_norm(each).double() for each in found]).square().sum())
        return torch.stack(squares).cpu().numpy()

    def per_bin(self, batch: int) -> int:
        """Samples of a bin: as asked for, or a global batch in all."""
        return int(self.options.samples or max(2, round(batch / self.bins)))

    def cost(self, batch: int, channels: int) -> Cost:
        """A measurement in every bin, every `frequency` steps."""
        return Cost(gradient=self.gradients * self.bins * self.per_bin(batch) / self.options.frequency)


class GradientNorm(FromGradients):
    r"""Follows the root mean square of a sample's gradient g at t, with importance weights.

    $$p(t) \propto \sqrt{E\left[g^\top D g \mid t\right]}, \qquad w(t) = \frac{1}{T p(t)}$$

    Ours: the density that gives uniform's objective the least gradient noise (Katharopoulos and Fleuret 2018, eq. 12,
    for timesteps). ``norm: preconditioned`` measures in the metric of Adam, g² / (sqrt(v) + eps), in which its steps
    are steepest; ``plain`` is the Euclidean norm.
    """

    corrected = True

    def measure(self, observation: Observation) -> Array:
        """Mean squared norm of a sample's gradient in every bin."""
        count = self.per_bin(observation.place.total)
        roots = None
        if self.options.norm == "preconditioned":
            roots = [each.sqrt() for each in observation.meter.metric()]
        return count * self.squares(observation, self.signs(observation, count), roots)

    def relative(self, values: Array) -> Array:
        """The root."""
        return np.sqrt(np.maximum(values, 0.0))


class Auto(GradientNorm):
    r"""As `gradient_norm`, from a prior that is uniform in the angle of v-diffusion, with nothing to choose.

    $$p(t) \propto p_0(t) \left(\sqrt{E\left[g^\top D g \mid t\right]} + \frac{1}{9} \mathrm{mean}\right), \qquad
    p_0(\lambda) = \frac{1}{2 \pi \cosh(\lambda / 2)}$$

    Ours, to go with the weighting ``auto``. A tenth of the draws stay the prior's, which bounds the corrections. Points
    are even. It is measured every 100 steps, which is 1 % of the passes.
    """

    def __init__(self, options: Any, schedule: NoiseSchedule, seed: int = 0):
        super().__init__(options, schedule, seed, LogSnr(every.LogSnr(law="secant", scale=1.0), schedule))

    def relative(self, values: Array) -> Array:
        """The root, and the prior's share."""
        roots = super().relative(values)
        return 0.9 * roots + 0.1 * np.average(roots, weights=self.prior.masses())


class GradientVariance(FromGradients):
    r"""Follows the variance of the loss' gradient g at t (Kim et al. 2025, table 4).

    $$p(t) \propto E\left[\|g\|^2 \mid t\right] - \left\|E[g \mid t]\right\|^2$$

    A failure case there: FID 11.3. The objective is changed, as published: no importance weights. The variance is that
    over samples, summed over parameters.
    """

    gradients = 2

    def measure(self, observation: Observation) -> Array:
        """Unbiased: mean ||g||² less ||mean g||², times m/(m - 1)."""
        count = self.per_bin(observation.place.total)
        second = count * self.squares(observation, self.signs(observation, count))
        mean = self.squares(observation, torch.full((self.bins, count), 1 / count))
        return (second - mean) * count / (count - 1)


class FirstOrder(FromGradients):
    r"""Follows what a step at t takes off the target, to first order.

    $$p(t) \propto \max\left(0, \; \nabla L_t^\top D \, \nabla \bar{L}\right), \qquad
    \bar{L} = \frac{1}{T} \sum_t w(t) L_t$$

    Ours: the inner product, in Adam's metric, of the gradient of the loss at t with that of the target, the weighted
    loss averaged over all t; each from another half of the measured samples, so that their noise does not correlate.
    Where a step at t would raise the target the density is the floor's.
    """

    gradients = 2

    def per_bin(self, batch: int) -> int:
        """An even number, for two halves."""
        return 2 * max(1, super().per_bin(batch) // 2)

    def measure(self, observation: Observation) -> Array:
        """The inner product of every bin."""
        half = self.per_bin(observation.place.total) // 2
        index, fractions = self.samples(observation, 2 * half)
        metric = observation.meter.metric()
        parts = (slice(0, half), slice(half, 2 * half))
        ones = torch.full((half,), 1 / half)
        targets = []
        for number, part in enumerate(parts):
            flat, factors = (index[:, part].flatten(), fractions[:, part].flatten()), ones.repeat(self.bins) / self.bins
            found = observation.meter.gradient(*flat, f"measured target {number}", factors)
            targets.append([each.mul_(d).flatten() for each, d in zip(found, metric)])
        inner_products = []
        for k in range(self.bins):
            for number, part in enumerate(parts):
                mine = observation.meter.gradient(index[k, part], fractions[k, part], f"measurement {k} {number}", ones)
                products = [torch.dot(g.flatten(), h) for g, h in zip(mine, targets[1 - number])]
                inner_products.append(torch.stack(products).double().sum())
        of_halves = torch.stack(inner_products).cpu().numpy().reshape(self.bins, 2)  # waits for the device once
        return of_halves[:, 0] + of_halves[:, 1]
