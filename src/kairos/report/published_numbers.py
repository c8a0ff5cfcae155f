"""Published numbers with measured ones: which pairs are comparable, and published and measured accelerations.

A pair is comparable if extractor, number of samples, sampling steps, guidance, real images and training steps equal
those in the paper. If one differs, both numbers are shown with the reason. Settings that a paper does not state are
ignored, except guidance: images of a network with conditions are not comparable if their guidance is unknown.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from kairos.config.published_results import ClaimConfig, PublishedConfig, PublishedNumber
from kairos.report import formatting
from kairos.report.collect import Results
from kairos.report.ranking import (
    Ratio,
    build_curve,
    compute_acceleration,
    compute_acceleration_by_chance,
    compute_cost_factor,
    crossing_cost,
    highest_cost_ratio,
)

# columns of published.csv
COLUMNS = ["table", "method", "step", "metric", "published", "measured", "comparable", "why"]


@dataclass(frozen=True)
class NumberComparison:
    """A published number and the measured one.

    Attributes:
        block: published table.
        row: published number.
        measured: measured number, mean over seeds in the paper's unit; NaN if there is none.
        std: standard deviation of the measured number over seeds, in the paper's unit; NaN with fewer than two seeds.
        obstacle: reason why the two numbers are not comparable; empty if they are.
    """

    block: PublishedConfig
    row: PublishedNumber
    measured: float
    std: float
    obstacle: str


@dataclass(frozen=True)
class Acceleration:
    """Largest factor by which a method needs fewer steps than the baseline to reach a distance.

    Attributes:
        method: name of the method.
        baseline: name of the baseline.
        published: factor by the curves in the paper; None if it does not contain both curves.
        measured: factor by the measured curves, over seeds; None if no seed has a common snapshot of both methods.
    """

    method: str
    baseline: str
    published: float | None
    measured: Ratio | None


def compare_published_numbers(results: Results) -> list[NumberComparison]:
    """Return a comparison with the measured number for every published one in the experiment file, in its order."""
    comparisons = []
    for block in results.experiment.published:
        comparisons += [_compare_number(results, block, row) for row in block.numbers()]
    return comparisons


def published_csv(results: Results) -> str:
    """Return the content of published.csv: a row per published number, with `COLUMNS`, which scripts may rely on.

    ``step`` is the training length as the paper prints it, ``comparable`` is true or false, and ``why`` is the obstacle
    of `NumberComparison`. Without a measured number, its cell is empty.
    """
    rows = []
    for comparison in compare_published_numbers(results):
        block, row = comparison.block, comparison.row
        values = {
            "table": block.table,
            "method": row.row,
            "step": row.printed,
            "metric": block.metric,
            "published": row.value,
            "measured": comparison.measured,
            "comparable": "false" if comparison.obstacle else "true",
            "why": comparison.obstacle,
        }
        rows.append(values)
    return pd.DataFrame(rows, columns=COLUMNS).to_csv(index=False, lineterminator="\n")


def compute_accelerations(results: Results) -> Iterator[Acceleration]:
    """Yield SpeeD's acceleration over the baseline, measured and published, for every other method.

    Measured accelerations are by the primary metric, which may be the validation loss, up to the last common snapshot.
    If the experiment has no baseline, the first method replaces it.
    """
    common = results.measurements.common_measurements
    baseline = results.baseline or results.methods[0]
    for method in results.methods:
        if method != baseline:
            measured = compute_acceleration(build_curve(common, method), build_curve(common, baseline))
            published = _published_acceleration(results.experiment.published, method, baseline)
            yield Acceleration(method, baseline, published, measured)


def compute_baseline_acceleration_by_chance(results: Results) -> Ratio | None:
    """Return the acceleration of the baseline over itself with other seeds, by the rule of `compute_accelerations`."""
    baseline = results.baseline or results.methods[0]
    return compute_acceleration_by_chance(build_curve(results.measurements.common_measurements, baseline))


def judge_claim(results: Results) -> str:
    """Return the paper's sentence with its claimed factor, the measured factor, and the factor by the paper's rows.

    The measured factor is the claim's quantity by the primary metric up to the last common snapshot, see
    `_judge_factor`. The highest ratio along two curves is above 1 even for equal methods. Its text has the ratio of the
    baseline against itself with other seeds, by the same rule. The text is empty if the experiment has no claim, or
    lacks results of the claim's method or baseline.
    """
    claim = results.experiment.claim
    if claim is None or not {claim.method, claim.baseline} <= {*results.methods}:
        return ""
    common = results.measurements.common_measurements
    curve, baseline_curve = build_curve(common, claim.method), build_curve(common, claim.baseline)
    by_chance = ""
    if claim.quantity == "highest_ratio":
        factor = compute_acceleration(curve, baseline_curve)
        value_by_chance, _ = formatting.format_factor(compute_acceleration_by_chance(baseline_curve))
        by_chance = f" {claim.baseline} against {claim.baseline} of other seeds, by this rule: {value_by_chance}."
    elif claim.cost == "time":
        factor = compute_cost_factor(curve, baseline_curve, "seconds_by_seed")
    else:
        factor = compute_cost_factor(curve, baseline_curve, "steps")
    value, _ = formatting.format_factor(factor)
    published = compute_published_factor(results.experiment.published, claim)
    by_rows = "have no curves of both methods" if published is None else f"give {published:.2f}"
    return (
        f"The paper: {claim.sentence}. Claimed: {describe_claim(claim)}. Measured: {value}, "
        f"{_judge_factor(factor, claim.factor)}.{by_chance} The published rows {by_rows}."
    )


def describe_claim(claim: ClaimConfig) -> str:
    """Return a claim with its factor, cost and quantity, as a sentence without a full stop."""
    if claim.quantity == "highest_ratio":
        distance = f"the distance at which the ratio to {claim.baseline} is highest"
    else:
        distance = f"the final distance of {claim.baseline}"
    if claim.factor == 1:
        return f"{claim.method} needs at most the {claim.cost} of {claim.baseline} for {distance}"
    unit = "training time" if claim.cost == "time" else "steps"
    return f"a speed-up in {unit} of {claim.factor:g} for {claim.method} until {distance}"


def compute_published_factor(blocks: list[PublishedConfig], claim: ClaimConfig) -> float | None:
    """Return the quantity of a claim by the published rows; None if no table has curves of both methods.

    For cost ``time``, published steps are multiplied by the published overhead. The factor is NaN if the method's row
    does not reach the final distance.
    """
    curves = _find_published_curves(blocks, claim.method, claim.baseline)
    if curves is None:
        return None
    steps, values, baseline_values = curves
    if claim.quantity == "highest_ratio":
        return highest_cost_ratio(steps, baseline_values, steps, values)
    target = baseline_values[-1]
    ratio = crossing_cost(steps, baseline_values, target) / crossing_cost(steps, values, target)
    return ratio / claim.overhead


def _judge_factor(factor: Ratio | None, claimed: float) -> str:
    """Describe the outcome of a claim by the interval of the measured cost factor over seeds.

    The outcome is ``confirmed`` if the interval begins at `claimed` or above, ``refuted`` if it ends below, else ``left
    open``. In three cases the text is a reason without an outcome:

    - without a factor, that the claim cannot be judged
    - if seeds do not reach the value, ``in 2 of 5 seeds``, for example; with one seed in all, ``in no seed``
    - with one seed, ``which one seed cannot confirm or refute``
    """
    _, interval_or_missed_seeds = formatting.format_factor(factor)
    if factor is None:
        return "which cannot be judged: results or training times are missing, or a run starts at the value"
    if factor.missed_seed_count:
        return interval_or_missed_seeds or "in no seed"  # empty with one seed
    if not factor.low < factor.high:  # one seed: both are NaN
        return "which one seed cannot confirm or refute"
    if factor.low >= claimed:
        outcome = "confirmed"
    elif factor.high < claimed:
        outcome = "refuted"
    else:
        outcome = "left open"
    return f"95 % interval {interval_or_missed_seeds}: {outcome} at this length and with these settings"


def _compare_number(results: Results, block: PublishedConfig, row: PublishedNumber) -> NumberComparison:
    """Compare a published number with the measured one at its step, or at the last milestone if there is no such step.

    Mean and standard deviation are in the paper's unit, over the seeds that have a value. If the published table
    reports the best values so far, a seed's value is its lowest one after step 0 up to the step. `obstacle` lists the
    settings that differ from the paper's, and `block.differs`.

    If no seed has a value, or no method reproduces the row of the table, both are NaN and `obstacle` is the reason.
    Step 0 is treated as not measured.
    """
    not_measured = NumberComparison(block, row, measured=np.nan, std=np.nan, obstacle="not measured yet")
    if row.method is None:
        return replace(not_measured, obstacle=block.missing[row.row])
    steps = results.experiment.milestones
    step = row.step if row.step in steps else steps[-1]
    snapshots = results.table[(results.table["method"] == row.method) & (results.table["step"] == step)]
    if snapshots.empty:
        return not_measured
    # the measured values of all seeds, in the paper's unit
    # "fid" stands for the experiment's Fréchet distance, whatever its features
    column = results.distance_metric if block.column == "fid" else block.column
    values = results.measurements.values_of(row.method, column)  # (seeds, steps)
    values = values.drop(columns=0, errors="ignore")  # papers have no untrained network
    if block.best_so_far:
        values = values.cummin(axis=1)
    is_measured = step in values.columns and values[step].notna().any()  # step 0 has no column
    if not is_measured:
        return replace(not_measured, obstacle=f"{column} is not measured")
    values_at_step = values[step] / block.scale
    protocol = snapshots.iloc[0]  # the first seed's protocol, which stands for all
    settings = {  # measured and published
        "extractor": (protocol["extractor"], block.extractor),
        "samples": (protocol["n_samples"], block.samples),
        "sampling steps": (protocol["steps"], block.sampling_steps),
        "reference": (results.reference["reference"], block.reference),
        "training steps": (step, row.step),
    }
    obstacles = _describe_unequal_settings(settings)
    if {"class", "text"} & {*results.experiment.conditions}:  # guidance needs a condition
        scale = protocol.get("guidance_scale", results.experiment.sampling.guidance_scale)
        if block.guidance is None:
            obstacles.append(f"guidance {scale:g}, published: not stated")
        obstacles += _describe_unequal_settings({"guidance": (scale, block.guidance)})
    if block.differs:
        obstacles.append(block.differs)
    return NumberComparison(
        block=block,
        row=row,
        measured=values_at_step.mean(),
        std=values_at_step.std(),
        obstacle="; ".join(obstacles),
    )


def _describe_unequal_settings(settings: dict[str, tuple[Any, Any]]) -> list[str]:
    """Return a text for each setting whose measured value, the first of a pair, differs from the published one.

    An example is ``samples 500, published 50000``. A published value of None, which the paper does not state, is
    ignored.
    """
    descriptions = []
    for name, (measured, published) in settings.items():
        if published is not None and published != measured:
            descriptions.append(f"{name} {measured}, published {published}")
    return descriptions


def _published_acceleration(blocks: list[PublishedConfig], method: str, baseline: str) -> float | None:
    """Return the acceleration, see `highest_cost_ratio`, by the published rows; None without curves of both methods."""
    curves = _find_published_curves(blocks, method, baseline)
    if curves is None:
        return None
    steps, values, baseline_values = curves
    return highest_cost_ratio(steps, baseline_values, steps, values)


def _find_published_curves(
    blocks: list[PublishedConfig], method: str, baseline: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Return steps, values of the method and values of the baseline, by the first published table with both curves.

    Curves are values of FID at several steps. Steps that lack a value of one of the two methods are left out. A table
    without any step left is skipped. The result is None without such a table.
    """
    for block in blocks:
        # a row that `methods` lacks has the name of its method
        values_by_method = {block.methods.get(row, row): values for row, values in block.rows.items()}
        has_curves = block.column == "fid" and len(block.steps) > 1
        if not has_curves or not {method, baseline} <= values_by_method.keys():
            continue
        values = np.array(values_by_method[method], float)  # a published null becomes NaN
        baseline_values = np.array(values_by_method[baseline], float)
        is_known = np.isfinite(values) & np.isfinite(baseline_values)
        if is_known.any():
            return np.array(block.steps, float)[is_known], values[is_known], baseline_values[is_known]
    return None
