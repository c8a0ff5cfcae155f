"""The comparison: which differences between final distances the tests find, and factors against uniform.

All methods of a seed share initial weights, data order and noise, so methods are compared seed by seed: for every pair
a two-sided paired t-test on the logarithm of the final distance, corrected after Holm (Scand. J. Statist. 6, 1979) over
all pairs, so that at most 5 % of the tables of methods that are alike but for chance name any difference. Of methods
whose logarithms are alike only in the mean, with skewed noise ten times larger for some, it was 9 to 13 %. Below five
seeds nothing is tested.
"""

import math
from dataclasses import KW_ONLY, dataclass

import numpy as np
import pandas as pd
from scipy import stats

from kairos.report.collect import Measured, Results, Training

NOT_MOVED = 0.01  # total variation distance from the start below which a learned sampler counts as not moved
SEEDS = 5  # common to all methods, from which on they are ranked: fewer say little of how much seeds matter
LEVEL = 0.05  # share of tables of methods alike that may name a difference; an interval misses as often


@dataclass(frozen=True)
class Curve:
    """A method's distance over training; arrays of (milestones,), or (seeds, milestones) where it says so.

    Attributes:
        steps, seconds: where it was measured; training time as a mean over seeds, NaN where no clock was kept.
        mean: over seeds.
        over_sets, over_seeds: standard deviations; NaN where they are unknown, over seeds with one.
        spread: what is drawn around each point, the larger of the two.
        values, clock: distances and seconds of every seed, (seeds, milestones).
    """

    steps: np.ndarray
    seconds: np.ndarray
    mean: np.ndarray
    over_sets: np.ndarray
    over_seeds: np.ndarray
    spread: np.ndarray
    values: np.ndarray
    clock: np.ndarray


@dataclass(frozen=True)
class Ratio:
    """A method against the baseline over common seeds: geometric mean of the ratios, and its 95 % interval.

    Attributes:
        value, low, high: the interval is of this ratio alone; NaN with one seed.
        p: of distances, corrected over the table; NaN where nothing is tested.
        missed: of factors, in how many of the `seeds` the baseline's final value is not reached; their value is NaN.
    """

    value: float
    low: float
    high: float
    p: float = math.nan
    _: KW_ONLY
    missed: int = 0
    seeds: int = 0


@dataclass(frozen=True)
class Row:
    """Row of a method in the comparison: distance, the ranks that the tests allow, and the ratio to the baseline."""

    method: str
    curve: Curve
    seeds: int  # common to all methods
    first_rank: int
    last_rank: int
    against: Ratio | None  # final distance over the baseline's
    values: dict[str, tuple[float, float]]  # validation losses: mean and spread over seeds
    steps: Ratio | None  # the baseline's for its final value over the method's for the same
    time: Ratio | None

    @property
    def judged(self) -> bool:
        """True if there are enough seeds to rank methods."""
        return self.seeds >= SEEDS

    @property
    def like_best(self) -> bool:
        """True if the methods are ranked and no test finds a method that ends below this one."""
        return self.judged and self.first_rank == 1


def curve(measured: Measured, method: str) -> Curve:
    """The distance at every milestone; of an unfinished experiment the mean is over the seeds that are there."""
    names = (measured.metric, "train_seconds", f"{measured.metric}_spread")
    values, clock, sets = (measured.values(method, name) for name in names)
    mean, seconds, squares = (part.mean(skipna=bool(measured.missing)) for part in (values, clock, sets**2))
    over_sets, over_seeds = np.sqrt(squares.to_numpy()), values.std().to_numpy()
    spread, steps = np.fmax(over_sets, over_seeds), values.columns.to_numpy(float)
    arrays = (seconds.to_numpy(), mean.to_numpy(), over_sets, over_seeds, spread, values.to_numpy(), clock.to_numpy())
    return Curve(steps, *arrays)


def compare(measured: Results | Measured) -> list[Row]:
    """All methods at their last common milestone, the lowest distance first."""
    common = (measured.measured if isinstance(measured, Results) else measured).common
    curves = [curve(common, method) for method in common.methods]
    finals = np.array([own.values[:, -1] for own in curves])  # (methods, seeds)
    finals = finals[:, (np.isfinite(finals) & (finals > 0)).all(axis=0)]  # the common ones
    tests = paired(np.log(finals))
    below = (tests[3] < LEVEL) & (tests[0] < 1)  # [a, b]: a ends below b
    base = common.methods.index(common.baseline) if common.baseline else None
    rows = [
        Row(
            method=method,
            curve=own,
            seeds=finals.shape[1],
            first_rank=1 + int(below[:, k].sum()),
            last_rank=len(curves) - int(below[k].sum()),
            against=None if base in (None, k) else Ratio(*(float(part[k, base]) for part in tests)),
            values={name: _final(common.values(method, name).iloc[:, -1]) for name in _VALIDATION},
            steps=None if base is None else factor(own, curves[base], "steps"),
            time=None if base is None else factor(own, curves[base], "clock"),
        )
        for k, (method, own) in enumerate(zip(common.methods, curves))
    ]
    return sorted(rows, key=lambda row: row.curve.mean[-1])


def paired(logs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Compare every method with every other, over seeds, in one table or in many at once.

    Args:
        logs: logarithm of the final distance, (..., methods, seeds).

    Returns:
        Geometric mean of a's distance over b's, the ends of its 95 % interval, and p corrected over all pairs: each
        (..., methods, methods), [a, b]; p is NaN below five seeds.
    """
    ratio, low, high, raw = _ratio(logs[..., :, None, :] - logs[..., None, :, :])
    if logs.shape[-1] < SEEDS:
        return ratio, low, high, np.full(raw.shape, np.nan)
    first, second = np.triu_indices(logs.shape[-2], 1)
    p = np.nan_to_num(raw[..., first, second], nan=1.0)  # NaN: no seed tells the two apart
    order = p.argsort(axis=-1)
    stepped = np.take_along_axis(p, order, axis=-1) * np.arange(len(first), 0, -1)
    stepped = np.maximum.accumulate(stepped, axis=-1).clip(max=1)
    corrected = np.ones(raw.shape)
    corrected[..., first, second] = np.take_along_axis(stepped, order.argsort(axis=-1), axis=-1)
    corrected[..., second, first] = corrected[..., first, second]
    return ratio, low, high, corrected


def crossing(costs: np.ndarray, values: np.ndarray, target: float) -> float:
    """The cost at which a curve first is at `target` or below, linear between milestones; NaN: never."""
    return _interpolated(costs, values, target, values <= target)


def crossing_just_below(costs: np.ndarray, values: np.ndarray, target: float) -> float:
    """Return the limit of `crossing` as the target rises to `target`; NaN if no value is below `target`.

    The limit exceeds `crossing` where the curve only touches `target`, rises, and later falls below `target`.
    """
    return _interpolated(costs, values, target, values < target)


def _interpolated(costs: np.ndarray, values: np.ndarray, target: float, reached: np.ndarray) -> float:
    """Interpolate the cost of `target` between the first milestone of `reached` and the milestone before it."""
    indices = np.flatnonzero(reached)
    if not len(indices):
        return math.nan
    span = slice(max(indices[0] - 1, 0), indices[0] + 1)  # the milestones before and after, or the first alone
    return float(np.interp(-target, -values[span], costs[span]))


def highest(costs: np.ndarray, values: np.ndarray, own_costs: np.ndarray, own_values: np.ndarray) -> float:
    """Return the supremum of the ratio of what two curves spend for one value, linear between milestones.

    Wang et al. (2025, section 3.3) read an acceleration off curves of the distance in this way. Between neighbouring
    values of milestones the ratio is monotone, so the supremum is the ratio at such a value or its limit from below:
    a cost jumps where a curve rises again from a minimum.
    """
    lowest = max(values.min(), own_values.min())  # the lowest value that both curves reach
    ratios = []
    for target in {*values, *own_values}:
        if target >= lowest:
            ratios.append(crossing(costs, values, target) / crossing(own_costs, own_values, target))
        if target > lowest:
            own_limit = crossing_just_below(own_costs, own_values, target)
            ratios.append(crossing_just_below(costs, values, target) / own_limit)
    return max(ratios)


def acceleration(own: Curve, baseline: Curve) -> Ratio:
    """The highest factor by which a method needs fewer steps than the baseline, seed by seed, from step 1 on."""
    trained = own.steps > 0
    steps = own.steps[trained]
    pairs = zip(baseline.values[:, trained], own.values[:, trained])
    found = np.array([highest(steps, base, steps, values) for base, values in pairs])
    return Ratio(*map(float, _ratio(np.log(found))[:3]), seeds=len(found))


def moved(training: Training) -> float | None:
    """Total variation distance of a learned sampler's p(t) from its start at the last milestone; None where fixed."""
    distance = training.final.record["strategy"].get("tv_from_start")
    return float(math.nan if distance is None else distance) if training.learned else None


def stands_still(training: Training) -> bool:
    """Return True if a sampler learns, but its p(t) is less than `NOT_MOVED` away from its start.

    An unknown distance counts as not moved.
    """
    distance = moved(training)
    return distance is not None and not distance >= NOT_MOVED


_VALIDATION = ("val_loss", "val_vlb", "val_vlb_without_last")


def factor(own: Curve, baseline: Curve, cost: str) -> Ratio | None:
    """Compute the baseline's cost for its final value over the method's cost for that value, seed by seed.

    None without a clock, or if the baseline never improved on its start.
    """
    targets = baseline.values[:, -1]
    costs = [np.broadcast_to(getattr(curve, cost), curve.values.shape) for curve in (baseline, own)]
    pairs = zip(costs, (baseline, own))
    needed, spent = (np.array(list(map(crossing, cost, curve.values, targets))) for cost, curve in pairs)
    if not np.isfinite(costs[1]).all() or not (needed > 0).all() or (spent == 0).any():
        return None  # no clock, or uniform never improved on its start
    value, low, high, _ = map(float, _ratio(np.log(needed / spent)))
    return Ratio(value, low, high, missed=int(np.isnan(spent).sum()), seeds=len(spent))


def _ratio(logs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Geometric mean over the last axis, its 95 % interval, and p of its being 1; all but the mean NaN with one."""
    if logs.shape[-1] < 2:
        nothing = np.full(logs.shape[:-1], np.nan)
        return np.exp(logs[..., 0]) if logs.shape[-1] else nothing, nothing, nothing, nothing
    test = stats.ttest_1samp(logs, 0, axis=-1)
    low, high = test.confidence_interval(1 - LEVEL)
    return np.exp(logs.mean(axis=-1)), np.exp(low), np.exp(high), test.pvalue


def _final(values: "pd.Series[float]") -> tuple[float, float]:
    return float(values.mean(skipna=False)), float(values.std())
