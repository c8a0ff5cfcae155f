"""Couplings of noise with images: against every other assignment, on digits, and in a training that resumes."""

import itertools
import re
import sys

import pytest
import torch

import kairos_timesteps
from kairos_timesteps.errors import ConfigError
from kairos_timesteps.randomness import Stream


def digits(count):
    from sklearn.datasets import load_digits

    return torch.from_numpy(load_digits().images[:count] / 8 - 1).float()[:, None]  # (count, 1, 8, 8)


def coupled(coupling, x0, seed=0, step=0, **draw):
    strategy = kairos_timesteps.Strategy("log_normal", coupling=coupling, seed=seed)
    strategy.step = step
    noise = Stream(seed, "noise").normal(step, range(len(x0)), tuple(x0.shape[1:]), dtype=x0.dtype)
    return noise, strategy.couple(strategy.draw(x0, **draw), noise)


def cost(x0, noise):
    return (x0.double() - noise.double()).square().flatten(1).sum(1)


@pytest.mark.parametrize("seed", range(5))
def test_an_assignment_costs_no_more_than_any_other(seed):
    pytest.importorskip("scipy")
    x0 = digits(6)
    noise, results = coupled("assignment", x0, seed)
    least = min(cost(x0, noise[list(order)]).sum() for order in itertools.permutations(range(6)))
    assert float(cost(x0, results).sum()) == pytest.approx(float(least), rel=1e-12)


def test_an_assignment_is_a_permutation_and_leaves_the_noise_what_it_was():
    pytest.importorskip("scipy")
    x0 = digits(64)
    noise, results = coupled("assignment", x0)
    rows = sorted(map(tuple, noise.flatten(1).tolist()))
    assert sorted(map(tuple, results.flatten(1).tolist())) == rows and not torch.equal(results, noise)
    assert cost(x0, results).sum() < 0.97 * cost(x0, noise).sum()


@pytest.mark.parametrize("k", [2, 4, 9])
def test_nearest_is_the_nearest_of_k(k):
    x0 = digits(20)
    noise, results = coupled({"name": "nearest", "k": k}, x0, seed=3)
    more = Stream(3, "coupling").normal(0, range(20), (k - 1, 1, 8, 8))
    for row, image in enumerate(x0):
        every = [noise[row], *more[row]]
        nearest = min(every, key=lambda one: float((one.double() - image.double()).square().sum()))
        assert torch.equal(results[row], nearest)
    assert (cost(x0, results) <= cost(x0, noise)).all()


@pytest.mark.parametrize(("size", "square"), [(8, 0.88), (56, 0.98)])
def test_how_far_nearest_leans_towards_the_image(size, square):
    """The nearest is a little shorter, too; both the less the more numbers an image has, as the guide says."""
    x0 = torch.nn.functional.interpolate(digits(1), (size, size)).expand(20_000 * 64 // size**2, 1, size, size)
    _, results = coupled("nearest", x0)
    along = (results * x0).flatten(1).sum(1) / x0[0].norm()
    assert float(results.square().mean()) == pytest.approx(square, abs=0.02)
    assert 0.3 < float(along.mean()) < 1.03  # that is the mean of the largest of 4 normal numbers


@pytest.mark.parametrize("coupling", ["assignment", "nearest"])
def test_a_coupling_is_a_function_of_seed_and_step(coupling):
    pytest.importorskip("scipy")
    x0 = digits(16)
    _, one = coupled(coupling, x0, seed=1, step=7)
    _, again = coupled(coupling, x0, seed=1, step=7)
    _, other = coupled(coupling, x0, seed=1, step=8)
    assert torch.equal(one, again) and not torch.equal(one, other)


def test_nearest_gives_each_image_what_it_gets_in_any_part_of_the_batch():
    x0 = digits(16)
    noise, whole = coupled("nearest", x0)
    strategy = kairos_timesteps.Strategy("uniform", coupling="nearest")
    draw = strategy.draw(x0[5:9], index=range(5, 9), total=16)
    assert torch.equal(strategy.couple(draw, noise[5:9]), whole[5:9])
    picked = torch.tensor([11, 2, 7])
    strategy = kairos_timesteps.Strategy("uniform", coupling="nearest")
    draw = strategy.draw(x0[picked], index=picked, total=16, same=True)
    assert torch.equal(strategy.couple(draw, noise[picked]), whole[picked])
    strategy = kairos_timesteps.Strategy("uniform", coupling="nearest")
    draw = strategy.draw(x0, step=torch.tensor(0))  # as in a graph that is replayed
    assert torch.equal(strategy.couple(draw, noise), whole)


def test_batches_that_are_accumulated_get_different_noise():
    strategy, x0 = (
        kairos_timesteps.Strategy("uniform", coupling={"name": "nearest", "k": 8}),
        digits(1).expand(32, 1, 8, 8),
    )
    first, second = (strategy.couple(strategy.draw(x0), torch.full_like(x0, 9.0)) for _ in range(2))  # never its own
    assert not torch.equal(first, second)


@pytest.mark.parametrize("name", ["uniform", "speed"])
def test_nearest_is_a_part_of_a_compiled_step(name):
    strategy, x0 = kairos_timesteps.Strategy(name, coupling="nearest"), digits(8)

    def step(x0, noise, number):
        draw = strategy.draw(x0, step=number)
        return strategy.couple(draw, noise)

    noise, number = torch.randn_like(x0), torch.tensor(3)
    compiled = torch.compile(step, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x0, noise, number), step(x0, noise, number))


def test_independent_gives_back_what_it_got():
    noise, results = coupled("independent", digits(4))
    assert results is not None and torch.equal(noise, results)


@pytest.mark.parametrize(
    ("coupling", "words"),
    [
        ("asignment", "unknown coupling 'asignment'; did you mean 'assignment'?"),
        (3, "unknown coupling 3"),
        ({"name": "nearest", "k": 1}, "coupling nearest.k: got 1, allowed: integer >= 2"),
        ({"name": "nearest", "n": 4}, "coupling nearest: unknown option 'n'"),
        ({"k": 4}, "coupling independent: unknown option 'k'"),
    ],
)
def test_refusals(coupling, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        kairos_timesteps.Strategy("uniform", coupling=coupling)


def test_noise_of_another_shape_is_refused():
    strategy = kairos_timesteps.Strategy("uniform")
    with pytest.raises(ConfigError, match=r"couple: noise: got shape \(3, 1\), allowed: that of x0, \(4, 1\)"):
        strategy.couple(strategy.draw(torch.zeros(4, 1)), torch.zeros(3, 1))


def test_assignment_without_scipy_is_rejected_and_nearest_works(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    kairos_timesteps.Strategy("uniform", coupling="nearest")
    with pytest.raises(ConfigError, match=r"assignment.*scipy.*couplings"):
        kairos_timesteps.Strategy("uniform", coupling="assignment")
