"""InfoNoise: rate, gate, pivot and weight against direct computations; warm-up and state."""

import numpy as np
import pytest
import torch

import kairos_timesteps
from components_by_name import make_sampler
from kairos_timesteps.base import Observation
from kairos_timesteps.coordinates import RandomCoordinates
from kairos_timesteps.diffusion.schedule import error_ratio, make_schedule
from kairos_timesteps.samplers.info_noise import interpolated, onset
from small_loop import SmallLoop, equal_bits
from specifications import Specification

QUICK = {"start": 1, "frequency": 1, "min_count": 1}
PROCESSES = {
    "epsilon": ("linear", {}),
    "x0": ("linear", {"prediction": "x0"}),
    "v": ("cosine", {"prediction": "v"}),
    "flow": ("flow", {}),
    "edm": ("edm", {}),
}
STATE = {"sums", "means", "measured", "pivot", "taken", "updates", "masses"}


def make_strategy(process="edm", weighting="none", prediction=None, weighting_options=None, **options):
    """Return a strategy whose sampler updates its density at every step."""
    name = f"info_noise+{weighting}"
    return kairos_timesteps.Strategy(
        name, process, prediction=prediction, sampler={**QUICK, **options}, weighting=weighting_options or {}
    )


def learn(strategy, error_of_x0, steps=1):
    """Let the strategy observe, at the centre of every cell, the error of x0 that a function of sigma returns."""
    sampler, process = strategy.sampler, strategy.process
    schedule = sampler.schedule
    centres = (torch.arange(schedule.timesteps, dtype=torch.float64) + 0.5) / schedule.timesteps
    x0 = torch.zeros(schedule.timesteps, 1)
    sigma = schedule.snr**-0.5
    errors = torch.from_numpy(error_of_x0(sigma) * error_ratio(schedule.snr, process.prediction))
    for step in range(steps):
        coordinates = RandomCoordinates(step=step).for_batch(x0)
        observation = Observation(
            step, x0, centres, errors, None, coordinates, errors, process.prediction, strategy.weighting
        )
        with sampler.observe(observation):
            pass
    return sampler


def mmse(sigma):
    """Return the error of the posterior mean of standard normal data."""
    return sigma**2 / (1 + sigma**2)


def gated_rate(sigma, pivot, exponent=3):
    """Return the unnormalised density of ln sigma for standard normal data and weight 1."""
    return mmse(sigma) / sigma**2 * sigma**exponent / (sigma**exponent + pivot**exponent)


def masses(schedule, density_of_log_sigma):
    """Return the probability of every timestep."""
    relative = density_of_log_sigma * np.gradient(-np.log(schedule.snr) / 2)
    return relative / relative.sum()


def weights_of_x0(strategy):
    """Return the weight of a strategy on the error of x0, (T,)."""
    schedule = strategy.sampler.schedule
    return strategy.weighting.weights() * error_ratio(schedule.snr, strategy.process.prediction)


@pytest.mark.parametrize("prediction", PROCESSES)
@pytest.mark.parametrize("weighting", ["none", "min_snr", "edm"])
def test_the_density_of_gaussian_data_is_the_gated_rate_over_the_weight(prediction, weighting):
    process, arguments = PROCESSES[prediction]
    weighting_options = {"sigma_data": 1.0} if weighting == "edm" else None
    strategy = make_strategy(process, weighting, weighting_options=weighting_options, pivot=0.15, **arguments)
    schedule = strategy.sampler.schedule
    sigma = schedule.snr**-0.5
    expected = masses(schedule, gated_rate(sigma, 0.15) / weights_of_x0(strategy))
    sampler = learn(strategy, mmse)
    np.testing.assert_allclose(sampler.masses(), expected, rtol=1e-9)
    assert sampler.statistics() == {"updates": 1, "pivot": 0.15}


def test_effective_allocation_is_the_gated_rate_under_any_weighting():
    for weighting in ("none", "min_snr", "p2", "snr"):
        strategy = make_strategy("cosine", weighting, "v", pivot=0.15)
        sampler = learn(strategy, mmse)
        allocation = sampler.masses() * weights_of_x0(strategy)
        expected = masses(sampler.schedule, gated_rate(sampler.schedule.snr**-0.5, 0.15))
        np.testing.assert_allclose(allocation / allocation.sum(), expected, rtol=1e-9)


@pytest.mark.parametrize("weighting", ["none", "min_snr"])
def test_without_division_the_density_is_the_gated_rate(weighting):
    sampler = learn(make_strategy("linear", weighting, pivot=0.15, divide=False), mmse)
    expected = masses(sampler.schedule, gated_rate(sampler.schedule.snr**-0.5, 0.15))
    np.testing.assert_allclose(sampler.masses(), expected, rtol=1e-9)


@pytest.mark.parametrize("weighting", ["min_snr", "p2"])
def test_predictions_have_equal_densities_if_the_weighting_converts_between_them(weighting):
    strategy = [learn(make_strategy("linear", weighting, prediction), np.sqrt) for prediction in ("epsilon", "x0", "v")]
    for other in strategy[1:]:
        np.testing.assert_allclose(other.masses(), strategy[0].masses(), rtol=1e-9)


def test_the_pivot_of_gaussian_data_equals_the_closed_form():
    """m/sigma³ = 1/(sigma (1 + sigma²)) decreases, so that c solves c (1 + c²) = sigma_min (1 + sigma_min²)/p."""
    sampler = learn(make_strategy("edm", bins=4001), mmse)
    sigma = sampler.schedule.snr**-0.5
    goal = sigma[0] * (1 + sigma[0] ** 2) / 0.002
    real = next(root.real for root in np.roots([1, 0, 1, -goal]) if abs(root.imag) < 1e-9)
    step = np.log(sigma[-1] / sigma[0]) / 4000
    pivot = sampler.statistics()["pivot"]
    assert real * np.exp(-step) < pivot <= real * (1 + 1e-12)
    np.testing.assert_allclose(sampler.masses(), masses(sampler.schedule, gated_rate(sigma, pivot)), rtol=1e-9)


def test_onset_is_the_last_level_above_the_threshold_from_high_noise():
    sigma = torch.tensor([0.1, 0.2, 0.4, 0.8, 1.6, 3.2], dtype=torch.float64)
    rate = torch.tensor([1000.0, 1.0, 3.0, 2.0, 1.9, 0.0], dtype=torch.float64)
    assert onset(rate, sigma, 0.002) == 0.8
    assert onset(rate, sigma, 0.0025) == 0.4
    assert onset(rate, sigma, 0.5) == 0.1


def test_gate_removes_the_draws_at_low_noise():
    below = {}
    for exponent in (0, 3):
        sampler = learn(make_strategy("edm", pivot=0.15, exponent=exponent), mmse)
        below[exponent] = sampler.masses()[sampler.schedule.snr > 0.05**-2].sum()
    assert below[0] > 0.4 and below[3] < 0.02


def test_means_gaps_and_smoothing_equal_a_direct_computation():
    bins, decay, smoothing, count = 40, 0.7, 1.5, 3
    options = {"bins": bins, "decay": decay, "smoothing": smoothing, "min_count": count, "onset": 0.01}
    sampler = make_sampler({"name": "info_noise", **options}, make_schedule("cosine", 300))
    log_sigma = -np.log(sampler.schedule.snr) / 2
    sigma, centres = np.exp(log_sigma), np.linspace(log_sigma[0], log_sigma[-1], bins)
    bin_of = np.abs(np.subtract.outer(log_sigma, centres)).argmin(1)
    weights, means, collected = 1 + np.cos(sigma) ** 2, {}, {number: [] for number in range(bins)}
    random = np.random.default_rng(0)
    for _ in range(4):
        for _ in range(3):
            cells, errors = random.integers(40, 250, 12), random.uniform(1, 9, 12)
            errors[0] = np.nan  # left out
            sampler.add_losses(torch.from_numpy(cells), torch.from_numpy(errors))
            for cell, error in zip(cells[1:], errors[1:], strict=True):
                collected[bin_of[cell]].append(error)
        sampler.refresh(torch.from_numpy(weights))
        for number, values in collected.items():
            if len(values) >= count:
                share = 1 - decay if number in means else 1.0
                means[number] = (1 - share) * means.get(number, 0.0) + share * np.mean(values)
                collected[number] = []
        filled = np.interp(np.arange(bins), sorted(means), [means[number] for number in sorted(means)])
        kernel = np.exp(-((np.subtract.outer(np.arange(bins), np.arange(bins)) / smoothing) ** 2) / 2)
        smooth = kernel @ filled / kernel.sum(1)
        per_sigma = smooth / (1 + np.exp(2 * centres)) / np.exp(centres)
        pivot = np.exp(centres)[per_sigma >= 0.01 * per_sigma.max()].max()
        rate = np.interp(log_sigma, centres, smooth) / (1 + sigma**2) / (1 + (pivot / sigma) ** 3)
        np.testing.assert_allclose(sampler.masses(), masses(sampler.schedule, rate / weights), rtol=1e-9)
        assert sampler.statistics()["pivot"] == pytest.approx(pivot)
    assert len(means) < bins and int(sampler.updates) == 4


@pytest.mark.parametrize("measured", [[3], [0, 7], [2, 3, 6], list(range(8))])
def test_bins_between_two_means_are_interpolated(measured):
    values = torch.arange(8, dtype=torch.float64) ** 2
    known = torch.zeros(8, dtype=torch.bool)
    known[measured] = True
    expected = np.interp(np.arange(8), measured, values[measured])
    np.testing.assert_allclose(interpolated(values, known), expected)


def test_warm_up_draws_from_the_prior_of_edm():
    strategy = kairos_timesteps.Strategy("info_noise", "edm", sampler={"start": 3, "frequency": 2, "min_count": 1})
    prior = make_sampler({"name": "edm_log_normal"}, strategy.sampler.schedule)
    x0, updates = torch.zeros(64, 1), []
    for step in range(8):
        if step < 3:
            np.testing.assert_allclose(strategy.sampler.masses(), prior.masses(), rtol=1e-12)
        draw = strategy.draw(x0)
        strategy.loss(draw, 1 + draw.t.float())
        with strategy.observe(draw):
            pass
        updates.append(int(strategy.sampler.updates))
    assert updates == [0, 0, 1, 1, 2, 2, 3, 3]
    assert abs(strategy.sampler.masses() - prior.masses()).sum() > 0.1


def test_prior_has_a_mean_and_a_standard_deviation():
    sampler = make_sampler({"name": "info_noise", "prior_mean": 0.0, "prior_std": 1.0}, make_schedule("cosine"))
    log_sigma = -np.log(sampler.schedule.snr) / 2
    assert sampler.masses() @ log_sigma == pytest.approx(0, abs=0.01)
    assert sampler.masses() @ log_sigma**2 == pytest.approx(1, abs=0.02)


def test_prior_stays_until_a_bin_has_enough_errors():
    strategy = make_strategy("edm", min_count=10_000)
    prior = strategy.sampler.masses().copy()
    sampler = learn(strategy, mmse, steps=3)
    assert np.array_equal(sampler.masses(), prior) and sampler.statistics() == {"updates": 0}
    assert sampler._sums[1].sum() == 3 * 1000  # bins keep collecting


def test_floor_is_a_share_of_the_draws():
    sampler = learn(make_strategy("edm", floor=0.2, pivot=0.15), mmse)
    expected = masses(sampler.schedule, gated_rate(sampler.schedule.snr**-0.5, 0.15))
    np.testing.assert_allclose(sampler.probabilities(), 0.8 * expected + 0.2 / 1000, rtol=1e-9)


def test_timesteps_of_weight_zero_are_drawn_by_the_floor_alone():
    strategy = make_strategy("linear", "table_weight", weighting_options={"values": [0.0, 0.0, 1.0]}, pivot=0.15)
    sampler = learn(strategy, mmse)
    weights = weights_of_x0(strategy)
    assert (weights == 0).any() and np.array_equal(sampler.masses() == 0, weights == 0)


def test_weights_that_depend_on_the_step_are_those_of_the_next_step():
    strategy = make_strategy("edm", "edm", weighting_options={"warmup": 4}, pivot=0.15)
    sampler = learn(strategy, mmse, steps=2)
    expected = gated_rate(sampler.schedule.snr**-0.5, 0.15) / strategy.weighting.weights(2)
    np.testing.assert_allclose(sampler.masses(), masses(sampler.schedule, expected), rtol=1e-9)


def test_the_sampler_ignores_the_learned_part_of_the_weighting():
    edm2 = kairos_timesteps.Strategy(
        "info_noise+edm2", "edm", sampler={**QUICK, "pivot": 0.15}, weighting={"base": "edm", "lr": 0.1}
    )
    plain = kairos_timesteps.Strategy("info_noise+edm", "edm", sampler={**QUICK, "pivot": 0.15})
    for strategy in (edm2, plain):
        for _ in range(3):
            draw = strategy.draw(torch.zeros(256, 1))
            strategy.loss(draw, torch.ones(256))
            with strategy.observe(draw):
                pass
    np.testing.assert_allclose(edm2.sampler.masses(), plain.sampler.masses(), rtol=1e-12)


def test_an_observation_without_a_weighting_has_weight_one():
    schedule = make_schedule("cosine", 50)
    sampler = make_sampler({"name": "info_noise", **QUICK, "pivot": 0.15}, schedule)
    errors = torch.from_numpy(mmse(schedule.snr**-0.5))
    x0, centres = torch.zeros(50, 1), (torch.arange(50, dtype=torch.float64) + 0.5) / 50
    coordinates = RandomCoordinates().for_batch(x0)
    with sampler.observe(Observation(0, x0, centres, errors, None, coordinates, errors, "x0")):
        pass
    np.testing.assert_allclose(sampler.masses(), masses(schedule, gated_rate(schedule.snr**-0.5, 0.15)), rtol=1e-9)


@pytest.mark.parametrize("interrupted", [1, 3, 5])
@pytest.mark.parametrize("process", ["linear", "edm"])
def test_info_noise_resumes_bit_for_bit(process, interrupted):
    """The steps are in the warm-up, between two updates of the density, and after an update."""
    options = {"start": 3, "frequency": 2, "min_count": 2, "bins": 8}
    specification = Specification({"name": "info_noise", **options}, {"name": "min_snr"}, process)
    whole = SmallLoop(specification)
    for _ in range(interrupted):
        whole.step()
    resumed = SmallLoop(specification)
    resumed.load(whole.save())
    for _ in range(5):
        assert equal_bits(whole.step(), resumed.step())
    assert equal_bits(whole.state(), resumed.state())
    assert resumed.strategy.sampler.statistics() == whole.strategy.sampler.statistics()
    assert resumed.strategy.sampler.updates > 0


def test_the_keys_of_the_state_are_constant():
    strategy = make_strategy()
    assert strategy.sampler.state_dict().keys() == STATE
    assert learn(strategy, mmse).state_dict().keys() == STATE


def test_two_micro_batches_equal_one_batch():
    states = []
    for micro_batches in (1, 2):
        strategy = make_strategy("linear", "min_snr")
        for _ in range(3):
            count = 64 // micro_batches
            for _ in range(micro_batches):
                draw = strategy.draw(torch.zeros(count, 1))
                strategy.loss(draw, 1 + draw.t.float())
            with strategy.observe(draw):
                pass
        states.append(strategy.state_dict()["sampler"])
    assert equal_bits(*states)


def test_info_noise_learns_from_several_times_of_a_sample():
    strategy = make_strategy("flow")
    draw = strategy.draw(torch.zeros(16, 1), times=(3,))
    strategy.loss(draw, torch.ones(16, 3))
    with strategy.observe(draw):
        pass
    assert int(strategy.sampler.updates) == 1 and int(strategy.sampler._measured.sum()) > 16
