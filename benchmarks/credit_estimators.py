"""Estimators of the benefit of each timestep for `credit.py`, and the frozen training run that they are measured on.

Every estimator is measured on new batches from the same weights and optimizer state, so measurements are independent
repetitions of one experiment. Each measurement gives two estimates of one vector, from separate halves of its data.
"""

import copy
import math
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
FRESH = 10**6  # measurements at step s use the batches from FRESH * (1 + s) on, so that no two steps share batches
TARGET = 256  # samples of the fixed set that a step's effect is measured on
PERTURBATION = 0.5  # of the density in a bin, up or down, for antithetic batches


@dataclass(frozen=True)
class Estimator:
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


class FrozenRun:
    """A training run at a fixed step: every measured optimizer step starts from its weights and is undone.

    Attributes:
        size: number of images in a batch.
        first: number of the first step of measurements, which decides batches and random numbers.
        saved: states of network and optimizer at the beginning.
        fixed: images, conditions, fractions and noise of the fixed set.
        before: targets at the beginning, see `target`.
    """

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
        """Restore the weights and the optimizer state that were saved at the beginning."""
        self.network.load_state_dict(self.saved[0])
        self.optimizer.load_state_dict(copy.deepcopy(self.saved[1]))

    def batch(self, number: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the images and conditions of measurement `number`; negative numbers are used for the fixed set."""
        step = self.first + number
        (batch,) = self.training.batches.steps(step, step + 1)
        return batch.x0, batch.conditions

    def _predict(
        self, x0: Tensor, conditions: dict[str, Tensor], fractions: Tensor, noise: Tensor
    ) -> tuple[Tensor, ...]:
        """Return times, noisy images, the network's output and per-sample losses, all with batch dimension."""
        t = self.process.times(fractions).to(x0.device)
        x_t = self.process.noised(x0, noise, t)
        output = self.process.predict(self.network, x_t, t, conditions)
        return t, x_t, output, per_sample((output - self.process.target(x0, noise, t)) ** 2)

    def draws(self, number: int) -> Tensor:
        """Draw uniform fractions of the process for the batch of measurement `number`, float64 (batch,)."""
        return Stream(self.first, "timesteps").uniform(number, range(self.size))

    def losses(self, number: int, fractions: Tensor) -> Tensor:
        """Return per-sample losses on the batch of measurement `number` at some fractions, (batch,), with gradients."""
        x0, conditions = self.batch(number)
        noise = Stream(self.first, "noise").normal(number, range(self.size), tuple(x0.shape[1:]), x0.device)
        self.network.train()
        _, _, _, losses = self._predict(x0, conditions, fractions, noise)
        return losses

    def backward(self, losses: Tensor) -> None:
        """Compute the gradients of the mean loss, clipped as in training."""
        self.optimizer.zero_grad(set_to_none=True)
        losses.mean().backward()
        nn.utils.clip_grad_norm_(self.training.parameters, self.training.grad_clip)

    def _fixed(self) -> tuple[Any, ...]:
        """Return images, conditions, equidistant fractions in random order, and noise of `TARGET` fixed samples."""
        batch_count = math.ceil(TARGET / self.size)
        batches = [self.batch(-1 - number) for number in range(batch_count)]
        x0 = torch.cat([images for images, _ in batches])[:TARGET]
        _, first_conditions = batches[0]
        conditions = {}
        for name in first_conditions:
            conditions[name] = torch.cat([values[name] for _, values in batches])[:TARGET]
        random = torch.Generator().manual_seed(0)
        fractions = (torch.randperm(TARGET, generator=random) + 0.5).double() / TARGET
        return x0, conditions, fractions, torch.randn(x0.shape, generator=random).to(x0.device)

    def target(self) -> Array:
        """Return the unweighted loss and the variational bound on the fixed images, timesteps and noise, (2,)."""
        _, _, _, noise = self.fixed
        with torch.no_grad(), evaluating(self.network):
            t, x_t, output, losses = self._predict(*self.fixed)
            epsilon_errors = per_sample((self.process.epsilon(output, x_t, t) - noise) ** 2).double().cpu()
        bound = epsilon_errors * torch.from_numpy(self.schedule.vlb)[t.cpu()]
        return np.array([losses.double().mean().item(), bound.mean().item()])

    def reduction(self, number: int, fractions: Tensor) -> Array:
        """Return how far an optimizer step lowers the two targets, (2,); the step is then undone.

        The step is on the batch of measurement `number` at some fractions.
        """
        self.backward(self.losses(number, fractions))
        self.optimizer.step()
        reduction = self.before - self.target()
        self.restore()
        return reduction

    def observe_step(self, strategy: Strategy, number: int) -> tuple[Tensor, Any]:
        """Take an optimizer step that a strategy draws and observes, undo it, and return the images and the draw."""
        x0, conditions = self.batch(number)
        draw = strategy.draw(x0)
        self.backward(strategy.weighted(draw, self.losses(number, draw.fractions)))
        with strategy.observe(draw, self.network, self.optimizer, conditions):
            self.optimizer.step()
        self.restore()
        return x0, draw

    def observation(self, x0: Tensor, conditions: dict[str, Tensor], number: int) -> Observation:
        """Return the `Observation` of a batch that a sampler receives before an optimizer step."""
        coordinates = RandomCoordinates(self.first, number)
        meter = Meter(self.process, self.network, x0, coordinates, conditions, self.weighting, self.optimizer)
        fractions = torch.zeros(len(x0), dtype=torch.float64)
        return Observation(number, x0, fractions, None, meter, coordinates)


def bins_of(fractions: Tensor) -> Array:
    """Return the index of the bin that contains each fraction, int64; the process is divided into `BINS` equal bins."""
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


def tables_of_halves(fractions: Tensor, values: Array) -> list[Array]:
    """Return the sums and numbers of the values in each bin, (2, BINS), for each half of a batch."""
    bins_of_halves, values_of_halves = halves(bins_of(fractions)), halves(values)
    return [sums_by_bin(bins, half_values) for bins, half_values in zip(bins_of_halves, values_of_halves)]


def ratio(table: Array) -> Array:
    """Return means (..., BINS) from sums and counts (..., 2, BINS); an empty bin gets the mean of all values."""
    sums, counts = table[..., 0, :], table[..., 1, :]
    overall_mean = sums.sum(-1, keepdims=True) / counts.sum(-1, keepdims=True)
    return np.where(counts > 0, sums / np.maximum(counts, 1.0), overall_mean)


def mean_of(values: Array) -> Callable[[Array], Array]:
    """Return the estimator that averages measured vectors (count, 2, components) over the selected measurements."""
    return lambda selected: values[selected].mean(0)


def measure_published(run: FrozenRun, name: str, count: int) -> list[Estimator]:
    """Measure the rewards of sampler `name`, ``adaptive`` or ``adaptive_official``, and return four estimators.

    They are the policy gradient of a and b, its two terms, and the mean reward by bins of t. In the first term, the
    mean reward of the batch credits all timesteps of the batch. In the second, the remainder of each sample's reward
    credits the timestep of the sample.

    The policy keeps its initial value, close to uniform, because its learning rate is 1e-30. The queue is filled before
    the first measurement; S is selected again after every measurement, as in training.
    """
    strategy = Strategy(name, run.process, sampler={"frequency": 1, "lr": 1e-30}, seed=run.first)
    sampler: Any = strategy.sampler
    compute_advantage = sampler.advantage
    rewards = []

    def record_advantage(change: Any) -> Any:
        rewards.append(compute_advantage(change))
        return rewards[-1]

    sampler.advantage = record_advantage
    gradients: dict[str, list[Any]] = {"": [], ", batch's part": [], ", samples' part": []}  # by suffix of the name
    tables = []
    warm_up = sampler.queue
    for number in range(warm_up + count):
        x0, draw = run.observe_step(strategy, number)
        if number < warm_up:
            continue
        a, b = (value.detach().requires_grad_() for value in sampler.policy(x0))
        density = Beta(a, b)
        log_density = density.log_prob(draw.fractions.clamp(1e-6, 1 - 1e-6).float())
        score = torch.stack(torch.autograd.grad(log_density.sum(), [a, b]), 1).numpy()
        coefficient = rewards[-1].float()
        if name == "adaptive_official":
            coefficient = coefficient + sampler.entropy * density.entropy().detach()
        sample_rewards = coefficient.numpy()[:, None]
        batch_reward = sample_rewards.mean(0)
        factors = (sample_rewards, batch_reward, sample_rewards - batch_reward)
        for suffix, factor in zip(gradients, factors, strict=True):
            gradients[suffix].append([half.mean(0) for half in halves(score * factor)])
        tables.append(tables_of_halves(draw.fractions, rewards[-1].double().numpy()))
    table = np.array(tables)  # (count, halves, sums and numbers, BINS)
    cost = (2 * len(sampler.features)) / run.size + 2 * sampler.selected
    estimators = []
    for suffix, values in gradients.items():
        estimate = mean_of(np.array(values, np.float64))
        estimators.append(Estimator(f"{name}: policy gradient{suffix}", cost, count, estimate, profile=False))
    estimators.append(Estimator(f"{name}: reward by bins", cost, count, lambda selected: ratio(table[selected].sum(0))))
    return estimators


def measure_second_moment(run: FrozenRun, count: int) -> Estimator:
    """Measure the root mean square of the loss by bins, from the losses of the training step, at no further cost."""
    tables = []
    for number in range(count):
        fractions = run.draws(number)
        with torch.no_grad():
            squares = run.losses(number, fractions).double().cpu().numpy() ** 2
        tables.append(tables_of_halves(fractions, squares))
    table = np.array(tables)  # (count, halves, sums and numbers, BINS)
    return Estimator("loss rms", 0.0, count, lambda selected: np.sqrt(ratio(table[selected].sum(0))))


def measure_gradients(run: FrozenRun, name: str, options: dict[str, Any], count: int) -> Estimator:
    """Measure gradients by bins of t with sampler `name`, ``gradient_norm`` or ``first_order``; return the estimator.

    Each half of the images of a batch gives an estimate. `options` are options of the sampler.
    """
    half_size = run.size // 2
    samples_per_bin = max(2, half_size // BINS)
    sampler: Any = SAMPLERS.build(name, {"bins": BINS, "samples": samples_per_bin, **options}, run.schedule)
    values = np.zeros((count, 2, BINS))
    for number in range(count):
        x0, conditions = run.batch(number)
        for half, images in enumerate((slice(0, half_size), slice(half_size, 2 * half_size))):
            half_conditions = {key: value[images] for key, value in conditions.items()}
            observation = run.observation(x0[images], half_conditions, 2 * number + half)
            values[number, half] = sampler.measure(observation)
    samples = BINS * samples_per_bin * 2  # of both halves
    if name == "first_order":
        return Estimator("first order", 3 * 2 * samples / run.size, count, mean_of(values))
    label = f"gradient rms, {sampler.norm}"
    return Estimator(label, 3 * samples / run.size, count, lambda selected: np.sqrt(values[selected].mean(0)))


def measure_regressions(run: FrozenRun, count: int) -> list[Estimator]:
    """Measure steps, and return the regression of each target's reduction on the batch's histogram of timesteps.

    The steps alternate between the two halves of a measurement.
    """
    histograms = np.zeros((count, 2, BINS))
    reductions = np.zeros((count, 2, 2))  # measurement, half, target
    for number in range(count):
        for half in range(2):
            fractions = run.draws(2 * number + half)
            histograms[number, half] = np.bincount(bins_of(fractions), minlength=BINS) / run.size
            reductions[number, half] = run.reduction(2 * number + half, fractions)

    def make_estimate(target: int) -> Callable[[Array], Array]:
        def estimate(selected: Array) -> Array:
            return np.stack(
                [ridge(histograms[selected, half], reductions[selected, half, target]) for half in range(2)]
            )

        return estimate

    cost = 2 * 2 * TARGET / run.size
    return [
        Estimator(f"regression, {name}", cost, count, make_estimate(target), least=10)
        for target, name in enumerate(("loss", "VLB"))
    ]


def ridge(features: Array, values: Array) -> Array:
    """Return the coefficients of a ridge regression with intercept, (features,).

    The penalty is the sum of squares of a centred feature, averaged over features.
    """
    x, y = features - features.mean(0), values - values.mean()
    squares = x.T @ x
    penalty = np.trace(squares) / len(squares)
    return np.linalg.solve(squares + penalty * np.eye(len(squares)), x.T @ y)


def measure_antithetic(run: FrozenRun, count: int) -> list[Estimator]:
    """Measure pairs of steps on batches with opposite densities, and return an estimator for each target.

    The uniform density is perturbed by +xi and by -xi, with random signs xi by bins. An estimate is the difference of
    the two reductions, times xi.
    """
    random = np.random.default_rng(run.first)
    values = np.zeros((count, 2, 2, BINS))  # measurement, half, target, bin
    for number in range(count):
        for half in range(2):
            xi = random.permutation(np.repeat([1.0, -1.0], BINS // 2))
            reductions = []
            for index, sign in enumerate((1, -1)):
                density = (1 + sign * PERTURBATION * xi) / BINS
                bins = random.choice(BINS, run.size, p=density / density.sum())
                fractions = torch.from_numpy((bins + random.random(run.size)) / BINS)
                reductions.append(run.reduction(4 * number + 2 * half + index, fractions))
            difference = reductions[0] - reductions[1]  # by target
            values[number, half] = difference[:, None] * xi / (2 * PERTURBATION)
    cost = 4 * 2 * TARGET / run.size
    return [
        Estimator(f"antithetic, {name}", cost, count, mean_of(values[:, :, target]))
        for target, name in enumerate(("loss", "VLB"))
    ]


def measure_all(run: FrozenRun, count: int) -> list[Estimator]:
    """Measure and return all estimators.

    Gradients are measured `count` // 3 times, but at least twice, regressions 2 `count` times, the others `count`
    times.
    """
    few = max(count // 3, 2)
    return [
        *measure_published(run, "adaptive", count),
        *measure_published(run, "adaptive_official", count),
        measure_second_moment(run, count),
        measure_gradients(run, "gradient_norm", {"norm": "plain"}, few),
        measure_gradients(run, "gradient_norm", {"norm": "preconditioned"}, few),
        measure_gradients(run, "first_order", {}, few),
        *measure_regressions(run, 2 * count),
        *measure_antithetic(run, count),
    ]
