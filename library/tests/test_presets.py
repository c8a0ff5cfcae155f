"""Presets against reimplemented formulas of the trainers: quantiles, weights, draws, signs, validation errors."""

import re
import subprocess
import sys

import numpy as np
import pytest
import torch

import kairos_timesteps
from kairos_timesteps.errors import ConfigError
from kairos_timesteps.preset_table import BOUNDS, CONVENTIONS, TABLE
from kairos_timesteps.presets import evaluate
from kairos_timesteps.registry import split

pytest.importorskip("scipy")
from small_loop import TinyNetwork
from trainers import TRAINERS

LEVELS = (np.arange(10_001) + 0.5) / 10_001
REQUIRED = {
    "diffusers:logit_normal": {"mean", "std"},
    "diffusers:mode": {"mode_scale"},
    "diffusers:cosmap": set(),
    "diffusers:sigma_sqrt": set(),
    "kohya:sigmoid": {"sigmoid_scale"},
    "kohya:shift": {"shift"},
    "musubi:flux_shift": set(),
    "musubi:qwen_shift": set(),
    "musubi:logsnr": {"mean", "std"},
    "simpletuner:beta": {"alpha", "beta"},
    "onetrainer:cos_map": set(),
    "onetrainer:inverted_parabola": {"weight", "bias"},
    "diffsynth:bell": set(),
    "nemo:linear": set(),
    "chroma:parabola": set(),
    "edm:log_normal": {"mean", "std"},
    "edm2:img512": set(),
    "wan:high_noise": {"boundary", "shift"},
    "wan:low_noise": {"boundary", "shift"},
}


def test_every_preset_has_a_reference_formula_and_the_documented_names_exist():
    assert kairos_timesteps.names("preset") == sorted(TRAINERS)
    for name, options in REQUIRED.items():
        assert options <= kairos_timesteps.preset(name).options.keys()


def test_every_row_has_a_source_and_a_convention_and_uses_its_options():
    names = [row.name for row in TABLE]
    assert len({*names}) == len(names)
    for row in TABLE:
        preset = kairos_timesteps.preset(row.name)
        assert re.fullmatch(r"[\w.-]+/[\w.-]+: [\w/]+\.py|[\w .]+ 20\d\d, arXiv:\d{4}\.\d{5}", preset.source), row.name
        assert (preset.trainer, preset.convention) == (row.name.split(":")[0], CONVENTIONS[row.convention].meaning)
        assert preset.options == row.options
        words = {*re.findall(r"\w+", row.sampler + row.weighting)}
        assert row.options.keys() <= words, row.name
    assert BOUNDS.keys() <= {option for row in TABLE for option in row.options}
    assert {row.convention for row in TABLE} == CONVENTIONS.keys()


def test_specifications_are_calls_with_arithmetic_of_options():
    options = {"mean": 3.0, "shift": 2.0, "values": [1.0, 4.0]}
    assert evaluate("shift(alpha=shift, density=beta(a=1 / 4, b=-mean / 2))", options) == {
        "name": "shift",
        "alpha": 2.0,
        "density": {"name": "beta", "a": 0.25, "b": -1.5},
    }
    assert evaluate("table(values=values, between='spline')", options)["values"] == [1.0, 4.0]
    assert evaluate("[1 - 2 * mean, (mean / 3) ** 0.5, True]", options) == [-5.0, 1.0, True]
    with pytest.raises(KeyError):
        evaluate("beta(a=missing)", options)


def test_names_of_presets_need_no_torch():
    code = "import sys, kairos_timesteps; assert kairos_timesteps.names('preset'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", sorted(TRAINERS))
def test_quantiles_equal_those_of_the_trainer(name):
    trainer = TRAINERS[name]
    results = kairos_timesteps.preset(name, **trainer.options).quantile(LEVELS, **trainer.context)
    error = np.abs(results - trainer.quantile(LEVELS)) / (trainer.quantile(LEVELS) if trainer.sigma else 1)
    assert results.dtype == np.float64
    assert error.max() < 1e-6


@pytest.mark.parametrize("name", sorted(TRAINERS))
def test_weights_equal_those_of_the_trainer(name):
    trainer = TRAINERS[name]
    times = trainer.quantile(LEVELS).astype(np.float32)
    results = kairos_timesteps.preset(name, **trainer.options).weights(torch.from_numpy(times))
    expected = trainer.weight(times.astype(np.float64))
    assert results.dtype == torch.float32
    assert results.shape == times.shape
    np.testing.assert_allclose(results.numpy(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("row", [row for row in TABLE if row.weighting != "none()"], ids=lambda row: row.name)
def test_a_weighting_that_is_attached_as_printed_has_the_weights_of_its_preset(row):
    """Each in the prediction that its convention names, for which the trainer states it."""
    convention = CONVENTIONS[row.convention]
    name, options = split(evaluate(row.weighting, row.options))
    if convention.time == "step":
        times = np.arange(1000) / 1000
        strategy = kairos_timesteps.Strategy(
            f"uniform+{name}", "scaled_linear", prediction=convention.prediction, weighting=options
        )
    else:
        strategy = kairos_timesteps.Strategy(
            f"uniform+{name}", {"t": "flow", "sigma": "edm"}[convention.time], weighting=options
        )
        times = strategy.process.schedule.times
    weights = kairos_timesteps.preset(row.name).weights(times)
    np.testing.assert_allclose(strategy.table()["w"], weights, rtol=1e-5)


@pytest.mark.parametrize("name", sorted(TRAINERS))
def test_the_call_of_attach_that_is_printed_has_the_density_and_the_weights_of_the_trainer(name):
    """Code is pasted into a loop with the trainer's options."""
    trainer = TRAINERS[name]
    preset = kairos_timesteps.preset(name, **trainer.options)
    network = TinyNetwork()
    names = {"network": network, "optimizer": torch.optim.SGD(network.parameters(), lr=0.1)}
    attached = eval(preset.attach_call(), {"kairos_timesteps": kairos_timesteps}, names)
    t = torch.cat([attached(torch.zeros(100, 1), **trainer.context) for _ in range(200)])  # a mixture is one of batches
    assert attached.time.name == ("index" if trainer.steps else "sigma" if trainer.sigma else "noise_is_one")
    times = t.double().numpy() / (1000 if trainer.steps else 1)
    # the process of sigma ends at 0.002 and 80; ln SNR is interpolated in the first and the last of 1,000 cells of t
    low, high = (0.0021, 79) if trainer.sigma else (0.001, 0.999) if name.endswith("log_snr") else (-1, 2)
    inside = (trainer.quantile(LEVELS) > low) & (trainer.quantile(LEVELS) < high)
    below = np.searchsorted(np.sort(times), trainer.quantile(LEVELS)[inside] + 1e-6, "right") / len(times)
    spread = 5 * np.sqrt(LEVELS[inside] * (1 - LEVELS[inside]) / len(times)) + 2e-3
    is_discrete = len(np.unique(trainer.quantile(LEVELS))) < len(LEVELS) / 2
    assert is_discrete or (np.abs(below - LEVELS[inside]) < spread).all()
    expected = trainer.weight(times[-100:].astype(np.float32).astype(np.float64))
    np.testing.assert_allclose(attached.weights, expected, rtol=2e-3, atol=2e-5)


@pytest.mark.parametrize("name", ["simpletuner:beta", "ai_toolkit:content", "kohya:shift", "edm:log_normal"])
@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.bfloat16])
def test_quantiles_of_presets_have_the_type_of_their_argument(name, kind):
    preset = kairos_timesteps.preset(name)
    p = torch.tensor([0.1, 0.5, 0.9, 1 - torch.finfo(kind).eps / 2], dtype=kind)
    quantiles = preset.quantile(p)
    assert quantiles.dtype == kind and (name == "edm:log_normal" or (quantiles < 1).all())
    np.testing.assert_allclose(quantiles.double(), preset.quantile(p.double().numpy()), rtol=torch.finfo(kind).eps * 2)
    assert preset.quantile(np.float32([0.5])).dtype == np.float32


def distance(draws, quantile):
    """Return the Kolmogorov-Smirnov distance, measured on both sides of 20,001 quantiles of the trainer."""
    levels = (np.arange(20_001) + 0.5) / 20_001
    quantiles = quantile(levels)
    draws = np.sort(draws)
    empirical = (
        np.searchsorted(draws, quantiles, "left") / len(draws),
        np.searchsorted(draws, quantiles, "right") / len(draws),
    )
    expected = (
        np.searchsorted(quantiles, quantiles, "left") / len(quantiles),
        np.searchsorted(quantiles, quantiles, "right") / len(quantiles),
    )
    return max(np.abs(a - b).max() for a, b in zip(empirical, expected))


@pytest.mark.parametrize("name", sorted(TRAINERS))
def test_draws_follow_the_trainers_density(name):
    """Another test compares the quantiles to 1e-6; this one shows that draws use them."""
    count = 100_000
    if name == "nemo:mix":
        pytest.skip("a batch has one component, see the next test")
    trainer = TRAINERS[name]
    preset = kairos_timesteps.preset(name, **trainer.options)
    draws = preset.sample(count, seed=1, **trainer.context)
    assert draws.dtype == torch.float32
    assert draws.shape == (count,)
    assert torch.equal(draws[:100], preset.sample(100, seed=1, **trainer.context))
    last = torch.inf if trainer.sigma else 1
    assert ((draws >= 0) & (draws <= last)).all()

    def nearest(levels):
        return trainer.quantile(levels).astype(np.float32)  # where the density is infinite, many are 1

    assert distance(draws.numpy(), nearest) < 3 / count**0.5


def test_a_mixed_batch_of_nemo_has_one_component():
    preset = kairos_timesteps.preset("nemo:mix", ratio=0.25, shift=2.0)
    uniform = logit_normal = 0
    for seed in range(400):
        t = preset.sample(400, seed=seed).double().numpy()
        base = np.sort(t / (2 - t))  # inverts the shift
        even = np.abs(base - (np.arange(400) + 0.5) / 400).max() < 0.1
        uniform, logit_normal = uniform + even, logit_normal + (not even and 0.2 < np.quantile(base, 0.1) < 0.25)
    assert 70 < uniform < 130
    assert uniform + logit_normal > 350


@pytest.mark.parametrize(
    ("name", "options", "context", "median"),
    [
        ("diffusers:logit_normal", {"mean": 1.0}, {}, 0.2689414),  # u decreases with noise: less noise
        ("diffusers:ideogram4", {"mean": 1.0}, {}, 0.7310586),  # u is sigma: more noise
        ("musubi:logsnr", {"mean": 2.0}, {}, 0.2689414),  # a large signal-to-noise ratio: less noise
        ("laplace:log_snr", {"mean": 2.0}, {}, 0.2689414),
        ("kohya:shift", {"shift": 3.0}, {}, 0.75),  # above 1: more noise
        ("musubi:flux_shift", {}, {"tokens": 4096}, 0.7595109),
        ("musubi:qwen_shift", {}, {"tokens": 8192}, 0.7109495),
        ("ai_toolkit:content", {}, {}, 0.7595909),  # index 0 is the most noise
        ("ai_toolkit:style", {}, {}, 0.2404091),
        ("simpletuner:beta", {"alpha": 3.0, "beta": 1.0}, {}, 0.9203148),
        ("simpletuner:mixflow", {}, {}, 0.5540971),
        ("onetrainer:sigmoid", {"weight": 50.0, "bias": 0.3}, {}, 0.9),
        ("wan:high_noise", {}, {}, 0.95),
        ("edm:log_normal", {}, {}, 0.3011942),
        ("edm2:img512", {}, {}, 0.6703200),
    ],
)
def test_options_shift_the_median_in_the_documented_direction(name, options, context, median):
    assert kairos_timesteps.preset(name, **options).quantile(0.5, **context) == pytest.approx(median, abs=1e-3)


def test_each_sample_has_its_context():
    tokens = torch.tensor([256, 4096])
    results = kairos_timesteps.preset("musubi:flux_shift").quantile(torch.tensor([0.5, 0.5]), tokens=tokens)
    np.testing.assert_allclose(results, 1 / (1 + np.exp([-0.5, -1.15])), rtol=1e-6)
    timesteps = kairos_timesteps.preset("musubi:flux_shift").sample(20_000, tokens=tokens.repeat(10_000)).view(-1, 2)
    np.testing.assert_allclose(timesteps.median(0).values, results, atol=0.02)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("kohya:sigmod", {}, "did you mean 'kohya:sigmoid'"),
        ("kohya:sigmoid", {"sigmoid_scal": 1.0}, "did you mean 'sigmoid_scale'"),
        ("kohya:sigmoid", {"sigmoid_scale": "wide"}, "sigmoid_scale: got 'wide', allowed: number > 0"),
        ("kohya:shift", {"shift": 0}, "shift: got 0, allowed: number > 0"),
        ("diffusers:logit_normal", {"mean": float("nan")}, "mean: got nan"),
        ("diffusers:mode", {"mode_scale": 2.0}, "mode_scale: got 2.0"),
        ("wan:high_noise", {"boundary": 1.0}, "boundary: got 1.0"),
        ("onetrainer:inverted_parabola", {"weight": -1.0}, "weight: got -1.0"),
        ("sana:stretched", {"p_low": 0.9, "p_high": 0.1}, "got 0.9 and 0.1"),
        ("simpletuner:cubic", {"values": [0, 0]}, "one above"),
        ("simpletuner:cubic", {"values": 3}, "values: got 3"),
        ("rae:shift", {"dim": -4}, "dim: got -4"),
    ],
)
def test_bad_names_and_options_of_presets_are_rejected(name, options, message):
    with pytest.raises(ConfigError) as rejected:
        kairos_timesteps.preset(name, **options)
    assert message in str(rejected.value)
    assert "\n" not in str(rejected.value)


@pytest.mark.parametrize(
    ("name", "time"),
    [
        ("diffusers:sigma_sqrt", 0.0),
        ("edm:log_normal", 0.0),
        ("edm:log_normal", -1.0),
        ("kohya:shift", 1.5),
        ("nemo:linear", float("nan")),
    ],
)
def test_times_without_a_finite_weight_are_rejected(name, time):
    with pytest.raises(ConfigError, match=f"preset {name}: weights: got"):
        kairos_timesteps.preset(name).weights(torch.tensor([0.5, time]))


def test_a_missing_context_is_reported():
    with pytest.raises(ConfigError, match="needs tokens"):
        kairos_timesteps.preset("musubi:flux_shift").sample(4)


def test_densities_and_weightings_work_without_a_strategy():
    density = kairos_timesteps.density("log_normal", m=1.0, s=0.5)
    t = density.sample(4, seed=3)
    assert t.shape == (4,)
    np.testing.assert_allclose(density.cdf(np.array([density.quantile(np.array([0.3]))[0]])), 0.3, atol=1e-9)
    np.testing.assert_allclose(kairos_timesteps.weighting("power")(((1 - t) / t) ** 2), t**-2)
    snr = torch.tensor([0.1, 1.0, 10.0]).double()
    np.testing.assert_allclose(kairos_timesteps.weighting("min_snr", "linear", "v")(snr), snr.clip(max=5) / (snr + 1))
    sigma = torch.tensor([0.2, 3.0]).double()
    edm = kairos_timesteps.weighting("edm", kairos_timesteps.Edm(sigma_data=0.7))
    np.testing.assert_allclose(edm(sigma**-2), (sigma**2 + 0.49) / (0.7 * sigma) ** 2)
    for call in (
        lambda: kairos_timesteps.density("adaptive"),
        lambda: kairos_timesteps.density("log_norml").sample(3),
        lambda: kairos_timesteps.density("beta", a=-1.0),
        lambda: kairos_timesteps.weighting("min_snr", prediction="noise"),
        lambda: kairos_timesteps.weighting("min_snr", gama=3),
    ):
        with pytest.raises(ConfigError):
            call()


@pytest.mark.parametrize("name", ["kohya:shift", "edm:log_normal", "diffusers:logit_normal", "rfpp:u_shape"])
def test_cdf_is_the_inverse_of_quantile(name):
    preset, p = kairos_timesteps.preset(name), np.array([1e-9, 0.01, 0.3, 0.5, 0.9, 1 - 1e-6])
    np.testing.assert_allclose(preset.cdf(preset.quantile(p)), p, rtol=1e-6)
    assert preset.cdf([0.0]) == 0
