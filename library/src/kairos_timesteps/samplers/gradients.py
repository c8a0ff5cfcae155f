"""Samplers that measure gradients in bins of t, rarely: one batch of forward and backward passes per measurement.

The second moment of a sample's gradient follows from a whole batch at once: with random signs s_i, the mean of
|| (1/m) sum s_i g_i ||² over the signs is (1/m) mean ||g_i||². Gradients are those of the weighted loss, in evaluation
mode, without factors that depend on a sample's own loss (weighting ``robust``). They are summed over the ranks, so that
the density does not depend on the number of processes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from kairos_timesteps.base import Cost, MeasuresNetwork, Observation, Sampler, TableDensity
from kairos_timesteps.diffusion.schedule import NoiseSchedule
from kairos_timesteps.lazy import Tensor, torch
from kairos_timesteps.numeric import Array
from kairos_timesteps.options import option, parse
from kairos_timesteps.registry import sampler
from kairos_timesteps.samplers.fixed import Uniform
from kairos_timesteps.samplers.log_snr import LogSnr


class FollowsGradients(MeasuresNetwork, TableDensity):
    """Base of densities by a number that is measured in each bin of t, smoothed over bins and in time.

    Bins have equal shares of the draws of a `prior`, which is uniform by default. Losses are multiplied by
    1/(T p(t)) of the prior, so gradients are those of the objective of uniform timesteps.

    Attributes:
        gradients: number of gradients that a measurement computes for every sample.
    """

    floor: float = option(0.1, "share of draws that are uniform instead", ge=0, lt=1)
    bins: int = option(16, "bins of t that gradients are measured in", ge=2)
    samples: int | None = option(None, "samples per bin and measurement; null: about a batch in all", ge=2)
    frequency: int = option(100, "steps between measurements", ge=1)
    decay: float = option(0.8, "decay of earlier measurements", ge=0, lt=1)
    start: int = option(3, "measurements before the density is first set", ge=1)

    gradients = 1
    state_names = ("_values", "updates")

    def __init__(self, options: Any, schedule: NoiseSchedule, seed: int = 0, prior: Sampler | None = None):
        super().__init__(options, schedule, seed)
        self.bin_count = min(self.bins, schedule.timesteps)
        self.prior = prior or Uniform(parse(Uniform, {}), schedule)
        self.set_masses(self.prior.masses())
        self._values = np.zeros(self.bin_count)

    @contextmanager
    def observe(self, observation: Observation) -> Iterator[None]:
        """Measure before the optimizer step, every `frequency` steps from step 0 on; update the density after the step.

        A measurement with a value that is not finite, for example in half precision, changes nothing.
        """
        new = self.measure(observation) if self.measures_in_step(observation.step) else None
        yield
        if new is not None and np.isfinite(new).all():
            decay = self.decay if self.updates else 0.0
            self._values = decay * self._values + (1 - decay) * new
            self.updates += 1
            self.restored()

    def measures_in_step(self, step: int) -> bool:
        """Return True in every `frequency`-th step from step 0 on."""
        return step % self.frequency == 0

    def measure(self, observation: Observation) -> Array:
        """Measure the number of every bin, (bins,)."""
        raise NotImplementedError

    def relative_masses(self, values: Array) -> Array:
        """Return probabilities up to a factor from smoothed values, elementwise: their positive part."""
        return np.maximum(values, 0.0)

    def restored(self) -> None:
        """Set the density that follows from the values of the bins.

        The density is the prior before there are enough measurements, or if no mass is above 0.
        """
        if self.updates < self.start:
            self.set_masses(self.prior.masses())
            return
        edged = np.concatenate([self._values[:1], self._values, self._values[-1:]])
        smooth = (edged[:-2] + 2 * edged[1:-1] + edged[2:]) / 4
        centres = (np.arange(self.bin_count) + 0.5) / self.bin_count
        shares = self.prior.cdf((np.arange(self.schedule.timesteps) + 0.5) / self.schedule.timesteps)
        masses = self.relative_masses(np.interp(shares, centres, smooth)) * self.prior.masses()
        self.set_masses(masses if masses.sum() > 0 else self.prior.masses())

    def measured_samples(self, observation: Observation, per_bin: int) -> tuple[Tensor, Tensor]:
        """Return indices of images in the global batch, and fractions of the process, each (bins, per_bin), on the CPU.

        Images repeat if the batch has fewer. Fractions are random quantiles of the prior within their bin.
        """
        coordinates, count = observation.coordinates, self.bin_count * per_bin
        size = coordinates.batch_size
        start = coordinates.stream("measured images").integers(coordinates.step, size, range(1))
        index = ((start + torch.arange(count)) % size).view(per_bin, self.bin_count).T
        inside = coordinates.stream("measured times").uniform(coordinates.step, range(self.bin_count), (per_bin,))
        return index, self.prior.quantile((torch.arange(self.bin_count)[:, None] + inside) / self.bin_count)

    def signs(self, observation: Observation, per_bin: int) -> Tensor:
        """Return random signs divided by their number, (bins, per_bin)."""
        coordinates = observation.coordinates
        bits = coordinates.stream("measured signs").integers(coordinates.step, 2, range(self.bin_count), (per_bin,))
        return (2.0 * bits - 1) / per_bin

    def squared_norms(self, observation: Observation, factors: Tensor, roots: list[Tensor] | None = None) -> Array:
        """Return the squared norm of the sum of gradients times `factors` in every bin, (bins,).

        Args:
            observation: the step.
            factors: (bins, per_bin).
            roots: square roots of a diagonal metric; None: the Euclidean metric.
        """
        index, fractions = self.measured_samples(observation, factors.shape[1])
        timesteps = self.schedule.timesteps
        masses = torch.from_numpy(self.prior.masses())
        factors = factors / (timesteps * masses[(fractions * timesteps).long()])  # importance weights of the prior
        squares = []
        for number, (bin_index, bin_fractions, bin_factors) in enumerate(zip(index, fractions, factors)):
            gradient = observation.meter.gradient(bin_index, bin_fractions, f"measurement {number}", bin_factors)
            for values, root in zip(gradient, roots or []):
                values.mul_(root)
            norms = torch.stack([torch.linalg.vector_norm(values).double() for values in gradient])
            squares.append(norms.square().sum())
        return torch.stack(squares).cpu().numpy()

    def per_bin(self, batch: int) -> int:
        """Return the number of samples of a bin: `samples`, or a global batch in all."""
        return int(self.samples or max(2, round(batch / self.bin_count)))

    def cost(self, batch: int, channels: int) -> Cost:
        """Return the cost of a measurement in every bin, every `frequency` steps."""
        return Cost(gradient=self.gradients * self.bin_count * self.per_bin(batch) / self.frequency)


@sampler("gradient_norm", "kairos: minimises the gradient variance of the uniform objective")
class GradientNorm(FollowsGradients):
    r"""Density by the root mean square of a sample's gradient g at t, with importance weights.

    $$p(t) \propto \sqrt{E\left[g^\top D g \mid t\right]}, \qquad w(t) = \frac{1}{T p(t)}$$

    A method of kairos: the density that gives the objective of uniform timesteps the least gradient noise
    (Katharopoulos and Fleuret 2018, eq. 12, for timesteps). ``norm: preconditioned`` uses the metric of Adam,
    g²/(sqrt(v) + eps), in which its steps are steepest; ``plain`` uses the Euclidean norm.
    """

    norm: str = option("preconditioned", "metric of the gradient's size", choices=("plain", "preconditioned"))
    importance = True

    def measure(self, observation: Observation) -> Array:
        """Measure the mean squared norm of a sample's gradient in every bin."""
        count = self.per_bin(observation.coordinates.batch_size)
        roots = None
        if self.norm == "preconditioned":
            roots = [diagonal.sqrt() for diagonal in observation.meter.metric()]
        return count * self.squared_norms(observation, self.signs(observation, count), roots)

    def relative_masses(self, values: Array) -> Array:
        """Return the root of the positive part, elementwise."""
        return np.sqrt(np.maximum(values, 0.0))


@sampler("auto", "kairos: least noise of the objective's gradient, no options")
class Auto(GradientNorm):
    r"""Density of `gradient_norm` relative to a prior that is uniform in the angle of v-diffusion, without options.

    $$p(t) \propto p_0(t) \left(\sqrt{E\left[g^\top D g \mid t\right]} + \frac{1}{9} \mathrm{mean}\right), \qquad
    p_0(\lambda) = \frac{1}{2 \pi \cosh(\lambda / 2)}$$

    A method of kairos, made for the weighting ``auto``. A tenth of the draws follow the prior, which bounds the
    corrections. Points are even. A measurement every 100 steps costs 1 % of the forward passes.
    """

    floor = 0.0
    bins, samples, frequency, decay, start = 16, None, 100, 0.8, 3
    norm = "preconditioned"
    points = "systematic"

    def __init__(self, options: Any, schedule: NoiseSchedule, seed: int = 0):
        prior = LogSnr(parse(LogSnr, {"distribution": "secant", "scale": 1.0}), schedule)
        super().__init__(options, schedule, seed, prior)

    def relative_masses(self, values: Array) -> Array:
        """Return 0.9 times the roots, and 0.1 times their mean under the prior."""
        roots = super().relative_masses(values)
        return 0.9 * roots + 0.1 * np.average(roots, weights=self.prior.masses())


@sampler("gradient_variance", "variance of the gradient (Kim et al. 2025, table 4)")
class GradientVariance(FollowsGradients):
    r"""Density by the variance of the loss' gradient g at t (Kim et al. 2025, table 4).

    $$p(t) \propto E\left[\|g\|^2 \mid t\right] - \left\|E[g \mid t]\right\|^2$$

    The paper reports it as a failure: FID 11.3. As published it has no floor and changes the objective, as it has no
    importance weights. The variance is that over samples, summed over parameters.
    """

    floor: float = option(0.0, "share of draws that are uniform instead", ge=0, lt=1)
    gradients = 2

    def measure(self, observation: Observation) -> Array:
        """Measure mean ||g||² less ||mean g||², times m/(m - 1), which is unbiased."""
        count = self.per_bin(observation.coordinates.batch_size)
        second = count * self.squared_norms(observation, self.signs(observation, count))
        mean = self.squared_norms(observation, torch.full((self.bin_count, count), 1 / count))
        return (second - mean) * count / (count - 1)


@sampler("first_order", "kairos: first-order decrease of the weighted loss after a step at t")
class FirstOrder(FollowsGradients):
    r"""Density by the first-order decrease of the target after a gradient step at t.

    $$p(t) \propto \max\left(0, \; w(t) \, \nabla L_t^\top D \, \nabla \bar{L}\right), \qquad
    \bar{L} = \frac{1}{T} \sum_t w(t) L_t$$

    A method of kairos: the inner product, in Adam's metric, of the gradient of the weighted loss at t with the gradient
    of the target. The target is the weighted loss averaged over all t. Each gradient uses another half of the measured
    samples, so that their noise does not correlate. Where a step at t would raise the target, the floor still draws the
    timestep.
    """

    floor: float = option(0.2, "share of draws that are uniform instead", gt=0, lt=1)
    gradients = 2

    def per_bin(self, batch: int) -> int:
        """Return an even number, for two halves."""
        return 2 * max(1, super().per_bin(batch) // 2)

    def measure(self, observation: Observation) -> Array:
        """Measure the inner product of every bin, the sum over both halves of the samples."""
        half = self.per_bin(observation.coordinates.batch_size) // 2
        index, fractions = self.measured_samples(observation, 2 * half)
        metric = observation.meter.metric()
        halves = (slice(0, half), slice(half, 2 * half))
        ones = torch.full((half,), 1 / half)
        targets = []
        for number, part in enumerate(halves):
            factors = ones.repeat(self.bin_count) / self.bin_count
            images, times = index[:, part].flatten(), fractions[:, part].flatten()
            gradient = observation.meter.gradient(images, times, f"measured target {number}", factors)
            targets.append([derivative.mul_(diagonal).flatten() for derivative, diagonal in zip(gradient, metric)])
        inner_products = []
        for k in range(self.bin_count):
            for number, part in enumerate(halves):
                noise = f"measurement {k} {number}"
                gradient = observation.meter.gradient(index[k, part], fractions[k, part], noise, ones)
                products = [torch.dot(g.flatten(), h) for g, h in zip(gradient, targets[1 - number])]
                inner_products.append(torch.stack(products).double().sum())
        by_half: Array = torch.stack(inner_products).cpu().numpy().reshape(self.bin_count, 2)  # one synchronisation
        return by_half[:, 0] + by_half[:, 1]
