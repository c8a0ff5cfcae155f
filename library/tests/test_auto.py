"""`auto` and `coarse_to_fine`: one objective on every process, its density, what can be predicted, opposite noise."""

import numpy as np
import pytest
import torch

import kairos_timesteps
from components_by_name import make_sampler, make_weighting
from kairos_timesteps.diffusion import registries
from kairos_timesteps.diffusion.schedule import error_ratio, make_schedule
from kairos_timesteps.weightings.fixed import level_measure
from test_couplings import coupled, digits
from test_measured import Known, T

PROCESSES = {
    "cosine": registries.PROCESSES.build("discrete", {"schedule": "cosine"}, "v"),
    "linear": registries.PROCESSES.build("discrete", {"schedule": "linear"}, "epsilon"),
    "flow": registries.PROCESSES.build("flow", {}, "flow"),
    "edm": registries.PROCESSES.build("edm", {"sigma_data": 0.5}, "x0"),
}


def parts(name):
    process = PROCESSES[name]
    sampler = make_sampler({"name": "auto"}, process.schedule)
    return process.schedule, sampler, make_weighting({"name": "auto"}, process.schedule, process.prediction)


@pytest.mark.parametrize("name", PROCESSES)
def test_the_objective_is_one_integral_over_ln_snr(name):
    """The weight on the error of x0 is SNR/sqrt(1 + SNR) per ln SNR, for any process and prediction."""
    schedule, _, weighting = parts(name)
    level = np.log(schedule.snr)
    of_x0 = weighting.weights() * error_ratio(schedule.snr, PROCESSES[name].prediction)
    within = (abs(level) < 3) & (np.arange(len(level)) > 5) & (np.arange(len(level)) < len(level) - 6)
    wanted = schedule.snr / np.sqrt(1 + schedule.snr) * abs(np.gradient(level))
    ratio = (of_x0 / wanted)[within]
    np.testing.assert_allclose(ratio, np.median(ratio), rtol=0.01)


@pytest.mark.parametrize("name", PROCESSES)
def test_its_first_draws_are_of_uniform_angles(name):
    schedule, sampler, _ = parts(name)
    angles = np.arctan(schedule.snr**-0.5)
    np.testing.assert_allclose(sampler.masses()[5:-5], (-np.gradient(-angles) / (np.pi / 2))[5:-5], rtol=0.02)


def test_its_density_follows_the_gradient_and_its_weights_keep_the_objective():
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


def trained(name, reported, steps=700):
    """The weighting after steps in which the error of epsilon is what `told` leaves of a guess, by SNR."""
    process = PROCESSES[name]
    strategy, snr = kairos_timesteps.Strategy("uniform+coarse_to_fine", process), process.schedule.snr
    ratio = error_ratio(snr, process.prediction) / error_ratio(snr, "epsilon")
    x0 = torch.zeros(64, 1)
    for _ in range(steps):
        draw = strategy.draw(x0)
        cells = (draw.fractions * len(snr)).long().numpy()
        errors = (1 - reported(snr)[cells]) * (snr / (1 + snr) * ratio)[cells]
        strategy.loss(draw, torch.from_numpy(errors).float())
        with strategy.observe(draw):
            pass
    return strategy, snr


@pytest.mark.parametrize("name", PROCESSES)
def test_what_cannot_be_predicted_weighs_less(name):
    reported = lambda snr: 0.8 / (snr**0.2 + (1 / snr) ** 0.5)  # noqa: E731
    before, _ = trained(name, reported, steps=99)
    strategy, snr = trained(name, reported)
    assert np.array_equal(before.weighting.weights(), parts(name)[2].weights()), "before step 100 nothing is known"
    results = strategy.weighting.weights() / before.weighting.weights()
    best = snr[reported(snr).argmax()]
    wanted = np.where(snr > best, (reported(snr) / reported(snr).max()).clip(0.05), 1)
    within = (abs(np.log(snr)) < 4) & (np.arange(len(snr)) > 20) & (np.arange(len(snr)) < len(snr) - 21)
    np.testing.assert_allclose(results[within], wanted[within], rtol=0.25)
    assert results.min() >= 0.05 * (1 - 1e-12) and results.max() <= 1 + 1e-12


def test_a_network_that_predicts_nothing_keeps_the_objective():
    strategy, _ = trained("cosine", lambda snr: -0.1 + 0 * snr, steps=400)
    assert np.array_equal(strategy.weighting.weights(), parts("cosine")[2].weights())


def test_its_weights_go_on_after_a_resume():
    reported = lambda snr: 0.8 / (1 + snr / 4)  # noqa: E731
    strategy, _ = trained("linear", reported, steps=450)
    other = kairos_timesteps.Strategy("uniform+coarse_to_fine", PROCESSES["linear"])
    other.load_state_dict(strategy.state_dict())
    for _ in range(160):  # the weights change on the way
        both = []
        for one in (strategy, other):
            draw = one.draw(torch.zeros(64, 1))
            one.loss(draw, draw.fractions.float() + 0.1)
            with one.observe(draw):
                both.append(draw)
        assert torch.equal(both[0].t, both[1].t) and torch.equal(both[0].weights, both[1].weights)
    assert strategy.weighting.weights().tobytes() == other.weighting.weights().tobytes()


@pytest.mark.parametrize("count", [2, 9, 32])
def test_neighbours_in_time_have_opposite_noise(count):
    x0 = digits(count)
    noise, results = coupled("antithetic", x0)
    strategy = kairos_timesteps.Strategy("log_normal", coupling="antithetic")
    order = strategy.draw(x0).t.argsort()
    for first, second in zip(order[::2], order[1::2]):
        assert torch.equal(results[first], noise[first]) and torch.equal(results[second], -noise[first])
    if count % 2:
        assert torch.equal(results[order[-1]], noise[order[-1]])


def test_opposite_noise_is_as_normal_and_its_sum_is_nothing():
    x0 = torch.zeros(64, 1, 4, 4)
    draws = torch.cat([coupled("antithetic", x0, step=step)[1] for step in range(100)])
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
