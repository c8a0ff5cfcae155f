"""Write the tables in Markdown and the figures for the page of the study."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

SHOWN = 4  # the axis ends at 4 times uniform's value, and at a fourth of it


def format_ratios(judged: pd.DataFrame) -> str:
    """Return a Markdown table per metric, with a row per method and a column per setting, the best method first.

    A cell contains the ratio to the baseline at equal time, its interval and the corrected p, see `_cell`. `judged` is
    the result of ``judge.table``.
    """
    tables = {}
    for metric, metric_rows in judged.groupby("metric", sort=False):
        rows_by_method_and_setting = {(row.method, row.setting): row for row in metric_rows.itertuples()}
        settings = sorted(metric_rows["setting"].unique())
        methods = mean_ratios(metric_rows).index
        cells = []
        for method in methods:
            cells.append([_cell(rows_by_method_and_setting.get((method, setting))) for setting in settings])
        tables[metric] = pd.DataFrame(cells, methods, settings)
    return _markdown(tables)


def format_rates(ratios: dict[str, pd.DataFrame]) -> str:
    """Return a Markdown table per metric, with a row per method and a column per setting.

    A cell contains the ratios to uniform at all learning rates of the setting, separated by commas. `ratios` is the
    result of ``judge.rates``.
    """
    tables = {}
    for metric, ratios_of_metric in ratios.items():
        tables[metric] = pd.DataFrame(index=ratios_of_metric.index)
        for setting in ratios_of_metric.columns.unique(0):
            ratios_of_setting = ratios_of_metric[setting]  # a column per factor of the learning rate
            factors = ", ".join(f"{factor:g}" for factor in ratios_of_setting.columns)
            texts = ratios_of_setting.map("{:.3f}".format)
            tables[metric][f"{setting} at {factors}"] = texts.agg(", ".join, axis=1)
    return _markdown(tables)


def format_times(times: dict[str, pd.DataFrame]) -> str:
    """Return a Markdown table per metric of times relative to the fastest method, with a column per setting.

    `times` are results of ``judge.relative_times_to_target`` by metric. Methods are ordered by the
    geometric mean of their ratios, the lowest first; missing settings are left out of the mean.
    """
    tables = {}
    for metric, times_of_metric in times.items():
        order = np.log(times_of_metric).mean(axis=1).sort_values(kind="stable").index
        tables[metric] = times_of_metric.loc[order].map(_format_ratio)
    return _markdown(tables)


def _format_ratio(ratio: float) -> str:
    """Return a ratio of times with two decimals, ``never`` for infinity, or ``unfinished`` for NaN."""
    if math.isnan(ratio):
        return "unfinished"
    return "never" if math.isinf(ratio) else f"{ratio:.2f}"


def profile_curve(ratios: "pd.Series[float]", largest: float) -> tuple[list[float], list[float]]:
    """Return the corners of a method's performance profile: multiples of the fastest time, and shares of settings.

    Each share counts the settings whose ratio is at most the multiple. The multiples are 1, the finite ratios in
    ascending order, and `largest`. `ratios` are times divided by the fastest method's, by setting.
    """
    finite_ratios = sorted(ratio for ratio in ratios if math.isfinite(ratio))
    reached = [number / len(ratios) for number in range(len(finite_ratios) + 1)]  # after each of the finite ratios
    return [1, *finite_ratios, largest], [*reached, reached[-1]]


def draw_profile(times: dict[str, pd.DataFrame], path: Path) -> None:
    """Write performance profiles, a panel per metric, to the file `path`.

    A curve is the share of settings in which a method reaches uniform's final value within a multiple of the fastest
    method's time. The curves end at the largest finite multiple, at least 1.1. Each is drawn a little below the one
    before, so that equal curves stay visible. Settings that lack a method are left out. `times` are results of
    ``relative_times_to_target`` by metric.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, NullLocator

    figure = Figure(figsize=(3.6 * len(times), 3.2), layout="constrained", dpi=150)
    panels = figure.subplots(1, len(times), sharey=True, squeeze=False)[0]
    for axes, (metric, times_of_metric) in zip(panels, times.items()):
        axes.set_title(metric)
        times_of_metric = times_of_metric.dropna(axis="columns")
        if times_of_metric.empty:  # no setting is finished
            continue
        values = times_of_metric.to_numpy()
        largest = max(values[np.isfinite(values)].max(initial=1), 1.1)
        for number, (method, ratios) in enumerate(times_of_metric.iterrows()):
            multiples, shares = profile_curve(ratios, largest)
            style = ("-", "--", ":")[number // 10 % 3]
            shifted = [share - 0.008 * number for share in shares]
            axes.step(multiples, shifted, where="post", label=method, color=f"C{number % 10}", ls=style, lw=1.2)
        axes.set(xscale="log", xlabel="time / time of the fastest method")
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter("{x:.3g}")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.tick_params(labelsize=7)
    panels[0].set_ylabel("share of settings (curves shifted by 0.008 each)", fontsize=7)
    figure.legend(*panels[0].get_legend_handles_labels(), fontsize=6, loc="outside center right", frameon=False)
    figure.savefig(path)


def mean_ratios(judged: pd.DataFrame) -> "pd.Series[float]":
    """Return the geometric mean over settings of each method's ratio to uniform, by method, the lowest first."""
    log_ratios = np.log(judged["ratio"])
    return np.exp(log_ratios.groupby(judged["method"]).mean()).sort_values()


def _markdown(tables: dict[Any, pd.DataFrame]) -> str:
    """Return tables of text in Markdown; the first column contains the index, with the table's name as header."""
    blocks = []
    for name, table in tables.items():
        lines = [f"| {name} | {' | '.join(table.columns)} |", "|---" * (len(table.columns) + 1) + "|"]
        lines += [f"| {' | '.join(row)} |" for row in table.itertuples()]  # the index is the first item of a row
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _cell(row: Any) -> str:
    """Return the text of a row of ``judge.table``: ratio, interval and corrected p, such as ``0.950 (0.910 to 0.990)``.

    A p of 1 is left out. Interval and p are left out with one seed, or if the method's runs are the baseline's. For the
    baseline, the text is its value. Without a row, a value or a ratio it is ``unfinished``.
    """
    if row is None or math.isnan(row.value):
        return "unfinished"
    if row.method == row.baseline:
        return f"{row.value:.3g}"
    if math.isnan(row.ratio):  # the baseline lacks a seed of the method
        return "unfinished"
    if math.isnan(row.low):  # one seed, or the runs of the method are the baseline's
        return f"{row.ratio:.3f}"
    p = f", p {row.p_holm:.2g}" if row.p_holm < 1 else ""
    return f"{row.ratio:.3f} ({row.low:.3f} to {row.high:.3f}{p})"


def draw(judged: pd.DataFrame, path: Path, metrics: Sequence[str], level: float) -> None:
    """Write a figure of ratios to the baseline, with intervals, to the file `path`: a panel per metric and setting.

    Methods are ordered by their ratio in the first metric, the lowest at the top; the baseline is left out. Dots are
    full if the corrected p is below `level`. `judged` is the result of ``judge.table``.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, NullLocator

    settings = sorted(judged["setting"].unique())
    first_ratios, baseline = mean_ratios(judged[judged["metric"] == metrics[0]]), judged["baseline"].iloc[0]
    methods = [name for name in first_ratios.index[::-1] if name != baseline]  # from the bottom to the top
    figure = Figure(figsize=(3.2 * len(settings), 0.6 + 2 * (0.7 + 0.22 * len(methods))), layout="constrained", dpi=150)
    panels = figure.subplots(len(metrics), len(settings), sharey=True, squeeze=False)
    for metric, panels_of_metric in zip(metrics, panels):
        for setting, axes in zip(settings, panels_of_metric):
            is_in_panel = (judged["metric"] == metric) & (judged["setting"] == setting)
            panel_rows = judged[is_in_panel].set_index("method")
            for height, method in enumerate(methods):
                if method in panel_rows.index and not math.isnan(panel_rows["ratio"][method]):
                    ratio, low, high, p = panel_rows.loc[method, ["ratio", "low", "high", "p_holm"]]
                    axes.plot([low, high], [height, height], color="C0", lw=1.5)
                    axes.plot(ratio, height, "o", color="C0", ms=5, mfc="C0" if p < level else "white")
            axes.axvline(1, color="0.5", lw=1)
            # the axis contains 1; an interval is unknown with one seed, and a setting may lack the metric
            shown = panel_rows[["ratio", "low", "high"]].clip(1 / SHOWN, SHOWN).to_numpy()
            left, right = np.nanmin(shown, initial=1), np.nanmax(shown, initial=1)
            axes.set(xscale="log", yticks=range(len(methods)), yticklabels=methods, title=f"{setting}: {metric}")
            axes.set_xlim(left**1.05 / 1.005, right**1.05 * 1.005)  # a margin on the logarithmic axis
            axes.xaxis.set_major_locator(MaxNLocator(5))
            axes.xaxis.set_major_formatter("{x:.4g}")
            axes.xaxis.set_minor_locator(NullLocator())
            axes.tick_params(labelsize=7)
    figure.supxlabel(f"ratio to {baseline} at equal time, 95 % interval; full: corrected p < {level}", fontsize=8)
    figure.savefig(path)
