"""The study's statistics, of what studies/run.py has trained: differences at equal time, times to a value, power.

    python studies/judge.py first --out studies/results/first.csv        # reads results/study_first_*/
    python studies/judge.py first --table studies/results/first.csv      # the same without the results
    python studies/judge.py first --power
    python studies/judge.py second --goal auto
    python studies/judge.py second --page --figure studies/results/second.png  # Markdown, and a picture
    python studies/judge.py second --table studies/results/{second,third}.csv  # both rounds
    python studies/judge.py rates --table studies/results/{second,third,rates}.csv --rates

Time is counted in passes of samples through the network, a backward pass as two forward ones, as the strategies state
their own (`Sampler.cost`): a step of uniform is 1. At equal time a method is judged where it has spent what uniform
spends for its last milestone, between two milestones on the line of log value against log time, each milestone after
a decay of the learning rate of its own. Seeds are paired: a two-sided paired t-test over seeds on the logarithm,
corrected after Holm over all methods, settings and metrics of the round.
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
from scipy import optimize, stats

from kairos.config.experiment import load
from kairos.forward_process import build_process
from kairos.report.collect import collect
from kairos.report.ranking import crossing_cost
from kairos.section import build
from kairos_timesteps.components import SAMPLERS
from kairos_timesteps.errors import KairosError

METRICS = ("distance", "val_loss", "val_mlperf8")
FIXED = ("log_normal", "laplace", "two_phase", "min_snr", "p2", "speed")  # densities and weights that do not learn
LEVEL, POWER = 0.05, 0.8


def read(which: str) -> pd.DataFrame:
    """A row per complete setting, method, seed and milestone of a round: time, and what was measured there."""
    rows = []
    for folder in sorted(report.parent for report in Path("results").glob(f"study_{which}_*/report.html")):
        experiment = load(folder / "experiment.yaml")
        plain = experiment.plain()
        try:
            results = collect(experiment, folder)
        except KairosError as error:  # while methods are added to it
            print(f"{folder.name} is left out: {error}", file=sys.stderr)
            continue
        batch, schedule = experiment.training.batch_size, build_process(plain["diffusion"], sigma_data=1.0).schedule
        reference = {f"ref_{name}": row[results.metric] for name, row in results.reference["rows"].items()}
        for training, milestone in results.run_snapshots:
            cost = build(SAMPLERS, plain["methods"][training.method]["sampler"], schedule).cost(batch, 1)
            ratio = 1 + (cost.forward + 3 * cost.gradient) / (3 * batch)
            if milestone.step:
                rows.append(
                    {
                        "setting": folder.name.removeprefix(f"study_{which}_"),
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


def at(rows: pd.DataFrame, metric: str, time: float) -> "pd.Series[float]":
    """Logarithm of a metric after a time, by seed; NaN where a training has not gone so far."""
    found = {}
    for seed, own in rows.sort_values("time").groupby("seed"):
        found[seed] = np.interp(math.log(time), np.log(own["time"]), np.log(own[metric]), right=math.nan)
    return pd.Series(found, dtype=float)


def needed(rows: pd.DataFrame, metric: str, targets: "pd.Series[float]") -> "pd.Series[float]":
    """Logarithm of the time to log values `targets`, by seed; NaN where they are not reached."""
    found = {}
    for seed, own in rows.sort_values("time").groupby("seed"):
        found[seed] = crossing_cost(np.log(own["time"].to_numpy()), np.log(own[metric].to_numpy()), targets[seed])
    return pd.Series(found, dtype=float)


def compared(log_ratios: "pd.Series[float]") -> dict[str, float]:
    """Geometric mean over seeds, its 95 % interval, and p of a two-sided t-test; NaN where a seed has no value."""
    mean, spread, p = log_ratios.mean(skipna=False), math.nan, math.nan
    if len(log_ratios) > 1 and log_ratios.any() and not math.isnan(mean):  # of a method with itself there is none
        spread = log_ratios.sem() * stats.t.ppf(1 - LEVEL / 2, len(log_ratios) - 1)
        p = stats.ttest_1samp(log_ratios, 0).pvalue
    return {"ratio": math.exp(mean), "low": math.exp(mean - spread), "high": math.exp(mean + spread), "p": p}


def parts(rows: pd.DataFrame) -> Iterator[tuple[str, str, dict[Any, pd.DataFrame], float, str]]:
    """Setting, metric, its methods' rows, uniform's whole time, and the fixed method that is best then."""
    for (setting,), of_setting in rows.groupby(["setting"]):
        methods = dict(list(of_setting.groupby("method")))
        whole = methods["uniform"]["time"].max()
        fixed = [name for name in FIXED if name in methods]
        for metric in METRICS:
            if methods["uniform"][metric].notna().all():
                best = min(fixed, key=lambda name: at(methods[name], metric, whole).mean(), default="uniform")
                yield setting, metric, methods, whole, best


def table(rows: pd.DataFrame) -> pd.DataFrame:
    """Compare every method with uniform at equal time: ratio, its interval, p, and how many times as fast it is.

    ``to_uniform`` and ``to_fixed``: how many times as fast it is as uniform, and as the best fixed method (`gained`).
    """
    found = []
    for setting, metric, methods, whole, best in parts(rows):
        for method, own in methods.items():
            value = at(own, metric, whole)
            found.append(
                {
                    "setting": setting,
                    "metric": metric,
                    "method": method,
                    "seeds": len(value),
                    "value": math.exp(value.mean()),
                    **compared((value - at(methods["uniform"], metric, whole)).loc[value.index]),
                    "best_fixed": best,
                    "to_uniform": math.exp(gained(own, methods["uniform"], metric, whole).mean(skipna=False)),
                    "to_fixed": math.exp(gained(own, methods[best], metric, whole).mean(skipna=False)),
                }
            )
    return pd.DataFrame(found).assign(p_holm=lambda all_: holm(all_["p"].to_numpy()))


def gained(own: pd.DataFrame, other: pd.DataFrame, metric: str, whole: float) -> "pd.Series[float]":
    """Logarithm of how many times as fast a method is as another, by seed.

    Where it gets within `whole` to the other's last value: `whole` over its time. Otherwise it is slower, by as much as
    the other is sooner where this one ends, so that no seed is left out.
    """
    sooner = math.log(whole) - needed(own, metric, at(other, metric, whole))
    later = needed(other, metric, at(own, metric, whole)) - math.log(whole)
    return sooner.where(sooner >= 0, later)


def goal(rows: pd.DataFrame, method: str) -> pd.DataFrame:
    """Compare a method with the best fixed method and with uniform: value at equal time, speed to their final values.

    The goal is to be at least as good as the best fixed method at equal time, and to reach both final values sooner.
    Returns a row per metric, setting and question, with ratio, interval and p. Row ``all`` is the mean over settings.
    """
    asked = "value over the best fixed", "speed to the best fixed", "speed to uniform"
    logs: dict[tuple[str, str], dict[str, pd.Series[float]]] = {}
    best_fixed = {}
    for setting, metric, methods, whole, best in parts(rows):
        own, fixed = methods[method], methods[best]
        best_fixed[setting, metric] = best
        answers = (
            at(own, metric, whole) - at(fixed, metric, whole),
            gained(own, fixed, metric, whole),
            gained(own, methods["uniform"], metric, whole),
        )
        for question, answer in zip(asked, answers):
            logs.setdefault((metric, question), {})[setting] = answer
    found = [
        {
            "metric": metric,
            "question": question,
            "setting": setting,
            "best_fixed": best_fixed.get((setting, metric), ""),
        }
        | compared(series)
        for (metric, question), by_setting in logs.items()
        for setting, series in [*by_setting.items(), ("all", pd.DataFrame(by_setting).mean(axis=1, skipna=False))]
    ]
    return pd.DataFrame(found).assign(p_holm=lambda all_: holm(all_["p"].to_numpy()))


def rates(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """By metric, a row per method and a column per (setting, factor of the learning rate): over uniform's at factor 1.

    Rows of a factor are those of setting ``<setting>_lr<factor>``; of all, the seeds that every factor has.
    """
    named = rows["setting"].str.extract(r"^(?P<setting>.*?)(?:_lr(?P<factor>.*))?$")
    rows = rows.assign(setting=named["setting"], factor=named["factor"].fillna("1").astype(float))
    seeds = set.intersection(*(set(own) for _, own in rows.groupby("factor")["seed"]))
    methods = set.intersection(*(set(own) for _, own in rows.groupby("factor")["method"]))
    rows = rows[rows["seed"].isin(seeds) & rows["method"].isin(methods)]
    found: dict[str, dict[tuple[str, float], dict[str, float]]] = {metric: {} for metric in METRICS}
    for metric, columns in found.items():
        for setting, of_setting in rows.groupby("setting"):
            parted = dict(list(of_setting.groupby(["method", "factor"])))
            whole = parted["uniform", 1.0]["time"].max()
            base = at(parted["uniform", 1.0], metric, whole)
            for (method, factor), own in parted.items():
                column = columns.setdefault((setting, factor), {})
                column[method] = compared(at(own, metric, whole) - base)["ratio"]
    return {metric: pd.DataFrame(columns).sort_index() for metric, columns in found.items()}


def holm(p: np.ndarray) -> np.ndarray:
    """Corrected p-values over all that are no NaN (Holm 1979)."""
    corrected, known = np.full(p.shape, np.nan), np.flatnonzero(~np.isnan(p))
    order = known[p[known].argsort()]
    steps = p[order] * np.arange(len(order), 0, -1)
    corrected[order] = np.maximum.accumulate(steps).clip(max=1) if len(order) else steps
    return corrected


def smallest(deviation: float, seeds: int, level: float) -> float:
    """The true difference that a two-sided paired t-test of so many seeds finds with a probability of 80 %."""
    edge = stats.t.ppf(1 - level / 2, seeds - 1)

    def missed(shift: float) -> float:
        below = np.nan_to_num(stats.nct.cdf(-edge, seeds - 1, shift))  # NaN where it is too small for scipy
        return float(stats.nct.cdf(edge, seeds - 1, shift) - below) - (1 - POWER)

    return float(optimize.brentq(missed, 0, 3 * edge)) * deviation / math.sqrt(seeds)


def power(rows: pd.DataFrame, seeds: int, comparisons: int) -> pd.DataFrame:
    """Analyse the statistical power of each setting and metric.

    Returns a row per setting and metric. It contains the standard deviation over seeds of a method's log ratio to
    uniform, pooled over methods. It also contains the smallest true difference that `seeds` seeds detect at the
    strictest level of Holm's correction for `comparisons` comparisons.
    """
    found = []
    for (setting,), of_setting in rows.groupby(["setting"]):
        methods = dict(list(of_setting.groupby("method")))
        base = methods.pop("uniform")
        whole = base["time"].max()
        for metric in METRICS:
            if base[metric].isna().any():
                continue
            changes = [at(own, metric, whole) - at(base, metric, whole) for own in methods.values()]
            deviation = math.sqrt(np.nanmean([change.var() for change in changes]))
            least = smallest(deviation, seeds, LEVEL / comparisons)
            found.append(
                {
                    "setting": setting,
                    "metric": metric,
                    "uniform": math.exp(at(base, metric, whole).mean()),
                    **{name: base[f"ref_{name}"].iloc[0] for name in ("floor", "gaussian") if metric == "distance"},
                    "spread_of_log_ratio": deviation,
                    "smallest_difference_%": 100 * math.expm1(least),
                }
            )
    return pd.DataFrame(found)


def main() -> None:
    """Read or take a table, and print what it says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("round", choices=ROUNDS)
    parser.add_argument("--table", type=Path, nargs="+", help="what --out has written, in the place of the results")
    parser.add_argument("--out", type=Path, help="write a row per milestone to this file")
    parser.add_argument("--power", action="store_true", help="what differences the settings can tell")
    parser.add_argument("--seeds", type=int, default=8, help="of the power analysis")
    parser.add_argument("--comparisons", type=int, default=27, help="of the power analysis: methods, settings, metrics")
    parser.add_argument(
        "--goal", metavar="METHOD", help="that method against the best fixed one, and over all settings"
    )
    parser.add_argument("--page", action="store_true", help="the table in Markdown")
    parser.add_argument("--figure", type=Path, help="draw the table to this file")
    parser.add_argument("--rates", action="store_true", help="values by learning rate over uniform's, in Markdown")
    arguments = parser.parse_args()
    if (arguments.power or arguments.goal) and (arguments.page or arguments.figure):
        parser.error("--page and --figure show the table, not --power or --goal")
    try:
        rows = (
            pd.concat(map(pd.read_csv, arguments.table), ignore_index=True)
            if arguments.table
            else read(arguments.round)
        )
    except OSError as error:
        parser.error(f"--table: {error.filename} cannot be read ({error.strerror}); --out writes such a file")
    except ValueError:
        parser.error("--table: one of these is no CSV file; --out writes such a file")
    if lacks := sorted({"setting", "method", "seed", "time", *METRICS} - {*rows}) if arguments.table else []:
        parser.error(f"--table: no column {', '.join(lacks)}; --out writes such a file")
    if rows.empty:
        raise SystemExit(f"results/study_{arguments.round}_*: nothing there; python studies/run.py {arguments.round}")
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
