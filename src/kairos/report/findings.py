"""Outcome of an experiment in sentences that are computed from its numbers, and warnings about these numbers.

`list_warnings` is the only source of an experiment's warnings: every view of its numbers shows them. They are the
warnings that the stages have stored with the results, and warnings that follow from several runs.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise

import numpy as np

from kairos.evaluation.separation import ADVICE, describe_gaussian_limit, find_instrument_faults
from kairos.report.collect import MethodMeasurements, Results, RunResults
from kairos.report.equal_time import why_times_are_not_compared
from kairos.report.formatting import (
    format_change,
    format_count,
    format_factor,
    format_number,
    format_plus_minus,
    join_first_names,
)
from kairos.report.ranking import (
    MIN_SEEDS,
    SIGNIFICANCE_LEVEL,
    Curve,
    MethodComparison,
    build_curve,
    distance_from_start,
    find_slower_methods_that_end_better,
    has_not_moved,
)

_MOST_WARNINGS = 12  # warnings of one kind
_UNEVEN_TIMES = 1.5  # ratio of the slowest to the fastest seed of a method; runs on an idle machine are below


def summarise_outcome(results: Results, comparisons: list[MethodComparison]) -> list[str]:
    """Summarise the outcome in a few sentences that claim no more than the tests find.

    The sentences are, in this order:

    - why the metric cannot rank methods, see `leading_warnings`
    - the last common step, if results are missing
    - the ranking, or the range of final values with too few seeds
    - the advice to add seeds or to finish missing results, if there are several methods and a ranking needs them
    - the comparison with the baseline, or that there is none
    - each method that ends better than the baseline although its speed-up is below 1

    Args:
        results: results of the experiment.
        comparisons: comparison of its methods, the best one first, see `ranking.compare_methods`.
    """
    ranks_by_distance = results.primary_metric == results.distance_metric
    sentences = leading_warnings(results.measurements)
    metric_can_rank = not sentences
    if results.missing:
        last_step = comparisons[0].curve.steps[-1]
        sentences.append(f"So far, at step {last_step:,.0f}, the last that all methods here have:")
    seeds = results.configured_seeds
    measure = "Fréchet distance"
    if not ranks_by_distance:
        measure = f"validation loss of {results.experiment.diffusion.prediction_name}"
    sentences += _summarise_ranking(comparisons, measure, len(seeds))
    more_seeds_would_rank = len(comparisons) > 1 and metric_can_rank
    if len(seeds) < MIN_SEEDS and more_seeds_would_rank:
        sentences.append(_advise_more_seeds(seeds))
    elif results.missing and not comparisons[0].is_ranked and more_seeds_would_rank:
        sentences.append("To rank them, run the experiment again; it computes the missing results.")
    if results.baseline is None:
        sentences.append("No method samples uniformly without weights, so there is no baseline for factors.")
    else:
        sentences += _summarise_baseline_comparison(comparisons, results.baseline)
        higher_is_better = results.measurements.higher_is_better
        sentences += find_slower_methods_that_end_better(comparisons, results.baseline, higher_is_better)
    return sentences


def _advise_more_seeds(seeds: Sequence[int]) -> str:
    """Return a sentence that advises to add the smallest unused seeds, up to the five seeds that a ranking needs.

    The caller ensures that there are fewer than five `seeds`.
    """
    # at most len(seeds) of the seeds 0 ... 4 are in use, so that enough of them are unused
    unused_seeds = [seed for seed in range(MIN_SEEDS) if seed not in seeds]
    missing_count = MIN_SEEDS - len(seeds)
    enough_seeds = sorted([*seeds, *unused_seeds[:missing_count]])
    return (
        f"To rank them, set seeds: {enough_seeds} in the experiment file and run it again; only new seeds are computed."
    )


def _summarise_ranking(comparisons: list[MethodComparison], measure: str, configured_count: int) -> list[str]:
    """Return one or two sentences about which methods may be the best; `comparisons` have the lowest final value first.

    If methods are not ranked, the sentences only report the range of final values, and the number of seeds if that is
    the reason. `measure` is the name of the metric in the sentences, and `configured_count` the number of seeds in the
    experiment file.
    """
    final_values = {}
    for comparison in comparisons:
        final_values[comparison.method] = format_plus_minus(comparison.curve.mean[-1], comparison.curve.std[-1])
    values_with_names = [f"{value} ({method})" for method, value in final_values.items()]
    lowest, highest = values_with_names[0], values_with_names[-1]  # comparisons are in this order
    best = [comparison.method for comparison in comparisons if comparison.may_be_best]
    if not best:  # only if methods are not ranked: otherwise the lowest one may be the best
        final_range = f"Final values of the {measure}: from {lowest} to {highest}"
        if not comparisons[0].metric_can_rank:
            return [f"{final_range}; they do not show which method is better."]
        seed_count = comparisons[0].seed_count
        have = f"this experiment has {seed_count}"
        if seed_count < configured_count:
            have = f"all methods have results of {seed_count} of the experiment's {configured_count} seeds"
        return [
            f"Not ranked: methods are ranked from {MIN_SEEDS} seeds on, and {have}.",
            f"{final_range}; another seed may reorder them.",
        ]
    if len(best) == 1:
        return [f"{best[0]} ends with the lowest {measure}, {final_values[best[0]]}."]
    names = join_first_names(best)
    return [f"The tests find no difference between {names} and no method below them; the lowest mean is {lowest}."]


def _summarise_baseline_comparison(comparisons: list[MethodComparison], baseline: str) -> list[str]:
    """Return sentences that list the methods that end below the baseline, above it, or without a detected difference.

    A further sentence reports how many steps a method saves. It is the lowest of the methods that end below the
    baseline and whose interval of the step factor is above 1. The list is empty if methods are not ranked.
    `comparisons` have the lowest final value first.
    """
    methods_by_outcome: dict[str, list[str]] = {"Below": [], "Above": [], "No significant difference from": []}
    saving_methods = []  # comparisons of methods that end below the baseline and need fewer steps
    for comparison in comparisons:
        ratio = comparison.ratio_to_baseline
        if not comparison.is_ranked or ratio is None:  # None: the baseline itself
            continue
        outcome = "No significant difference from"
        if ratio.p_value < SIGNIFICANCE_LEVEL:
            outcome = "Below" if ratio.value < 1 else "Above"
        change, _ = format_change(ratio)
        methods_by_outcome[outcome].append(f"{comparison.method} ({change})")
        step_factor = comparison.step_factor
        if outcome == "Below" and step_factor is not None and step_factor.low > 1:
            saving_methods.append(comparison)
    sentences = []
    for outcome, methods in methods_by_outcome.items():
        if methods:
            sentences.append(f"{outcome} {baseline}: {join_first_names(methods)}.")
    if saving_methods:
        sentences.append(_summarise_saving(saving_methods[0], baseline))  # the lowest, since comparisons are sorted
    return sentences


def _summarise_saving(comparison: MethodComparison, baseline: str) -> str:
    """Return a sentence with a method's speed-up in steps, and its speed-up in training time if that is known.

    Each has its 95 % interval. The snapshots between which the speed-up is interpolated are named. The caller ensures
    that the comparison has a speed-up in steps.
    """
    assert comparison.step_factor is not None
    steps, interval = format_factor(comparison.step_factor)
    speed_up = f"a speed-up in steps of {steps} until {baseline}'s final value (95 % interval {interval}"
    snapshots = comparison.curve.steps
    crossing = snapshots[-1] / comparison.step_factor.value  # about the step at which the method has the value
    after = min(int(np.searchsorted(snapshots, crossing)), len(snapshots) - 1)
    if after > 0:
        speed_up += f", interpolated between snapshots at steps {snapshots[after - 1]:,.0f} and {snapshots[after]:,.0f}"
    saving = f"{comparison.method} has {speed_up})"
    if comparison.time_factor is None:
        return f"{saving}."
    time, time_interval = format_factor(comparison.time_factor)
    return f"{saving}; its speed-up in training time is {time} ({time_interval})."


def list_warnings(results: Results, metric: str | None = None) -> list[str]:
    """Return all warnings of an experiment, each once; reasons why a metric cannot rank its methods come first.

    `metric` is the column that methods are compared by; None: the primary metric.
    """
    measurements = results.measurements_of(metric or results.primary_metric)
    return [*leading_warnings(measurements), *find_warnings(results, measurements)]


def leading_warnings(measurements: MethodMeasurements) -> list[str]:
    """Return the reasons why the compared metric cannot rank the methods, the last one with advice; empty if it can."""
    reasons = list(measurements.reasons_not_to_rank)
    if measurements.instrument_faults:
        reasons[-1] = f"{reasons[-1]} {ADVICE}"
    return reasons


def list_run_warnings(results: Results, run: RunResults) -> list[str]:
    """Return the stored warnings about the numbers of a training run, each once: of the reference and its evaluations.

    The warning that a distance is not below a Gaussian's is included only for the last snapshot.
    """
    gaussian_limit = describe_gaussian_limit(results.reference)
    warnings = list(results.reference.get("warnings", []))
    for snapshot in run.snapshots:
        messages = snapshot.evaluation.get("warnings") or []
        if snapshot is not run.last_snapshot:
            messages = [message for message in messages if message != gaussian_limit]
        warnings += messages
    return list(dict.fromkeys(warnings))


def find_warnings(results: Results, measurements: MethodMeasurements | None = None) -> Iterator[str]:
    """Yield a sentence for everything that limits what the numbers may be used for, besides `leading_warnings`.

    - Stage `reference` has stored a warning.
    - Learned samplers have not moved from their start.
    - Distances end no lower than a Gaussian's, or the primary metric rises during training.
    - An evaluation has a warning, or a run is not bit-exact; a run whose record has no reason is treated as bit-exact.
    - There is only one seed, or training times are missing or of different machines.

    More than 12 warnings about unmoved samplers, or about the primary metric, are shortened to five and a count.

    Args:
        results: results of an experiment.
        measurements: its measurements for the metric that methods are compared by; None: the primary metric.
    """
    if measurements is None:
        measurements = results.measurements
    stored_warnings = [*find_instrument_faults(results.reference), *results.reference.get("warnings", [])]
    for warning in dict.fromkeys(stored_warnings):  # each once
        if warning not in measurements.instrument_faults:
            yield warning
    unmoved_warnings = list(_find_unmoved_samplers(results))
    yield from _shorten(unmoved_warnings, "training runs have samplers that learn but have not moved from their start")
    distances = results.measurements_of(results.distance_metric)
    gaussian_is_a_reason = measurements.reasons_not_to_rank and not measurements.instrument_faults
    if distances.gaussian_warning and not gaussian_is_a_reason:
        yield distances.gaussian_warning
    rises: list[str] = []
    for method in results.methods:
        rises += _find_rises(method, build_curve(results.measurements, method))
    yield from _shorten(rises, f"warnings of this kind; {results.folder}/summary.csv has all values")
    yield from _find_evaluation_warnings(results, distances)
    reasons_by_run = [run.record["provenance"].get("inexact_because") or [] for run in results.runs]
    for inexact_reason in dict.fromkeys(chain.from_iterable(reasons_by_run)):  # each reason once
        yield f"Not bit-exact: {inexact_reason}."
    if len(results.experiment.seeds) == 1:
        yield "One seed: the variation between seeds is unknown, and is not part of the standard deviation."
    reason = why_times_are_not_compared(results.measurements)
    if reason:
        yield reason
    else:
        yield from _find_uneven_times(results)


def _find_uneven_times(results: Results) -> Iterator[str]:
    """Yield a warning if the training times of a method differ between seeds, for the method that differs most."""
    common = results.measurements.common_measurements
    ratios = {}
    for method in common.methods:
        seconds = common.values_of(method, "train_seconds").iloc[:, -1]
        ratios[method] = float(seconds.max() / seconds.min())
    method = max(ratios, key=lambda name: ratios[name])
    if ratios[method] > _UNEVEN_TIMES:
        yield (
            f"Training times of {method} vary by a factor of {format_number(ratios[method], 2)} between seeds, so the "
            "load of the machine varied: do not rely on speed-ups in time, or train one run at a time."
        )


def _find_unmoved_samplers(results: Results) -> Iterator[str]:
    """Yield a warning for each training run whose sampler learns but has not moved from its start, see `has_not_moved`.

    An unknown distance is treated as not moved, and shown as a dash.
    """
    for run in results.runs:
        if has_not_moved(run):
            distance = format_number(distance_from_start(run))
            yield (
                f"{run.method} seed {run.seed}: its sampler learns but has not moved from its start (total variation "
                f"distance {distance}); its numbers are those of the distribution it started from."
            )


def _shorten(warnings: list[str], subject: str) -> Iterator[str]:
    """Yield all warnings of one kind; of more than 12, the first five and a sentence ``N more SUBJECT.``."""
    if len(warnings) <= _MOST_WARNINGS:
        yield from warnings
    else:
        yield from warnings[:5]
        yield f"{len(warnings) - 5} more {subject}."


def _find_evaluation_warnings(results: Results, distances: MethodMeasurements) -> Iterator[str]:
    """Yield each warning in the evaluation records once, with the first of its evaluations and the number of others.

    Warnings of the reference are left out. The warning that a distance is not below a Gaussian's counts for the last
    snapshot of a run alone. It is left out if it is true of the mean of the run's method, in `distances`.
    """
    gaussian_limit = describe_gaussian_limit(results.reference)
    evaluations_by_message: dict[str, list[str]] = defaultdict(list)
    for run, snapshot in results.run_snapshots:
        concerns_single_run = snapshot is run.last_snapshot and run.method not in distances.methods_above_gaussian
        for message in snapshot.evaluation.get("warnings") or []:
            if message == gaussian_limit and not concerns_single_run:
                continue
            evaluations_by_message[message].append(f"{run.method} seed {run.seed} step {snapshot.step:,}")
    for message, evaluations in evaluations_by_message.items():
        if message in find_instrument_faults(results.reference):
            continue
        subject = evaluations[0]
        other_count = len(evaluations) - 1
        if other_count:
            subject = f"{subject} and {format_count(other_count, 'other evaluation')}"
        yield f"{subject}: {message}."


def _find_rises(method: str, curve: Curve) -> Iterator[str]:
    """Yield a warning for each rise of a method's primary metric between two neighbouring snapshots.

    A rise must exceed the sum of the two standard deviations. With an unknown standard deviation there is no warning.
    """
    for before, after in pairwise(range(len(curve.mean))):  # indices of neighbouring snapshots
        if curve.mean[after] - curve.mean[before] > curve.std[before] + curve.std[after]:
            start = f"{curve.steps[before]:,.0f} ({format_number(curve.mean[before])})"
            end = f"{curve.steps[after]:,.0f} ({format_number(curve.mean[after])})"
            yield f"{method} gets worse from step {start} to {end}, beyond the standard deviations."
