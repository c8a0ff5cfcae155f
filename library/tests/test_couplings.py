"""Couplings of noise with images: optimal assignments, nearest noise, random coordinates and validation errors."""

import itertools
import re
import sys

import pytest
import torch

import kairos_timesteps
from kairos_timesteps.errors import ConfigError
from kairos_timesteps.randomness import Stream


def digits(count):
    """Return images of digits (count, 1, 8, 8)."""
    from sklearn.datasets import load_digits

    return torch.from_numpy(load_digits().images[:count] / 8 - 1).float()[:, None]  # (count, 1, 8, 8)


def couple(coupling, x0, seed=0, step=0, **draw):
    """Return independent noise, and the noise that a coupling assigns to images."""
    strategy = kairos_timesteps.Strategy("log_normal", coupling=coupling, seed=seed)
    strategy.step = step
    noise = Stream(seed, "noise").normal(step, range(len(x0)), tuple(x0.shape[1:]), dtype=x0.dtype)
    return noise, strategy.couple(strategy.draw(x0, **draw), noise)


def cost(x0, noise):
    """Return the squared distance of each image to its noise."""
    return (x0.double() - noise.double()).square().flatten(1).sum(1)


@pytest.mark.parametrize("seed", range(5))
def test_an_assignment_costs_no_more_than_any_other(seed):
    pytest.importorskip("scipy")
    x0 = digits(6)
    noise, results = couple("assignment", x0, seed)
    least = min(cost(x0, noise[list(order)]).sum() for order in itertools.permutations(range(6)))
    assert float(cost(x0, results).sum()) == pytest.approx(float(least), rel=1e-12)


def test_an_assignment_permutes_the_noise_of_a_batch():
    pytest.importorskip("scipy")
    x0 = digits(64)
    noise, results = couple("assignment", x0)
    rows = sorted(map(tuple, noise.flatten(1).tolist()))
    assert sorted(map(tuple, results.flatten(1).tolist())) == rows and not torch.equal(results, noise)
    assert cost(x0, results).sum() < 0.97 * cost(x0, noise).sum()


@pytest.mark.parametrize("k", [2, 4, 9])
def test_nearest_selects_the_nearest_of_k_noises(k):
    x0 = digits(20)
    noise, results = couple({"name": "nearest", "k": k}, x0, seed=3)
    more = Stream(3, "coupling").normal(0, range(20), (k - 1, 1, 8, 8))
    for row, image in enumerate(x0):
        candidates = [noise[row], *more[row]]
        nearest = min(candidates, key=lambda candidate: float((candidate.double() - image.double()).square().sum()))
        assert torch.equal(results[row], nearest)
    assert (cost(x0, results) <= cost(x0, noise)).all()


@pytest.mark.parametrize(("size", "square"), [(8, 0.88), (56, 0.98)])
def test_nearest_noise_is_shorter_and_correlates_with_the_image(size, square):
    """Both effects decrease with the number of pixels of an image, as the guide states."""
    x0 = torch.nn.functional.interpolate(digits(1), (size, size)).expand(20_000 * 64 // size**2, 1, size, size)
    _, results = couple("nearest", x0)
    along = (results * x0).flatten(1).sum(1) / x0[0].norm()
    assert float(results.square().mean()) == pytest.approx(square, abs=0.02)
    assert 0.3 < float(along.mean()) < 1.03  # that is the mean of the largest of 4 normal numbers


@pytest.mark.parametrize("coupling", ["assignment", "nearest"])
def test_a_coupling_is_a_function_of_seed_and_step(coupling):
    pytest.importorskip("scipy")
    x0 = digits(16)
    _, one = couple(coupling, x0, seed=1, step=7)
    _, again = couple(coupling, x0, seed=1, step=7)
    _, other = couple(coupling, x0, seed=1, step=8)
    assert torch.equal(one, again) and not torch.equal(one, other)


def test_nearest_noise_of_an_image_does_not_depend_on_the_slice_of_the_batch():
    x0 = digits(16)
    noise, whole = couple("nearest", x0)
    strategy = kairos_timesteps.Strategy("uniform", coupling="nearest")
    draw = strategy.draw(x0[5:9], index=range(5, 9), total=16)
    assert torch.equal(strategy.couple(draw, noise[5:9]), whole[5:9])
    indices = torch.tensor([11, 2, 7])
    strategy = kairos_timesteps.Strategy("uniform", coupling="nearest")
    draw = strategy.draw(x0[indices], index=indices, total=16, shared_time=True)
    assert torch.equal(strategy.couple(draw, noise[indices]), whole[indices])
    strategy = kairos_timesteps.Strategy("uniform", coupling="nearest")
    draw = strategy.draw(x0, step=torch.tensor(0))  # as in a graph that is replayed
    assert torch.equal(strategy.couple(draw, noise), whole)


def test_accumulated_micro_batches_get_different_noise():
    strategy, x0 = (
        kairos_timesteps.Strategy("uniform", coupling={"name": "nearest", "k": 8}),
        digits(1).expand(32, 1, 8, 8),
    )
    first, second = (
        strategy.couple(strategy.draw(x0), torch.full_like(x0, 9.0)) for _ in range(2)
    )  # the independent noise is never the nearest
    assert not torch.equal(first, second)


@pytest.mark.long
@pytest.mark.parametrize("name", ["uniform", "speed"])
def test_nearest_is_a_part_of_a_compiled_step(name):
    strategy, x0 = kairos_timesteps.Strategy(name, coupling="nearest"), digits(8)

    def step(x0, noise, number):
        draw = strategy.draw(x0, step=number)
        return strategy.couple(draw, noise)

    noise, number = torch.randn_like(x0), torch.tensor(3)
    compiled = torch.compile(step, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x0, noise, number), step(x0, noise, number))


def test_the_independent_coupling_keeps_the_noise():
    noise, results = couple("independent", digits(4))
    assert results is not None and torch.equal(noise, results)


@pytest.mark.parametrize(
    ("coupling", "message"),
    [
        ("asignment", "unknown coupling 'asignment'; did you mean 'assignment'?"),
        (3, "unknown coupling 3"),
        ({"name": "nearest", "k": 1}, "coupling nearest.k: got 1, allowed: integer >= 2"),
        ({"name": "nearest", "n": 4}, "coupling nearest: unknown option 'n'"),
        ({"k": 4}, "coupling independent: unknown option 'k'"),
    ],
)
def test_bad_couplings_are_rejected(coupling, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        kairos_timesteps.Strategy("uniform", coupling=coupling)


def test_noise_of_another_shape_is_rejected():
    strategy = kairos_timesteps.Strategy("uniform")
    with pytest.raises(ConfigError, match=r"couple: noise: got shape \(3, 1\), allowed: that of x0, \(4, 1\)"):
        strategy.couple(strategy.draw(torch.zeros(4, 1)), torch.zeros(3, 1))


def test_assignment_without_scipy_is_rejected_and_nearest_works(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    kairos_timesteps.Strategy("uniform", coupling="nearest")
    with pytest.raises(ConfigError, match=r"assignment.*scipy.*couplings"):
        kairos_timesteps.Strategy("uniform", coupling="assignment")
