"""What came out, in sentences computed from the numbers, and what a reader has to be warned of."""

import math
from collections import defaultdict
from itertools import chain, pairwise

from kairos.report.collect import Results
from kairos.report.ranking import Row, curve, lower, moved, stands_still
from kairos.report.text import listed, number, plural, plus_minus

_SPACES = {
    "none": "in pixels",
    "train": "in the latents of an autoencoder trained for it",
    "pretrained": "in the latents of a pretrained autoencoder",
}


def setting(results: Results) -> str:
    """What was compared, in one sentence."""
    experiment, dataset = results.experiment, results.dataset
    source = experiment.dataset.path or experiment.dataset.source
    size = f"{dataset['height']}×{dataset['width']}"
    return (
        f"{plural(len(results.methods), 'timestep strategy', 'timestep strategies')} on {source} "
        f"({dataset['train_count']:,} training images, {size}), {_SPACES[results.autoencoder['kind']]}: "
        f"{plural(experiment.milestones[-1], 'step')} of {experiment.training.batch_size} images, "
        f"{plural(len(experiment.seeds), 'seed')} each."
    )


def verdict(results: Results, rows: list[Row]) -> list[str]:
    """The outcome, in a few sentences that claim no more than the spread allows."""
    baseline = next((row for row in rows if row.method == results.baseline), None)
    alike = [row for row in rows if row.like_best]
    low = f"{plus_minus(rows[0].mean, rows[0].spread)}"
    if not all(row.judged for row in rows):
        return [f"{rows[0].method} ends with the lowest number, {low}, but the spread is unknown: nothing is ranked."]
    if len(alike) == 1:
        first = f"{rows[0].method} ends with the lowest Fréchet distance, {low}"
        if baseline is not None and baseline is not rows[0]:
            first += f"; {baseline.method} ends at {plus_minus(baseline.mean, baseline.spread)}"
        sentences = [first + "."]
    else:
        names = listed([row.method for row in alike])
        sentences = [f"{names} end within the spread of the lowest Fréchet distance, {low}, and are not ranked."]
    if baseline is None:
        return [*sentences, "No method samples uniformly without weights, so there is no baseline for factors."]
    curves = {row.method: curve(results, row.method) for row in rows}
    better = [method for method, own in curves.items() if lower(own, curves[baseline.method])]
    worse = [method for method, own in curves.items() if lower(curves[baseline.method], own)]
    alike_baseline = [row.method for row in rows if row is not baseline and row.method not in (*better, *worse)]
    for words, methods in (
        (f"Below {baseline.method} by more than the spread", better),
        (f"Above {baseline.method} by more than the spread", worse),
        (f"Not distinguishable from {baseline.method}", alike_baseline),
    ):
        sentences += [f"{words}: {listed(methods)}."] if methods else []
    sure = [row for row in rows if row.method in better and row.steps and row.steps.value and row.steps.hard]
    if sure:
        fastest = max(sure, key=lambda row: row.steps.value)  # type: ignore[union-attr, arg-type, return-value]
        assert fastest.steps is not None and fastest.steps.value is not None
        text = f"{fastest.method} reaches {baseline.method}'s final value in {fastest.steps.value:.2f}× fewer steps"
        if fastest.time is not None and fastest.time.value is not None:
            text += f" ({fastest.time.value:.2f}× less time)"
        sentences.append(text + ".")
    return sentences


def warnings(results: Results) -> list[str]:
    """Everything that limits what the numbers may be used for; empty where nothing does."""
    found = (_of_samplers, _of_distances, _of_evaluations, _of_exactness, _of_extent)
    return [message for part in found for message in part(results)]


def _of_samplers(results: Results) -> list[str]:
    return [
        f"{training.method} seed {training.seed}: its sampler learns but has not moved from its start (total variation "
        f"distance {number(moved(training))}); its numbers are those of the distribution it started from."
        for training in results.trainings
        if stands_still(training)
    ]


def _of_distances(results: Results) -> list[str]:
    messages = []
    unknown = [method for method in results.methods if math.isnan(curve(results, method).spread[-1])]
    if unknown:
        messages.append(
            f"The spread of the final distance of {listed(unknown)} is unknown, so nothing can be ranked by it: "
            "two sets of samples (evaluation.sets) or two seeds give one."
        )
    gaussian = results.reference["rows"].get("gaussian", {}).get(results.metric)
    for method in results.methods:
        own = curve(results, method)
        if gaussian is not None and own.mean[-1] >= gaussian:
            messages.append(
                f"{method} ends at {number(own.mean[-1])}, not below a Gaussian fitted to the data, {number(gaussian)}."
            )
        for k, (before, after) in enumerate(pairwise(own.mean)):
            if after - before > own.spread[k] + own.spread[k + 1]:
                messages.append(
                    f"{method} gets worse from step {own.steps[k]:,.0f} ({number(before)}) to "
                    f"{own.steps[k + 1]:,.0f} ({number(after)}), beyond the spread."
                )
    return messages


def _of_evaluations(results: Results) -> list[str]:
    places: dict[str, list[str]] = defaultdict(list)
    for training in results.trainings:
        for milestone in training.milestones:
            for message in milestone.evaluation.get("warnings") or []:
                places[message].append(f"{training.method} seed {training.seed} step {milestone.step:,}")
    messages = []
    for message, (first, *others) in places.items():
        more = f" and {plural(len(others), 'other evaluation')}" if others else ""
        messages.append(f"{first}{more}: {message}.")
    return messages


def _of_exactness(results: Results) -> list[str]:
    reasons = (training.record["provenance"].get("inexact_because") or [] for training in results.trainings)
    return [f"Not bit-exact: {reason}." for reason in dict.fromkeys(chain.from_iterable(reasons))]


def _of_extent(results: Results) -> list[str]:
    messages = []
    if len(results.experiment.seeds) == 1:
        messages.append("One seed: how much another seed would change the numbers is not part of the spread.")
    if any(training.timing.empty for training in results.trainings):
        messages.append("Some trainings have no timing.jsonl: their times and factors in time are missing.")
    return messages
