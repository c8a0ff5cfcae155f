"""Print the tables of the study from the rows in results/.

    python examples/lora_study/evaluate.py rates    # distance by learning rate, and the selected rates
    python examples/lora_study/evaluate.py power    # smallest differences that ten seeds detect
    python examples/lora_study/evaluate.py table    # ratios to uniform, intervals and corrected p
    python examples/lora_study/evaluate.py levels   # validation loss and its gap to training images, by noise level

All tables are Markdown. A ratio is a geometric mean over seeds with its 95 % interval, of two-sided paired t-tests on
the logarithm. Holm's correction is over all planned comparisons. Unfinished cells are left out, and count as p = 1 in
the correction: when they are finished, corrected p-values of other cells can only fall.
"""

import argparse
import math
from pathlib import Path

import numpy as np
import pandas as pd
from finetune import STRATEGIES
from study import HERE, IMAGE_COUNTS, SEEDS, read_rows, select_rates

from kairos.report.ranking import compare_pairs, correct_after_holm, smallest_detectable_log_ratio

TESTED = ("distance", "val_loss", "memorised", "base_distance")
BASELINE = "uniform"
CELL = ["task", "images"]
LEVEL = 0.05
COMPARISONS = (len(STRATEGIES) - 1) * len(TESTED) * len(IMAGE_COUNTS) * 2  # planned, with two tasks
# ln SNR in the middle of the eight intervals of a rectified flow; level 1 has the least noise
LOG_SNR = {level: 2 * math.log((1 - t) / t) for level, t in enumerate((np.arange(8) + 0.5) / 8, 1)}


def log_values(rows: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Return the logarithm of a metric by seed (rows) and strategy (columns) of one cell; a missing run is NaN."""
    return np.log(rows.pivot(index="seed", columns="strategy", values=metric))


def compare(rows: pd.DataFrame) -> pd.DataFrame:
    """Compare all strategies with uniform: a row per cell, metric and strategy, with ratio, interval and p."""
    table = []
    for (task, images), cell in rows.groupby(CELL):
        for metric in TESTED:
            values = log_values(cell, metric)
            for strategy in values.columns.drop(BASELINE):
                pair = values[[strategy, BASELINE]].dropna().to_numpy().T  # (2, seeds)
                ratio = compare_pairs(pair)
                row = {"task": task, "images": images, "metric": metric, "strategy": strategy, "seeds": pair.shape[1]}
                for column in ("values", "low", "high", "p_values"):
                    row[column] = float(getattr(ratio, column)[0, 1])
                table.append(row)
    compared = pd.DataFrame(table)
    return compared.assign(p_holm=correct_after_holm(compared["p_values"].to_numpy(), COMPARISONS))


def measure_power(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the smallest detectable difference by cell and metric, from the tuning runs of the selected rates.

    The standard deviation is that of a log ratio to uniform over seeds, pooled over strategies. The level is the
    strictest one of Holm's correction over all comparisons of the study.
    """
    rates = select_rates(rows)
    keys = zip(rows["task"], rows["images"], rows["strategy"], rows["rate"])
    selected = rows[[rates.get(key[:3]) == key[3] for key in keys]]
    table = []
    for (task, images), cell in selected.groupby(CELL):
        for metric in TESTED:
            values = log_values(cell, metric)
            ratios = values.drop(columns=BASELINE).sub(values[BASELINE], axis=0)
            deviation = math.sqrt(ratios.var().mean())
            least = smallest_detectable_log_ratio(deviation, len(SEEDS["judge"]), LEVEL / COMPARISONS)
            row = {"task": task, "images": images, "metric": metric, "deviation": deviation}
            table.append({**row, "smallest_difference": math.expm1(least)})
    return pd.DataFrame(table)


def to_markdown(cells: pd.DataFrame, corner: str) -> str:
    """Return a Markdown table of text cells; the index is the first column."""
    lines = [[corner, *map(str, cells.columns)], ["---"] * (len(cells.columns) + 1)]
    lines += [[str(name), *row] for name, row in zip(cells.index, cells.to_numpy(str))]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def format_ratio(row: pd.Series) -> str:
    """Return ratio, interval and, where it is below 1, the corrected p-value."""
    p = f", p {row['p_holm']:.2g}" if row["p_holm"] < 1 else ""
    return f"{row['values']:.3f} ({row['low']:.3f} to {row['high']:.3f}{p})"


def print_table(rows: pd.DataFrame, base: pd.DataFrame) -> None:
    """Print tables of ratios to uniform by metric, with means of the references, and a table of recognised shares."""
    compared = compare(rows)
    columns = compared["task"] + ", " + compared["images"].astype(str)
    print(f"{len(rows)} runs; seeds by cell: {rows.groupby(CELL)['seed'].nunique().to_dict()}\n")
    for metric in TESTED:
        of_metric = compared[compared["metric"] == metric].assign(
            column=columns, text=compared.apply(format_ratio, axis=1)
        )
        cells = of_metric.pivot(index="strategy", columns="column", values="text").fillna("")
        for strategy, source in {BASELINE: rows[rows["strategy"] == BASELINE], "base": base, "real": base}.items():
            of_source = source if strategy == BASELINE else base[base["strategy"] == strategy]
            for (task, images), values in of_source.groupby(CELL)[metric]:
                cells.loc[strategy, f"{task}, {images}"] = f"{values.mean():.4g}"
        print(to_markdown(cells.fillna(""), metric), end="\n\n")
    everything = pd.concat([rows, base])
    shares = everything.groupby(["strategy", *CELL])["recognised"].mean().unstack(CELL)
    shares.columns = [f"{task}, {images}" for task, images in shares.columns]
    print(to_markdown(shares.map("{:.3f}".format), "recognised"))


def print_levels(rows: pd.DataFrame, base: pd.DataFrame) -> None:
    """Print, by cell, the validation loss over the base's and the gap to training images, by ln SNR."""
    for (task, images), cell in rows.groupby(CELL):
        of_base = base[(base["task"] == task) & (base["images"] == images) & (base["strategy"] == "base")]
        losses, gaps = {}, {}
        for strategy, group in cell.groupby("strategy"):
            validation = group[[f"val_{level}" for level in LOG_SNR]].mean().to_numpy()
            training = group[[f"train_{level}" for level in LOG_SNR]].mean().to_numpy()
            untuned = of_base[[f"val_{level}" for level in LOG_SNR]].mean().to_numpy()
            losses[strategy], gaps[strategy] = validation / untuned, 1 - training / validation
        columns = [f"{value:.1f}" for value in LOG_SNR.values()]
        for title, values in ((f"{task}, {images}: loss over the base's", losses), ("gap", gaps)):
            cells = pd.DataFrame(values, index=columns).T.map("{:.3f}".format)
            print(to_markdown(cells, f"{title}, by ln SNR"), end="\n\n")


def print_rates(rows: pd.DataFrame) -> None:
    """Print the geometric mean distance by learning rate, with the selected rate of each strategy in bold."""
    selected = select_rates(rows)
    means = rows.assign(log=np.log(rows["distance"])).groupby([*CELL, "strategy", "rate"])["log"].mean()
    texts: dict[str, dict[str, list[str]]] = {}
    for (task, images, strategy, rate), value in means.items():
        text = f"{math.exp(value):.3g}"
        bold = f"**{text}**" if selected.get((task, images, strategy)) == rate else text
        texts.setdefault(f"{task}, {images}", {}).setdefault(strategy, []).append(bold)
    cells = pd.DataFrame(
        {column: {name: ", ".join(values) for name, values in by.items()} for column, by in texts.items()}
    )
    print(
        to_markdown(cells.fillna(""), f"distance at {', '.join(f'{rate:g}' for rate in sorted(rows['rate'].unique()))}")
    )


def main() -> None:
    """Print the selected table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("rates", "power", "table", "levels"))
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder of the rows")
    arguments = parser.parse_args()
    needed = "tune.csv" if arguments.what in ("rates", "power") else "judge.csv"
    rows = read_rows(arguments.results / needed)
    if needed == "judge.csv":
        rows = rows[rows.groupby(CELL)["seed"].transform("count") >= len(SEEDS["judge"]) * rows["strategy"].nunique()]
    if rows.empty:
        parser.error(f"{arguments.results / needed}: no finished cell; run study.py {needed.removesuffix('.csv')}")
    base = read_rows(arguments.results / "base.csv")
    if arguments.what == "rates":
        print_rates(rows)
    elif arguments.what == "power":
        cells = measure_power(rows).set_index(["task", "images", "metric"])
        cells.index = [", ".join(map(str, key)) for key in cells.index]
        print(to_markdown(cells.map("{:.4f}".format), "setting"))
    elif arguments.what == "table":
        print_table(rows, base)
    else:
        print_levels(rows, base)


if __name__ == "__main__":
    main()
