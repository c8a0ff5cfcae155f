"""The random generator: published vectors, values that must never change, and distributions."""

import itertools
import os
import subprocess
import sys

import mpmath
import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch

from kairos_timesteps import randomness
from kairos_timesteps.randomness import Stream, _normal, derived_seed, key_schedule, philox

NOISE = Stream(1, "noise")
TORCH = "cpu:0"  # the CPU by a name for which torch computes, as on a GPU, instead of numpy


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # kat_vectors of Random123
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
@pytest.mark.parametrize("array", [np.array, torch.tensor])
def test_philox_returns_the_published_vectors(counter, key, words, array):
    parsed = [array([int(word, 16)]) for word in counter.split()]
    results = philox(parsed, key_schedule(*(int(half, 16) for half in key.split())))
    assert " ".join(f"{word.item():08x}" for word in results) == words


def all_kinds(stream, step, index, device="cpu"):
    """Draw numbers of every kind for each sample; returns them by kind."""
    index = torch.as_tensor(list(index))
    a = torch.tensor([0.3, 5.0, 1e-3, 40.0])[index % 4].to(device)
    return {
        "words": stream.words(step, index, 7, device),
        "uniform": stream.uniform(step, index, (3,), device),
        "normal": stream.normal(step, index, (3, 5), device),
        "normal64": stream.normal(step, index, (), device, torch.float64),
        "integers": stream.integers(step, 1000, index, (2,), device),
        "beta": stream.beta(step, index, a, 2 * a),
    }


def test_golden_values():
    """Earlier runs and samples used these draws: if a value changes, none of them can be reproduced."""
    assert NOISE.words(0, range(2), 6).tolist() == [
        [2163215365, 1066633742, 1903122159, 271593864, 704008136, 2918755507],
        [329068298, 1332993881, 3004752202, 1012055349, 1187952133, 2737767239],
    ]
    words = {
        (0, "noise", 0, 0): [840322717, 2277042260],
        (1, "noise", 2**32 + 5, 2**32 - 1): [771771324, 2485877522],
        (1 + 2**32, "noise", 0, 0): [3119352622, 953003717],
        (1 + 2**62, "noise", 0, 0): [1000800987, 3842919050],
        (2**63 - 1, "order", 2**63 - 1, 7): [4086135303, 2649928318],
    }
    for (seed, name, step, position), two in words.items():
        assert Stream(seed, name).words(step, torch.tensor([position]), 2).tolist() == [two]
    assert NOISE.uniform(3, range(4)).tolist() == [
        0.9674853084137109,
        0.054911252852677284,
        0.15753094124147027,
        0.2787668210571794,
    ]
    assert NOISE.integers(3, 1000, range(8)).tolist() == [967, 54, 157, 278, 175, 131, 419, 6]
    assert NOISE.integers(3, 2, range(2), (8,)).tolist() == [[1, 1, 0, 0, 1, 0, 0, 0], [0, 1, 1, 0, 1, 1, 0, 0]]
    assert NOISE.normal(3, range(2), (3,)).flatten().tolist() == pytest.approx(
        [1.84505606, 2.78973246, 0.322643369, -1.59899139, -0.897838771, 0.730621278], rel=1e-6
    )
    a, b = torch.tensor([2.0, 0.5, 1e-3, 1e-3, 30.0]), torch.tensor([3.0, 0.5, 1e-3, 2e-3, 0.1])
    assert NOISE.beta(3, range(5), a, b).tolist() == pytest.approx(
        [0.5484569139044632, 0.029306799157832526, 1.0, 7.912266806606418e-176, 0.9999929194664037], rel=1e-6
    )
    assert derived_seed(1, "weights") == 2218878379593219762


def test_every_bit_of_the_random_coordinates_changes_the_draws():
    keys = [(seed, "noise", 0, 0) for seed in (1, 1 + 2**31, 1 + 2**32, 1 + 2**62, 2**63 - 1)]
    keys += [(1, "flips", 0, 0), (1, "noise", 1, 0), (1, "noise", 2**32, 0), (1, "noise", 2**62, 0)]
    keys += [(1, "noise", 0, 1), (1, "noise", 0, 2**31), (1, "noise", 0, 2**32 - 1)]
    draws = {tuple(Stream(*key[:2]).words(key[2], torch.tensor([key[3]]), 4)[0].tolist()) for key in keys}
    assert len(draws) == len(keys)


def test_value_does_not_depend_on_the_batch():
    whole = all_kinds(NOISE, 7, range(301))
    random = np.random.default_rng(0)
    for _ in range(20):
        index = torch.as_tensor(random.permutation(301)[: random.integers(1, 300)])
        for kind, values in all_kinds(NOISE, 7, index).items():
            assert torch.equal(values, whole[kind][index]), kind
    assert torch.equal(NOISE.words(7, range(10, 301, 3), 7), whole["words"][10::3])
    assert torch.equal(NOISE.words(7, range(301), 3), whole["words"][:, :3])  # nor on the number of words
    assert torch.equal(NOISE.normal(7, range(301), (3,)), whole["normal"][:, 0, :3])
    assert NOISE.normal(7, range(0), (3,)).shape == (0, 3)


def test_prefetched_steps_equal_single_steps():
    """Small draws are computed for several steps at once, and changes to the result do not affect later draws."""
    for step in (0, 15, 16, 2**32 - 1, 2**32, 2**63 - 1):
        for draw in (NOISE.normal, NOISE.uniform):
            for shape in ((), (5,)):
                alone = draw(step, torch.arange(9), shape)
                with torch.inference_mode():
                    draw(step, range(9), shape).zero_()
                again = draw(step, range(9), shape)
                assert torch.equal(again, alone) and not again.is_inference()


def test_numpy_and_torch_agree():
    for step, stream in itertools.product((0, 2**32 + 5, 2**63 - 1), (NOISE, Stream(2**62, "t"))):
        index = [0, 1, 2, 2**31 - 1, 2**31, 2**32 - 1, *range(100, 200)]
        plain, other = all_kinds(stream, step, index), all_kinds(stream, step, index, TORCH)
        assert all(torch.equal(plain[kind], other[kind]) for kind in plain)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_numpy_and_a_gpu_agree():
    for step in (0, 2**32 + 5, 2**63 - 1):
        index = [0, 1, 2**31, 2**32 - 1, *range(100, 20000)]
        plain, other = all_kinds(NOISE, step, index), all_kinds(NOISE, step, index, "cuda")
        for kind in plain:
            assert other[kind].is_cuda
            exact = kind in ("words", "integers", "uniform")
            torch.testing.assert_close(other[kind].cpu(), plain[kind], rtol=0 if exact else 1e-6, atol=0)


COMPARE_TRITON = """
import torch
from kairos_timesteps import philox_triton, randomness
stream = randomness.Stream(5, "noise")
key = randomness._KEYS[5, "noise"][0][2]
all_steps = range(1), range(7, 10), range(2**32 - 2, 2**32), range(2**33 + 2**31 + 7, 2**33 + 2**31 + 9)
all_indices = range(5), range(3, 300, 7), range(2**32 - 3, 2**32), torch.tensor([0, 5, 2**32 - 1, 2**31])
for steps in all_steps:
    for index in all_indices:
        for count in (1, 6, 257):
            words = torch.full((len(steps), len(index), -(-count // 4), 4), -1)
            philox_triton.write_words(words, steps, index, key)
            assert torch.equal(words.flatten(2)[..., :count], stream.words(steps, index, count)), (steps, index, count)
            centred = torch.full(words.shape, -1.0, dtype=torch.float64)
            philox_triton.write_words(centred, steps, index, key)
            assert torch.equal(centred, randomness._centred(words)), (steps, index, count)

# the words of a device are compared before they are used, and a kernel with other words is rejected
randomness._load_kernel("cpu")
randomness._load_kernel.cache_clear()
philox_triton.write_words = lambda words, *arguments: words.zero_()
try:
    randomness._load_kernel("cpu")
except RuntimeError:
    pass
else:
    raise AssertionError("a kernel with wrong words is used")
"""


@pytest.mark.long
def test_triton_writes_equal_words():
    """The kernel runs in Triton's interpreter, which needs no GPU."""
    pytest.importorskip("triton", exc_type=ImportError)  # some releases need setuptools, which may be missing
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", COMPARE_TRITON], env=environment, check=True)


def test_normal_numbers_have_equal_bits_with_fused_conversions(monkeypatch):
    """A GPU converts types within other operations; here the CPU does so."""
    words = torch.cat([NOISE.words(0, range(100), 37), torch.tensor([[0, 1, 2**31 - 1, 2**31, 2**32 - 1] + [7] * 32])])
    dtypes = (torch.float32, torch.float64, torch.bfloat16)
    plain = [_normal(words[:, :-1], dtype) for dtype in dtypes]
    monkeypatch.setattr(randomness, "_fuses_conversions", lambda values: True)
    for dtype, expected in zip(dtypes, plain):
        fused = _normal(words[:, :-1], dtype)
        assert fused.dtype == dtype and torch.equal(fused, expected)


def test_uniform_numbers_and_integers_have_their_distributions():
    u = NOISE.uniform(0, range(10**5), (3,))
    assert u.dtype == torch.float64 and u.min() >= 0 and u.max() < 1
    assert scipy.stats.kstest(u.flatten(), "uniform").pvalue > 0.01
    assert (u * 2**53 % 2 == 1).double().mean() == pytest.approx(0.5, abs=0.01)  # the last of 53 bits
    for high in (2, 10, 1000):
        counts = torch.bincount(NOISE.integers(1, high, range(10**5)), minlength=high)
        assert len(counts) == high and scipy.stats.chisquare(counts).pvalue > 0.01
    assert NOISE.integers(0, 2**53, range(10**5)).max() > 2**52


def test_normal_numbers_have_their_distribution():
    z = NOISE.normal(0, range(1000), (10, 100))
    assert z.dtype == torch.float32 and z.shape == (1000, 10, 100)
    assert scipy.stats.kstest(z.flatten().double(), "norm").pvalue > 0.01
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert (z.double() ** power).mean().item() == pytest.approx(moment, abs=4 * (variance / z.numel()) ** 0.5)


def test_normal_numbers_are_exact_to_1e_7():
    ends = [0, 1, 2**31 - 2, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1, *(2**k for k in range(2, 31))]
    for word, z in zip(ends, _normal(torch.tensor(ends)).float().tolist()):
        exact = mpmath.sqrt(2) * mpmath.erfinv(mpmath.mpf(2 * word + 1) / 2**32 - 1)
        assert abs(z - exact) <= 1e-7 * abs(exact)
    words = NOISE.words(0, range(1000), 1000)
    exact = 2**0.5 * scipy.special.erfinv((2 * words.numpy() + 1) / 2**32 - 1)
    np.testing.assert_allclose(NOISE.normal(0, range(1000), (1000,)).numpy(), exact, rtol=1e-7)


@pytest.mark.parametrize(("a", "b"), [(1, 1), (0.8, 1), (2, 5), (0.5, 0.5), (0.05, 0.3), (100, 3), (1e4, 1e4)])
def test_beta_numbers_have_their_distribution(a, b):
    n = 10**5
    values = NOISE.beta(0, range(n), torch.full((n,), a), torch.full((n,), b))
    assert values.dtype == torch.float64
    assert scipy.stats.kstest(values, scipy.stats.beta(a, b).cdf).pvalue > 0.01


def test_beta_numbers_of_tiny_parameters_are_finite():
    n = 10**5
    values = NOISE.beta(0, range(n), torch.full((n,), 1e-3), torch.full((n,), 2e-3))  # practically 0 or 1
    assert values.isfinite().all() and values.min() >= 0 and values.max() <= 1
    assert values.mean().item() == pytest.approx(1 / 3, abs=0.005)


@pytest.mark.parametrize("index", [range(3, 8), torch.arange(3, 8)])
@pytest.mark.parametrize("shape", [(), (2, 4)])
def test_a_range_of_steps_gives_all_numbers_a_leading_axis(index, shape):
    a, b = torch.linspace(0.5, 3, 5), torch.linspace(2, 0.1, 5)
    kinds = [
        lambda step: NOISE.words(step, index, 4),
        lambda step: NOISE.uniform(step, index, shape),
        lambda step: NOISE.normal(step, index, shape),
        lambda step: NOISE.integers(step, 1000, index, shape),
        lambda step: NOISE.beta(step, index, a, b, shape),
    ]
    for draw in kinds:
        together = draw(range(15, 18))
        assert together.shape[0] == 3
        for row, step in enumerate(range(15, 18)):
            assert torch.equal(together[row], draw(step)) and torch.equal(together[row], draw(torch.tensor(step)))


def test_streams_steps_and_samples_are_independent():
    n = 10**5
    draws = [Stream(seed, name).normal(step, range(n)) for seed in (0, 1) for name in ("a", "b") for step in (0, 1, 2)]
    draws += [NOISE.normal(0, range(n), (3,))[:, k] for k in range(3)]  # words of one sample
    draws += [NOISE.normal(0, range(1, n + 1), (3,))[:, 0]]  # neighbours in the batch
    draws += [-draw.abs() for draw in draws]
    correlations = np.corrcoef(torch.stack(draws))
    same = np.abs(np.subtract.outer(np.arange(32), np.arange(32))) % 16 == 0
    assert np.abs(correlations[~same]).max() < 5 / n**0.5


def test_words_on_the_cpu_do_not_depend_on_the_default_device():
    expected = Stream(0, "timesteps").words(3, range(5), 4)
    with torch.device("meta"):
        assert torch.equal(Stream(0, "timesteps").words(3, range(5), 4, "cpu"), expected)
