"""Figures of a sweep: final distance against each option of a `grid`; names of methods contain the option's value."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from kairos.config.sweeps import parse_sweep_name
from kairos.report.collect import Results
from kairos.report.plot_style import MUTED, Label, Look, figure, label_lines, plain_log
from kairos.report.ranking import curve


def swept(methods: Sequence[str]) -> dict[str, dict[str, dict[str, str]]]:
    """Group the methods of a sweep: option, then name without the option, then value of the option to method."""
    found: dict[str, dict[str, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
    for method in methods:
        for option, value in parse_sweep_name(method):
            found[option][method.replace(f"-{option}={value}", "", 1)][value] = method
    return found


def metric(results: Results, looks: dict[str, Look]) -> Figure:
    """Final distance against each option: on a scale where all its values are numbers, else in their order."""
    panels, baseline = swept(results.methods), results.baseline
    drawing, grid = figure(4.6, 3.4 * len(panels) - 0.8, len(panels), above=0.8)
    for axes, (option, lines) in zip(grid[:, 0], panels.items()):
        values, labels = list(dict.fromkeys(value for line in lines.values() for value in line)), []
        numbers = pd.to_numeric(pd.Series(values), errors="coerce")
        places = dict(zip(values, range(len(values)) if numbers.isna().any() else numbers.astype(float)))
        for name, line in lines.items():
            ordered = sorted(line, key=lambda value: places[value])
            ends, look = [curve(results.measured, line[value]) for value in ordered], looks[line[ordered[0]]]
            x, y = [places[value] for value in ordered], [float(end.mean[-1]) for end in ends]
            axes.errorbar(x, y, np.nan_to_num([end.spread[-1] for end in ends]), **look, markersize=4.5, capsize=2)
            labels.append(Label(y[-1], name, look["color"], bold=True, x=x[-1]))
        if baseline is not None and not parse_sweep_name(baseline):
            labels.append(Label(float(curve(results.measured, baseline).mean[-1]), baseline, MUTED))
            axes.axhline(labels[-1].y, color=MUTED, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        wide = 0 < 20 * min(places.values()) < max(places.values())
        axes.set(xscale="log" if wide else "linear", yscale="log", xlabel=option, ylabel=results.primary_metric)
        axes.set_xticks(list(places.values()), values)
        axes.set_xticks([], minor=True)
        plain_log(axes)
        label_lines(axes, labels)
    return drawing
