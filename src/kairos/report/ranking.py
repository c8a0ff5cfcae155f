"""The comparison: final values with their spread, which differences are real, and factors against uniform.

A method's uncertainty is the larger of two spreads: over its sets of samples (pooled over seeds) and over its seeds.
Two methods differ when their intervals, mean ± uncertainty, do not overlap; those that do not differ are not ranked,
nor are those of unknown uncertainty: with one set of samples and one seed there is none.
"""

import math
from dataclasses import dataclass

import numpy as np

from kairos.report.collect import Results, Training

NOT_MOVED = 0.01  # total variation distance from the start below which a learned sampler counts as not moved


@dataclass(frozen=True)
class Curve:
    """A method's distance over training, mean over seeds; arrays of (milestones,)."""

    steps: np.ndarray
    seconds: np.ndarray
    mean: np.ndarray
    over_sets: np.ndarray
    over_seeds: np.ndarray  # NaN with one seed

    @property
    def spread(self) -> np.ndarray:
        """The uncertainty of each point: the larger of the two spreads; NaN where neither is known."""
        return np.fmax(self.over_sets, self.over_seeds)


@dataclass(frozen=True)
class Factor:
    """How many times fewer steps (or less time) a method needs for uniform's final value; None: not reached.

    `easy` and `hard` are the factors when the method's curve lies lower and higher by both methods' uncertainty; None
    too where that is unknown.
    """

    value: float | None
    easy: float | None
    hard: float | None


@dataclass(frozen=True)
class Row:
    """One method of the comparison; `spread` is the uncertainty that ranks are decided by, NaN where it is unknown."""

    method: str
    mean: float
    spread: float
    over_sets: float
    over_seeds: float
    first_rank: int
    last_rank: int
    like_best: bool
    values: dict[str, tuple[float, float]]  # validation losses: mean and spread over seeds
    steps: Factor | None
    time: Factor | None
    step_seconds: float

    @property
    def judged(self) -> bool:
        """Whether its distance can be compared at all."""
        return math.isfinite(self.spread)

    @property
    def ranked(self) -> bool:
        """Whether its rank is beyond the spread."""
        return self.judged and self.first_rank == self.last_rank


def curve(results: Results, method: str) -> Curve:
    """The method's distance at every milestone."""
    trainings = results.of(method)
    name = results.metric
    values = _array(trainings, name)  # (seeds, milestones)
    sets = _array(trainings, f"{name}_spread")
    return Curve(
        steps=np.array([milestone.step for milestone in trainings[0].milestones], float),
        seconds=np.array([[m.seconds for m in training.milestones] for training in trainings], float).mean(axis=0),
        mean=values.mean(axis=0),
        over_sets=np.sqrt((sets**2).mean(axis=0)),
        over_seeds=_over_seeds(values),
    )


def compare(results: Results) -> list[Row]:
    """All methods, the lowest distance first."""
    curves = {method: curve(results, method) for method in results.methods}
    best = min(curves.values(), key=lambda c: c.mean[-1])
    baseline = curves.get(results.baseline) if results.baseline else None
    rows = []
    for method, own in curves.items():
        others = [other for name, other in curves.items() if name != method]
        rows.append(
            Row(
                method=method,
                mean=float(own.mean[-1]),
                spread=float(own.spread[-1]),
                over_sets=float(own.over_sets[-1]),
                over_seeds=float(own.over_seeds[-1]),
                first_rank=1 + sum(lower(other, own) for other in others),
                last_rank=len(curves) - sum(lower(own, other) for other in others),
                like_best=not (math.isnan(own.spread[-1]) or lower(best, own)),
                values={name: _final(results.of(method), name) for name in _VALIDATION},
                steps=_factor(own, baseline, own.steps, baseline.steps) if baseline else None,
                time=_factor(own, baseline, own.seconds, baseline.seconds) if baseline else None,
                step_seconds=float(own.seconds[-1] / own.steps[-1]),
            )
        )
    return sorted(rows, key=lambda row: row.mean)


def lower(one: Curve, other: Curve) -> bool:
    """Whether `one` ends lower than `other`, their intervals apart; never where a spread is unknown."""
    return bool(one.mean[-1] + one.spread[-1] < other.mean[-1] - other.spread[-1])


def crossing(steps: np.ndarray, values: np.ndarray, target: float) -> float | None:
    """The step at which a curve first is at `target` or below, linear between milestones; None: never."""
    below = np.flatnonzero(values <= target)
    if not len(below):
        return None
    span = slice(max(below[0] - 1, 0), below[0] + 1)  # the milestones before and after, or the first alone
    return float(np.interp(-target, -values[span], steps[span]))


def moved(training: Training) -> float | None:
    """Total variation distance of a learned sampler's p(t) from its start at the last milestone; None where fixed."""
    distance = training.final.record["strategy"].get("tv_from_start")
    return float(math.nan if distance is None else distance) if training.learned else None


def stands_still(training: Training) -> bool:
    """Whether a sampler learns and has not moved from its start."""
    distance = moved(training)
    return distance is not None and not distance >= NOT_MOVED


_VALIDATION = ("val_loss", "val_vlb", "val_vlb_without_last")


def _factor(own: Curve, baseline: Curve, own_cost: np.ndarray, baseline_cost: np.ndarray) -> Factor | None:
    target = float(baseline.mean[-1])
    needed = crossing(baseline.steps, baseline.mean, target)
    assert needed is not None  # its last value is at the target
    needed = float(np.interp(needed, baseline.steps, baseline_cost))
    if not needed > 0 or not np.isfinite(own_cost).all():  # no clock, or uniform never improved on its start
        return None
    margin = 0.0 if own is baseline else float(own.spread[-1] + baseline.spread[-1])

    def at(shift: float) -> float | None:
        step = crossing(own.steps, own.mean + shift, target)
        if step is None:
            return None
        spent = float(np.interp(step, own.steps, own_cost))
        return needed / spent if spent > 0 else math.inf

    return Factor(at(0.0), at(-margin), at(margin))


def _final(trainings: list[Training], name: str) -> tuple[float, float]:
    values = _array(trainings, name)[:, -1:]
    return float(values.mean()), float(_over_seeds(values)[0])


def _array(trainings: list[Training], name: str) -> np.ndarray:
    return np.array([[m.value(name) for m in training.milestones] for training in trainings], float)  # None: NaN


def _over_seeds(values: np.ndarray) -> np.ndarray:
    return values.std(axis=0, ddof=1) if len(values) > 1 else np.full(values.shape[1], np.nan)
