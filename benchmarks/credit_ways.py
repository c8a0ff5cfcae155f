"""Estimators of the benefit of each timestep for `credit.py`, and the frozen training run that they are measured on.

Every estimator is measured on new batches from the same weights and optimiser state, so measurements are independent
repetitions of one experiment. Each measurement gives two estimates of one vector, from separate halves of its data.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributions import Beta

from kairos.losses.terms import per_sample
from kairos.training.state import TrainingState
from kairos_timesteps.base import Observation
from kairos_timesteps.components import SAMPLERS, WEIGHTINGS
from kairos_timesteps.coordinates import RandomCoordinates
from kairos_timesteps.meter import Meter, evaluating
from kairos_timesteps.randomness import Stream
from kairos_timesteps.strategy import Strategy

Array = NDArray[np.float64]
BINS = 16
FRESH = 10**6  # measurements use batches from this many times the step on: others at every moment
TARGET = 256  # samples of the fixed set that a step's effect is measured on
PERTURBATION = 0.5  # of the density in a bin, up or down, for antithetic batches


@dataclass(frozen=True)
class Way:
    """An estimator of the benefit of each timestep, with its measurements.

    Attributes:
        name: name in tables.
        cost: cost of one measurement, both halves, in forward passes of a batch beyond the training step.
        count: number of measurements.
        estimate: function of the indices of measurements; returns the estimates of the two halves, (2, components).
        profile: True if the components are bins of t, of which only differences matter.
        least: smallest number of measurements for an estimate.
    """

    name: str
    cost: float
    count: int
    estimate: Callable[[Array], Array]
    profile: bool = True
    least: int = 1


class Moment:
    """A training run at a fixed step: every measured optimiser step starts from its weights and is undone."""

    def __init__(self, training: TrainingState):
        self.training, self.process = training, training.process
        self.network, self.optimizer = training.model, training.optimizer
        self.schedule = training.process.schedule
        self.weighting = WEIGHTINGS.build("none", {}, self.schedule, self.process.prediction)
        self.size = training.settings.batch_size
        self.first = FRESH * (1 + training.step)
        self.saved = copy.deepcopy((self.network.state_dict(), self.optimizer.state_dict()))
        self.fixed = self._fixed()
        self.before = self.target()

    def restore(self) -> None:
        """Restore the weights and the optimiser state that were saved at the beginning."""
        self.network.load_state_dict(self.saved[0])
        self.optimizer.load_state_dict(copy.deepcopy(self.saved[1]))

    def batch(self, number: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the images and conditions of a measurement."""
        step = self.first + number
        (batch,) = self.training.batches.steps(step, step + 1)
        return batch.x0, batch.conditions

    def _predict(
        self, x0: Tensor, conditions: dict[str, Tensor], fractions: Tensor, noise: Tensor
    ) -> tuple[Tensor, ...]:
        t = self.process.times(fractions).to(x0.device)
        x_t = self.process.noised(x0, noise, t)
        output = self.process.predict(self.network, x_t, t, conditions)
        return t, x_t, output, per_sample((output - self.process.target(x0, noise, t)) ** 2)

    def draws(self, number: int) -> Tensor:
        """Draw uniform fractions of the process for a batch, float64 (batch,)."""
        return Stream(self.first, "timesteps").uniform(number, range(self.size))

    def losses(self, number: int, fractions: Tensor) -> Tensor:
        """Return per-sample losses of a training step on a new batch at given fractions, (batch,), with gradients."""
        x0, conditions = self.batch(number)
        noise = Stream(self.first, "noise").normal(number, range(self.size), tuple(x0.shape[1:]), x0.device)
        self.network.train()
        return self._predict(x0, conditions, fractions, noise)[3]

    def backward(self, losses: Tensor) -> None:
        """Compute the gradients of the mean loss, clipped as in training."""
        self.optimizer.zero_grad(set_to_none=True)
        losses.mean().backward()
        nn.utils.clip_grad_norm_(self.training.parameters, self.training.grad_clip)

    def _fixed(self) -> tuple[Any, ...]:
        parts = [self.batch(-1 - k) for k in range(-(-TARGET // self.size))]
        x0 = torch.cat([part[0] for part in parts])[:TARGET]
        conditions = {name: torch.cat([part[1][name] for part in parts])[:TARGET] for name in parts[0][1]}
        random = torch.Generator().manual_seed(0)
        fractions = (torch.randperm(TARGET, generator=random) + 0.5).double() / TARGET
        return x0, conditions, fractions, torch.randn(x0.shape, generator=random).to(x0.device)

    def target(self) -> Array:
        """Return the unweighted loss and the variational bound on the fixed images, timesteps and noise, (2,)."""
        with torch.no_grad(), evaluating(self.network):
            t, x_t, output, plain = self._predict(*self.fixed)
            epsilon = per_sample((self.process.epsilon(output, x_t, t) - self.fixed[3]) ** 2).double().cpu()
        bound = epsilon * torch.from_numpy(self.schedule.vlb)[t.cpu()]
        return np.array([plain.double().mean().item(), bound.mean().item()])

    def reduction(self, number: int, fractions: Tensor) -> Array:
        """Return how far one optimiser step on a new batch at these fractions lowers the two targets, (2,)."""
        self.backward(self.losses(number, fractions))
        self.optimizer.step()
        fallen = self.before - self.target()
        self.restore()
        return fallen

    def observation(self, x0: Tensor, conditions: dict[str, Tensor], number: int) -> Observation:
        """Return the `Observation` of a batch that a sampler receives before an optimiser step."""
        coordinates = RandomCoordinates(self.first, number)
        meter = Meter(self.process, self.network, x0, coordinates, conditions, self.weighting, self.optimizer)
        fractions = torch.zeros(len(x0), dtype=torch.float64)
        return Observation(number, x0, fractions, None, meter, coordinates)


def bins_of(fractions: Tensor) -> Array:
    """Return the index of the bin of t that each fraction is in."""
    return np.minimum((fractions.numpy() * BINS).astype(np.int64), BINS - 1)


def halves(values: Array) -> tuple[Array, Array]:
    """Return the first and the second half of a batch."""
    middle = len(values) // 2
    return values[:middle], values[middle:]


def sums_by_bin(bins: Array, values: Array) -> Array:
    """Return the sum and the number of the values in each bin, (2, BINS)."""
    sums, counts = np.zeros(BINS), np.zeros(BINS)
    np.add.at(sums, bins, values)
    np.add.at(counts, bins, 1.0)
    return np.stack([sums, counts])


def ratio(table: Array) -> Array:
    """Return means (..., BINS) from sums and counts (..., 2, BINS); an empty bin gets the mean of the other values."""
    sums, counts = table[..., 0, :], table[..., 1, :]
    overall = sums.sum(-1, keepdims=True) / counts.sum(-1, keepdims=True)
    return np.where(counts > 0, sums / np.maximum(counts, 1.0), overall)


def mean_of(values: Array) -> Callable[[Array], Array]:
    """Return the estimator that averages measured vectors (count, 2, components) over the selected measurements."""
    return lambda selected: values[selected].mean(0)


def published(moment: Moment, name: str, count: int) -> list[Way]:
    """Measure the rewards of `adaptive` or `adaptive_official`: as policy gradients of a and b, and by bins of t.

    The gradient is also split into two terms. The batch's mean reward credits all timesteps of the batch; the remainder
    of each sample's reward credits the timestep of the sample.

    The policy keeps its initial value, close to uniform, because its learning rate is 1e-30. The queue is filled before
    the first measurement; S is selected again after every measurement, as in training.
    """
    strategy = Strategy(name, moment.process, sampler={"frequency": 1, "lr": 1e-30}, seed=moment.first)
    sampler: Any = strategy.sampler
    advantage, rewards = sampler.advantage, []
    sampler.advantage = lambda change: rewards.append(advantage(change)) or rewards[-1]
    gradients: dict[str, list[Any]] = {part: [] for part in ("", ", batch's part", ", samples' part")}
    tables = []
    warm_up = sampler.queue
    for number in range(warm_up + count):
        x0, conditions = moment.batch(number)
        draw = strategy.draw(x0)
        moment.backward(strategy.weighted(draw, moment.losses(number, draw.fractions)))
        with strategy.observe(draw, moment.network, moment.optimizer, conditions):
            moment.optimizer.step()
        moment.restore()
        if number < warm_up:
            continue
        a, b = (value.detach().requires_grad_() for value in sampler.policy(x0))
        density = Beta(a, b)
        log_density = density.log_prob(draw.fractions.clamp(1e-6, 1 - 1e-6).float())
        score = torch.stack(torch.autograd.grad(log_density.sum(), [a, b]), 1).numpy()
        coefficient = rewards[-1].float()
        if name == "adaptive_official":
            coefficient = coefficient + sampler.entropy * density.entropy().detach()
        whole = coefficient.numpy()[:, None]
        for part, factor in zip(gradients, (whole, whole.mean(0), whole - whole.mean(0)), strict=True):
            gradients[part].append([half.mean(0) for half in halves(score * factor)])
        parts = zip(halves(bins_of(draw.fractions)), halves(rewards[-1].double().numpy()))
        tables.append([sums_by_bin(*part) for part in parts])
    table = np.array(tables)  # (count, halves, sums and numbers, BINS)
    cost = (2 * len(sampler.features)) / moment.size + 2 * sampler.selected
    return [
        *(
            Way(f"{name}: policy gradient{part}", cost, count, mean_of(np.array(values, np.float64)), profile=False)
            for part, values in gradients.items()
        ),
        Way(f"{name}: reward by bins", cost, count, lambda selected: ratio(table[selected].sum(0))),
    ]


def second_moment_of_loss(moment: Moment, count: int) -> Way:
    """Measure the root mean square of the loss by bins, from the losses of the training step, at no further cost."""
    tables = []
    for number in range(count):
        fractions = moment.draws(number)
        with torch.no_grad():
            squares = moment.losses(number, fractions).double().cpu().numpy() ** 2
        tables.append([sums_by_bin(*part) for part in zip(halves(bins_of(fractions)), halves(squares))])
    table = np.array(tables)
    return Way("loss rms", 0.0, count, lambda selected: np.sqrt(ratio(table[selected].sum(0))))


def of_gradients(moment: Moment, name: str, options: dict[str, Any], count: int) -> Way:
    """Measure `gradient_norm` or `first_order` as the samplers do, on each half of the images of a batch."""
    half = moment.size // 2
    settings = {"bins": BINS, "samples": max(2, half // BINS), **options}
    sampler: Any = SAMPLERS.build(name, settings, moment.schedule)
    values = np.zeros((count, 2, BINS))
    for number in range(count):
        x0, conditions = moment.batch(number)
        for k, part in enumerate((slice(0, half), slice(half, 2 * half))):
            half_conditions = {key: value[part] for key, value in conditions.items()}
            values[number, k] = sampler.measure(moment.observation(x0[part], half_conditions, 2 * number + k))
    samples = BINS * max(2, half // BINS) * 2
    if name == "first_order":
        return Way("first order", 3 * 2 * samples / moment.size, count, mean_of(values))
    label = f"gradient rms, {sampler.norm}"
    return Way(label, 3 * samples / moment.size, count, lambda selected: np.sqrt(values[selected].mean(0)))


def regressions(moment: Moment, count: int) -> list[Way]:
    """Regress the reduction of a target on the batch's histogram of timesteps; steps alternate between halves."""
    histograms, fallen = np.zeros((count, 2, BINS)), np.zeros((count, 2, 2))
    for number in range(count):
        for half in range(2):
            fractions = moment.draws(2 * number + half)
            histograms[number, half] = np.bincount(bins_of(fractions), minlength=BINS) / moment.size
            fallen[number, half] = moment.reduction(2 * number + half, fractions)

    def estimate(target: int) -> Callable[[Array], Array]:
        return lambda selected: np.stack(
            [ridge(histograms[selected, h], fallen[selected, h, target]) for h in range(2)]
        )

    cost = 2 * 2 * TARGET / moment.size
    return [
        Way(f"regression, {aim}", cost, count, estimate(target), least=10) for target, aim in enumerate(("loss", "VLB"))
    ]


def ridge(features: Array, values: Array) -> Array:
    """Return the coefficients of a ridge regression whose penalty per row is the mean variance of a feature."""
    x, y = features - features.mean(0), values - values.mean()
    squares = x.T @ x
    return np.linalg.solve(squares + np.trace(squares) / len(squares) * np.eye(len(squares)), x.T @ y)


def antithetic(moment: Moment, count: int) -> list[Way]:
    """Estimate from pairs of batches with densities perturbed by ±xi: the difference of the reductions, times xi."""
    random = np.random.default_rng(moment.first)
    values = np.zeros((count, 2, 2, BINS))
    for number in range(count):
        for half in range(2):
            xi = random.permutation(np.repeat([1.0, -1.0], BINS // 2))
            fallen = []
            for k, sign in enumerate((1, -1)):
                density = (1 + sign * PERTURBATION * xi) / BINS
                bins = random.choice(BINS, moment.size, p=density / density.sum())
                fractions = torch.from_numpy((bins + random.random(moment.size)) / BINS)
                fallen.append(moment.reduction(4 * number + 2 * half + k, fractions))
            values[number, half] = (fallen[0] - fallen[1])[:, None] * xi / (2 * PERTURBATION)
    cost = 4 * 2 * TARGET / moment.size
    return [
        Way(f"antithetic, {aim}", cost, count, mean_of(values[:, :, target]))
        for target, aim in enumerate(("loss", "VLB"))
    ]


def ways(moment: Moment, count: int) -> list[Way]:
    """Measure all estimators: gradients `count` // 3 times, regressions 2 `count` times, the others `count` times."""
    few = max(count // 3, 2)
    return [
        *published(moment, "adaptive", count),
        *published(moment, "adaptive_official", count),
        second_moment_of_loss(moment, count),
        of_gradients(moment, "gradient_norm", {"norm": "plain"}, few),
        of_gradients(moment, "gradient_norm", {"norm": "preconditioned"}, few),
        of_gradients(moment, "first_order", {}, few),
        *regressions(moment, 2 * count),
        *antithetic(moment, count),
    ]
