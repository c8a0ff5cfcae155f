"""Write the tables in Markdown and the figure for the page of the study."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

SHOWN = 4  # the axis ends at 4 times uniform's value, and at a fourth of it


def of_ratios(judged: pd.DataFrame) -> str:
    """Return a table per metric: ratio to uniform at equal time, interval and corrected p; the best method first."""
    tables = {}
    for metric, of_metric in judged.groupby("metric", sort=False):
        cells = {(row.method, row.setting): row for row in of_metric.itertuples()}
        settings, methods = sorted(of_metric["setting"].unique()), mean_ratios(of_metric).index
        tables[metric] = pd.DataFrame(
            [[_cell(cells.get((method, setting))) for setting in settings] for method in methods], methods, settings
        )
    return _markdown(tables)


def of_rates(ratios: dict[str, pd.DataFrame]) -> str:
    """Return a table per metric: a row per method, a column per setting with its value at each rate."""
    tables = {}
    for metric, of_metric in ratios.items():
        tables[metric] = pd.DataFrame(index=of_metric.index)
        for setting in of_metric.columns.unique(0):
            of_setting = of_metric[setting]
            column = f"{setting} at {', '.join(f'{factor:g}' for factor in of_setting.columns)}"
            tables[metric][column] = of_setting.map("{:.3f}".format).agg(", ".join, axis=1)
    return _markdown(tables)


def mean_ratios(judged: pd.DataFrame) -> "pd.Series[float]":
    """Return the geometric mean over settings of each method's ratio to uniform, the lowest first."""
    return np.exp(np.log(judged["ratio"]).groupby(judged["method"]).mean()).sort_values()


def _markdown(tables: dict[Any, pd.DataFrame]) -> str:
    parts = []
    for name, table in tables.items():
        head = [f"| {name} | {' | '.join(table.columns)} |", "|---" * (len(table.columns) + 1) + "|"]
        parts.append("\n".join([*head, *(f"| {' | '.join(row)} |" for row in table.itertuples())]))
    return "\n\n".join(parts)


def _cell(row: Any) -> str:
    if row is None or math.isnan(row.value):
        return "not so far"
    if row.method == "uniform":
        return f"{row.value:.3g}"
    p = f", p {row.p_holm:.2g}" if row.p_holm < 1 else ""
    return f"{row.ratio:.3f} ({row.low:.3f} to {row.high:.3f}{p})"


def draw(judged: pd.DataFrame, path: Path, metrics: Sequence[str], level: float) -> None:
    """Draw ratios with intervals, a panel per metric and setting; dots are full if the corrected p is below `level`."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, NullLocator

    settings = sorted(judged["setting"].unique())
    methods = [name for name in mean_ratios(judged[judged["metric"] == metrics[0]]).index[::-1] if name != "uniform"]
    figure = Figure(figsize=(3.2 * len(settings), 0.6 + 2 * (0.7 + 0.22 * len(methods))), layout="constrained", dpi=150)
    panels = figure.subplots(len(metrics), len(settings), sharey=True, squeeze=False)
    for metric, of_metric in zip(metrics, panels):
        for setting, axes in zip(settings, of_metric):
            of_setting = judged[(judged["metric"] == metric) & (judged["setting"] == setting)].set_index("method")
            for height, method in enumerate(methods):
                if method in of_setting.index and not math.isnan(of_setting["ratio"][method]):
                    ratio, low, high, p = of_setting.loc[method, ["ratio", "low", "high", "p_holm"]]
                    axes.plot([low, high], [height, height], color="C0", lw=1.5)
                    axes.plot(ratio, height, "o", color="C0", ms=5, mfc="C0" if p < level else "white")
            axes.axvline(1, color="0.5", lw=1)
            ends = of_setting["low"].clip(1 / SHOWN, 1).min(), of_setting["high"].clip(1, SHOWN).max()
            axes.set(xscale="log", yticks=range(len(methods)), yticklabels=methods, title=f"{setting}: {metric}")
            axes.set_xlim(ends[0] ** 1.05 / 1.005, ends[1] ** 1.05 * 1.005)
            axes.xaxis.set_major_locator(MaxNLocator(5))
            axes.xaxis.set_major_formatter("{x:.4g}")
            axes.xaxis.set_minor_locator(NullLocator())
            axes.tick_params(labelsize=7)
    figure.supxlabel(f"ratio to uniform at equal time, 95 % interval; full: corrected p < {level}", fontsize=8)
    figure.savefig(path)
