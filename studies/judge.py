"""Evaluate the training runs of studies/run.py: differences at equal time, times to reach a value, statistical power.

    python studies/judge.py first --out studies/results/first.csv        # reads results/study_first_*/
    python studies/judge.py first --table studies/results/first.csv      # reads the table instead of the results
    python studies/judge.py first --power
    python studies/judge.py second --goal auto
    python studies/judge.py second --page --figure studies/results/second.png  # Markdown, and a figure
    python studies/judge.py second --table studies/results/{second,third}.csv  # both rounds
    python studies/judge.py rates --table studies/results/{second,third,rates}.csv --rates
    python studies/judge.py final --table studies/results/tuned_final.csv --profile studies/results/tuned_profile.png

Time is counted in passes of samples through the network, as the strategies report them (`Sampler.cost`). A backward
pass counts as two forward passes. The unit is a step of uniform. Methods are compared at the time of uniform's last
snapshot. Between two snapshots, the logarithm of a value is interpolated linearly over the logarithm of time; the
learning rate decays before each snapshot. Seeds are paired: the test is a two-sided paired t-test over seeds on the
logarithm, with Holm's correction over all methods, settings and metrics of the round.
"""

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import page
import pandas as pd
from run import ROUNDS
from scipy import stats

from kairos.config.experiment import load
from kairos.files import write_text
from kairos.forward_process import build_process
from kairos.report.collect import collect
from kairos.report.ranking import correct_after_holm, crossing_cost, smallest_detectable_log_ratio
from kairos_timesteps.base import Sampler
from kairos_timesteps.errors import ConfigError, KairosError

METRICS = ("distance", "val_loss_epsilon", "val_mlperf8")
FIXED = ("log_normal", "laplace", "two_phase", "min_snr", "p2", "speed")  # densities and weights that do not learn
LEVEL = 0.05


def read_round(which: str) -> pd.DataFrame:
    """Return a row per setting, method, seed and snapshot of a round, with time, metrics and reference rows.

    An experiment without a report is ignored; one whose results are incomplete is skipped with a message. The table is
    empty without results.
    """
    tables = []
    for folder in sorted(report.parent for report in Path("results").glob(f"study_{which}_*/report.html")):
        try:
            rows = read_experiment(folder)
        except ConfigError:
            raise
        except KairosError as error:  # methods are being added to the experiment
            print(f"{folder.name} is skipped: {error}", file=sys.stderr)
            continue
        tables.append(rows.assign(setting=folder.name.removeprefix(f"study_{which}_")))
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()


def read_experiment(folder: Path) -> pd.DataFrame:
    """Return a row per method, seed and snapshot of a results folder, with time, metrics and reference rows.

    Snapshots of step 0 are left out. Column ``setting`` is empty. Raises KairosError if the results are incomplete.
    """
    experiment = load(folder / "experiment.yaml")
    results = collect(experiment, folder)
    batch, diffusion = experiment.training.batch_size, experiment.diffusion
    schedule = build_process(diffusion.process, diffusion.prediction, sigma_data=1.0).schedule
    reference = {f"ref_{name}": row[results.distance_metric] for name, row in results.reference["rows"].items()}
    rows = []
    for training, snapshot in results.run_snapshots:
        sampler = experiment.methods[training.method].sampler.build(schedule)
        if snapshot.step:
            rows.append(
                {
                    "setting": "",
                    "method": training.method,
                    "seed": training.seed,
                    "step": snapshot.step,
                    "time": snapshot.step * relative_step_cost(sampler, batch),
                    "seconds": training.seconds_by_step.get(snapshot.step),
                    "distance": snapshot.measured_values[results.distance_metric],
                    "val_loss_epsilon": snapshot.measured_values.get("val_loss_epsilon"),
                    "val_mlperf8": snapshot.measured_values.get(f"val_mlperf8_{diffusion.prediction_name}"),
                    "val_vlb": snapshot.measured_values.get("val_vlb"),
                    **reference,
                }
            )
    table = pd.DataFrame(rows)
    measured = [name for name in ("seconds", *METRICS, "val_vlb") if name in table]
    return table.astype(dict.fromkeys(measured, float))  # None, a value that is not measured, becomes NaN


def relative_step_cost(sampler: Sampler, batch: int) -> float:
    """Return the cost of a training step with a sampler relative to a step of uniform, in passes."""
    cost = sampler.cost(batch, 1)
    return 1 + (cost.forward + 3 * cost.gradient) / (3 * batch)


def write_table(path: Path, parts: Sequence[pd.DataFrame], run: list[str]) -> None:
    """Write the rows of all parts to a CSV file; of rows with equal values in the columns `run`, the last is kept."""
    rows = pd.concat([part for part in parts if not part.empty], ignore_index=True)
    rows = rows.drop_duplicates(run, keep="last")
    write_text(path, rows.to_csv(index=False, float_format="%.6g", lineterminator="\n"))


def final_seeds(setting: str) -> range:
    """Return the seeds of a setting in the final round of studies/tuned.py.

    In latents, the distance varies more: there are twelve seeds, not ten, which detect a difference of 23 %.
    """
    return range(40, 52) if setting == "fashion_mnist_latents" else range(40, 50)


def drop_unfinished_settings(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of finished settings, and print the names of unfinished settings to standard error.

    A setting is finished if every method that occurs in any setting has all seeds of `final_seeds`.
    """
    methods = set(rows["method"])
    finished = []
    for setting, setting_rows in rows.groupby("setting", sort=False):
        seeds_by_method = setting_rows.groupby("method")["seed"].agg(set)
        has_all_seeds = all(seeds >= {*final_seeds(setting)} for seeds in seeds_by_method)
        if set(seeds_by_method.index) == methods and has_all_seeds:
            finished.append(setting)
        else:
            print(f"{setting}: unfinished, left out", file=sys.stderr)
    return rows[rows["setting"].isin(finished)]


def drop_settings_without(method: str, rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of settings that have a method, and print the other settings to standard error.

    Uniform also counts as missing if no metric was measured at all of its snapshots.
    """
    kept = []
    for setting, setting_rows in rows.groupby("setting", sort=False):
        method_rows = setting_rows[setting_rows["method"] == method]
        has_metric = method_rows[list(METRICS)].notna().all().any()
        if method_rows.empty or (method == "uniform" and not has_metric):
            print(f"{setting}: no {method}, left out", file=sys.stderr)
        else:
            kept.append(setting)
    return rows[rows["setting"].isin(kept)]


def log_values_at(rows: pd.DataFrame, metric: str, time: float) -> "pd.Series[float]":
    """Return the logarithm of a metric at a time, interpolated between snapshots, by seed.

    The value is NaN for a training run that ended earlier. Before the first snapshot it is that of the first snapshot.
    `rows` are the snapshots of one method and setting.
    """
    values = {}
    for seed, seed_rows in rows.sort_values("time").groupby("seed"):
        values[seed] = np.interp(np.log(time), np.log(seed_rows["time"]), np.log(seed_rows[metric]), right=math.nan)
    return pd.Series(values, dtype=float)


def log_times_to_reach(rows: pd.DataFrame, metric: str, targets: "pd.Series[float]") -> "pd.Series[float]":
    """Return the logarithm of the time at which a metric first reaches its target, by seed; NaN if it does not.

    Args:
        rows: snapshots of one method and setting.
        metric: column of the metric, of which lower is better.
        targets: logarithm of the value to reach, by seed; a seed without a target has the time NaN.
    """
    times = {}
    for seed, seed_rows in rows.sort_values("time").groupby("seed"):
        log_times = np.log(seed_rows["time"].to_numpy())
        log_values = np.log(seed_rows[metric].to_numpy())
        times[seed] = crossing_cost(log_times, log_values, targets.get(seed, math.nan))
    return pd.Series(times, dtype=float)


def summarise_log_ratios(log_ratios: "pd.Series[float]") -> dict[str, float]:
    """Return ``ratio``, the geometric mean over seeds, its 95 % interval ``low`` to ``high``, and ``p``.

    p is of a two-sided t-test. All are NaN if a seed has no value. Interval and p are NaN for a single seed, and if all
    ratios are 1. `log_ratios` are logarithms by seed.
    """
    mean, margin, p = log_ratios.mean(skipna=False), math.nan, math.nan
    if len(log_ratios) > 1 and log_ratios.any() and not math.isnan(mean):  # a method compared with itself has no p
        margin = log_ratios.sem() * stats.t.ppf(1 - LEVEL / 2, len(log_ratios) - 1)
        p = stats.ttest_1samp(log_ratios, 0).pvalue
    return {"ratio": math.exp(mean), "low": math.exp(mean - margin), "high": math.exp(mean + margin), "p": p}


def iterate_metrics(
    rows: pd.DataFrame, metrics: Sequence[str] = METRICS
) -> Iterator[tuple[str, str, dict[Any, pd.DataFrame], float, str]]:
    """Yield setting, metric, rows by method, time of uniform's last snapshot, and best fixed method at that time.

    The best fixed method is uniform if the setting has none of `FIXED`. A metric that a snapshot of uniform lacks is
    left out. The caller ensures that every setting has uniform, see `drop_settings_without`.
    """
    for (setting,), setting_rows in rows.groupby(["setting"]):
        rows_by_method = dict(list(setting_rows.groupby("method")))
        end_time = rows_by_method["uniform"]["time"].max()
        fixed_methods = [name for name in FIXED if name in rows_by_method]
        for metric in metrics:
            if rows_by_method["uniform"][metric].isna().any():
                continue
            final_values = {
                name: log_values_at(rows_by_method[name], metric, end_time).mean() for name in fixed_methods
            }
            known_values = {name: value for name, value in final_values.items() if not math.isnan(value)}
            best_fixed = min(known_values, key=lambda name: known_values[name], default="uniform")
            yield setting, metric, rows_by_method, end_time, best_fixed


def table(
    rows: pd.DataFrame,
    correct_each_metric: bool = False,
    metrics: Sequence[str] = METRICS,
    baseline: str = "uniform",
) -> pd.DataFrame:
    """Return a row per setting, metric and method, which compares the method with a baseline at equal time.

    The columns are ``value``, the geometric mean over seeds; ``ratio`` to the method ``baseline`` with ``low``,
    ``high`` and ``p``, see `summarise_log_ratios`; and ``p_holm``, the corrected p. ``to_uniform`` and ``to_fixed`` are
    the speed relative to uniform and to the best fixed method, see `log_speedups`. `rows` are the result of
    `read_round`. Holm's correction is over all rows, or over those of a metric if `correct_each_metric` is True.
    """
    table_rows = []
    for setting, metric, rows_by_method, end_time, best_fixed in iterate_metrics(rows, metrics):
        uniform_rows, fixed_rows = rows_by_method["uniform"], rows_by_method[best_fixed]
        baseline_values = log_values_at(rows_by_method[baseline], metric, end_time)
        for method, method_rows in rows_by_method.items():
            values = log_values_at(method_rows, metric, end_time)
            log_ratios = (values - baseline_values).loc[values.index]  # only seeds of the method
            speed_to_uniform = log_speedups(method_rows, uniform_rows, metric, end_time).mean(skipna=False)
            speed_to_fixed = log_speedups(method_rows, fixed_rows, metric, end_time).mean(skipna=False)
            table_rows.append(
                {
                    "setting": setting,
                    "metric": metric,
                    "method": method,
                    "baseline": baseline,
                    "seeds": len(values),
                    "value": math.exp(values.mean()),
                    **summarise_log_ratios(log_ratios),
                    "best_fixed": best_fixed,
                    "to_uniform": math.exp(speed_to_uniform),
                    "to_fixed": math.exp(speed_to_fixed),
                }
            )
    compared = pd.DataFrame(table_rows)
    families = compared["metric"] if correct_each_metric else pd.Series("all", compared.index)
    p_holm = compared.groupby(families)["p"].transform(lambda p_values: correct_after_holm(p_values.to_numpy()))
    return compared.assign(p_holm=p_holm)


def log_speedups(method_rows: pd.DataFrame, other: pd.DataFrame, metric: str, end_time: float) -> "pd.Series[float]":
    """Return the logarithm of a method's speed relative to another method, by seed.

    If the method reaches the other's final value by `end_time`, its speed is `end_time` over the time to reach it.
    Otherwise the speed is below 1: the time at which the other reaches this method's final value, over `end_time`. So
    no seed is left out. `method_rows` and `other` are the snapshots of the two methods.
    """
    other_final_values = log_values_at(other, metric, end_time)
    method_final_values = log_values_at(method_rows, metric, end_time)
    speedup = math.log(end_time) - log_times_to_reach(method_rows, metric, other_final_values)
    slowdown = log_times_to_reach(other, metric, method_final_values) - math.log(end_time)
    return speedup.where(speedup >= 0, slowdown)


def relative_times_to_target(rows: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Return the time of each method to uniform's final value, divided by the time of the fastest method in a setting.

    A row is a method and a column a setting; settings without the metric are left out. The time is the median over
    seeds. It is infinite if at least half of the seeds do not reach uniform's value of their seed by uniform's final
    time. `rows` are the result of `read_round`. Performance profiles show these ratios (Dahl et al. 2023, AlgoPerf).
    """
    times: dict[str, dict[str, float]] = {}
    for setting, iterated_metric, rows_by_method, end_time, _ in iterate_metrics(rows):
        if iterated_metric != metric:
            continue
        targets = log_values_at(rows_by_method["uniform"], metric, end_time)
        medians = {}
        for method, method_rows in rows_by_method.items():
            log_times = log_times_to_reach(method_rows, metric, targets)
            log_times = log_times.where(log_times <= math.log(end_time) + 1e-9, math.inf)  # NaN becomes infinite too
            medians[method] = math.exp(log_times.median())
        fastest = min(medians.values())
        times[setting] = {method: median / fastest for method, median in medians.items()}
    return pd.DataFrame(times)


def goal(rows: pd.DataFrame, method: str) -> pd.DataFrame:
    """Compare a method with the best fixed method and with uniform: value at equal time, speed to their final values.

    The goal is to be at least as good as the best fixed method at equal time, and to reach both final values sooner.
    Returns a row per metric, question and setting, with ratio, interval, p and corrected p. In rows of setting ``all``,
    each seed has the geometric mean over settings. The caller ensures that every setting has `method` and uniform.
    """
    # logarithms of ratios by seed, by metric and question, then by setting
    logs: dict[tuple[str, str], dict[str, pd.Series[float]]] = {}
    best_fixed_methods = {}
    for setting, metric, rows_by_method, end_time, best_fixed in iterate_metrics(rows):
        method_rows, fixed_rows = rows_by_method[method], rows_by_method[best_fixed]
        best_fixed_methods[setting, metric] = best_fixed
        method_values = log_values_at(method_rows, metric, end_time)
        fixed_values = log_values_at(fixed_rows, metric, end_time)
        answers = {
            "value over the best fixed": (method_values - fixed_values).loc[method_values.index],
            "speed to the best fixed": log_speedups(method_rows, fixed_rows, metric, end_time),
            "speed to uniform": log_speedups(method_rows, rows_by_method["uniform"], metric, end_time),
        }
        for question, answer in answers.items():
            logs.setdefault((metric, question), {})[setting] = answer

    answer_rows = []
    for (metric, question), logs_by_setting in logs.items():
        mean_over_settings = pd.DataFrame(logs_by_setting).mean(axis=1, skipna=False)
        for setting, log_ratios in [*logs_by_setting.items(), ("all", mean_over_settings)]:
            row = {
                "metric": metric,
                "question": question,
                "setting": setting,
                "best_fixed": best_fixed_methods.get((setting, metric), ""),
            }
            answer_rows.append(row | summarise_log_ratios(log_ratios))
    return pd.DataFrame(answer_rows).assign(p_holm=lambda all_: correct_after_holm(all_["p"].to_numpy()))


def rates(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return a table per metric of ratios to uniform at learning rate factor 1, at equal time.

    A row is a method, and a column is a pair of setting and factor. The setting ``<setting>_lr<factor>`` of `rows`
    contains the snapshots of another factor than 1. Only seeds and methods that every factor has are included. Settings
    without uniform at factor 1 are left out.
    """
    names = rows["setting"].str.extract(r"^(?P<setting>.*?)(?:_lr(?P<factor>.*))?$")
    rows = rows.assign(setting=names["setting"], factor=names["factor"].fillna("1").astype(float))
    seeds = set.intersection(*(set(seeds_of_factor) for _, seeds_of_factor in rows.groupby("factor")["seed"]))
    methods = set.intersection(*(set(methods_of_factor) for _, methods_of_factor in rows.groupby("factor")["method"]))
    rows = rows[rows["seed"].isin(seeds) & rows["method"].isin(methods)]
    # ratios by metric, then by column, then by method
    ratios: dict[str, dict[tuple[str, float], dict[str, float]]] = {metric: {} for metric in METRICS}
    for metric, columns in ratios.items():
        for setting, setting_rows in rows.groupby("setting"):
            rows_by_method_and_factor = dict(list(setting_rows.groupby(["method", "factor"])))
            uniform_rows = rows_by_method_and_factor.get(("uniform", 1.0))
            if uniform_rows is None:
                continue
            end_time = uniform_rows["time"].max()
            uniform_values = log_values_at(uniform_rows, metric, end_time)
            for (method, factor), method_rows in rows_by_method_and_factor.items():
                log_ratios = log_values_at(method_rows, metric, end_time) - uniform_values
                column = columns.setdefault((setting, factor), {})
                column[method] = summarise_log_ratios(log_ratios)["ratio"]
    return {metric: pd.DataFrame(columns).sort_index() for metric, columns in ratios.items()}


def power(rows: pd.DataFrame, seeds: int, comparisons: int, metrics: Sequence[str] = METRICS) -> pd.DataFrame:
    """Return a row per setting and metric with its statistical power.

    ``spread_of_log_ratio`` is the standard deviation over seeds of a method's log ratio to uniform, pooled over
    methods. ``smallest_difference_%`` is the smallest true difference that `seeds` seeds detect at the strictest level
    of Holm's correction for `comparisons` comparisons. ``uniform`` is uniform's value at the end; the rows of the
    distance also contain the reference rows ``floor`` and ``gaussian``. The caller ensures that every setting has
    uniform.
    """
    power_rows = []
    for (setting,), setting_rows in rows.groupby(["setting"]):
        rows_by_method = dict(list(setting_rows.groupby("method")))
        uniform_rows = rows_by_method.pop("uniform")
        end_time = uniform_rows["time"].max()
        for metric in metrics:
            if uniform_rows[metric].isna().any():
                continue
            uniform_values = log_values_at(uniform_rows, metric, end_time)
            variances = []  # over seeds, of each method's log ratio to uniform
            for method_rows in rows_by_method.values():
                log_ratios = log_values_at(method_rows, metric, end_time) - uniform_values
                variances.append(log_ratios.var())
            deviation = math.sqrt(np.nanmean(variances))
            smallest_log_ratio = smallest_detectable_log_ratio(deviation, seeds, LEVEL / comparisons)
            reference_rows = ("floor", "gaussian") if metric == "distance" else ()
            power_rows.append(
                {
                    "setting": setting,
                    "metric": metric,
                    "uniform": math.exp(uniform_values.mean()),
                    **{name: uniform_rows[f"ref_{name}"].iloc[0] for name in reference_rows},
                    "spread_of_log_ratio": deviation,
                    "smallest_difference_%": 100 * math.expm1(smallest_log_ratio),
                }
            )
    return pd.DataFrame(power_rows)


def main() -> None:
    """Read a round or tables, and print the selected evaluation; write the table and the figure if requested."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("round", choices=[*ROUNDS, "final"], help="final: of studies/tuned.py, with --table")
    parser.add_argument(
        "--table", type=Path, nargs="+", help="tables that --out has written, read instead of the results"
    )
    parser.add_argument("--out", type=Path, help="write a row per snapshot to this file")
    parser.add_argument(
        "--power", action="store_true", help="print the smallest differences that the settings can detect"
    )
    parser.add_argument("--seeds", type=int, default=10, help="number of seeds, for --power")
    parser.add_argument("--comparisons", type=int, default=63, help="methods times settings times metrics, for --power")
    parser.add_argument(
        "--goal", metavar="METHOD", help="compare METHOD with the best fixed method, by setting and over all settings"
    )
    parser.add_argument("--page", action="store_true", help="print the table in Markdown")
    parser.add_argument("--baseline", default="uniform", help="method that the others are divided by (uniform)")
    parser.add_argument("--figure", type=Path, help="draw the table into this file")
    parser.add_argument("--rates", action="store_true", help="print ratios to uniform by learning rate, in Markdown")
    parser.add_argument(
        "--profile",
        type=Path,
        help="print relative times to uniform's final value, and draw performance profiles into this file",
    )
    arguments = parser.parse_args()
    if (arguments.power or arguments.goal) and (arguments.page or arguments.figure):
        parser.error("--page and --figure show the table, not --power or --goal")
    if arguments.baseline != "uniform" and (arguments.power or arguments.goal or arguments.profile or arguments.rates):
        parser.error("--baseline applies to the table, --page and --figure")
    if arguments.profile and (
        arguments.power or arguments.goal or arguments.page or arguments.figure or arguments.rates
    ):
        parser.error("--profile cannot be combined with --power, --goal, --page, --figure or --rates")
    if arguments.seeds < 2:  # a standard deviation needs two
        parser.error(f"--seeds: got {arguments.seeds}, allowed: at least 2")
    if arguments.comparisons < 1:
        parser.error(f"--comparisons: got {arguments.comparisons}, allowed: at least 1")
    if arguments.round == "final" and not arguments.table:
        parser.error("final: pass --table studies/results/tuned_final.csv, which studies/tuned.py writes")
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
    missing_columns = sorted({"setting", "method", "seed", "time", *METRICS} - {*rows})
    if arguments.table and missing_columns:
        parser.error(f"--table: no column {', '.join(missing_columns)}; pass files that --out has written")
    if rows.empty:
        raise SystemExit(f"results/study_{arguments.round}_*: no results; run python studies/run.py {arguments.round}")
    known = sorted(rows["method"].unique())
    for option in ("goal", "baseline"):
        method = getattr(arguments, option)
        if method not in (None, "uniform", *known):  # a round without uniform has a message of its own
            parser.error(f"--{option}: got {method}, allowed: {', '.join(known)}")
    if arguments.round == "final":
        rows = drop_unfinished_settings(rows)
        if rows.empty:
            parser.error("--table: no setting is finished; run python studies/tuned.py final first")
    if arguments.out:
        rows.to_csv(arguments.out, index=False, float_format="%.6g", lineterminator="\n")
    if arguments.rates:
        ratios = rates(rows)
        if all(ratios_of_metric.empty for ratios_of_metric in ratios.values()):
            parser.error("--rates: no setting has uniform at learning rate factor 1 with the seeds of all factors")
        print(page.format_rates(ratios))
        return
    for method in dict.fromkeys(["uniform", arguments.goal or "uniform", arguments.baseline]):
        rows = drop_settings_without(method, rows)
        if rows.empty:
            parser.error(f"--table: no setting with {method} is left")
    if arguments.profile:
        times = {metric: relative_times_to_target(rows, metric) for metric in METRICS}
        page.draw_profile(times, arguments.profile)
        print(page.format_times(times))
        return
    if arguments.power:
        evaluation = power(rows, arguments.seeds, arguments.comparisons)
    elif arguments.goal:
        evaluation = goal(rows, arguments.goal)
    else:
        evaluation = table(rows, correct_each_metric=arguments.round == "final", baseline=arguments.baseline)
    if arguments.figure:
        page.draw(evaluation, arguments.figure, METRICS[:2], LEVEL)
    if arguments.page:
        print(page.format_ratios(evaluation))
        return
    with pd.option_context("display.width", 200, "display.max_rows", None, "display.max_columns", None):
        print(evaluation.to_string(index=False, float_format=lambda value: f"{value:.4g}"))


if __name__ == "__main__":
    main()
