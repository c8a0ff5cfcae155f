"""What came out, in sentences computed from the numbers, and what a reader has to be warned of."""

from collections import defaultdict
from itertools import chain, pairwise

from kairos.report.collect import Results
from kairos.report.ranking import LEVEL, SEEDS, Ratio, Row, curve, moved, stands_still
from kairos.report.text import change, listed, number, plural, plus_minus, times

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
    """The outcome, in a few sentences that claim no more than the tests find."""
    best = [row for row in rows if row.like_best]
    ends = [f"{plus_minus(row.mean, row.spread)} ({row.method})" for row in rows]
    if not best:
        sentences = [f"Not ranked: methods are ranked from {SEEDS} seeds on, and this experiment has {rows[0].seeds}."]
        sentences.append(f"Fréchet distances at the end: from {ends[0]} to {ends[-1]}; another seed may reorder them.")
    elif len(best) == 1:
        sentences = [
            f"{best[0].method} ends with the lowest Fréchet distance, {plus_minus(best[0].mean, best[0].spread)}."
        ]
    else:
        names = listed([row.method for row in best])
        sentences = [f"No test tells {names} apart or finds a method below them; the lowest mean is {ends[0]}."]
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
        text = (
            f"{sure[0].method} needs {steps} fewer steps for {results.baseline}'s final value (95 % interval {limits})"
        )
        sentences.append(text + (f"; in time the factor is {time} ({span})." if sure[0].time else "."))
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
        messages.append("One seed: how much another would change the numbers is unknown, and no part of the spread.")
    if any(training.timing.empty for training in results.trainings):
        messages.append("Some trainings have no timing.jsonl: their times and factors in time are missing.")
    return messages
