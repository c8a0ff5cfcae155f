"""Selection of the methods that a report shows one by one: all, or a few of the hundreds of a large sweep."""

from kairos.config.sweeps import parse_sweep_name
from kairos.report.collect import Results
from kairos.report.ranking import build_curve

MOST_SHOWN = 12  # methods that a figure can show with a colour and a name each


def select_shown_methods(results: Results) -> list[str]:
    """Return the methods that figures show one by one, in the order of the configuration.

    With at most 12 methods, all are returned. Otherwise 12 are selected: first the baseline, then the best method of
    each sweep, then the best methods of the experiment. The best method has the lowest primary metric, mean over seeds,
    at the last common snapshot. Sweeps without a place among the 12 are left out.

    Raises:
        KairosError: there are more than 12 methods, and no snapshot after step 0 is evaluated for all of them.
    """
    methods = results.methods
    if len(methods) <= MOST_SHOWN:
        return methods
    common = results.measurements.common_measurements
    final_values = {method: build_curve(common, method).mean[-1] for method in methods}
    best_first = sorted(methods, key=lambda method: final_values[method])
    best_of_sweeps: dict[str, str] = {}
    for method in best_first:
        if parse_sweep_name(method):
            best_of_sweeps.setdefault(name_of_sweep(method), method)  # keeps the first, which is the best
    baselines = [results.baseline] if results.baseline else []
    by_priority = dict.fromkeys([*baselines, *best_of_sweeps.values(), *best_first])  # each method once
    selected = list(by_priority)[:MOST_SHOWN]
    return [method for method in methods if method in selected]


def name_of_sweep(method: str) -> str:
    """Return the name of a method without the options of its grid: ``speed`` for ``speed-k=5`` and for ``speed``."""
    for option, value in parse_sweep_name(method):
        method = method.replace(f"-{option}={value}", "", 1)
    return method
