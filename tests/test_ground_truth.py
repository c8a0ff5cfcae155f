"""The benchmark with a known optimum: its recursion, its optimum, and samplers that approach it."""

from dataclasses import replace

import ground_truth
import pytest
import torch

from kairos_timesteps.base import TableDensity
from kairos_timesteps.options import parse

NOISE, FLAT, SLOW = ground_truth.problems(12)


class Fixed(TableDensity):
    """A density given as a table, with importance weights or without."""

    def __init__(self, strategy, p, corrected):
        super().__init__(parse(TableDensity, {}), strategy.process.schedule)
        self.set_masses(p.numpy())
        self.importance = corrected


@pytest.mark.long
@pytest.mark.parametrize("corrected", [True, False])
def test_recursion_agrees_with_training_runs_of_strategy(corrected):
    problem = replace(NOISE, steps=25)
    p = torch.softmax(torch.linspace(1, -1, 12, dtype=torch.float64), 0)
    squares = []
    for seed in range(64):
        strategy = ground_truth.make_strategy(problem, "uniform", seed)
        strategy.sampler = Fixed(strategy, p, corrected)
        distance, densities = ground_truth.train(problem, strategy)
        torch.testing.assert_close(densities[-1], p)
        squares.append(distance**2)
    squares = torch.stack(squares)
    exact = ground_truth.second_moments(problem, p, corrected)
    error = squares.std(0) / 8
    assert ((squares.mean(0) - exact).abs() < 4 * error).all()
    assert (error < 0.3 * exact).all()  # otherwise the comparison above is weak
    other = ground_truth.second_moments(problem, p.flip(0), corrected)
    assert ((squares.mean(0) - other).abs() > 4 * error).sum() >= 3


@pytest.mark.parametrize("corrected", [True, False])
def test_recursion_over_periods_equals_the_whole_recursion(corrected):
    p = torch.softmax(torch.linspace(0, 2, 12, dtype=torch.float64), 0)
    parts = [p] * -(-NOISE.steps // ground_truth.PERIOD)
    whole = ground_truth.second_moments(NOISE, p, corrected)
    torch.testing.assert_close(ground_truth.along(NOISE, parts, corrected), whole)


def test_errors_at_timesteps_that_are_never_drawn_stay():
    p = torch.cat([torch.zeros(2, dtype=torch.float64), torch.full((10,), 0.1, dtype=torch.float64)])
    assert ground_truth.second_moments(NOISE, p, False)[:2].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("problem", [NOISE, FLAT, SLOW], ids=lambda problem: problem.name)
@pytest.mark.parametrize("corrected", [True, False])
def test_optimum_beats_uniform_and_its_neighbours(problem, corrected):
    def loss(p):
        return problem.loss(ground_truth.second_moments(problem, p, corrected)).item()

    best = ground_truth.optimum(problem, corrected)
    assert abs(best.sum().item() - 1) < 1e-12
    assert loss(best) <= loss(torch.full_like(best, 1 / 12))
    random = torch.Generator().manual_seed(0)
    for _ in range(50):
        shift = 0.3 * torch.randn(12, generator=random, dtype=torch.float64)
        assert loss(best) < loss(torch.softmax(best.log() + shift, 0))
    if not corrected:
        beta = problem.loss(ground_truth.second_moments(problem, ground_truth.best_beta(problem), False)).item()
        assert loss(best) < beta < loss(torch.full_like(best, 1 / 12))


def test_the_optimum_is_proportional_to_gradient_noise_if_noise_dominates():
    """After many steps at a small rate, the optimum has a closed form."""
    problem = replace(NOISE, rate=0.01, steps=10**6)
    # E d² -> r s²/(2 T B p h) for small r: h/2 E d² ~ s²/p, so p ~ s
    best = ground_truth.optimum(problem, True)
    torch.testing.assert_close(best, problem.noise / problem.noise.sum(), rtol=0.01, atol=0)


@pytest.mark.long
def test_samplers_that_follow_losses_or_gradients_approach_the_optimum():
    """`loss_rms` approaches it if losses are proportional to gradient norms, `gradient_norm` in general."""
    even = torch.full((12,), 1 / 12, dtype=torch.float64)
    for problem, names in ((NOISE, ("loss_rms", "gradient_norm", "loss_second_moment")), (FLAT, ("gradient_norm",))):
        best = ground_truth.optimum(problem, True)
        uniform = problem.loss(ground_truth.second_moments(problem, even, True)).item()
        least = problem.loss(ground_truth.second_moments(problem, best, True)).item()
        for name in names:
            strategy = ground_truth.make_strategy(problem, name, 0)
            _, densities = ground_truth.train(problem, strategy)
            share = 0.1 if name == "loss_second_moment" else 0.7
            relative_distance = (densities[-1] - best).abs().sum() / (even - best).abs().sum()
            assert relative_distance < 1 - share / 2, (problem.name, name, relative_distance)
            final_loss = problem.loss(ground_truth.along(problem, densities, True)).item()
            assert final_loss < uniform - share * (uniform - least), (problem.name, name, final_loss, uniform, least)
