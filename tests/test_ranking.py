"""Statistics of the comparison: how often it reports differences that do not exist, and detects those that do."""

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from kairos.report import ranking


def correct_by_holm(p):
    """Return the p-values after Holm's correction, computed step by step as in textbooks."""
    corrected, largest = {}, 0.0
    for k, index in enumerate(sorted(range(len(p)), key=p.__getitem__)):
        largest = max(largest, min(1.0, (len(p) - k) * p[index]))
        corrected[index] = largest
    return [corrected[index] for index in range(len(p))]


def test_pairs_are_compared_by_t_tests_with_holms_correction():
    logs = np.random.default_rng(0).normal(np.arange(5)[:, None] * 0.05, 0.05, (5, 7))
    logs[4] = logs[3]  # two equal methods: no difference, and no NaN
    ratio, low, high, p = ranking.compare_pairs(logs)
    pairs = list(combinations(range(5), 2))
    tests = [stats.ttest_rel(logs[a], logs[b]) for a, b in pairs]
    expected = correct_by_holm([1.0 if np.isnan(test.pvalue) else test.pvalue for test in tests])
    assert [p[a, b] for a, b in pairs] == pytest.approx(expected) == [p[b, a] for a, b in pairs]
    assert ratio[0, 1] * ratio[1, 0] == pytest.approx(1) == low[0, 1] * high[1, 0]
    assert p[3, 4] == ratio[3, 4] == 1 and 0 < sum(value < 0.05 for value in expected) < len(pairs)


def test_holms_correction_leaves_out_impossible_tests_and_counts_planned_ones():
    corrected = ranking.correct_after_holm(np.array([0.01, math.nan, 0.04, 0.03, 0.5]))
    np.testing.assert_allclose(corrected, [0.04, math.nan, 0.09, 0.09, 0.5])
    tables = np.array([[0.01, 0.02], [math.nan, 0.02]])
    np.testing.assert_allclose(ranking.correct_after_holm(tables), [[0.02, 0.02], [math.nan, 0.02]])
    np.testing.assert_allclose(ranking.correct_after_holm(tables, 10), [[0.1, 0.18], [math.nan, 0.2]])


def test_the_smallest_detectable_log_ratio_is_detected_with_the_stated_power():
    deviation, seeds, level = 0.2, 8, 0.05 / 27
    shift = ranking.smallest_detectable_log_ratio(deviation, seeds, level)
    samples = np.random.default_rng(1).normal(shift, deviation, (20_000, seeds))
    power = (stats.ttest_1samp(samples, 0, axis=1).pvalue < level).mean()
    assert power == pytest.approx(0.8, abs=0.012)  # four standard errors


def simulate_tables(methods, seeds, noise, sets, heavy=False, effect=0.0, count=1000):
    """Simulate logarithms of final distances (count, methods, seeds) with effects of seeds and of methods with a seed.

    Args:
        noise: standard deviation of a method with a seed; a seed has standard deviation 0.2.
        sets: standard deviation over sample sets relative to the distance; three sets are averaged.
        heavy: sets from Student's t with two degrees of freedom instead of normal ones.
        effect: decrease of the first method.
    """
    rng = np.random.default_rng([methods, seeds])
    logs = 3 + rng.normal(0, 0.2, (count, 1, seeds)) + rng.normal(0, noise, (count, methods, seeds))
    logs[:, 0] -= effect
    shape = (count, methods, seeds, 3)
    deviations = rng.standard_t(2, shape) if heavy else rng.standard_normal(shape)
    return logs + np.log(np.clip(1 + sets * deviations, 0.1, None).mean(axis=-1))


@pytest.mark.parametrize(("methods", "seeds"), [(2, 5), (6, 5), (6, 20), (10, 8)])
@pytest.mark.parametrize(
    ("noise", "sets", "heavy"), [(0.02, 0.02, False), (0.1, 0.02, False), (0.01, 0.2, False), (0.01, 0.05, True)]
)
def test_at_most_one_in_twenty_tables_of_equal_methods_reports_a_difference(methods, seeds, noise, sets, heavy):
    p = ranking.compare_pairs(simulate_tables(methods, seeds, noise, sets, heavy))[3]
    tables_with_difference = int((p < ranking.SIGNIFICANCE_LEVEL).any(axis=(1, 2)).sum())
    assert tables_with_difference <= stats.binom.ppf(0.999, 1000, 0.05)  # 72


def test_real_differences_are_detected():
    for methods, seeds, effect, least in ((6, 5, 0.15, 0.9), (10, 8, 0.1, 0.9), (2, 5, 0.06, 0.8)):
        p = ranking.compare_pairs(simulate_tables(methods, seeds, 0.02, 0.02, effect=effect))[3]
        assert (p[:, 0, 1:] < ranking.SIGNIFICANCE_LEVEL).mean() > least  # the first method and each of the others
        assert (p[:, 1:, 1:] < ranking.SIGNIFICANCE_LEVEL).any(
            axis=(1, 2)
        ).mean() <= 0.072  # but no difference among the others


@pytest.mark.parametrize(("seeds", "first_rank", "may_be_best"), [(5, 1, True), (5, 2, False), (4, 1, False)])
def test_a_method_may_be_best_if_five_seeds_rank_no_method_above_it(seeds, first_rank, may_be_best):
    empty, empty_by_seed = np.zeros(1), np.zeros((1, 1))
    curve = ranking.Curve(empty, empty, empty, empty, empty, empty, empty_by_seed, empty_by_seed)
    row = ranking.MethodComparison("uniform", curve, seeds, first_rank, 3, None, {}, None, None)
    assert row.may_be_best is may_be_best


def test_the_cost_of_reaching_a_value_is_interpolated():
    steps, values = np.array([0.0, 10, 20]), np.array([100.0, 50, 60])
    assert ranking.crossing_cost(steps, values, 75.0) == 5
    assert np.isnan(ranking.crossing_cost(steps, values, 49.0))
    assert ranking.crossing_cost(steps, values, 100.0) == 0


def test_a_factor_of_training_time_needs_a_clock_in_every_seed():
    steps, values = np.array([0.0, 10, 20]), np.array([[4.0, 2, 1], [4.0, 2, 1]])

    def curve(clock):
        empty = np.full(3, np.nan)
        return ranking.Curve(steps, empty, values.mean(0), empty, empty, empty, values, np.array(clock))

    baseline, method = curve([[0.0, 8, 16]] * 2), curve([[0.0, 2, 4], [0.0, 1, 1]])
    assert ranking.compute_cost_factor(method, baseline, "seconds_by_seed").value == pytest.approx(8)
    assert ranking.compute_cost_factor(curve([[0.0, 2, 4], [np.nan] * 3]), baseline, "seconds_by_seed") is None


def test_a_factor_leaves_out_snapshots_without_a_value():
    """The first seed reaches the baseline's final value at step 20 of 40, and the second one at step 22.5."""
    steps, empty = np.array([0.0, 20, 40]), np.full(3, np.nan)

    def curve(*values):
        seconds = np.where(np.isnan(values), np.nan, 2 * steps)  # a missing snapshot has no training time either
        return ranking.Curve(steps, empty, empty, empty, empty, empty, np.array(values), seconds)

    baseline = curve([4.0, 3, 2.25], [4.0, 3, 2.25])
    for cost in ("steps", "seconds_by_seed"):
        factor = ranking.compute_cost_factor(curve([4.0, np.nan, 0.5], [4.0, 2.5, 0.5]), baseline, cost)
        assert factor.value == pytest.approx(math.sqrt(40 / 20 * 40 / 22.5)) and factor.missed_seed_count == 0
        factor = ranking.compute_cost_factor(curve([4.0, np.nan, 3], [4.0, 2.25, 0.5]), baseline, cost)
        assert factor.missed_seed_count == 1
        # a seed without results may reach the value or not
        assert ranking.compute_cost_factor(curve([np.nan] * 3, [4.0, 2.25, 0.5]), baseline, cost) is None


def test_acceleration_counts_values_just_below_a_minimum_that_a_curve_leaves_again():
    steps = np.array([1.0, 2, 3, 4])
    baseline, method = np.array([10.0, 5, 8, 2]), np.array([10.0, 4, 3, 2])
    assert ranking.highest_cost_ratio(steps, baseline, steps, method) == pytest.approx(
        3.5 / (1 + 5 / 6)
    )  # 1.909, just below 5


def test_acceleration_does_not_count_values_that_one_curve_never_reaches():
    steps = np.array([1.0, 2, 3, 4])
    baseline, method = np.array([10.0, 5, 8, 2]), np.array([10.0, 5, 6, 7])
    assert ranking.highest_cost_ratio(steps, baseline, steps, method) == 1


def compute_acceleration_on_grid(baseline, method):
    """Return the largest ratio of the costs at which two curves first reach a value, on dense grids of both."""
    nodes = np.arange(1, len(baseline) + 1)
    costs = np.linspace(1, len(baseline), 2000 * (len(baseline) - 1) + 1)
    lowest = [np.minimum.accumulate(np.interp(costs, nodes, curve)) for curve in (baseline, method)]
    start, end = max(low[-1] for low in lowest), max(low[0] for low in lowest)
    targets = np.linspace(start, end, round(1000 * (end - start)) + 1)
    first = [costs[np.searchsorted(-low, -targets - 1e-12)] for low in lowest]
    return (first[0] / first[1]).max()


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(curves=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=2, max_size=6))
def test_acceleration_is_the_supremum_over_all_values(curves):
    baseline, method = np.array(curves, float).T
    steps = np.arange(1.0, len(curves) + 1)
    acceleration = ranking.highest_cost_ratio(steps, baseline, steps, method)
    assert acceleration == pytest.approx(compute_acceleration_on_grid(baseline, method), abs=0.02)
