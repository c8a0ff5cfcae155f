"""Outcome of an experiment, in sentences computed from its numbers, and warnings about the numbers."""

from collections import defaultdict
from collections.abc import Iterator
from itertools import chain, pairwise

from kairos.evaluation.separation import ADVICE, cannot_rank
from kairos.report.collect import Results
from kairos.report.formatting import change, listed, number, plural, plus_minus, times
from kairos.report.ranking import LEVEL, SEEDS, Curve, Ratio, Row, curve, moved, stands_still


def verdict(results: Results, rows: list[Row]) -> list[str]:
    """The outcome, in a few sentences that claim no more than the tests find.

    The first sentence reports a distance that ranks methods although it cannot.
    """
    measure = "Fréchet distance" if results.primary_metric == results.metric else "validation loss"
    best = [row for row in rows if row.like_best]
    ends = {row.method: plus_minus(row.curve.mean[-1], row.curve.spread[-1]) for row in rows}
    named = [f"{end} ({method})" for method, end in ends.items()]
    if not best:
        sentences = [
            f"Not ranked: methods are ranked from {SEEDS} seeds on, and this experiment has {rows[0].seeds}.",
            f"Final values of the {measure}: from {named[0]} to {named[-1]}; another seed may reorder them.",
        ]
    elif len(best) == 1:
        sentences = [f"{best[0].method} ends with the lowest {measure}, {ends[best[0].method]}."]
    else:
        names = listed([row.method for row in best])
        sentences = [f"No test tells {names} apart or finds a method below them; the lowest mean is {named[0]}."]
    if results.missing:
        sentences.insert(0, f"So far, at step {rows[0].curve.steps[-1]:,.0f}, the last that all methods here have:")
    if results.primary_metric == results.metric and (reason := cannot_rank(results.reference)):
        sentences.insert(0, f"{reason} {ADVICE}")
    if results.baseline is None:
        return [*sentences, "No method samples uniformly without weights, so there is no baseline for factors."]
    found: dict[str, list[tuple[Row, Ratio]]] = {"Below": [], "Above": [], "Not told apart from": []}
    for row in rows:
        if row.judged and row.against:
            side = "Below" if row.against.value < 1 else "Above"
            found[side if row.against.p < LEVEL else "Not told apart from"].append((row, row.against))
    for words, members in found.items():
        listing = [f"{row.method} ({change(against)[0]})" for row, against in members]
        sentences += [f"{words} {results.baseline}: {listed(listing)}."] if listing else []
    sure = [row for row, _ in found["Below"] if row.steps and row.steps.low > 1]
    if sure:
        (steps, limits), (time, span) = times(sure[0].steps), times(sure[0].time)
        in_time = f"; in time the factor is {time} ({span})" if sure[0].time else ""
        needs = f"{sure[0].method} needs {steps} fewer steps for {results.baseline}'s final value"
        sentences.append(f"{needs} (95 % interval {limits}){in_time}.")
    return sentences


def warnings(results: Results) -> Iterator[str]:
    """Everything that limits what the numbers may be used for; nothing where nothing does."""
    for training in filter(stands_still, results.trainings):
        off = f"has not moved from its start (total variation distance {number(moved(training))})"
        told = f"its sampler learns but {off}; its numbers are those of the distribution it started from."
        yield f"{training.method} seed {training.seed}: {told}"
    reason = cannot_rank(results.reference)
    if reason and results.primary_metric != results.metric:
        yield reason
    gaussian = results.reference["rows"].get("gaussian", {}).get(results.primary_metric)
    for method in results.methods:
        yield from _of_distances(method, curve(results.measured, method), gaussian)
    places: dict[str, list[str]] = defaultdict(list)
    for training, milestone in results.evaluated:
        for message in milestone.evaluation.get("warnings") or []:
            places[message].append(f"{training.method} seed {training.seed} step {milestone.step:,}")
    for message, (first, *others) in places.items():
        more = f" and {plural(len(others), 'other evaluation')}" if others else ""
        yield f"{first}{more}: {message}."
    reasons = (training.record["provenance"].get("inexact_because") or [] for training in results.trainings)
    yield from (f"Not bit-exact: {reason}." for reason in dict.fromkeys(chain.from_iterable(reasons)))
    if len(results.experiment.seeds) == 1:
        yield "One seed: how much another would change the numbers is unknown, and no part of the spread."
    if not all(training.clock for training in results.trainings):
        yield "Some trainings have no timing.jsonl: their times and factors in time are missing."


def _of_distances(method: str, own: Curve, gaussian: float | None) -> Iterator[str]:
    if gaussian is not None and own.mean[-1] >= gaussian:
        yield f"{method} ends at {number(own.mean[-1])}, not below a Gaussian fitted to the data, {number(gaussian)}."
    for k, (before, after) in enumerate(pairwise(own.mean)):
        if after - before > own.spread[k] + own.spread[k + 1]:
            first, then = (f"{step:,.0f} ({number(its)})" for step, its in zip(own.steps[k:], (before, after)))
            yield f"{method} gets worse from step {first} to {then}, beyond the spread."
