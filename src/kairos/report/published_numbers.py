"""Published numbers beside ours: which of them compare, and how much faster methods are by both.

Two numbers compare where extractor, number of samples, sampling steps, real images and training steps are those that
the paper states; where one differs, both are shown and the reason is named. What a paper leaves open is no reason.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd

from kairos.config.published_results import PublishedConfig, PublishedRow
from kairos.report import formatting
from kairos.report.collect import Results
from kairos.report.ranking import Ratio, acceleration, curve, factor, highest

COLUMNS = ["table", "method", "step", "metric", "published", "measured", "comparable", "why"]


@dataclass(frozen=True)
class Beside:
    """A published number and ours, a mean over seeds in the paper's unit; NaN where there is none.

    Attributes:
        block, row: the published number and its table.
        measured, spread: ours, and its standard deviation over seeds.
        why: they do not compare; empty where they do.
    """

    block: PublishedConfig
    row: PublishedRow
    measured: float
    spread: float
    why: str


@dataclass(frozen=True)
class Acceleration:
    """Largest factor by which a method needs fewer steps than the baseline to reach a distance.

    Attributes:
        method, baseline: of the experiment.
        published: by the curves of the paper; None where it has none of both.
        measured: by ours, over seeds.
    """

    method: str
    baseline: str
    published: float | None
    measured: Ratio


def beside(results: Results) -> list[Beside]:
    """A row for every number that the experiment says is published."""
    return [_beside(results, block, row) for block in results.experiment.published for row in block.numbers()]


def csv(results: Results) -> str:
    """The content of published.csv; its columns are those that a script may rely on."""
    rows = []
    for one in beside(results):
        its, row, good = one.block, one.row, "false" if one.why else "true"
        rows.append((its.table, row.row, row.printed, its.metric, row.value, one.measured, good, one.why))
    return pd.DataFrame(rows, columns=COLUMNS).to_csv(index=False, lineterminator="\n")


def accelerations(results: Results) -> Iterator[Acceleration]:
    """SpeeD's acceleration of every other method over the baseline, or over the first where there is no baseline."""
    common, baseline = results.measured.common, results.baseline or results.methods[0]
    for method in results.methods:
        if method != baseline:
            found = acceleration(curve(common, method), curve(common, baseline))
            yield Acceleration(method, baseline, _published(results.experiment.published, method, baseline), found)


def claimed(results: Results) -> str:
    """Return a sentence that compares the measured factor with the paper's claim.

    Empty if there is no claim, or its method or baseline is missing.
    """
    claim = results.experiment.claim
    if claim is None or not {claim.method, claim.baseline} <= {*results.methods}:
        return ""
    common = results.measured.common
    own, base = curve(common, claim.method), curve(common, claim.baseline)
    found = factor(own, base, "steps" if claim.cost == "steps" else "clock")
    value, limits = formatting.times(found)
    if found is None or found.missed:
        said = limits or "in no seed"
    elif not found.low < found.high:
        said = "which decides nothing, being of one seed"
    else:
        judged = "confirmed" if found.low >= claim.factor else "refuted" if found.high < claim.factor else "left open"
        said = f"95 % interval {limits}: {judged} at this length and with these settings"
    less = f"{claim.factor:g} times {'less training time' if claim.cost == 'time' else 'fewer steps'}"
    reached = f"{claim.method} needs {less} for the final distance of {claim.baseline}"
    return f"Claimed: {reached}. Measured: {value}, {said}."


def _beside(results: Results, block: PublishedConfig, row: PublishedRow) -> Beside:
    if row.method is None:
        return Beside(block, row, np.nan, np.nan, block.missing[row.row])
    steps, column = results.experiment.milestones, results.metric if block.column == "fid" else block.column
    step = row.step if row.step in steps else steps[-1]
    found = results.table[(results.table["method"] == row.method) & (results.table["step"] == step)]
    values = results.measured.values(row.method, column)
    values = values[[each for each in values if each]]  # the untrained network is in no table
    own = (values.cummin(axis=1) if block.best_so_far else values).get(step, pd.Series(dtype=float)) / block.scale
    if found.empty or own.isna().all():
        missing = "not measured yet" if found.empty else f"{column} is not measured"
        return Beside(block, row, np.nan, np.nan, missing)
    protocol = found.iloc[0]
    both = {
        "extractor": (protocol["extractor"], block.extractor),
        "samples": (protocol["n_samples"], block.samples),
        "sampling steps": (protocol["steps"], block.sampling_steps),
        "reference": (results.reference["reference"], block.reference),
        "training steps": (step, row.step),
    }
    apart = {name: pair for name, pair in both.items() if pair[1] not in (None, pair[0])}
    why = [f"{name} {ours}, published {theirs}" for name, (ours, theirs) in apart.items()] + [block.differs or ""]
    return Beside(block, row, own.mean(), own.std(), "; ".join(filter(None, why)))


def _published(blocks: list[PublishedConfig], *methods: str) -> float | None:
    """The acceleration of the first method over the second by the first published table with curves of both."""
    for block in blocks:
        rows = {block.methods.get(row, row): values for row, values in block.rows.items()}
        if block.column == "fid" and len(block.steps) > 1 and {*methods} <= rows.keys():
            own, base = (np.array(rows[method], float) for method in methods)
            there = np.isfinite(own + base)
            steps = np.array(block.steps, float)[there]
            return highest(steps, base[there], steps, own[there])
    return None
