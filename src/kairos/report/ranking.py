"""Statistics of the comparison: tests between final distances, and cost factors against the baseline.

All methods of a seed share initial weights, data order and noise, so methods are compared seed by seed. Every pair gets
a two-sided paired t-test on the logarithm of the final distance. The p-values are corrected after Holm (Scand. J.
Statist. 6, 1979) over all pairs. If methods differ only by chance, at most 5 % of the tables contain a difference. The
t-test assumes normal noise: with skewed noise that is ten times larger for some methods, 9 to 13 % of the tables
contain a difference.
Nothing is tested with fewer than five seeds, or if the metric cannot rank the methods.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float

from kairos.report.collect import MethodMeasurements, RunResults

NOT_MOVED = 0.01  # total variation distance from the start below which a learned sampler has not moved
MIN_SEEDS = 5  # common to all methods, to rank them: fewer show little of how much seeds matter
SIGNIFICANCE_LEVEL = 0.05  # largest share of tables of equal methods that contain a difference; intervals cover 95 %

PerSnapshot = Float[np.ndarray, "snapshots"]
PerBaselineSnapshot = Float[np.ndarray, "baseline_snapshots"]
PerSeed = Float[np.ndarray, "seeds"]
PerSeedAndSnapshot = Float[np.ndarray, "seeds snapshots"]
SnapshotFlags = Bool[np.ndarray, "snapshots"]
LogDistances = Float[np.ndarray, "*tables methods seeds"]
LogRatios = Float[np.ndarray, "*ratios seeds"]
PerRatio = Float[np.ndarray, "*ratios"]
PValues = Float[np.ndarray, "*families tests"]


@dataclass(frozen=True)
class Curve:
    """Compared metric of a method over training; arrays are (snapshots,) unless stated otherwise.

    Attributes:
        steps: optimizer steps of the snapshots.
        seconds: training time, mean over seeds; NaN without a clock, or if machines of several kinds were the clock.
        mean: value, mean over seeds.
        std_over_sets: standard deviation over sample sets; NaN if unknown.
        std_over_seeds: standard deviation over seeds; NaN with one seed.
        std: the larger of the two, which is drawn around each point.
        values_by_seed: value of every seed, (seeds, snapshots).
        seconds_by_seed: training time of every seed, (seeds, snapshots).
    """

    steps: PerSnapshot
    seconds: PerSnapshot
    mean: PerSnapshot
    std_over_sets: PerSnapshot
    std_over_seeds: PerSnapshot
    std: PerSnapshot
    values_by_seed: PerSeedAndSnapshot
    seconds_by_seed: PerSeedAndSnapshot


@dataclass(frozen=True)
class Ratio:
    """Ratio of a method to the baseline: geometric mean over common seeds, and its 95 % interval.

    Attributes:
        value: geometric mean.
        low, high: interval of this ratio alone; NaN with one seed.
        p_value: p-value of the hypothesis that a ratio of distances is 1, corrected over the table; NaN if nothing is
            tested, and for cost factors.
        missed_seed_count: for cost factors, number of seeds that do not reach the baseline's final value. If it is not
            0, `value` is NaN.
        seed_count: for cost factors, number of seeds.
    """

    value: float
    low: float
    high: float
    p_value: float = math.nan
    missed_seed_count: int = 0
    seed_count: int = 0


class RatioArrays(NamedTuple):
    """Many ratios at once, as arrays of one shape.

    Attributes:
        values: geometric means.
        low, high: ends of the 95 % intervals.
        p_values: p-values of the hypothesis that a ratio is 1.
    """

    values: PerRatio
    low: PerRatio
    high: PerRatio
    p_values: PerRatio


@dataclass(frozen=True)
class MethodComparison:
    """Comparison of a method with all other methods and with the baseline.

    Attributes:
        method: name of the method.
        curve: metric over training.
        seed_count: number of seeds that tests and ranks are over: those for which every method has a positive value.
        first_rank, last_rank: best and worst rank that the tests allow.
        ratio_to_baseline: final value over the baseline's; None for the baseline and without a baseline.
        validation_losses: mean and standard deviation over seeds of every measured loss on held-out images, at the last
            common snapshot, by column; NaN if unknown.
        step_factor: speed-up in steps: steps that the baseline needs for its final value, over the method's steps for
            that value.
        time_factor: speed-up in training time: seconds that the baseline needs for its final value, over the method's
            seconds for that value.
        metric_can_rank: False if the metric cannot rank these methods, see `MethodMeasurements.reasons_not_to_rank`.
    """

    method: str
    curve: Curve
    seed_count: int
    first_rank: int
    last_rank: int
    ratio_to_baseline: Ratio | None
    validation_losses: dict[str, tuple[float, float]]
    step_factor: Ratio | None
    time_factor: Ratio | None
    metric_can_rank: bool = True

    @property
    def is_ranked(self) -> bool:
        """True if the metric can rank methods, and there are enough seeds."""
        return self.metric_can_rank and self.seed_count >= MIN_SEEDS

    @property
    def may_be_best(self) -> bool:
        """True if methods are ranked and no test finds a method that ends better than this one."""
        return self.is_ranked and self.first_rank == 1


def build_curve(measurements: MethodMeasurements, method: str) -> Curve:
    """Build the curve of a method's metric over its snapshots.

    Means of an unfinished experiment are over the available seeds; lines in `missing` show that it is unfinished.
    Otherwise a mean is NaN where the value of a seed is missing. Mean times are treated in the same way. The deviation
    over sample sets is the root of the mean of the seeds' variances. `std` is the larger of the two deviations, or the
    known one.
    """
    values = measurements.values_of(method, measurements.metric)
    seconds = measurements.values_of(method, "train_seconds")
    if not measurements.has_one_clock:
        seconds = seconds * math.nan
    set_stds = measurements.values_of(method, f"{measurements.metric}_spread")
    skip_missing = bool(measurements.missing)  # True for an unfinished experiment
    std_over_sets = np.sqrt((set_stds**2).mean(skipna=skip_missing).to_numpy())
    std_over_seeds = values.std().to_numpy()
    return Curve(
        steps=values.columns.to_numpy(float),
        seconds=seconds.mean(skipna=skip_missing).to_numpy(),
        mean=values.mean(skipna=skip_missing).to_numpy(),
        std_over_sets=std_over_sets,
        std_over_seeds=std_over_seeds,
        std=np.fmax(std_over_sets, std_over_seeds),  # fmax ignores NaN
        values_by_seed=values.to_numpy(),
        seconds_by_seed=seconds.to_numpy(),
    )


def compare_methods(measurements: MethodMeasurements) -> list[MethodComparison]:
    """Compare all methods at their last common snapshot; the method with the best value of the metric comes first.

    Curves, values and costs end at that snapshot. Ratios, tests and ranks are over the seeds for which every method has
    a positive value. With fewer than five such seeds, or with a metric that cannot rank, nothing is tested, and every
    method may have every rank. Without a baseline, `ratio_to_baseline` and the factors are None.

    Raises:
        KairosError: no snapshot after step 0 is evaluated for all methods.
    """
    common = measurements.common_measurements
    curves = [build_curve(common, method) for method in common.methods]
    # test every pair of methods
    final_values = np.array([curve.values_by_seed[:, -1] for curve in curves])  # (methods, seeds)
    has_logarithm = np.isfinite(final_values) & (final_values > 0)
    seed_is_usable = has_logarithm.all(axis=0)  # all methods have a positive value
    final_values = final_values[:, seed_is_usable]
    ratios = compare_pairs(np.log(final_values))
    metric_can_rank = not measurements.reasons_not_to_rank
    if not metric_can_rank:
        ratios = ratios._replace(p_values=np.full_like(ratios.p_values, np.nan))
    is_better = ratios.values > 1 if common.higher_is_better else ratios.values < 1
    is_significant = ratios.p_values < SIGNIFICANCE_LEVEL  # False for NaN: nothing is tested
    ends_better = is_significant & is_better  # [a, b]: a ends better than b
    # cost factors need curves of which lower values are better
    descending_curves = curves
    if common.higher_is_better:
        descending_curves = [replace(curve, values_by_seed=-curve.values_by_seed) for curve in curves]
    baseline_index = common.methods.index(common.baseline) if common.baseline else None
    # a comparison per method
    comparisons = []
    for index, (method, curve) in enumerate(zip(common.methods, curves)):
        ratio_to_baseline = step_factor = time_factor = None
        if baseline_index is not None:
            descending_curve = descending_curves[index]
            descending_baseline = descending_curves[baseline_index]
            step_factor = compute_cost_factor(descending_curve, descending_baseline, cost="steps")
            time_factor = compute_cost_factor(descending_curve, descending_baseline, cost="seconds_by_seed")
            if index != baseline_index:
                ratio_to_baseline = select_ratio(ratios, index, baseline_index)
        better_count = int(ends_better[:, index].sum())  # methods that end better than this one
        worse_count = int(ends_better[index].sum())  # methods that this one ends better than
        losses = {name: common.values_of(method, name).iloc[:, -1] for name in common.validation_columns}
        comparison = MethodComparison(
            method=method,
            curve=curve,
            seed_count=final_values.shape[1],
            first_rank=1 + better_count,
            last_rank=len(curves) - worse_count,
            ratio_to_baseline=ratio_to_baseline,
            validation_losses={name: _mean_and_std(values) for name, values in losses.items()},
            step_factor=step_factor,
            time_factor=time_factor,
            metric_can_rank=metric_can_rank,
        )
        comparisons.append(comparison)
    return sorted(comparisons, key=lambda comparison: comparison.curve.mean[-1], reverse=common.higher_is_better)


def select_ratio(ratios: RatioArrays, method: int, other: int) -> Ratio:
    """Return element [method, other] of arrays (methods, methods) as a `Ratio` of plain floats."""
    return Ratio(
        value=float(ratios.values[method, other]),
        low=float(ratios.low[method, other]),
        high=float(ratios.high[method, other]),
        p_value=float(ratios.p_values[method, other]),
    )


def compare_pairs(log_distances: LogDistances) -> RatioArrays:
    """Compare every pair of methods over seeds, in one table or in many at once.

    Args:
        log_distances: logarithm of the final distance, (..., methods, seeds).

    Returns:
        Ratios of a's distance to b's, with p-values corrected over all pairs. Arrays are (..., methods, methods),
        indexed [a, b]. P-values are NaN with fewer than five seeds. Otherwise they are 1 for a method with itself, and
        for methods that are equal for every seed. Intervals are NaN with one seed, and all arrays without seeds.
    """
    log_ratios = log_distances[..., :, None, :] - log_distances[..., None, :, :]  # (..., methods, methods, seeds)
    ratios = _geometric_mean_ratio(log_ratios)
    method_count, seed_count = log_distances.shape[-2:]
    if seed_count < MIN_SEEDS:
        return ratios._replace(p_values=np.full(ratios.values.shape, np.nan))
    first, second = np.triu_indices(method_count, 1)  # every pair once: [a, b] and [b, a] have equal p-values
    p_values_of_pairs = ratios.p_values[..., first, second]  # (..., pairs)
    # the p-value is NaN if both methods are equal for every seed
    corrected_of_pairs = correct_after_holm(np.nan_to_num(p_values_of_pairs, nan=1.0))
    corrected = np.ones(ratios.values.shape)
    corrected[..., first, second] = corrected_of_pairs
    corrected[..., second, first] = corrected_of_pairs
    return ratios._replace(p_values=corrected)


def correct_after_holm(p_values: PValues, test_count: int | None = None) -> PValues:
    """Return p-values corrected for multiple testing after Holm, in their order, (..., tests).

    The last axis is a family of tests. Its smallest p-value is multiplied by the number of tests n, the next by n - 1,
    and so on. A product below an earlier one is raised to it, and no product exceeds 1.

    Args:
        p_values: p-values; NaN, of a test that was not possible, stays NaN.
        test_count: n. None: the number of values that are not NaN. A larger number is for tests that are planned but
            not finished.
    """
    # statsmodels has this correction too, but takes 44 MB and corrects one table at a time
    n = np.count_nonzero(~np.isnan(p_values), axis=-1, keepdims=True) if test_count is None else test_count
    order = p_values.argsort(axis=-1)  # NaN last
    ascending = np.take_along_axis(p_values, order, axis=-1)
    # the k-th smallest p-value, k = 0, 1, ..., is multiplied by n - k
    products = ascending * (n - np.arange(p_values.shape[-1]))
    corrected = np.maximum.accumulate(products, axis=-1).clip(max=1)
    original_order = order.argsort(axis=-1)  # the inverse of the permutation `order`
    return np.take_along_axis(corrected, original_order, axis=-1)


def smallest_detectable_log_ratio(deviation: float, seeds: int, level: float, power: float = 0.8) -> float:
    """Return the smallest true mean log ratio that a two-sided paired t-test over seeds detects, above 0.

    Args:
        deviation: standard deviation of the log ratio over seeds.
        seeds: number of seeds.
        level: level of the test.
        power: probability of the detection. The caller ensures that it is above `level`.
    """
    from scipy import optimize, stats

    freedom = seeds - 1  # degrees of freedom
    critical_value = stats.t.ppf(1 - level / 2, freedom)  # critical value of the t statistic

    def excess_power(shift: float) -> float:
        """Return the test's power minus `power`, for a t statistic with noncentrality `shift`."""
        probability_above = stats.nct.sf(critical_value, freedom, shift)
        # NaN if it is too small for scipy
        probability_below = np.nan_to_num(stats.nct.cdf(-critical_value, freedom, shift))
        return float(probability_above + probability_below) - power

    # Without a shift the power is `level`; at three times the critical value it exceeds all usual powers. The shift is
    # the true mean over its standard error, deviation / sqrt(seeds), so that the mean is their product.
    shift = float(optimize.brentq(excess_power, 0, 3 * critical_value))
    return shift * deviation / math.sqrt(seeds)


def crossing_cost(costs: PerSnapshot, values: PerSnapshot, target: float) -> float:
    """Return the cost at which a curve first is at or below `target`, or NaN if it never is.

    Lower `values` are better. `costs` are steps or seconds at the snapshots; both arrays are (snapshots,). The curve is
    linear between snapshots with a finite value. If the first of these is at or below `target`, the result is its cost.
    """
    return _interpolate_cost(costs, values, target, values <= target)


def crossing_cost_just_below(costs: PerSnapshot, values: PerSnapshot, target: float) -> float:
    """Return the limit of `crossing_cost` for targets that approach `target` from below; NaN if no value is below it.

    The limit exceeds `crossing_cost` where the curve only touches `target`, rises, and later falls below `target`.
    """
    return _interpolate_cost(costs, values, target, values < target)


def _interpolate_cost(costs: PerSnapshot, values: PerSnapshot, target: float, is_reached: SnapshotFlags) -> float:
    """Return the cost of `target`, interpolated between the first snapshot with `is_reached` and the snapshot before.

    The result is NaN if no snapshot reaches the target, and the cost of the first snapshot if that one does. Snapshots
    without a finite value are left out. Arrays are (snapshots,).
    """
    is_known = np.isfinite(values)
    costs, values, is_reached = costs[is_known], values[is_known], is_reached[is_known]
    if not is_reached.any():
        return math.nan
    first_reached = int(is_reached.argmax())  # index of the first True
    if first_reached == 0:
        return float(costs[0])
    neighbours = slice(first_reached - 1, first_reached + 1)  # the snapshot before and the one that reaches the target
    # np.interp needs ascending values; the values of these two snapshots descend
    return float(np.interp(-target, -values[neighbours], costs[neighbours]))


def highest_cost_ratio(
    baseline_costs: PerBaselineSnapshot, baseline_values: PerBaselineSnapshot, costs: PerSnapshot, values: PerSnapshot
) -> float:
    """Return the supremum of the baseline's cost over the method's cost for one distance.

    Wang et al. (2025, section 3.3) define the acceleration by curves of the distance in this way. The curves are linear
    between snapshots, so the ratio is monotone between two consecutive snapshot distances in sorted order. The supremum
    is the ratio at such a distance or its limit from below: a cost jumps where a curve rises again from a minimum.

    Args:
        baseline_costs, costs: steps or seconds at the snapshots, each (snapshots,); above 0.
        baseline_values, values: distances at the snapshots, each (snapshots,); finite, and at least one each.
    """
    lowest_common = max(baseline_values.min(), values.min())  # the lowest distance that both curves reach
    ratios = []  # at every snapshot distance that both curves reach, and limits from below
    for target in {*baseline_values, *values}:
        if target >= lowest_common:
            baseline_cost = crossing_cost(baseline_costs, baseline_values, target)
            method_cost = crossing_cost(costs, values, target)
            ratios.append(baseline_cost / method_cost)
        if target > lowest_common:
            baseline_limit = crossing_cost_just_below(baseline_costs, baseline_values, target)
            method_limit = crossing_cost_just_below(costs, values, target)
            ratios.append(baseline_limit / method_limit)
    return max(ratios)


def compute_acceleration(curve: Curve, baseline: Curve) -> Ratio | None:
    """Return SpeeD's acceleration: the largest ratio of the baseline's steps to the method's steps for one distance.

    The ratio of each seed is `highest_cost_ratio`, and the result is their geometric mean, without a p-value. The
    snapshot before training (step 0) is left out: all methods are equal there. Snapshots that lack a value of one of
    the two curves are left out for that seed, and so are seeds without any snapshot left. The result is None if no
    seed is left. The caller ensures that both curves have equal seeds.
    """
    common_steps, baseline_columns, columns = np.intersect1d(baseline.steps, curve.steps, return_indices=True)
    baseline_values_by_seed = baseline.values_by_seed[:, baseline_columns]
    values_by_seed = curve.values_by_seed[:, columns]
    factors = []  # one per seed
    for baseline_values, values in zip(baseline_values_by_seed, values_by_seed):
        is_compared = (common_steps > 0) & np.isfinite(baseline_values) & np.isfinite(values)
        steps = common_steps[is_compared]
        if len(steps):
            factors.append(highest_cost_ratio(steps, baseline_values[is_compared], steps, values[is_compared]))
    if not factors:
        return None
    mean = _geometric_mean_ratio(np.log(np.array(factors)))
    return Ratio(float(mean.values), float(mean.low), float(mean.high), seed_count=len(factors))


def compute_acceleration_by_chance(curve: Curve) -> Ratio | None:
    """Return `compute_acceleration` of a method against itself, each seed with the next one; None with one seed.

    The highest ratio along two curves is above 1 for equal methods. This is its size without any difference.
    """
    if len(curve.values_by_seed) < 2:
        return None
    next_seeds = replace(curve, values_by_seed=np.roll(curve.values_by_seed, 1, axis=0))
    return compute_acceleration(next_seeds, curve)


def compute_cost_factor(curve: Curve, baseline: Curve, cost: str) -> Ratio | None:
    """Return the baseline's cost for its final value over the method's cost for that value, as a `Ratio` over seeds.

    Each seed has the final value of the baseline with that seed as its target. The mean is geometric, and the ratio has
    no p-value. The caller ensures that lower values of both curves are better, and that the curves have equal seeds.

    Args:
        curve: the method.
        baseline: the baseline.
        cost: attribute of `Curve` that contains the costs, ``steps`` or ``seconds_by_seed``.

    Returns:
        The factor; None without a clock at every snapshot with a value, or if a seed of the baseline or of the method
            reaches the value already at its start. It is also None if a seed of the method has neither reached the
            value nor a final value. The factor is NaN if a seed of the method does not reach the value.
    """
    targets = baseline.values_by_seed[:, -1]  # (seeds,)
    baseline_costs = _costs_of_targets(baseline, cost, targets)
    method_costs = _costs_of_targets(curve, cost, targets)
    has_clock = np.isfinite(_costs_by_seed(curve, cost)[np.isfinite(curve.values_by_seed)]).all()
    # only the snapshot before training has a cost of 0; a cost that is unknown, NaN, is not above 0 either
    baseline_has_improved = (baseline_costs > 0).all()
    method_starts_there = (method_costs == 0).any()
    has_no_result = (np.isnan(method_costs) & ~np.isfinite(curve.values_by_seed[:, -1])).any()
    if not has_clock or not baseline_has_improved or method_starts_there or has_no_result:
        return None
    mean = _geometric_mean_ratio(np.log(baseline_costs / method_costs))  # NaN if a method's cost is NaN
    missed_seed_count = int(np.isnan(method_costs).sum())
    return Ratio(
        value=float(mean.values),
        low=float(mean.low),
        high=float(mean.high),
        missed_seed_count=missed_seed_count,
        seed_count=len(targets),
    )


def find_slower_methods_that_end_better(
    comparisons: list[MethodComparison], baseline: str, higher_is_better: bool
) -> Iterator[str]:
    """Yield a sentence for each method that ends better than the baseline with a speed-up in steps below 1.

    A speed-up compares steps until the baseline's final value, not final values. It is below 1 if the baseline reaches
    its final value early, gets worse and comes back. `comparisons` are those of `compare_methods`.
    """
    curve_of_baseline = next(comparison.curve for comparison in comparisons if comparison.method == baseline)
    sign = -1 if higher_is_better else 1  # crossings need curves of which lower values are better
    descending = replace(curve_of_baseline, values_by_seed=sign * curve_of_baseline.values_by_seed)
    steps_of_baseline = _costs_of_targets(descending, "steps", descending.values_by_seed[:, -1])
    for comparison in comparisons:
        factor, ratio = comparison.step_factor, comparison.ratio_to_baseline
        if factor is None or ratio is None or not factor.value < 1:  # not below 1: also NaN, if a seed misses the value
            continue
        ends_better = ratio.value > 1 if higher_is_better else ratio.value < 1
        if ends_better:
            direction = "above" if higher_is_better else "below"
            method = comparison.method
            yield (
                f"{method} ends {direction} {baseline} although its speed-up in steps is {factor.value:.2f}. "
                f"{baseline} had its own final value at step {steps_of_baseline.mean():,.0f} (mean over seeds), "
                f"got worse and came back; {method} needed more steps for that value, and then passed it."
            )


def _costs_of_targets(curve: Curve, cost: str, targets: PerSeed) -> PerSeed:
    """Return the cost at which each seed's curve reaches its target, (seeds,); NaN if it does not, see `crossing_cost`.

    `cost` is the attribute of `Curve` with the costs, and `targets` has a value per seed.
    """
    target_costs = []
    for costs, values, target in zip(_costs_by_seed(curve, cost), curve.values_by_seed, targets):
        target_costs.append(crossing_cost(costs, values, target))
    return np.array(target_costs)


def _costs_by_seed(curve: Curve, cost: str) -> PerSeedAndSnapshot:
    """Return the costs of every seed's snapshots, (seeds, snapshots), from the attribute `cost` of the curve."""
    # steps are common to all seeds, seconds are not
    return np.broadcast_to(getattr(curve, cost), curve.values_by_seed.shape)


def distance_from_start(run: RunResults) -> float | None:
    """Return the total variation distance of a learned sampler's last p(t) from its start; None if it does not learn.

    The last p(t) is from the last evaluated snapshot. The result is NaN if its record lacks the distance.
    """
    if not run.learns_sampler:
        return None
    distance = run.last_snapshot.record["strategy"].get("tv_from_start")
    return math.nan if distance is None else float(distance)


def has_not_moved(run: RunResults) -> bool:
    """Return True if a run's sampler learns, but its p(t) is less than `NOT_MOVED` away from its start.

    An unknown distance is treated as not moved. The result is False if the sampler does not learn.
    """
    distance = distance_from_start(run)
    if distance is None:
        return False
    return math.isnan(distance) or distance < NOT_MOVED


def _geometric_mean_ratio(log_ratios: LogRatios) -> RatioArrays:
    """Return the geometric mean of ratios over seeds, its 95 % interval, and the p-value of the mean being 1.

    The logarithms are (..., seeds), and the result's arrays (...). Interval and p-value are from a two-sided t-test of
    the logarithms, not corrected. They are NaN with one seed; all values are NaN without seeds or if a ratio is NaN.
    """
    seed_count = log_ratios.shape[-1]
    unknown = np.full(log_ratios.shape[:-1], np.nan)
    if seed_count == 0:
        return RatioArrays(unknown, unknown, unknown, unknown)
    if seed_count == 1:
        return RatioArrays(np.asarray(np.exp(log_ratios[..., 0])), unknown, unknown, unknown)
    from scipy import stats  # a slow import: stage `track`, which imports this module, ranks nothing

    test = stats.ttest_1samp(log_ratios, 0, axis=-1)
    low, high = test.confidence_interval(1 - SIGNIFICANCE_LEVEL)
    columns = (np.exp(log_ratios.mean(axis=-1)), np.exp(low), np.exp(high), test.pvalue)
    return RatioArrays(*map(np.asarray, columns))  # numpy returns numbers for one-dimensional logarithms


def _mean_and_std(values: "pd.Series[float]") -> tuple[float, float]:
    """Return the mean and the standard deviation of values over seeds; the mean is NaN if a value is missing.

    The standard deviation is over the known values, and NaN with fewer than two.
    """
    return float(values.mean(skipna=False)), float(values.std())
