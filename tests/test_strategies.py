"""Strategies: published values, densities against their histograms, weights across prediction types, state."""

import numpy as np
import pytest
import torch

from kairos.diffusion.schedule import make_schedule
from kairos.errors import ConfigError
from kairos.strategies import SAMPLERS, WEIGHTINGS, Observation, make_sampler, make_weighting
from kairos.strategies.adaptive import select
from kairos.strategies.beta import beta_cdf
from kairos.strategies.fixed import tau_of_magnitude

SCHEDULES = ("linear", "cosine", "quadratic")


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
def test_published_schedule_values(schedule, quantity, values):
    computed = getattr(make_schedule(schedule), quantity)[[0, 100, 500, 999]]
    np.testing.assert_allclose(computed, values, rtol=3e-6)


def test_cosine_last_timestep_holds_97_percent_of_the_vlb():
    c = make_schedule("cosine").vlb
    assert 0.96 < c[-1] / c.sum() < 0.98


def test_other_lengths_end_in_noise_and_unscaled_betas_warn():
    assert make_schedule("linear", 100).alphas_cumprod[-1] < 1e-3
    with pytest.warns(UserWarning, match="scale_betas"):
        assert make_schedule("linear", 100, scale_betas=False).alphas_cumprod[-1] == pytest.approx(0.36, abs=0.01)


@pytest.mark.parametrize(("r", "tau"), [(5, 398.18), (20, 544.70), (100, 676.30)])
def test_speed_tau_of_published_magnitudes(r, tau):
    assert tau_of_magnitude(r, make_schedule()) == pytest.approx(tau, abs=0.005)


def test_speed_masses_are_those_of_equation_6():
    p = make_sampler({"name": "speed", "k": 5, "tau": 700}, make_schedule()).density()
    np.testing.assert_allclose(p[:700], 5 / (1000 + 700 * 4), rtol=1e-12)
    np.testing.assert_allclose(p[700:], 1 / (1000 + 700 * 4), rtol=1e-12)
    assert p[700:].sum() == pytest.approx(0.079, abs=0.0005)


@pytest.mark.parametrize("name", sorted(SAMPLERS))
@pytest.mark.parametrize("timesteps", [10, 37, 1000])
def test_density_sums_to_one_and_matches_its_histogram(name, timesteps):
    options = {"feature_timesteps": 5} if name == "adaptive" else {}
    sampler = make_sampler({"name": name, **options}, make_schedule("linear", timesteps))
    p = sampler.density()
    assert p.sum() == pytest.approx(1, abs=1e-12) and (p >= 0).all()
    x0 = torch.zeros(10_000, 1, 2, 2)
    generator = torch.Generator().manual_seed(1)
    draws = torch.cat([sampler.fractions(x0, generator) for _ in range(10)])
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


def test_fixed_draws_depend_on_the_generator_alone():
    sampler = make_sampler({"name": "log_normal"}, make_schedule())
    first = sampler.fractions(torch.zeros(7, 3, 4, 4), torch.Generator().manual_seed(3))
    second = sampler.fractions(torch.ones(7, 1), torch.Generator().manual_seed(3))
    assert torch.equal(first, second)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", sorted(set(WEIGHTINGS) - {"none", "change_aware"}))
def test_weights_are_equal_across_predictions_after_conversion(name, schedule):
    noise = make_schedule(schedule)
    epsilon, x0, v = (make_weighting({"name": name}, noise, p).weights() for p in ("epsilon", "x0", "v"))
    np.testing.assert_allclose(x0, epsilon * noise.snr, rtol=1e-9)
    np.testing.assert_allclose(v, epsilon * noise.alphas_cumprod, rtol=1e-9)
    assert np.isfinite(epsilon).all() and (epsilon >= 0).all()


def test_min_snr_closed_forms():
    noise = make_schedule()
    snr = noise.snr
    weights = {p: make_weighting({"name": "min_snr", "gamma": 5}, noise, p).weights() for p in ("epsilon", "x0", "v")}
    np.testing.assert_allclose(weights["epsilon"], np.minimum(snr, 5) / snr, rtol=1e-12)
    np.testing.assert_allclose(weights["x0"], np.minimum(snr, 5), rtol=1e-12)
    np.testing.assert_allclose(weights["v"], np.minimum(snr, 5) / (snr + 1), rtol=1e-12)


def test_min_snr_at_zero_snr_is_no_nan():
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
def test_change_aware_refuses_lambdas_that_give_negative_weights(lam):
    with pytest.raises(ConfigError, match=r"lambda: got .* allowed: number >= 0.5 and <= 1"):
        make_weighting({"name": "change_aware", "lambda": lam}, make_schedule())


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"name": "sped"}, "did you mean 'speed'"),
        ({"name": "speed", "kk": 3}, "unknown option 'kk'"),
        ({"name": "speed", "k": "many"}, "k: got 'many', allowed: number > 0"),
        ({"name": "speed", "tau": 10, "r": 5}, "one of them"),
        ({"name": "log_normal", "s": 0}, "s: got 0"),
        ({"name": "adaptive", "queue": 2}, "queue: got 2, allowed: integer >= 3"),
    ],
)
def test_refusals_name_field_value_and_what_is_allowed(named, message):
    with pytest.raises(ConfigError, match=message):
        make_sampler(named, make_schedule())


def test_beta_cdf_equals_scipy():
    from scipy.special import betainc

    random = np.random.default_rng(0)
    a, b = random.uniform(0.05, 30, (2, 300, 1))
    x = np.linspace(0, 1, 501)[None]
    np.testing.assert_allclose(beta_cdf(x, a, b), betainc(a, b, x), atol=1e-12)


def test_selection_is_that_of_f_regression_among_positive_correlations():
    from sklearn.feature_selection import f_regression

    random = np.random.default_rng(0)
    for _ in range(20):
        queue = random.normal(size=(12, 40)) + random.normal(size=(12, 1)) * random.uniform(-1, 2, 40)
        target = queue.mean(1)
        statistic, _ = f_regression(queue, target)
        positive = [i for i in range(40) if np.corrcoef(queue[:, i], target)[0, 1] > 0]
        wanted = sorted(positive, key=lambda i: -statistic[i])[:3]
        assert select(torch.from_numpy(queue), 3).tolist() == sorted(wanted)


def test_selection_leaves_out_a_timestep_that_goes_against_the_target():
    target = torch.linspace(-1, 1, 10, dtype=torch.float64)
    queue = torch.stack([-5 * target, 8 * target + torch.sin(9 * target), 6 * target + torch.cos(9 * target)], 1)
    assert 0 not in select(queue, 2).tolist()


class Bandit:
    """A model whose loss at t falls by a known amount at each optimiser step that trained on t; fractions at u."""

    def __init__(self, sampler, better, batch=64, shape=(2, 5, 3)):
        self.sampler, self.better, self.after = sampler, better, False
        self.x0 = torch.randn(batch, *shape, generator=torch.Generator().manual_seed(0))
        self.calls = []

    def step(self, k):
        fractions = self.sampler.fractions(self.x0, torch.Generator().manual_seed(k))
        gain = torch.where(fractions < 0.5, self.better[0], self.better[1]).float()

        def error(index, t, noise):
            self.calls.append((index.clone(), t.clone(), noise.clone()))
            return 1.0 - (gain[index] if self.after else 0.0) + 0.01 * noise.flatten(1).mean(1)

        self.after = False
        observation = Observation(k, self.x0, fractions, error, torch.Generator().manual_seed(1000 + k))
        with self.sampler.observe(observation):
            self.after = True
        return fractions


def adaptive(**options):
    return make_sampler({"name": "adaptive", "frequency": 1, **options}, make_schedule("linear", 50))


def test_adaptive_starts_almost_uniform_for_any_shape():
    for shape in ((1, 1, 1), (3, 32, 32), (4, 7, 5)):
        sampler = adaptive()
        sampler.fractions(torch.randn(3, *shape), torch.Generator())
        a, b = sampler.policy(torch.randn(3, *shape))
        torch.testing.assert_close(a, torch.full((3,), 0.97409), atol=1e-4, rtol=0)
        torch.testing.assert_close(a, b)


def test_adaptive_uses_the_same_noise_before_and_after_and_needs_no_policy_step_before_three_rows():
    sampler = adaptive()
    bandit = Bandit(sampler, (0.1, 0.0), batch=16)
    for k in range(4):
        bandit.calls.clear()
        bandit.step(k)
        half = len(bandit.calls) // 2
        for before, after in zip(bandit.calls[:half], bandit.calls[half:], strict=True):
            assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
        assert sampler.updates == max(0, k - 2)
    assert len(sampler.selected) == 3


def test_adaptive_counts_one_network_pass_per_loss():
    sampler = adaptive()
    bandit = Bandit(sampler, (0.1, 0.0), batch=16)
    for k in range(3):
        bandit.step(k)
    bandit.calls.clear()
    bandit.step(3)
    # T timesteps of one image and |S| = 3 of each of the batch, before and after
    assert sum(len(index) for index, _, _ in bandit.calls) == 2 * (50 + 3 * 16)


def test_adaptive_moves_towards_timesteps_whose_step_lowers_the_loss():
    means = {}
    for name, better in (("early", (0.1, 0.0)), ("late", (0.0, 0.1))):
        bandit = Bandit(adaptive(), better)
        for k in range(80):
            bandit.step(k)
        means[name] = float((bandit.sampler.density(bandit.x0) * np.arange(50)).sum() / 50)
    assert means["early"] < 0.35 and means["late"] > 0.65


def test_adaptive_density_with_images_matches_its_draws():
    bandit = Bandit(adaptive(), (0.1, 0.0))
    for k in range(30):
        bandit.step(k)
    p = bandit.sampler.density(bandit.x0)
    assert p.sum() == pytest.approx(1)
    generator = torch.Generator().manual_seed(9)
    draws = torch.cat([bandit.sampler.fractions(bandit.x0, generator) for _ in range(2000)])
    share = np.bincount((draws * 50).long().numpy(), minlength=50) / len(draws)
    np.testing.assert_allclose(share, p, atol=4 * np.sqrt(p.max() / len(draws)) + 1e-3)


def test_adaptive_resumes_exactly_from_its_state(tmp_path):
    def run(steps, sampler=None, start=0):
        bandit = Bandit(sampler or adaptive(), (0.1, 0.0), batch=8)
        return bandit, [bandit.step(k) for k in range(start, steps)]

    _, straight = run(12)
    first, early = run(5)
    torch.save(first.sampler.state_dict(), tmp_path / "state.pt")
    restored = adaptive()
    restored.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    _, late = run(12, restored, 5)
    assert all(torch.equal(x, y) for x, y in zip(straight, early + late, strict=True))


def test_adaptive_cap_limits_the_vlb_coefficients():
    sampler = make_sampler({"name": "adaptive", "c_max": 1.0}, make_schedule("cosine"))
    assert sampler.coefficients.max() == 1.0


def test_adaptive_works_with_a_batch_of_one_and_feature_timesteps():
    sampler = adaptive(feature_timesteps=7)
    bandit = Bandit(sampler, (0.1, 0.0), batch=1)
    for k in range(6):
        bandit.step(k)
    assert sampler.updates == 3 and all(np.isfinite(sampler.density(bandit.x0)))
