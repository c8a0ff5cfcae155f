"""`auto`: one objective on every process; `coarse_to_fine`: weights by predictability; `antithetic` coupling."""

import numpy as np
import pytest
import torch

import kairos_timesteps
from components_by_name import make_sampler, make_weighting
from kairos_timesteps.components import PROCESSES
from kairos_timesteps.diffusion.schedule import error_ratio, make_schedule
from kairos_timesteps.weightings.fixed import level_measure
from marks import mark_long
from test_couplings import couple, digits
from test_measured import Known, T

PROCESSES = {
    "cosine": PROCESSES.build("discrete", {"schedule": "cosine"}, "v"),
    "linear": PROCESSES.build("discrete", {"schedule": "linear"}, "epsilon"),
    "flow": PROCESSES.build("flow", {}, "flow"),
    "edm": PROCESSES.build("edm", {"sigma_data": 0.5}, "x0"),
}


def build_auto(name):
    """Return noise schedule, sampler `auto` and weighting `auto` of a process."""
    process = PROCESSES[name]
    sampler = make_sampler({"name": "auto"}, process.schedule)
    return process.schedule, sampler, make_weighting({"name": "auto"}, process.schedule, process.prediction)


@pytest.mark.parametrize("name", PROCESSES)
def test_auto_has_the_same_objective_over_ln_snr_for_every_process(name):
    """The weight on the error of x0 is SNR/sqrt(1 + SNR) per ln SNR, for any process and prediction."""
    schedule, _, weighting = build_auto(name)
    level = np.log(schedule.snr)
    of_x0 = weighting.weights() * error_ratio(schedule.snr, PROCESSES[name].prediction)
    within = (abs(level) < 3) & (np.arange(len(level)) > 5) & (np.arange(len(level)) < len(level) - 6)
    wanted = schedule.snr / np.sqrt(1 + schedule.snr) * abs(np.gradient(level))
    ratio = (of_x0 / wanted)[within]
    np.testing.assert_allclose(ratio, np.median(ratio), rtol=0.01)


@pytest.mark.parametrize("name", PROCESSES)
def test_auto_first_draws_uniform_angles(name):
    schedule, sampler, _ = build_auto(name)
    angles = np.arctan(schedule.snr**-0.5)
    np.testing.assert_allclose(sampler.masses()[5:-5], (-np.gradient(-angles) / (np.pi / 2))[5:-5], rtol=0.02)


@pytest.mark.long
def test_auto_follows_gradients_and_keeps_the_objective():
    sizes = torch.linspace(0.5, 4, T)
    network = Known(sizes)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-9)
    strategy = kairos_timesteps.Strategy("auto", "cosine", timesteps=T, prediction="v")
    weights, results = strategy.weighting.weights(), []
    for k in range(120):
        strategy.step = 100 * k  # it measures every 100 steps
        draw = strategy.draw(torch.randn(64, 1, 2, 2))
        strategy.loss(draw, torch.ones(64))
        with strategy.observe(draw, network, optimizer):
            pass
        results.append(strategy.sampler.masses())
    assert strategy.table()["effective"] == pytest.approx(weights / T)
    prior = strategy.sampler.prior.masses()
    wanted = sizes.numpy() * weights
    wanted = 0.9 * wanted / wanted.sum() + 0.1 * prior
    np.testing.assert_allclose(np.mean(results[3:], 0)[3:-6], wanted[3:-6], rtol=0.15)
    assert (results[-1] > 0.05 * prior).all() and np.array_equal(results[1], prior)


def train_weighting(name, predictable, steps=700):
    """Train weighting coarse_to_fine on errors of known predictability.

    Args:
        name: process.
        predictable: function from the SNR to the share of the error of epsilon that the network predicts.
        steps: number of steps.
    """
    process = PROCESSES[name]
    strategy, snr = kairos_timesteps.Strategy("uniform+coarse_to_fine", process), process.schedule.snr
    ratio = error_ratio(snr, process.prediction) / error_ratio(snr, "epsilon")
    x0 = torch.zeros(64, 1)
    for _ in range(steps):
        draw = strategy.draw(x0)
        cells = (draw.fractions * len(snr)).long().numpy()
        errors = (1 - predictable(snr)[cells]) * (snr / (1 + snr) * ratio)[cells]
        strategy.loss(draw, torch.from_numpy(errors).float())
        with strategy.observe(draw):
            pass
    return strategy, snr


@pytest.mark.parametrize("name", mark_long(PROCESSES, ["edm"]))
def test_coarse_to_fine_lowers_the_weight_of_unpredictable_details(name):
    predictable = lambda snr: 0.8 / (snr**0.2 + (1 / snr) ** 0.5)  # noqa: E731
    before, _ = train_weighting(name, predictable, steps=99)
    strategy, snr = train_weighting(name, predictable)
    assert np.array_equal(before.weighting.weights(), build_auto(name)[2].weights()), "before step 100 nothing is known"
    results = strategy.weighting.weights() / before.weighting.weights()
    best = snr[predictable(snr).argmax()]
    wanted = np.where(snr > best, (predictable(snr) / predictable(snr).max()).clip(0.05), 1)
    within = (abs(np.log(snr)) < 4) & (np.arange(len(snr)) > 20) & (np.arange(len(snr)) < len(snr) - 21)
    np.testing.assert_allclose(results[within], wanted[within], rtol=0.25)
    assert results.min() >= 0.05 * (1 - 1e-12) and results.max() <= 1 + 1e-12


def test_coarse_to_fine_keeps_the_objective_of_a_network_that_predicts_nothing():
    strategy, _ = train_weighting("cosine", lambda snr: -0.1 + 0 * snr, steps=400)
    assert np.array_equal(strategy.weighting.weights(), build_auto("cosine")[2].weights())


def test_coarse_to_fine_resumes_with_its_weights():
    predictable = lambda snr: 0.8 / (1 + snr / 4)  # noqa: E731
    strategy, _ = train_weighting("linear", predictable, steps=450)
    other = kairos_timesteps.Strategy("uniform+coarse_to_fine", PROCESSES["linear"])
    other.load_state_dict(strategy.state_dict())
    for _ in range(160):  # the weights change on the way
        both = []
        for trained in (strategy, other):
            draw = trained.draw(torch.zeros(64, 1))
            trained.loss(draw, draw.fractions.float() + 0.1)
            with trained.observe(draw):
                both.append(draw)
        assert torch.equal(both[0].t, both[1].t) and torch.equal(both[0].weights, both[1].weights)
    assert strategy.weighting.weights().tobytes() == other.weighting.weights().tobytes()


@pytest.mark.parametrize("count", [2, 9, 32])
def test_antithetic_samples_of_neighbouring_times_have_opposite_noise(count):
    x0 = digits(count)
    noise, results = couple("antithetic", x0)
    strategy = kairos_timesteps.Strategy("log_normal", coupling="antithetic")
    order = strategy.draw(x0).t.argsort()
    for first, second in zip(order[::2], order[1::2]):
        assert torch.equal(results[first], noise[first]) and torch.equal(results[second], -noise[first])
    if count % 2:
        assert torch.equal(results[order[-1]], noise[order[-1]])


def test_antithetic_noise_is_normal_and_sums_to_zero():
    x0 = torch.zeros(64, 1, 4, 4)
    draws = torch.cat([couple("antithetic", x0, step=step)[1] for step in range(100)])
    assert abs(float(draws.mean())) < 1e-7
    flat = draws.flatten().double()
    assert float(flat.square().mean()) == pytest.approx(1, abs=0.01) and float(flat.pow(4).mean()) == pytest.approx(
        3, abs=0.06
    )


@pytest.mark.parametrize("schedule", ["linear", "cosine", "quadratic"])
def test_the_measure_of_ln_snr_has_mean_one_over_the_timesteps(schedule):
    snr = make_schedule(schedule, 1000).snr
    level = -np.log(snr)
    measure = level_measure(snr, snr)
    assert measure.mean() == pytest.approx(1)
    slope = (level[2:] - level[:-2]) / 2
    assert measure[1:-1] / measure[500] == pytest.approx(slope / slope[499])
