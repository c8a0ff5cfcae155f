"""A comparison's results at equal steps and at equal time, beside uniform's: the table of the Fashion-MNIST study.

    make run EXPERIMENT=experiments/fashion_mnist_latents.yaml
    python benchmarks/overhead.py --batch 32 --width 64 --depth 2 --patch 2 --out benchmarks/results/study_cost.csv
    python benchmarks/study.py --results results/fashion_mnist_latents --step 3000 --out benchmarks/results/study.csv

Seeds are paired (all methods of a seed share initial weights, data order and noise), so the difference to uniform is
taken per seed: its mean and, as its spread, the standard deviation over seeds (ddof 1). Equal time: what a method has
reached in the time of `--budget` steps of uniform, by the cost of a step that `overhead.py` measured side by side;
clocks of trainings that share a machine would not do. Between two milestones by linear interpolation, which is to the
method's disadvantage: these curves are convex.
"""

import argparse
import csv
import statistics
from pathlib import Path

import pandas as pd
import yaml

METRICS = ("val_loss", "val_vlb_without_last", "frechet")


def main() -> None:
    """Read, compare, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--config", type=Path, default=Path("experiments/fashion_mnist_latents.yaml"))
    parser.add_argument("--cost", type=Path, default=Path("benchmarks/results/study_cost.csv"))
    parser.add_argument("--step", type=int, default=3000, help="of the comparison at equal steps")
    parser.add_argument("--budget", type=int, default=3300, help="steps of uniform, of the comparison at equal time")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    table = pd.read_csv(arguments.results / "summary.csv").rename(columns=lambda name: _plain(name))
    methods = yaml.safe_load(arguments.config.read_text(encoding="utf-8"))["methods"]
    cost = pd.read_csv(arguments.cost, comment="#").set_index("strategy")["ratio"].to_dict()
    rows = []
    for method, parts in methods.items():
        sampler = parts.get("sampler", "uniform")
        ratio = cost[sampler if isinstance(sampler, str) else sampler["name"]]
        row: dict[str, object] = {"method": method, "step": arguments.step, "time_ratio": ratio}
        for metric in METRICS:
            values = at(table, method, metric, arguments.step)
            row |= {metric: statistics.mean(values), f"{metric}_sd": _spread(values)}
            for name, steps, mine in (
                ("equal_steps", arguments.step, arguments.step),
                ("equal_time", arguments.budget, arguments.budget / ratio),
            ):
                pairs = zip(at(table, method, metric, mine), at(table, "uniform", metric, steps), strict=True)
                change = [100 * (one / other - 1) for one, other in pairs]
                row |= {f"{metric}_{name}": statistics.mean(change), f"{metric}_{name}_sd": _spread(change)}
        rows.append(row)
    seeds = sorted({int(seed) for seed in table["seed"].dropna()})
    print(
        f"{arguments.results}, step {arguments.step}, seeds {seeds}; changes against uniform in %, mean ± sd over seeds"
    )
    print(f"{'method':<24} {'time':>6} " + " ".join(f"{m + ' (equal steps, equal time)':>46}" for m in METRICS))
    for row in rows:
        cells = [
            f"{row[m]:.5g}±{row[f'{m}_sd']:.2g} ({row[f'{m}_equal_steps']:+.2f}±{row[f'{m}_equal_steps_sd']:.2f}, "
            f"{row[f'{m}_equal_time']:+.2f}±{row[f'{m}_equal_time_sd']:.2f})"
            for m in METRICS
        ]
        print(f"{row['method']:<24} {row['time_ratio']:6.3f} " + " ".join(f"{cell:>46}" for cell in cells))
    if arguments.out:
        with open(arguments.out, "w", newline="", encoding="utf-8") as file:
            how = f"python benchmarks/study.py --step {arguments.step} --budget {arguments.budget}"
            file.write(f"# {how}: {arguments.config}, seeds {seeds}\n")
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows({k: round(v, 6) if isinstance(v, float) else v for k, v in row.items()} for row in rows)


def at(table: pd.DataFrame, method: str, metric: str, step: float) -> list[float]:
    """A metric of every seed, in their order, after `step` steps; between two milestones by linear interpolation.

    Raises:
        SystemExit: no milestone is as late as `step`.
    """
    values = []
    for _, rows in table[table["method"] == method].sort_values("step").groupby("seed"):
        later = rows[rows["step"] >= step]
        if later.empty:
            raise SystemExit(f"{method}: no milestone at or after step {step:.0f}")
        before, after = rows[rows["step"] <= step].iloc[-1], later.iloc[0]
        span = after["step"] - before["step"]
        share = (step - before["step"]) / span if span else 0.0
        values.append(float(before[metric] + share * (after[metric] - before[metric])))
    return values


def _plain(name: str) -> str:
    """The distance's column under one name, whatever the features are called."""
    return "frechet" if name == "fid" or (name.startswith("frechet_") and not name.endswith("_spread")) else name


def _spread(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else float("nan")


if __name__ == "__main__":
    main()
