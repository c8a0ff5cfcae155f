"""Comparison of methods at equal training time, and the machines that the time was measured on."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import numpy as np

from kairos.report.collect import MethodMeasurements, RunResults
from kairos.report.formatting import join_first_names
from kairos.report.ranking import Curve, PerSeed, Ratio, build_curve, compare_pairs, crossing_cost, select_ratio


@dataclass(frozen=True)
class ValueAtTime:
    """Metric of a method after a training time that all methods share.

    Attributes:
        method: name of the method.
        values: metric of every seed, linear between snapshots; seeds without a ratio are included.
        steps: steps computed by then, mean over seeds.
        ratio_to_baseline: value over the baseline's; None for the baseline and without a baseline.
    """

    method: str
    values: PerSeed
    steps: float
    ratio_to_baseline: Ratio | None

    @property
    def mean(self) -> float:
        """Mean over seeds."""
        return float(self.values.mean())

    @property
    def std(self) -> float:
        """Standard deviation over seeds; NaN with one seed."""
        return float(self.values.std(ddof=1)) if len(self.values) > 1 else math.nan


@dataclass(frozen=True)
class EqualTimeComparison:
    """Comparison of all methods after an equal training time.

    Attributes:
        seconds: the training time, the shortest in which a run reaches the last snapshot that all methods have.
        seed_count: number of seeds in ratios and tests: those for which every method has a positive value.
        methods: values of the methods, the best one first.
    """

    seconds: float
    seed_count: int
    methods: list[ValueAtTime]


def compare_at_equal_time(measurements: MethodMeasurements) -> EqualTimeComparison | None:
    """Compare all methods after the training time of the run that first reaches the last common snapshot.

    The time is the shortest of all methods and seeds, so that no value is extrapolated. Tests are those of
    `compare_pairs`. They are left out if the metric cannot rank the methods. The result is None if
    `why_times_are_not_compared` has a reason.

    Raises:
        KairosError: no snapshot after step 0 is evaluated for all methods.
    """
    if why_times_are_not_compared(measurements):
        return None
    common = measurements.common_measurements
    curves = [build_curve(common, method) for method in common.methods]
    seconds = float(min(curve.seconds_by_seed[:, -1].min() for curve in curves))
    values = np.array([_values_after(curve, seconds) for curve in curves])  # (methods, seeds)
    has_logarithm = np.isfinite(values) & (values > 0)
    usable_values = values[:, has_logarithm.all(axis=0)]
    ratios = compare_pairs(np.log(usable_values))
    if measurements.reasons_not_to_rank:  # as in `compare_methods`
        ratios = ratios._replace(p_values=np.full_like(ratios.p_values, np.nan))
    baseline_index = common.methods.index(common.baseline) if common.baseline else None
    methods = []
    for index, (method, curve) in enumerate(zip(common.methods, curves)):
        ratio = None
        if baseline_index is not None and index != baseline_index:
            ratio = select_ratio(ratios, index, baseline_index)
        steps_by_seed = [crossing_cost(curve.steps, -times, -seconds) for times in curve.seconds_by_seed]
        value = ValueAtTime(
            method=method,
            values=values[index],
            steps=float(np.mean(steps_by_seed)),
            ratio_to_baseline=ratio,
        )
        methods.append(value)
    methods.sort(key=lambda value: value.mean, reverse=common.higher_is_better)
    return EqualTimeComparison(seconds, usable_values.shape[1], methods)


def _values_after(curve: Curve, seconds: float) -> PerSeed:
    """Return the metric of every seed after a training time, linear between snapshots with a finite value, (seeds,)."""
    values = []
    for seed_values, times in zip(curve.values_by_seed, curve.seconds_by_seed):
        is_known = np.isfinite(seed_values)
        # `crossing_cost` with exchanged axes: the value at which the negative time falls to -seconds
        values.append(crossing_cost(seed_values[is_known], -times[is_known], -seconds))
    return np.array(values)


def why_times_are_not_compared(measurements: MethodMeasurements) -> str:
    """Return the reason why training times cannot be compared, as a sentence; empty if they can.

    Times are missing for a run up to the last common snapshot, or machines of several kinds measured them.

    Raises:
        KairosError: no snapshot after step 0 is evaluated for all methods.
    """
    common = measurements.common_measurements
    untimed = []
    for method in common.methods:
        is_evaluated = common.values_of(method, common.metric).notna()  # (seeds, snapshots)
        has_time = common.values_of(method, "train_seconds").notna()
        if (is_evaluated & ~has_time).any(axis=None):
            untimed.append(method)
    if untimed:
        return (
            f"Training times are missing: no timing.jsonl of these runs has all times of {join_first_names(untimed)}."
        )
    if not common.has_one_clock:
        machines = "; ".join(
            f"{machine} ({join_first_names(methods)})" for machine, methods in common.methods_by_machine.items()
        )
        return f"Training times of different kinds of machine are not compared: {machines}."
    return ""


def describe_clock(measurements: MethodMeasurements, runs: Sequence[RunResults]) -> str:
    """Return a sentence with the machine that the training times were measured on, or why they are not compared.

    `runs` are the compared training runs.

    Raises:
        KairosError: no snapshot after step 0 is evaluated for all methods.
    """
    reason = why_times_are_not_compared(measurements)
    if reason:
        return reason
    machine = next(iter(measurements.common_measurements.methods_by_machine))
    at_a_time = most_simultaneous_runs(runs)
    return (
        f"Training times were measured on {machine}, with at most {at_a_time} of these training runs at a time; other "
        "load of the machine is unknown."
    )


def most_simultaneous_runs(runs: Sequence[RunResults]) -> int:
    """Return the largest number of these training runs that one machine computed at a time; 0 without times.

    A job is taken as running from its start to its last entry in timing.jsonl, in whole seconds.
    """
    intervals: dict[str, list[tuple[datetime, datetime]]] = defaultdict(list)  # of jobs, by host
    for run in runs:
        ends: dict[tuple[str, str], datetime] = {}  # last entry of each job, by host and start
        for entry in run.times:
            ends[entry["machine"]["host"], entry["started"]] = datetime.fromisoformat(entry["saved"])
        for (host, started), end in ends.items():
            intervals[host].append((datetime.fromisoformat(started), end))
    most = 0
    for jobs in intervals.values():
        for start, _ in jobs:  # the number of jobs rises only where one starts
            running = [job for job in jobs if job[0] == start or job[0] < start < job[1]]
            most = max(most, len(running))
    return most
