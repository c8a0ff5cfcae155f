"""Samplers of SpeeD (Wang et al. 2025): the paper's, and those of two versions of its public code."""

from typing import Any

import numpy as np

from kairos_timesteps.base import FixedDensity, TableDensity
from kairos_timesteps.coordinates import RandomCoordinates
from kairos_timesteps.diffusion.schedule import (
    NoiseSchedule,
    check_convergence,
    check_published_form,
    start_of_convergence,
)
from kairos_timesteps.errors import demand
from kairos_timesteps.lazy import Tensor, torch
from kairos_timesteps.numeric import Array, Tables, Values, namespace, same_kind
from kairos_timesteps.options import option, parse
from kairos_timesteps.registry import sampler
from kairos_timesteps.samplers.combined import Transformed, density_option


@sampler("speed", "SpeeD, eq. 2: k times more often before tau")
class Speed(Transformed):
    r"""Asymmetric sampling of SpeeD (Wang et al. 2025, eq. 2): k before tau, 1 from tau on, normalised.

    $$p(t) = \frac{1}{k \tau + T - \tau} \cdot \begin{cases} k & t < \tau \\ 1 & t \ge \tau \end{cases}$$

    ``tau`` defaults to 0.7 T (the paper's 700 of 1000). With ``r`` it is the tau of theorem 1, rounded down. This
    closed form is a few timesteps late: r = 100 gives 676, and 1/alpha-bar first exceeds 100 at timestep 673.

    Beyond the paper, and choices of kairos:

    - ``r`` with a process that is not linear: tau is the first timestep at which 1/alpha-bar = 1 + sigma² exceeds r.
    - ``density``: q(t) of a process that is not trained uniformly; the step multiplies it, p(t) ~ q(t) k before tau.
    - Without ``r``, tau of EDM is 0.7 of ln sigma, because the cells of EDM are even in ln sigma.

    Raises:
        ConfigError: tau is not inside of the process, or the density has no mass before it or from it on.
    """

    density: Any = density_option()
    k: float = option(5.0, "how much more often timesteps before tau are drawn", gt=0)
    tau: int | None = option(None, "first timestep of the convergence area; null: 0.7 T", ge=1)
    r: float | None = option(None, "tau is where 1/alpha-bar exceeds r (theorem 1 if the schedule is linear)", gt=1)

    def __init__(self, options: Any, schedule: NoiseSchedule, seed: int = 0):
        super().__init__(options, schedule, seed)
        self._edge = start_of_convergence(options.tau, options.r, schedule) / schedule.timesteps
        demand(not self.per_batch, "density", "a mixture with per: batch", "a density of single samples")
        allowed = "a density with mass before and after tau"
        has_mass = self.base.has_mass(0.0, self._edge) and self.base.has_mass(self._edge, 1.0)
        demand(has_mass, "density", options.density["name"], allowed)

    @staticmethod
    def check(options: Any) -> None:
        """Reject tau together with r."""
        both = options.tau is not None and options.r is not None
        demand(not both, "tau and r", f"{options.tau} and {options.r}", "one of them")

    @staticmethod
    def check_process(options: Any, timesteps: int, schedule: str) -> None:
        """Reject tau outside of the process."""
        check_convergence(options.tau, timesteps)

    def cdf(self, u: Values, **context: Any) -> Values:
        """Return the distribution function: that of the density, k times steeper before tau, over its total."""
        before: Values = self.base.cdf_with_floor(u.clip(None, self._edge), **context)
        below = self.base.cdf_with_floor(u, **context)
        _, total = self._totals(u, **context)
        return (self.k * before + (below - before)) / total

    def quantile(self, p: Values, **context: Any) -> Values:
        """Return the quantile of the density at the probability that p stands for."""
        mass_before, total = self._totals(p, **context)
        mass = p * total
        kink = self.k * mass_before
        probability = namespace(mass).where(mass < kink, mass / self.k, mass_before + (mass - kink))
        return self.base.quantile_with_floor(probability, **context)

    def map_uniform(self, uniform: Values, **context: Any) -> Values:
        """Draw by the quantile function."""
        return self.quantile(uniform, **context)

    def has_mass(self, low: float, high: float) -> bool:
        """Return True if the density has mass between two fractions."""
        return bool(self.floor) or self.base.has_mass(low, high)

    def _totals(self, like: Values, **context: Any) -> tuple[Values, Values]:
        """Return the probability of the density before tau, and the sum of both steps, in the kind of `like`."""
        before = self.base.cdf_with_floor(0 * like + self._edge, **context)
        return before, self.k * before + (1 - before)


class Reflected(TableDensity, FixedDensity):
    """Draws of SpeeD's public code: one half of a batch from a density, the other half its reflection.

    The first n//2 + 1 of n draws come from the density. Draw i of the rest is the reflection of draw i at m: m - t
    before m, t - m from m on. m - 1 is the first timestep where the central difference of sqrt(1 - alpha-bar) falls
    under 1e-4. The density of this sampler is that of the batch size last drawn by `draw`, which is part of the state.
    Before the first draw and within other samplers it is that of a large batch.
    """

    state_names = ("batch",)

    def __init__(self, options: Any, schedule: NoiseSchedule, seed: int = 0):
        super().__init__(options, schedule, seed)
        self.batch: int | None = None
        self.m = reflection_timestep(schedule)
        t = np.arange(schedule.timesteps)
        reflection = np.where(t < self.m, self.m - t, t - self.m).clip(0, schedule.timesteps - 1)
        self._reflection = Tables(reflection)
        self._half = TableDensity(parse(TableDensity, {}), schedule, seed)
        self._half.set_masses(self.half_masses())
        self.set_masses(self.masses())

    @staticmethod
    def check_process(options: Any, timesteps: int, schedule: str) -> None:
        """Reject continuous processes, whose increments the public code does not define."""
        check_published_form(getattr(options, "tau", None), timesteps, schedule)

    def half_masses(self) -> Array:
        """Return the relative probabilities of the half that is drawn, (T,)."""
        raise NotImplementedError

    def masses(self, x0: Tensor | None = None, **context: Any) -> Array:
        """Return the probability of every timestep in both halves together, (T,)."""
        half = self._half.masses()
        (reflection,) = self._reflection.like(half)
        reflected = np.bincount(reflection, weights=half, minlength=len(half))
        share = 0.5 if not self.batch else min((self.batch // 2 + 1) / self.batch, 1.0)
        return share * half + (1 - share) * reflected

    def draw(self, coordinates: RandomCoordinates, x0: Tensor | None = None) -> Tensor:
        """Draw half of the batch and reflect it; with a floor, that share of both halves is uniform instead.

        `masses` and `probabilities` are then those of this batch size.
        """
        self.batch, timesteps = coordinates.batch_size, self.schedule.timesteps
        count, index = coordinates.batch_size // 2 + 1, coordinates.index_tensor()
        reflected = (index >= count).view(-1, *[1] * len(coordinates.times_shape))
        # draw count + i is the reflection of draw i
        of_half = coordinates.replace(
            sample_indices=torch.where(index >= count, index - count, index), batch_size=count
        )
        position = self._half.quantile(self.uniforms(of_half)) * timesteps
        cell = position.long().clamp(max=timesteps - 1)
        (reflection,) = self._reflection.like(position)
        mirrored = reflection[cell] + (position - cell)
        draws = torch.where(reflected, mirrored, position) / timesteps
        if self.floor:
            other = coordinates.uniform("floor", 2)
            draws = torch.where(other[..., 0] < self.floor, other[..., 1], draws)
        return draws.clamp(0.0, 1.0 - 2**-53)

    def sample(self, *arguments: Any, **context: Any) -> Tensor:
        """Draw fractions without a batch; see `Sampler.sample`. The density does not change."""
        batch = self.batch
        draws = super().sample(*arguments, **context)
        self.batch = batch
        return draws

    def load_state_dict(self, state: dict[str, Any], device: "torch.device | str" = "cpu") -> None:
        """Restore a state that `state_dict` returned; states of earlier versions contain no batch size."""
        super().load_state_dict({"batch": None, **state}, device)

    def importance_weights(self, x0: Tensor, fractions: Tensor, coordinates: RandomCoordinates) -> Tensor | None:
        """Return 1/(T p(t)) of both halves together, float32; None without `importance`."""
        if not self.importance:
            return None
        timesteps = self.schedule.timesteps
        cell = (fractions * timesteps).long().clamp(0, timesteps - 1)
        return (1 / (timesteps * same_kind(self.probabilities(), fractions)[cell])).float()


@sampler("speed_official", "SpeeD's public code: half a batch reflected")
class SpeedOfficial(Reflected):
    r"""SpeeD as its public code draws it: q of eq. 2 for the drawn share s of a batch of n, the rest reflected at m.

    $$p(t) = s \, q(t) + (1 - s) \sum_{t': \, |t' - m| = t} q(t'), \qquad s = \frac{\lfloor n / 2 \rfloor + 1}{n}$$

    Against the paper it halves the concentration: at k = 5, tau = 700 the mass from tau on is (n//2 + 1)/n of 7.9 %.
    """

    k: float = option(5.0, "how much more often timesteps before tau are drawn, in the half that is drawn", gt=0)
    tau: int | None = option(None, "first timestep of the convergence area; null: 0.7 T", ge=1)

    def half_masses(self) -> Array:
        """Return k before tau, 1 from tau on, (T,)."""
        tau = start_of_convergence(self.tau, None, self.schedule)
        return np.where(np.arange(self.schedule.timesteps) < tau, self.k, 1.0)


@sampler("speed_v1", "SpeeD's first public code: tanh threshold, reflected")
class SpeedV1(Reflected):
    r"""SpeeD's first public version, half of it reflected: about 2.5 where the noise still grows, else 0.5.

    $$q(t) \propto \tanh\left(10^6 \left(\frac{d}{dt} \sqrt{1 - \bar\alpha_t} - 10^{-4}\right)\right) + 1.5$$
    """

    def half_masses(self) -> Array:
        """Return tanh(1e6 (slope - 1e-4)) + 1.5, (T,)."""
        return np.tanh(1e6 * (_slope(self.schedule) - _FLAT)) + 1.5


_FLAT = 1e-4  # slope from which the public code counts a timestep as meaningless


def _slope(schedule: NoiseSchedule) -> Array:
    """Return the change of sqrt(1 - alpha-bar) in a thousandth of the process, the public code's timestep, (T,)."""
    return np.asarray(np.gradient(np.sqrt(1 - schedule.alphas_cumprod))) * schedule.timesteps / 1000


def reflection_timestep(schedule: NoiseSchedule) -> int:
    """Return the timestep m at which the public code reflects; 1 if the slope never falls under 1e-4."""
    return int(np.argmax(_slope(schedule) < _FLAT)) + 1
