"""Strategies: published values, densities against histograms, weights across prediction types, names."""

import numpy as np
import pytest
import torch
from scipy import stats

from components_by_name import make_sampler, make_weighting
from kairos_timesteps.components import SAMPLERS, WEIGHTINGS
from kairos_timesteps.coordinates import RandomCoordinates
from kairos_timesteps.diffusion.schedule import make_schedule, tau_of_magnitude
from kairos_timesteps.errors import ConfigError
from kairos_timesteps.incomplete_beta import beta_cdf
from kairos_timesteps.lookup import parse_name, table
from kairos_timesteps.samplers.log_snr import DISTRIBUTIONS
from kairos_timesteps.samplers.speed import reflection_timestep
from kairos_timesteps.strategy import Strategy

SCHEDULES = ("linear", "cosine", "quadratic")
RAW = {"linear", "power", "cosmap_weight", "bell", "table_weight", "robust"}  # on the error of the network's output


@pytest.mark.parametrize(
    ("schedule", "quantity", "values"),
    [
        ("linear", "alphas_cumprod", (0.9999, 0.895142, 0.0777967, 4.03583e-05)),
        ("linear", "vlb", (0.500050, 0.00999623, 0.00550973, 0.0102045)),
        ("cosine", "alphas_cumprod", (0.999959, 0.971576, 0.492285, 2.42877e-09)),
        ("cosine", "vlb", (0.500021, 0.00936139, 0.00311758, 499.5)),
        ("quadratic", "alphas_cumprod", (0.9999, 0.971176, 0.331275, 0.000733412)),
    ],
)
def test_schedules_have_the_published_values(schedule, quantity, values):
    computed = getattr(make_schedule(schedule), quantity)[[0, 100, 500, 999]]
    np.testing.assert_allclose(computed, values, rtol=3e-6)


def test_the_last_timestep_of_cosine_has_97_percent_of_the_vlb():
    c = make_schedule("cosine").vlb
    assert 0.96 < c[-1] / c.sum() < 0.98


def test_schedules_of_other_lengths_end_in_noise_and_unscaled_betas_cause_a_warning():
    assert make_schedule("linear", 100).alphas_cumprod[-1] < 1e-3
    with pytest.warns(UserWarning, match="scale_betas"):
        assert make_schedule("linear", 100, scale_betas=False).alphas_cumprod[-1] == pytest.approx(0.36, abs=0.01)


@pytest.mark.parametrize(("r", "tau"), [(5, 398.18), (20, 544.70), (100, 676.30)])
def test_tau_of_speed_equals_the_published_values(r, tau):
    assert tau_of_magnitude(r, make_schedule()) == pytest.approx(tau, abs=0.005)


# timestep t of kairos is t + 1 of the paper, which suppresses its timesteps after tau (eq. 2)
@pytest.mark.parametrize(("r", "first"), [(5, 398), (10, 477), (20, 544), (50, 623), (100, 676), (138.6, 700)])
def test_a_magnitude_of_speed_suppresses_from_the_floor_of_tau(r, first):
    schedule = make_schedule()
    tau = tau_of_magnitude(r, schedule)
    assert first + 1 > tau >= first, "the first timestep of the paper after tau"
    p = make_sampler({"name": "speed", "r": r}, schedule).probabilities()
    np.testing.assert_allclose(p[:first], 5 / (1000 + first * 4), rtol=1e-9)
    np.testing.assert_allclose(p[first:], 1 / (1000 + first * 4), rtol=1e-9)


@pytest.mark.parametrize("r", [1.00001, 1e9])
def test_a_magnitude_without_timesteps_on_both_sides_is_rejected_by_its_name(r):
    with pytest.raises(ConfigError, match=r"r: got 1.*, allowed: .*between"):
        make_sampler({"name": "speed", "r": r}, make_schedule())


def test_probabilities_of_speed_equal_equation_2():
    p = make_sampler({"name": "speed", "k": 5, "tau": 700}, make_schedule()).probabilities()
    np.testing.assert_allclose(p[:700], 5 / (1000 + 700 * 4), rtol=1e-12)
    np.testing.assert_allclose(p[700:], 1 / (1000 + 700 * 4), rtol=1e-12)
    assert p[700:].sum() == pytest.approx(0.079, abs=0.0005)


@pytest.mark.parametrize("name", sorted(SAMPLERS))
def test_density_sums_to_one_and_matches_its_histogram(name):
    check_histogram(make_sampler({"name": name}, make_schedule("linear", 37)), draws=50_000)
    for timesteps in (10, 1000):
        density = make_sampler({"name": name}, make_schedule("linear", timesteps)).probabilities()
        assert density.sum() == pytest.approx(1, abs=1e-12) and (density >= 0).all()


@pytest.mark.parametrize("points", ["random", "stratified", "sobol"])
@pytest.mark.parametrize("name", ["uniform", "log_normal", "beta", "speed", "speed_official", "clts"])
def test_densities_with_a_floor_and_even_points_match_their_histograms(name, points):
    sampler = make_sampler({"name": name, "floor": 0.3, "points": points}, make_schedule("cosine", 100))
    check_histogram(sampler, step=20_000)


def check_histogram(sampler, batch=10_000, step=0, draws=100_000):
    """Compare the density with a histogram of draws, by a chi-square test on pooled cells."""
    timesteps = sampler.schedule.timesteps
    p = sampler.probabilities(step=step)
    assert p.sum() == pytest.approx(1, abs=1e-12) and (p >= 0).all()
    x0 = torch.zeros(batch, 1, 2, 2)
    draws = torch.cat([sampler.draw(RandomCoordinates(k, step).for_batch(x0), x0) for k in range(draws // batch)])
    assert draws.dtype == torch.float64 and draws.min() >= 0 and draws.max() < 1
    counts = np.bincount((draws * timesteps).long().numpy(), minlength=timesteps)
    expected = p * len(draws)
    order = np.argsort(expected)[::-1]
    pools = np.array_split(order, min(50, timesteps))  # pooled cells of 5 expected draws and more
    while len(pools) > 1 and expected[pools[-1]].sum() < 5:
        pools[-2:] = [np.concatenate(pools[-2:])]
    observed, wanted = (np.array([values[pool].sum() for pool in pools]) for values in (counts, expected))
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    degrees = max(len(pools) - 1, 1)
    assert statistic < degrees + 5 * np.sqrt(2 * degrees) + 5


def test_distributions_of_the_log_snr_equal_those_of_scipy():
    scipys = {
        "normal": stats.norm,
        "laplace": stats.laplace,
        "logistic": stats.logistic,
        "cauchy": stats.cauchy,
        "secant": stats.hypsecant(scale=2),
    }
    values, probabilities = np.linspace(-9, 9, 91), np.linspace(0.01, 0.99, 99)
    assert scipys.keys() == DISTRIBUTIONS.keys()
    for name, (cdf, quantile) in DISTRIBUTIONS.items():
        np.testing.assert_allclose(cdf(values), scipys[name].cdf(values), rtol=1e-9, err_msg=name)
        np.testing.assert_allclose(quantile(probabilities), scipys[name].ppf(probabilities), atol=1e-9, err_msg=name)


def test_a_log_normal_cut_at_two_quantiles_is_stretched_to_the_whole_process():
    sampler = make_sampler({"name": "log_normal", "m": 0.5, "low": 0.1, "high": 0.7}, make_schedule("linear", 37))
    check_histogram(sampler)
    probabilities = np.linspace(0, 1, 101)
    fractions = sampler.quantile(probabilities)
    assert fractions[[0, -1]] == pytest.approx([0, 1])
    np.testing.assert_allclose(sampler.cdf(fractions), probabilities, atol=1e-9)


@pytest.mark.parametrize("name", ["uniform", "log_normal", "speed", "mode", "beta"])
def test_the_density_is_the_derivative_of_the_distribution_function(name):
    sampler = make_sampler({"name": name}, make_schedule("linear", 10))
    fractions = np.linspace(0.05, 0.95, 50)
    slope = (sampler.cdf(fractions + 1e-4) - sampler.cdf(fractions - 1e-4)) / 2e-4
    np.testing.assert_allclose(sampler.pdf(fractions), slope, rtol=1e-3)


def test_densities_that_are_constant_near_the_ends_have_equal_values_at_the_ends():
    for name in ("uniform", "speed"):
        sampler = make_sampler({"name": name}, make_schedule("linear", 10))
        assert sampler.pdf(np.array([0.0, 1.0])) == pytest.approx(sampler.pdf(np.array([0.01, 0.99])), rel=1e-6)


def test_a_change_of_an_unknown_field_of_random_coordinates_is_an_error():
    assert RandomCoordinates(seed=3).replace(step=2) == RandomCoordinates(seed=3, step=2)
    with pytest.raises(TypeError, match="stepp"):
        RandomCoordinates().replace(stepp=2)


def test_draws_of_fixed_samplers_depend_on_the_random_coordinates_alone():
    sampler = make_sampler({"name": "log_normal"}, make_schedule())
    first = sampler.draw(RandomCoordinates(step=3).for_batch(torch.zeros(7, 3, 4, 4)))
    second = sampler.draw(RandomCoordinates(step=3).for_batch(torch.ones(7, 1)))
    assert torch.equal(first, second)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "name", sorted(set(WEIGHTINGS) - {"none", "change_aware", "change_aware_official", "debiased", *RAW})
)
def test_weights_are_equal_across_predictions_after_conversion(name, schedule):
    noise = make_schedule(schedule)
    epsilon, x0, v = (make_weighting({"name": name}, noise, p).weights() for p in ("epsilon", "x0", "v"))
    np.testing.assert_allclose(x0, epsilon * noise.snr, rtol=1e-9)
    np.testing.assert_allclose(v, epsilon * noise.alphas_cumprod, rtol=1e-9)
    assert np.isfinite(epsilon).all() and (epsilon >= 0).all()


def test_min_snr_equals_its_closed_forms():
    noise = make_schedule()
    snr = noise.snr
    weights = {p: make_weighting({"name": "min_snr", "gamma": 5}, noise, p).weights() for p in ("epsilon", "x0", "v")}
    np.testing.assert_allclose(weights["epsilon"], np.minimum(snr, 5) / snr, rtol=1e-12)
    np.testing.assert_allclose(weights["x0"], np.minimum(snr, 5), rtol=1e-12)
    np.testing.assert_allclose(weights["v"], np.minimum(snr, 5) / (snr + 1), rtol=1e-12)


def test_min_snr_is_finite_at_zero_snr():
    noise = make_schedule("cosine")
    object.__setattr__(noise, "snr", np.append(noise.snr[:-1], 0.0))
    weights = [make_weighting({"name": "min_snr"}, noise, p).weights()[-1] for p in ("epsilon", "x0", "v")]
    assert weights == [1, 0, 0]


def test_p2_gamma_zero_is_unweighted():
    assert (make_weighting({"name": "p2", "gamma": 0}, make_schedule()).weights() == 1).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_change_aware_spans_its_range_and_peaks_where_the_process_changes_most(schedule):
    noise = make_schedule(schedule)
    w = make_weighting({"name": "change_aware", "lambda": 0.6}, noise).weights()
    assert w.min() == pytest.approx(0.4) and w.max() == pytest.approx(0.6)
    if schedule == "linear":
        assert abs(int(w.argmax()) - 220) <= 2  # beta = sqrt(Delta-beta / T)


@pytest.mark.parametrize("lam", [5, 0.4, -1])
def test_change_aware_rejects_lambdas_with_negative_weights(lam):
    with pytest.raises(ConfigError, match=r"lambda: got .* allowed: number >= 0.5 and <= 1"):
        make_weighting({"name": "change_aware", "lambda": lam}, make_schedule())


@pytest.mark.parametrize(
    ("by_name", "message"),
    [
        ({"name": "sped"}, "did you mean 'speed'"),
        ({"name": "speed", "kk": 3}, "unknown option 'kk'"),
        ({"name": "speed", "k": "many"}, "k: got 'many', allowed: number > 0"),
        ({"name": "speed", "tau": 10, "r": 5}, "one of them"),
        ({"name": "log_normal", "s": 0}, "s: got 0"),
        ({"name": "uniform", "start": 5, "end": 5}, "start < end"),
        ({"name": "mode", "m": 1.8}, r"m: got 1.8, allowed: number >= -1 and <= 1.75"),
        ({"name": "speed", "points": "grid"}, "one of random, stratified, systematic, sobol, epochs"),
        ({"name": "adaptive", "points": "sobol"}, "unknown option 'points'"),
        ({"name": "bs"}, "is not available"),
        ({"name": "adaptive", "queue": 2}, "queue: got 2, allowed: integer >= 3"),
    ],
)
def test_errors_report_the_field_its_value_and_the_allowed_values(by_name, message):
    with pytest.raises(ConfigError, match=message):
        make_sampler(by_name, make_schedule())


def test_beta_cdf_equals_scipy():
    from scipy.special import betainc

    random = np.random.default_rng(0)
    a, b = random.uniform(0.05, 30, (2, 300, 1))
    x = np.linspace(0, 1, 501)[None]
    np.testing.assert_allclose(beta_cdf(x, a, b), betainc(a, b, x), atol=1e-12)


@pytest.mark.parametrize(
    ("name", "t", "formula"),
    [
        ("soft_min_snr", 100, lambda snr: 5 / (5 + snr)),
        ("debiased", 500, lambda snr: snr**-0.5),
        ("p2", 500, lambda snr: 1 / (1 + snr)),
        ("edm", 500, lambda snr: 1 + 4 / snr),
    ],
)
def test_weightings_equal_their_formulas_at_published_signal_to_noise_ratios(name, t, formula):
    published = {"linear": {100: 0.895142, 500: 0.0777967}, "cosine": {100: 0.971576, 500: 0.492285}}  # alpha-bar
    for schedule, alphas in published.items():
        value = formula(alphas[t] / (1 - alphas[t]))
        assert make_weighting({"name": name}, make_schedule(schedule)).weights()[t] == pytest.approx(value, rel=2e-5)


def test_debiased_is_capped_and_has_the_published_form_for_v():
    noise = make_schedule()
    snr = noise.snr
    weights = {p: make_weighting({"name": "debiased"}, noise, p).weights() for p in ("epsilon", "x0", "v")}
    np.testing.assert_allclose(weights["epsilon"], 1 / np.sqrt(np.minimum(snr, 1000)), rtol=1e-12)
    np.testing.assert_allclose(weights["x0"], snr / np.sqrt(np.minimum(snr, 1000)), rtol=1e-12)
    np.testing.assert_allclose(weights["v"], 1 / (snr + 1), rtol=1e-12)
    converted = make_weighting({"name": "debiased", "convert": True}, noise, "v").weights()
    np.testing.assert_allclose(converted, weights["epsilon"] * noise.alphas_cumprod, rtol=1e-9)


@pytest.mark.parametrize(("schedule", "m"), [("linear", 642), ("quadratic", 829), ("cosine", 959)])
def test_speed_official_reflects_at_the_published_timestep(schedule, m):
    assert reflection_timestep(make_schedule(schedule)) == m


def test_speed_official_has_half_the_papers_tail_and_depends_on_the_batch():
    sampler = make_sampler({"name": "speed_official", "tau": 700}, make_schedule())
    sampler.draw(RandomCoordinates().for_batch(torch.zeros(32, 1)))
    assert sampler.probabilities()[700:].sum() == pytest.approx(17 / 32 * 0.0789, abs=2e-4)  # 4.2 %, the paper's: 7.9 %
    check_histogram(sampler, batch=32, draws=20_000)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", ["speed_official", "speed_v1"])
def test_reflected_halves_fill_odd_and_tiny_batches(name, batch):
    sampler = make_sampler({"name": name}, make_schedule())
    assert sampler.draw(RandomCoordinates().for_batch(torch.zeros(batch, 1))).shape == (batch,)


def test_speed_official_pairs_each_draw_with_its_reflection():
    sampler = make_sampler({"name": "speed_official"}, make_schedule())
    t = (sampler.draw(RandomCoordinates(step=5).for_batch(torch.zeros(64, 1))) * 1000).long()
    samples, reflected = t[:31], t[33:]
    assert torch.equal(reflected, torch.where(samples < 642, 642 - samples, samples - 642))


def test_speed_v1_draws_from_the_two_areas_five_to_one():
    samples = make_sampler({"name": "speed_v1"}, make_schedule()).half_masses()
    assert samples[300] == pytest.approx(2.5, abs=1e-3) and samples[900] == pytest.approx(0.5, abs=1e-3)


def test_change_aware_official_is_one_from_tau_on():
    paper, official = (
        make_weighting({"name": name}, make_schedule()).weights() for name in ("change_aware", "change_aware_official")
    )
    assert (official[700:] == 1).all() and np.array_equal(official[:700], paper[:700])


def test_mode_equals_the_formula_of_sd3_and_beta_a_power():
    u = np.linspace(0, 1, 101)
    mode = make_sampler({"name": "mode", "m": 1.29}, make_schedule())
    np.testing.assert_allclose(mode.quantile(1 - u), 1 - u - 1.29 * (np.cos(np.pi / 2 * u) ** 2 - 1 + u), atol=1e-12)
    np.testing.assert_allclose(mode.cdf(mode.quantile(u)), u, atol=1e-9)
    beta = make_sampler({"name": "beta"}, make_schedule())
    np.testing.assert_allclose(beta.quantile(u), u ** (1 / 0.8), rtol=1e-12)


@pytest.mark.parametrize(("a", "b"), [(0.8, 1), (1, 0.5), (2, 5), (0.5, 0.5)])
def test_beta_of_any_parameters_matches_its_histogram(a, b):
    check_histogram(make_sampler({"name": "beta", "a": a, "b": b}, make_schedule("linear", 100)))


def test_edm_log_normal_is_normal_in_ln_sigma():
    noise = make_schedule("cosine")
    p = make_sampler({"name": "edm_log_normal"}, noise).probabilities()
    level = -0.5 * np.log(noise.snr)
    assert (p * level).sum() == pytest.approx(-1.2, abs=0.01)
    assert (p * (level + 1.2) ** 2).sum() ** 0.5 == pytest.approx(1.2, abs=0.01)


def test_clts_moves_from_uniform_to_a_truncated_normal_density():
    sampler = make_sampler({"name": "clts", "length": 100}, make_schedule())
    assert sampler.probabilities() == pytest.approx(1 / 1000)
    check_histogram(sampler, step=50)
    p = sampler.probabilities(step=1_000_000)
    assert abs(int(p.argmax()) - 300) <= 1 and np.isfinite(p).all()


def test_uniform_on_a_range_draws_only_from_the_range():
    sampler = make_sampler({"name": "uniform", "start": 200, "end": 300}, make_schedule())
    p = sampler.probabilities()
    assert p[200:300] == pytest.approx(0.01) and p.sum() == pytest.approx(1)
    t = (sampler.draw(RandomCoordinates().for_batch(torch.zeros(5000, 1))) * 1000).long()
    assert t.min() == 200 and t.max() == 299
    assert (p == 0).sum() == 900


@pytest.mark.parametrize("name", ["speed_official", "speed_v1"])
def test_a_sampler_with_a_table_keeps_its_density_as_a_component(name):
    noise = make_schedule("linear", 50)
    alone = make_sampler({"name": name}, noise).probabilities()
    mixture = make_sampler({"name": "mixture", "parts": [{"name": name, "share": 1}]}, noise)
    assert alone.max() > 1.1 * alone.min()
    np.testing.assert_allclose(mixture.probabilities(), alone, atol=1e-9)
    check_histogram(mixture)


@pytest.mark.parametrize("name", ["log_normal", "speed", "speed_official", "beta", "uniform"])
def test_importance_weights_restore_the_objective_of_uniform(name):
    noise = make_schedule("cosine", 50)
    sampler = make_sampler({"name": name, "importance": True, "floor": 0.2}, noise)
    columns = table(sampler, make_weighting({"name": "none"}, noise))
    assert columns["effective"] == pytest.approx(1 / 50)
    x0 = torch.zeros(100_000, 1)
    fractions = sampler.draw(RandomCoordinates(step=0).for_batch(x0), x0)
    losses = torch.exp(3 * fractions)
    mean = (sampler.importance_weights(x0, fractions, RandomCoordinates()).double() * losses).mean().item()
    assert mean == pytest.approx((np.exp(3) - 1) / 3, rel=0.01)


def test_even_points_have_less_variance_and_fill_every_cell():
    for kind, batch in (("stratified", 100), ("sobol", 64)):
        sampler = make_sampler({"name": "speed", "points": kind}, make_schedule())
        means, plain = [], []
        for k in range(60):
            u = sampler.draw(RandomCoordinates(step=k).for_batch(torch.zeros(batch, 1)))
            means.append(u.mean().item())
            plain.append(torch.rand(batch, generator=torch.Generator().manual_seed(k)).mean().item())
        assert np.std(means) < np.std(plain) / 5
        cells = np.floor(np.sort(sampler.cdf(u.numpy())) * batch + 1e-9)
        assert kind == "sobol" or np.array_equal(cells, np.arange(batch))


def test_sobol_points_continue_from_step_to_step():
    sampler = make_sampler({"name": "uniform", "points": "sobol"}, make_schedule())
    u = []
    for k in range(8):
        u.append(sampler.draw(RandomCoordinates(step=k).for_batch(torch.zeros(16, 1))))
    together = np.sort(torch.cat(u).numpy())
    assert np.diff(together).max() < 1.01 / 128 and np.diff(together).min() > 0.99 / 128


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("speed", ("speed", "none")),
        ("min_snr", ("uniform", "min_snr")),
        ("adaptive+min_snr", ("adaptive", "min_snr")),
        (" speed + change_aware ", ("speed", "change_aware")),
    ],
)
def test_names_of_strategies_are_split_into_sampler_and_weighting(name, parts):
    assert parse_name(name) == parts


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sped", "unknown strategy 'sped'.* Allowed: a sampler .*speed.* a weighting .*p2"),
        ("speed+minsnr", "unknown weighting 'minsnr'; did you mean 'min_snr'"),
        ("bs", "'bs' is not available: .*table 11"),
        ("bs+none", "'bs' is not available"),
    ],
)
def test_unknown_names_are_rejected(name, message):
    with pytest.raises(ConfigError, match=message):
        parse_name(name)


@pytest.mark.parametrize(
    ("name", "correction"),
    [("sped", "speed"), ("min_snrr", "min_snr"), ("sped+none", "speed"), ("uniform+minsnr", "min_snr")],
)
def test_the_message_on_a_misspelt_strategy_suggests_the_correct_name(name, correction):
    with pytest.raises(ConfigError, match=f"did you mean '{correction}'"):
        parse_name(name)


def test_importance_weights_of_edm2_apply_to_the_whole_objective():
    """Importance weights restore the objective of uniform draws including the term u, and therefore its optimum."""
    sampler, weighting = {"importance": True, "tau": 5}, {"base": "none"}
    strategy = Strategy("speed+edm2", "cosine", timesteps=10, sampler=sampler, weighting=weighting)
    with torch.no_grad():
        strategy.weighting.linear.normal_(generator=torch.Generator().manual_seed(0))
    draw = strategy.draw(torch.zeros(40_000, 1))
    losses = 1.0 + draw.t.float()
    results = strategy.weighted(draw, losses).mean().item()
    u = strategy.weighting.expected().detach().double().numpy()
    weights, t = strategy.weighting.base_weighting.weights(), np.arange(10)
    assert results == pytest.approx((weights * (1 + t) * np.exp(-u) + u).mean(), rel=0.02)
