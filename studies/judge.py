"""Evaluate the training runs of studies/run.py: differences at equal time, times to reach a value, statistical power.

    python studies/judge.py first --out studies/results/first.csv        # reads results/study_first_*/
    python studies/judge.py first --table studies/results/first.csv      # reads the table instead of the results
    python studies/judge.py first --power
    python studies/judge.py second --goal auto
    python studies/judge.py second --page --figure studies/results/second.png  # Markdown, and a figure
    python studies/judge.py second --table studies/results/{second,third}.csv  # both rounds
    python studies/judge.py rates --table studies/results/{second,third,rates}.csv --rates

Time is counted in passes of samples through the network, as the strategies report them (`Sampler.cost`). A backward
pass counts as two forward passes. The unit is a step of uniform. Methods are compared at the time of uniform's last
snapshot. Between two snapshots, the logarithm of a value is interpolated linearly over the logarithm of time; the
learning rate decays before each snapshot. Seeds are paired: the test is a two-sided paired t-test over seeds on the
logarithm, with Holm's correction over all methods, settings and metrics of the round.
"""

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import page
import pandas as pd
from run import ROUNDS
from scipy import stats

from kairos.config.experiment import load
from kairos.forward_process import build_process
from kairos.report.collect import collect
from kairos.report.ranking import correct_after_holm, crossing_cost, smallest_detectable_log_ratio
from kairos_timesteps.errors import KairosError

METRICS = ("distance", "val_loss", "val_mlperf8")
FIXED = ("log_normal", "laplace", "two_phase", "min_snr", "p2", "speed")  # densities and weights that do not learn
LEVEL = 0.05


def read_round(which: str) -> pd.DataFrame:
    """Read the results of a round; return a row per setting, method, seed and snapshot with time and metrics."""
    tables = []
    for folder in sorted(report.parent for report in Path("results").glob(f"study_{which}_*/report.html")):
        try:
            rows = read_experiment(folder)
        except KairosError as error:  # methods are being added to the experiment
            print(f"{folder.name} is skipped: {error}", file=sys.stderr)
            continue
        tables.append(rows.assign(setting=folder.name.removeprefix(f"study_{which}_")))
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()


def read_experiment(folder: Path) -> pd.DataFrame:
    """Read a results folder; return a row per method, seed and snapshot with time and metrics.

    Column ``setting`` is empty. Raises KairosError if the results are incomplete.
    """
    experiment = load(folder / "experiment.yaml")
    results = collect(experiment, folder)
    batch, diffusion = experiment.training.batch_size, experiment.diffusion
    schedule = build_process(diffusion.process, diffusion.prediction, sigma_data=1.0).schedule
    reference = {f"ref_{name}": row[results.metric] for name, row in results.reference["rows"].items()}
    rows = []
    for training, milestone in results.run_snapshots:
        cost = experiment.methods[training.method].sampler.build(schedule).cost(batch, 1)
        ratio = 1 + (cost.forward + 3 * cost.gradient) / (3 * batch)
        if milestone.step:
            rows.append(
                {
                    "setting": "",
                    "method": training.method,
                    "seed": training.seed,
                    "step": milestone.step,
                    "time": milestone.step * ratio,
                    "seconds": training.seconds_by_step.get(milestone.step),
                    "distance": milestone.measured_values[results.metric],
                    **{name: milestone.measured_values.get(name) for name in METRICS[1:]},
                    **reference,
                }
            )
    return pd.DataFrame(rows)


def log_values_at(rows: pd.DataFrame, metric: str, time: float) -> "pd.Series[float]":
    """Return the logarithm of a metric at a time, by seed; NaN for a training run that ended earlier."""
    values = {}
    for seed, of_seed in rows.sort_values("time").groupby("seed"):
        values[seed] = np.interp(math.log(time), np.log(of_seed["time"]), np.log(of_seed[metric]), right=math.nan)
    return pd.Series(values, dtype=float)


def log_times_to_reach(rows: pd.DataFrame, metric: str, targets: "pd.Series[float]") -> "pd.Series[float]":
    """Return the logarithm of the time to reach log values `targets`, by seed; NaN if they are not reached."""
    times = {}
    for seed, of_seed in rows.sort_values("time").groupby("seed"):
        times[seed] = crossing_cost(
            np.log(of_seed["time"].to_numpy()), np.log(of_seed[metric].to_numpy()), targets[seed]
        )
    return pd.Series(times, dtype=float)


def summarise_log_ratios(log_ratios: "pd.Series[float]") -> dict[str, float]:
    """Return geometric mean over seeds, its 95 % interval, and p of a two-sided t-test; NaN if a seed has no value."""
    mean, spread, p = log_ratios.mean(skipna=False), math.nan, math.nan
    if len(log_ratios) > 1 and log_ratios.any() and not math.isnan(mean):  # a method compared with itself has no p
        spread = log_ratios.sem() * stats.t.ppf(1 - LEVEL / 2, len(log_ratios) - 1)
        p = stats.ttest_1samp(log_ratios, 0).pvalue
    return {"ratio": math.exp(mean), "low": math.exp(mean - spread), "high": math.exp(mean + spread), "p": p}


def iterate_metrics(rows: pd.DataFrame) -> Iterator[tuple[str, str, dict[Any, pd.DataFrame], float, str]]:
    """Yield setting, metric, rows by method, time of uniform's last snapshot, and best fixed method at that time."""
    for (setting,), of_setting in rows.groupby(["setting"]):
        methods = dict(list(of_setting.groupby("method")))
        whole = methods["uniform"]["time"].max()
        fixed = [name for name in FIXED if name in methods]
        for metric in METRICS:
            if methods["uniform"][metric].notna().all():
                best = min(
                    fixed, key=lambda name: log_values_at(methods[name], metric, whole).mean(), default="uniform"
                )
                yield setting, metric, methods, whole, best


def table(rows: pd.DataFrame) -> pd.DataFrame:
    """Compare every method with uniform at equal time: ratio, its interval, p, and speed.

    Columns ``to_uniform`` and ``to_fixed`` are the speed relative to uniform and to the best fixed method, see
    `log_speedups`.
    """
    table_rows = []
    for setting, metric, methods, whole, best in iterate_metrics(rows):
        for method, method_rows in methods.items():
            value = log_values_at(method_rows, metric, whole)
            table_rows.append(
                {
                    "setting": setting,
                    "metric": metric,
                    "method": method,
                    "seeds": len(value),
                    "value": math.exp(value.mean()),
                    **summarise_log_ratios((value - log_values_at(methods["uniform"], metric, whole)).loc[value.index]),
                    "best_fixed": best,
                    "to_uniform": math.exp(
                        log_speedups(method_rows, methods["uniform"], metric, whole).mean(skipna=False)
                    ),
                    "to_fixed": math.exp(log_speedups(method_rows, methods[best], metric, whole).mean(skipna=False)),
                }
            )
    return pd.DataFrame(table_rows).assign(p_holm=lambda all_: correct_after_holm(all_["p"].to_numpy()))


def log_speedups(method_rows: pd.DataFrame, other: pd.DataFrame, metric: str, whole: float) -> "pd.Series[float]":
    """Return the logarithm of a method's speed relative to another method, by seed.

    If the method reaches the other's final value within the time `whole`, its speed is `whole` over the time to reach
    it. Otherwise the speed is below 1: the time at which the other reaches this method's final value, over `whole`. So
    no seed is left out.
    """
    speedup = math.log(whole) - log_times_to_reach(method_rows, metric, log_values_at(other, metric, whole))
    slowdown = log_times_to_reach(other, metric, log_values_at(method_rows, metric, whole)) - math.log(whole)
    return speedup.where(speedup >= 0, slowdown)


def goal(rows: pd.DataFrame, method: str) -> pd.DataFrame:
    """Compare a method with the best fixed method and with uniform: value at equal time, speed to their final values.

    The goal is to be at least as good as the best fixed method at equal time, and to reach both final values sooner.
    Returns a row per metric, setting and question, with ratio, interval and p. Row ``all`` is the mean over settings.
    """
    questions = "value over the best fixed", "speed to the best fixed", "speed to uniform"
    logs: dict[tuple[str, str], dict[str, pd.Series[float]]] = {}
    best_fixed = {}
    for setting, metric, methods, whole, best in iterate_metrics(rows):
        method_rows, fixed = methods[method], methods[best]
        best_fixed[setting, metric] = best
        answers = (
            log_values_at(method_rows, metric, whole) - log_values_at(fixed, metric, whole),
            log_speedups(method_rows, fixed, metric, whole),
            log_speedups(method_rows, methods["uniform"], metric, whole),
        )
        for question, answer in zip(questions, answers):
            logs.setdefault((metric, question), {})[setting] = answer
    answer_rows = [
        {
            "metric": metric,
            "question": question,
            "setting": setting,
            "best_fixed": best_fixed.get((setting, metric), ""),
        }
        | summarise_log_ratios(series)
        for (metric, question), by_setting in logs.items()
        for setting, series in [*by_setting.items(), ("all", pd.DataFrame(by_setting).mean(axis=1, skipna=False))]
    ]
    return pd.DataFrame(answer_rows).assign(p_holm=lambda all_: correct_after_holm(all_["p"].to_numpy()))


def rates(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return a table per metric: ratio to uniform at factor 1, by method and by (setting, learning rate factor).

    The rows of a factor are those of the setting ``<setting>_lr<factor>``. Only seeds and methods that every factor has
    are included.
    """
    names = rows["setting"].str.extract(r"^(?P<setting>.*?)(?:_lr(?P<factor>.*))?$")
    rows = rows.assign(setting=names["setting"], factor=names["factor"].fillna("1").astype(float))
    seeds = set.intersection(*(set(group_rows) for _, group_rows in rows.groupby("factor")["seed"]))
    methods = set.intersection(*(set(group_rows) for _, group_rows in rows.groupby("factor")["method"]))
    rows = rows[rows["seed"].isin(seeds) & rows["method"].isin(methods)]
    ratios: dict[str, dict[tuple[str, float], dict[str, float]]] = {metric: {} for metric in METRICS}
    for metric, columns in ratios.items():
        for setting, of_setting in rows.groupby("setting"):
            rows_by_method_and_factor = dict(list(of_setting.groupby(["method", "factor"])))
            whole = rows_by_method_and_factor["uniform", 1.0]["time"].max()
            base = log_values_at(rows_by_method_and_factor["uniform", 1.0], metric, whole)
            for (method, factor), method_rows in rows_by_method_and_factor.items():
                column = columns.setdefault((setting, factor), {})
                column[method] = summarise_log_ratios(log_values_at(method_rows, metric, whole) - base)["ratio"]
    return {metric: pd.DataFrame(columns).sort_index() for metric, columns in ratios.items()}


def power(rows: pd.DataFrame, seeds: int, comparisons: int) -> pd.DataFrame:
    """Analyse the statistical power of each setting and metric.

    Returns a row per setting and metric. It contains the standard deviation over seeds of a method's log ratio to
    uniform, pooled over methods. It also contains the smallest true difference that `seeds` seeds detect at the
    strictest level of Holm's correction for `comparisons` comparisons.
    """
    power_rows = []
    for (setting,), of_setting in rows.groupby(["setting"]):
        methods = dict(list(of_setting.groupby("method")))
        base = methods.pop("uniform")
        whole = base["time"].max()
        for metric in METRICS:
            if base[metric].isna().any():
                continue
            changes = [
                log_values_at(method_rows, metric, whole) - log_values_at(base, metric, whole)
                for method_rows in methods.values()
            ]
            deviation = math.sqrt(np.nanmean([change.var() for change in changes]))
            least = smallest_detectable_log_ratio(deviation, seeds, LEVEL / comparisons)
            power_rows.append(
                {
                    "setting": setting,
                    "metric": metric,
                    "uniform": math.exp(log_values_at(base, metric, whole).mean()),
                    **{name: base[f"ref_{name}"].iloc[0] for name in ("floor", "gaussian") if metric == "distance"},
                    "spread_of_log_ratio": deviation,
                    "smallest_difference_%": 100 * math.expm1(least),
                }
            )
    return pd.DataFrame(power_rows)


def main() -> None:
    """Read a round or a table, and print the selected evaluation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("round", choices=[*ROUNDS, "final"], help="final: of studies/tuned.py, with --table")
    parser.add_argument(
        "--table", type=Path, nargs="+", help="tables that --out has written, read instead of the results"
    )
    parser.add_argument("--out", type=Path, help="write a row per milestone to this file")
    parser.add_argument(
        "--power", action="store_true", help="print the smallest differences that the settings can detect"
    )
    parser.add_argument("--seeds", type=int, default=10, help="number of seeds, for --power")
    parser.add_argument("--comparisons", type=int, default=63, help="methods times settings times metrics, for --power")
    parser.add_argument(
        "--goal", metavar="METHOD", help="compare METHOD with the best fixed method, by setting and over all settings"
    )
    parser.add_argument("--page", action="store_true", help="print the table in Markdown")
    parser.add_argument("--figure", type=Path, help="draw the table into this file")
    parser.add_argument("--rates", action="store_true", help="print ratios to uniform by learning rate, in Markdown")
    arguments = parser.parse_args()
    if (arguments.power or arguments.goal) and (arguments.page or arguments.figure):
        parser.error("--page and --figure show the table, not --power or --goal")
    try:
        rows = (
            pd.concat(map(pd.read_csv, arguments.table), ignore_index=True)
            if arguments.table
            else read_round(arguments.round)
        )
    except OSError as error:
        parser.error(f"--table: {error.filename} cannot be read ({error.strerror}); pass files that --out has written")
    except ValueError:
        parser.error("--table: a file is not CSV; pass files that --out has written")
    if missing_columns := sorted({"setting", "method", "seed", "time", *METRICS} - {*rows}) if arguments.table else []:
        parser.error(f"--table: no column {', '.join(missing_columns)}; pass files that --out has written")
    if rows.empty:
        raise SystemExit(f"results/study_{arguments.round}_*: no results; run python studies/run.py {arguments.round}")
    if arguments.goal and arguments.goal not in (known := sorted(rows["method"].unique())):
        parser.error(f"--goal: got {arguments.goal}, allowed: {', '.join(known)}")
    if arguments.out:
        rows.to_csv(arguments.out, index=False, float_format="%.6g", lineterminator="\n")
    if arguments.rates:
        print(page.of_rates(rates(rows)))
        return
    if arguments.power:
        shown = power(rows, arguments.seeds, arguments.comparisons)
    else:
        shown = goal(rows, arguments.goal) if arguments.goal else table(rows)
    if arguments.figure:
        page.draw(shown, arguments.figure, METRICS[:2], LEVEL)
    if arguments.page:
        print(page.of_ratios(shown))
        return
    with pd.option_context("display.width", 200, "display.max_rows", None, "display.max_columns", None):
        print(shown.to_string(index=False, float_format=lambda value: f"{value:.4g}"))


if __name__ == "__main__":
    main()
