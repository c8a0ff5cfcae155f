"""Comparison of methods from several experiments in one table, and an index page of all reports.

All methods are compared at the last snapshot that all have, over the seeds that all have there. Tests and cost factors
are computed as in the report. A difference is in units of the metric: (ratio − 1) times the baseline's value, where the
ratio to the baseline is a geometric mean over seeds. The ends of the ratio's interval are converted in the same way.
The p-value tests the ratio.
"""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pandas as pd

from kairos import progress
from kairos.report import findings, formatting
from kairos.report.collect import MethodMeasurements, Results, select_methods
from kairos.report.equal_time import compare_at_equal_time, describe_clock, why_times_are_not_compared
from kairos.report.ranking import (
    MIN_SEEDS,
    MethodComparison,
    Ratio,
    compare_methods,
    find_slower_methods_that_end_better,
)
from kairos_timesteps.errors import KairosError, demand

COLUMNS = (
    "experiment", "method", "seeds", "step", "metric", "value", "spread", "baseline", "difference", "low", "high",
    "p_value", "speedup_steps", "speedup_seconds",
)  # fmt: skip
EQUAL_TIME_COLUMNS = (
    "experiment", "method", "seeds", "seconds", "machine", "step", "metric", "value", "spread", "baseline",
    "difference", "low", "high", "p_value",
)  # fmt: skip
# columns that a terminal shows once, above the table, if all their cells are equal
_COLUMNS_ABOVE_TABLE = ("experiment", "seeds", "step", "seconds", "machine", "metric", "baseline")
# fields of a protocol that need not be equal: the identity of one run; and the accuracy of the extractor, whose hash is
# compared
_IGNORED_PROTOCOL_FIELDS = ("identity", "accuracy")
_LINKS = {  # label on the index page: file in a results folder
    "report": "report.html",
    "unfinished report": "report_unfinished.html",
    "summary.csv": "summary.csv",
    "picture": "figures/metric_vs_steps.svg",
}
_UNKNOWN = Ratio(value=math.nan, low=math.nan, high=math.nan)
_BASELINE_TO_ITSELF = Ratio(value=1.0, low=math.nan, high=math.nan)
Selection = Sequence[tuple[Results, list[str]]]  # experiments, each with its selected methods


def join_experiments(
    selection: Selection, baseline: str | None = None, metric: str | None = None
) -> MethodMeasurements:
    """Join the measured values of the selected methods of several experiments, as `MethodMeasurements`.

    Methods are renamed to ``experiment/method``, except if the selection has one experiment.

    Args:
        selection: experiments, each with its selected methods.
        baseline: name of the baseline, or the method's name alone. By default it is the first experiment's uniform
            method, or else its first selected method.
        metric: column that methods are compared by; None: the one that each experiment ranks its methods by.

    Returns:
        The measurements. Column ``experiment`` of their table is the name of each experiment, or its results folder if
        names are equal. Methods have the order of the selection. Seeds are those that any experiment has, ascending.
        `missing` is empty, even for unfinished experiments: a mean over seeds is NaN where the value of a seed is
        missing.

    Raises:
        KairosError: the protocols of the numbers differ; the message reports the fields. A field that one experiment
            lacks differs, too.
        ConfigError: the baseline is not among the methods, or not all methods have the metric.
    """
    # join the tables, with everything that must be equal as columns
    tables = list[pd.DataFrame]()
    names = list[str]()
    for (results, methods), label in zip(selection, _experiment_labels(selection)):
        if len(selection) > 1:
            new_names = {method: f"{label}/{method}" for method in methods}
        else:
            new_names = {method: method for method in methods}
        rows = results.table[results.table["method"].isin(methods)]
        compared_column = metric or results.primary_metric
        rows = rows.assign(metric=compared_column, **_loss_settings(results, compared_column))
        rows = rows.assign(experiment=label, method=rows["method"].map(new_names))
        tables.append(rows)
        names += new_names.values()
    table = pd.concat(tables)
    # check that the numbers can be compared: every experiment measures the metric, and protocols are equal
    first_results, _ = selection[0]
    if metric is not None:
        measured_columns = _columns_measured_everywhere(selection)
        demand(metric in measured_columns, "--metric", metric, ", ".join(measured_columns))
    column = metric or first_results.primary_metric
    protocols = [results.runs[0].last_snapshot.evaluation["protocol"] for results, _ in selection]
    protocol_fields = [name for name in dict.fromkeys(chain(*protocols)) if name not in _IGNORED_PROTOCOL_FIELDS]
    differences = _find_differences(table, ["metric", *_loss_settings(first_results, column), *protocol_fields])
    if differences:
        raise KairosError(f"not compared: the protocols of the numbers differ in {'; '.join(differences)}")
    measurements = [results.measurements_of(column) for results, _ in selection]
    faults = chain.from_iterable(each.instrument_faults for each in measurements)
    return MethodMeasurements(
        table=table,
        methods=names,
        seeds=sorted({*table["seed"]}),
        metric=column,
        baseline=_choose_baseline(names, baseline, selection),
        instrument_faults=tuple(dict.fromkeys(faults)),  # each fault once
        gaussian=measurements[0].gaussian,  # of one reference, or none: the protocols are equal
    )


def _choose_baseline(names: list[str], requested: str | None, selection: Selection) -> str:
    """Return the first name that matches the requested method; without a request, a method of the first experiment.

    A name matches as a whole or by its method alone, as in ``experiment/method``. Without a request, the result is the
    name of the first experiment's baseline if that method is selected, else the first name. `names` has the order of
    the selection.

    Raises:
        ConfigError: the requested method matches no name.
    """
    if requested:
        matches = [name for name in names if requested in (name, _method_name(name))]
        demand(matches, "--baseline", requested, ", ".join(names))
        return matches[0]
    first_results, first_methods = selection[0]
    if first_results.baseline in first_methods:
        return names[first_methods.index(first_results.baseline)]
    return names[0]


def _method_name(name: str) -> str:
    """Return the method in a name such as ``experiment/method`` or ``method``."""
    return name.rpartition("/")[2]


def _find_differences(table: pd.DataFrame, columns: list[str]) -> list[str]:
    """Describe each of the columns whose value is not equal in all rows, such as ``n_samples (500 in a, 1000 in b)``.

    Each value is shown with the experiment that has it first. Values are compared as texts, and shown with at most 12
    characters. The list is empty if all values are equal.
    """
    differences = []
    for column in columns:
        texts = table.assign(value=table[column].astype(str))
        rows = texts.drop_duplicates("value")  # the first row with each value
        if len(rows) > 1:
            values = [f"{value[:12]} in {label}" for value, label in zip(rows["value"], rows["experiment"])]
            differences.append(f"{column} ({', '.join(values)})")
    return differences


def _columns_measured_everywhere(selection: Selection) -> list[str]:
    """Return the names of the measured numbers that every evaluated snapshot of the selected methods has.

    Standard deviations over sample sets (``_spread``) and lists are left out. The order is the first snapshot's. The
    list is empty if no snapshot is evaluated.
    """
    common_columns: list[str] | None = None  # None before the first snapshot
    for results, methods in selection:
        for run, snapshot in results.run_snapshots:
            if run.method not in methods:
                continue
            columns = []
            for name, value in snapshot.measured_values.items():
                if isinstance(value, (int, float)) and not name.endswith("_spread"):
                    columns.append(name)
            if common_columns is None:
                common_columns = columns
            else:
                common_columns = [name for name in common_columns if name in columns]
    return common_columns or []


def _loss_settings(results: Results, column: str) -> dict[str, str]:
    """Return the settings that must be equal to compare losses of held-out images, as texts by dotted name.

    They are hashes of data and autoencoder, the process, and the numbers of strata and images. The prediction is in the
    column's name. The dictionary is empty if `column` is not such a loss. A hash that a record lacks is the text
    ``None``, which equals only another missing hash.
    """
    if column not in results.measurements.validation_columns:
        return {}
    experiment = results.experiment
    return {
        "data": str(results.dataset.get("content_sha256")),
        "autoencoder": str(results.autoencoder.get("sha256")),
        "diffusion.process": str(experiment.diffusion.process),
        "evaluation.strata": str(experiment.evaluation.strata),
        "evaluation.loss_images": str(experiment.evaluation.loss_images),
    }


def build_comparison_table(
    measurements: MethodMeasurements, comparisons: list[MethodComparison] | None = None
) -> pd.DataFrame:
    """Build a table with `COLUMNS` and a row per method, the best value first; unknown values are NaN.

    The values are means over seeds at the last common snapshot. If the measurements have no baseline, the first method
    is used. Differences are in units of the metric: the baseline's value times (ratio to it − 1). The baseline's
    difference to itself is 0, without an interval. Column ``spread`` is the larger of the standard deviations over
    sample sets and over seeds.

    Args:
        measurements: measured values of the methods.
        comparisons: result of `compare_methods` for measurements with a baseline; None: it is computed.

    Raises:
        KairosError: no snapshot, or no seed at the last common snapshot, is evaluated for all methods; or the metric
            is not positive for any seed.
    """
    baseline = measurements.methods[0] if measurements.baseline is None else measurements.baseline
    if comparisons is None:
        comparisons = compare_methods(replace(measurements, baseline=baseline))
    if not comparisons[0].seed_count:
        raise _no_seeds_error(measurements)
    final_values = {comparison.method: comparison.curve.mean[-1] for comparison in comparisons}
    baseline_value = final_values[baseline]
    experiments = dict(zip(measurements.table["method"], measurements.table["experiment"]))
    rows = []
    for comparison in comparisons:
        row = {
            "experiment": experiments[comparison.method],
            "method": _method_name(comparison.method),
            "seeds": comparison.seed_count,
            "step": int(comparison.curve.steps[-1]),
            "metric": measurements.metric,
            "value": final_values[comparison.method],
            "spread": comparison.curve.std[-1],
            **_compare_with_baseline(comparison.method, comparison.ratio_to_baseline, baseline, baseline_value),
            "speedup_steps": (comparison.step_factor or _UNKNOWN).value,
            "speedup_seconds": (comparison.time_factor or _UNKNOWN).value,
        }
        rows.append(row)
    return pd.DataFrame(rows, columns=COLUMNS)


def build_equal_time_table(measurements: MethodMeasurements) -> pd.DataFrame:
    """Build a table with `EQUAL_TIME_COLUMNS` and a row per method, the best value first, see `compare_at_equal_time`.

    Values are after the training time in column ``seconds``; column ``step`` has the steps computed by then, mean over
    seeds, and ``spread`` the standard deviation over seeds. The caller ensures that there is a baseline.

    Raises:
        KairosError: training times cannot be compared, or there is no common snapshot, or no seed for ratios.
    """
    comparison = compare_at_equal_time(measurements)
    if comparison is None:
        raise KairosError(f"--at-equal seconds: {why_times_are_not_compared(measurements)} Compare by --at-equal steps")
    if not comparison.seed_count:
        raise _no_seeds_error(measurements)
    baseline = str(measurements.baseline)
    baseline_value = next(value.mean for value in comparison.methods if value.method == baseline)
    experiments = dict(zip(measurements.table["method"], measurements.table["experiment"]))
    rows = []
    for value in comparison.methods:
        row = {
            "experiment": experiments[value.method],
            "method": _method_name(value.method),
            "seeds": comparison.seed_count,
            "seconds": comparison.seconds,
            "machine": next(iter(measurements.methods_by_machine)),
            "step": value.steps,
            "metric": measurements.metric,
            "value": value.mean,
            "spread": value.std,
            **_compare_with_baseline(value.method, value.ratio_to_baseline, baseline, baseline_value),
        }
        rows.append(row)
    return pd.DataFrame(rows, columns=EQUAL_TIME_COLUMNS)


def _compare_with_baseline(method: str, ratio: Ratio | None, baseline: str, baseline_value: float) -> dict[str, object]:
    """Return the columns ``baseline``, ``difference``, ``low``, ``high`` and ``p_value`` of a method's row."""
    known_ratio = _BASELINE_TO_ITSELF if method == baseline else ratio or _UNKNOWN
    return {
        "baseline": baseline,
        "difference": baseline_value * (known_ratio.value - 1),
        "low": baseline_value * (known_ratio.low - 1),
        "high": baseline_value * (known_ratio.high - 1),
        "p_value": known_ratio.p_value,
    }


def _no_seeds_error(measurements: MethodMeasurements) -> KairosError:
    """Return the error for methods that have no common seed for ratios; its message contains the reason.

    The reason is that values are 0 or negative, or that no seed is evaluated for all methods.
    """
    names = ", ".join(measurements.methods)
    if _seeds_without_ratios(measurements):
        return KairosError(
            f"{names}: {measurements.metric} of a method is 0 or negative for every seed; differences are computed "
            "from ratios of positive values"
        )
    return KairosError(f"{names}: no seed is evaluated for all of them at their last common snapshot")


def _seeds_without_ratios(measurements: MethodMeasurements) -> list[int]:
    """Return the common seeds for which the metric of any method is 0 or negative at the last common snapshot.

    Missing values are ignored.
    """
    common = measurements.common_measurements
    final_values = [common.values_of(method, common.metric).iloc[:, -1] for method in common.methods]
    return [seed for seed in common.seeds if any(values[seed] <= 0 for values in final_values)]


def format_comparison(table: pd.DataFrame, warnings: dict[str, list[str]], form: str) -> str:
    """Format a comparison table and the warnings of its experiments, by their labels, in a form of `format_table`.

    Markdown and text begin with a line per warning. The other forms have a column ``warnings``, which contains all
    warnings of the row's experiment as one text.
    """
    if form in ("csv", "json"):
        texts = {label: " ".join(sentences) for label, sentences in warnings.items()}
        return format_table(table.assign(warnings=table["experiment"].map(texts)), form)
    marker = "> **Warning:** " if form == "md" else "warning: "
    paragraphs = [f"{marker}{line}\n\n" for line in label_warnings(warnings)]
    return "".join(paragraphs) + format_table(table, form)


def label_warnings(warnings: dict[str, list[str]]) -> list[str]:
    """Return each warning as a line that begins with the label of its experiment."""
    return [f"{label}: {sentence}" for label, sentences in warnings.items() for sentence in sentences]


def format_table(table: pd.DataFrame, form: str) -> str:
    """Format a comparison table as ``csv``, ``json``, ``md`` or, for any other `form`, as text for a terminal.

    csv and json contain all digits of the numbers; in the other forms floats have four significant digits. The text
    ends with a newline.
    """
    if form == "csv":
        return table.to_csv(index=False, lineterminator="\n")
    if form == "json":
        return table.to_json(orient="records", indent=1, double_precision=15) + "\n"
    cells = table.map(_format_cell)
    if form == "md":
        rows = [cells.columns, ["---"] * cells.shape[1], *cells.to_numpy(str)]
        return "".join(f"| {' | '.join(row)} |\n" for row in rows)
    return _format_for_terminal(cells)


def _format_for_terminal(cells: pd.DataFrame) -> str:
    """Return a line with the equal columns of `_COLUMNS_ABOVE_TABLE`, and below it the other columns, aligned.

    The first line is empty if no such column has equal cells. The caller ensures that the index is 0, 1, 2 ... and no
    cell is missing. Cells are texts.
    """
    equal_columns = [name for name in _COLUMNS_ABOVE_TABLE if name in cells and cells[name].nunique() == 1]
    shared_line = ", ".join(f"{name} {cells[name][0]}" for name in equal_columns)
    other_cells = cells.drop(columns=equal_columns)
    left_columns = [index for index, name in enumerate(other_cells.columns) if name in ("experiment", "method")]
    rows = [list(other_cells.columns), *other_cells.to_numpy(str)]
    return f"{shared_line}\n\n{progress.table(rows, left=left_columns)}\n"


def render_index(entries: dict[Path, tuple[Results, list[MethodComparison]] | str], out: Path) -> str:
    """Return the HTML of an index page, which shows the comparison of each results folder and links to its reports.

    The page is not written. It links only files that exist, and contains the warnings of each experiment.

    Args:
        entries: results and comparisons of each results folder, or the reason, as a text, why there are none.
        out: path of the page; links are relative to its folder.
    """
    experiments = []
    for folder, entry in entries.items():
        links = {}
        for label, file in _LINKS.items():
            if (folder / file).exists():
                links[label] = os.path.relpath(folder / file, out.parent)
        picture = links.pop("picture", None)  # the page shows it instead of a link
        leading, other = [], []  # warnings above the table, and below it
        if not isinstance(entry, str):
            results, _ = entry
            leading, other = findings.leading_warnings(results.measurements), list(findings.find_warnings(results))
        experiments.append((folder.name, entry, picture, links, leading, other))
    template = formatting.load_template(Path(__file__).with_suffix(".html.jinja"))
    return template.render(formatting=formatting, experiments=experiments)


def list_comparison_warnings(selection: Selection, metric: str | None = None) -> dict[str, list[str]]:
    """Return the warnings of the selected methods by the label of their experiment, see `findings.list_warnings`.

    Methods are compared by `metric`; with None, by the primary metric of each experiment.
    """
    warnings = {}
    for (results, methods), label in zip(selection, _experiment_labels(selection)):
        warnings[label] = findings.list_warnings(select_methods(results, methods), metric)
    return warnings


def comparison_notes(
    selection: Selection, measurements: MethodMeasurements, comparisons: list[MethodComparison]
) -> Iterator[str]:
    """Yield the notes below a comparison table, for the joined measurements of a selection (`join_experiments`).

    They report unfinished results (the first three runs of an experiment, and the number of runs), outdated results
    and the notes of `Results.notes`. Methods that end better than the baseline with a speed-up below 1 are explained.
    Further notes report the machine of the training times, too few seeds for a ranking, and seeds that are left out of
    all numbers or of the differences.

    Args:
        selection: experiments, each with its selected methods.
        measurements: joined measurements of the selection.
        comparisons: comparison of the methods with the baseline of the measurements, see `compare_methods`.
    """
    # missing and outdated results, and results that differ in code or rounding
    for (results, _), label in zip(selection, _experiment_labels(selection)):
        if results.missing:
            # without the reason, which follows the semicolon: "uniform seed 1: evaluated up to step 200; ..."
            run_progress = [line.partition(";")[0] for line in results.missing[:3]]
            run_count = formatting.format_count(len(results.missing), "training run")
            yield f"{label} is unfinished, {run_count}: {', '.join(run_progress)}"
        for changes in results.outdated:
            yield f"{label}: results of other settings are left out: {changes}"
        for note in results.notes:
            yield f"{label}: {note}"
    if measurements.baseline is not None:
        higher_is_better = measurements.higher_is_better
        yield from find_slower_methods_that_end_better(comparisons, measurements.baseline, higher_is_better)
    runs = [run for results, methods in selection for run in results.runs if run.method in methods]
    yield describe_clock(measurements, runs)
    # seeds
    seed_count = comparisons[0].seed_count
    if seed_count < MIN_SEEDS:
        have = formatting.format_count(seed_count, "seed")
        yield f"not ranked: methods are ranked from {MIN_SEEDS} seeds on, and these have {have}"
    common_seeds = measurements.common_measurements.seeds
    omitted_seeds = [str(seed) for seed in measurements.seeds if seed not in common_seeds]
    if omitted_seeds:
        seeds = formatting.join_names(omitted_seeds)
        yield f"left out, since not all methods have them at the last common snapshot: seeds {seeds}"
    seeds_without_ratios = [str(seed) for seed in _seeds_without_ratios(measurements)]
    if seeds_without_ratios:
        seeds = formatting.join_names(seeds_without_ratios)
        reason = f"{measurements.metric} of a method is 0 or negative"
        yield f"left out of differences and tests, since {reason}: seeds {seeds}"


def _experiment_labels(selection: Selection) -> list[str]:
    """Return a label per experiment: its name, or, if any two experiments have one name, its results folder."""
    names = [results.experiment.experiment for results, _ in selection]
    if len(set(names)) < len(names):
        return [str(results.folder) for results, _ in selection]
    return names


def _format_cell(value: object) -> str:
    """Format a cell of the table; a float has four significant digits, and NaN or infinity becomes an empty text.

    Integers and floats have separated thousands, such as ``12,000``. Other values are converted by `str`.
    """
    if isinstance(value, float):
        return formatting.format_number(value, 4) if math.isfinite(value) else ""
    return f"{value:,}" if isinstance(value, int) else str(value)
