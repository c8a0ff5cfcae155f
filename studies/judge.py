"""The study's statistics, of what studies/run.py has trained: differences at equal time, times to a value, power.

    python studies/judge.py first --out studies/results/first.csv        # reads results/study_first_*/
    python studies/judge.py first --table studies/results/first.csv      # the same without the results
    python studies/judge.py first --power

Time is counted in passes of samples through the network, a backward pass as two forward ones, as the strategies state
their own (`Sampler.cost`): a step of uniform is 1. At equal time a method is judged where it has spent what uniform
spends for its last milestone, between two milestones on the line of log value against log time, each milestone after
a decay of the learning rate of its own. Seeds are paired: a two-sided paired t-test over seeds on the logarithm,
corrected after Holm over all methods, settings and metrics of the round.
"""

import argparse
import math
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import optimize, stats

from kairos.config.experiment import load
from kairos.diffusion.processes import build_process
from kairos.report.collect import collect
from kairos.report.ranking import crossing
from kairos.section import build
from kairos.strategies.registries import SAMPLERS

METRICS = ("distance", "val_loss", "val_mlperf8")
FIXED = ("log_normal", "laplace", "two_phase", "min_snr", "p2", "speed")  # densities and weights that do not learn
LEVEL, POWER = 0.05, 0.8


def read(which: str) -> pd.DataFrame:
    """A row per complete setting, method, seed and milestone of a round: time, and what was measured there."""
    rows = []
    for folder in sorted(report.parent for report in Path("results").glob(f"study_{which}_*/report.html")):
        experiment = load(folder / "experiment.yaml")
        plain, results = experiment.plain(), collect(experiment, folder)
        batch, schedule = experiment.training.batch_size, build_process(plain["diffusion"], sigma_data=1.0).schedule
        reference = {f"ref_{name}": row[results.metric] for name, row in results.reference["rows"].items()}
        for training, milestone in results.evaluated:
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
                        "seconds": training.clock.get(milestone.step),
                        "distance": milestone.columns[results.metric],
                        **{name: milestone.columns.get(name) for name in METRICS[1:]},
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
        found[seed] = crossing(np.log(own["time"].to_numpy()), np.log(own[metric].to_numpy()), targets[seed])
    return pd.Series(found, dtype=float)


def table(rows: pd.DataFrame) -> pd.DataFrame:
    """Every method against uniform at equal time: ratio, its interval, p, and how many times as fast it gets there.

    ``to_uniform`` and ``to_fixed`` are uniform's time, and that of the best fixed method, over the method's, to the
    value that each ends with; geometric means, NaN where a seed does not get there.
    """
    found = []
    for (setting,), of_setting in rows.groupby(["setting"]):
        methods = dict(list(of_setting.groupby("method")))
        base = methods["uniform"]
        whole = base["time"].max()
        for metric in METRICS:
            if base[metric].isna().any():
                continue
            final = at(base, metric, whole)
            fixed = [name for name in FIXED if name in methods]
            best = min(fixed, key=lambda name: at(methods[name], metric, whole).mean(), default="uniform")
            for method, own in methods.items():
                value = at(own, metric, whole)
                change = (value - final).dropna()
                spread = change.std() / math.sqrt(len(change)) * stats.t.ppf(1 - LEVEL / 2, len(change) - 1)
                p = stats.ttest_1samp(change, 0).pvalue if method != "uniform" and len(change) > 1 else math.nan
                speeds = {}
                for name, other in (("to_uniform", "uniform"), ("to_fixed", best)):
                    target = at(methods[other], metric, whole)
                    speeds[name] = math.exp((math.log(whole) - needed(own, metric, target)).mean(skipna=False))
                found.append(
                    {
                        "setting": setting,
                        "metric": metric,
                        "method": method,
                        "seeds": len(change),
                        "value": math.exp(value.mean()),
                        "ratio": math.exp(change.mean()),
                        "low": math.exp(change.mean() - spread),
                        "high": math.exp(change.mean() + spread),
                        "p": p,
                        "best_fixed": best,
                        **speeds,
                    }
                )
    judged = pd.DataFrame(found)
    judged["p_holm"] = holm(judged["p"].to_numpy())
    return judged


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
    """What the settings can tell.

    Of every metric the spread over seeds of a method's log ratio to uniform, pooled over methods, and the smallest true
    difference that `seeds` find at the strictest level of Holm's correction.
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
    parser.add_argument("round")
    parser.add_argument("--table", type=Path, help="what --out has written, in the place of the results")
    parser.add_argument("--out", type=Path, help="write a row per milestone to this file")
    parser.add_argument("--power", action="store_true", help="what differences the settings can tell")
    parser.add_argument("--seeds", type=int, default=8, help="of the power analysis")
    parser.add_argument("--comparisons", type=int, default=27, help="of the power analysis: methods, settings, metrics")
    arguments = parser.parse_args()
    rows = pd.read_csv(arguments.table) if arguments.table else read(arguments.round)
    if rows.empty:
        raise SystemExit(f"results/study_{arguments.round}_*: nothing there; python studies/run.py {arguments.round}")
    if arguments.out:
        rows.to_csv(arguments.out, index=False, float_format="%.6g", lineterminator="\n")
    shown = power(rows, arguments.seeds, arguments.comparisons) if arguments.power else table(rows)
    with pd.option_context("display.width", 200, "display.max_rows", None, "display.max_columns", None):
        print(shown.to_string(index=False, float_format=lambda value: f"{value:.4g}"))


if __name__ == "__main__":
    main()
