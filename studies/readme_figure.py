"""Draw the figure of the repository's README, and print its table, from the committed results of the study.

    python studies/readme_figure.py                 # prints the table in Markdown and writes docs/study.png

Both show CIFAR-10 alone: the one setting that was not used while `auto` and `coarse_to_fine` were designed. Ratios are
those of ``judge.py``: at equal time, paired by seed.
"""

import argparse
import math
from pathlib import Path

import judge
import numpy as np
import pandas as pd
from scipy import stats

STUDIES = Path(__file__).resolve().parent
FIGURE = STUDIES.parent / "docs/study.png"
SETTING = "cifar10"
LOSS = "val_mlperf8"  # error of the velocity, which the networks of this setting predict, at eight times
NAMES = {  # method in the results: name of the strategy, as the library takes it
    "coarse_to_fine": "auto+coarse_to_fine",
    "log_normal": "log_normal",
    "auto": "auto",
    "speed": "speed+change_aware",
    "two_phase": "schedule",
    "uniform": "uniform",
    "loss_rms": "loss_rms",
    "gradient_norm": "gradient_norm",
}
COLOURS = {  # of the curves: Okabe and Ito's palette
    "uniform": "black",
    "speed": "#CC79A7",
    "auto": "#009E73",
    "log_normal": "#0072B2",
    "coarse_to_fine": "#D55E00",
}

# in points; of methods whose labels would cover each other in the usual place
LABEL_OFFSETS = {
    "two_phase": (0, 12),
    "speed": (6, 5),
    "uniform": (-6, -13),
    "gradient_norm": (6, 5),
    "loss_rms": (6, -14),
}


def read_results() -> pd.DataFrame:
    """Return the committed rows of the second and third round, whose ten seeds are equal; see `judge.read_round`."""
    return pd.concat((pd.read_csv(STUDIES / f"results/{name}.csv") for name in ("second", "third")), ignore_index=True)


def final_ratios(judged: pd.DataFrame) -> pd.DataFrame:
    """Return a row per method of the setting, the lowest ratio of the distance first.

    The columns are pairs of a metric, ``distance`` or `LOSS`, and a column of `judge.table`, such as ratio or p.
    """
    setting_rows = judged[judged["setting"] == SETTING]
    tables = {}
    for metric in ("distance", LOSS):
        tables[metric] = setting_rows[setting_rows["metric"] == metric].set_index("method")
    return pd.concat(tables, axis="columns").sort_values(("distance", "ratio"))


def markdown(ratios: pd.DataFrame) -> str:
    """Return the table of the README in Markdown: distance, error of the velocity and speed relative to uniform.

    `ratios` is the result of `final_ratios`.
    """
    lines = ["| strategy | distance | velocity error | speed-up |", "|---|---|---|---|"]
    for method, row in ratios.iterrows():
        cells = [_ratio(row["distance"], 2), _ratio(row[LOSS], 3), f"{row['distance', 'to_uniform']:.1f}"]
        lines.append(f"| `{NAMES[method]}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def _ratio(row: pd.Series, digits: int) -> str:
    """Return the text of a ratio with its interval, bold if the corrected p is below 0.05; uniform has no interval."""
    text = f"{row['ratio']:.{digits}f}"
    if math.isnan(row["p_holm"]):
        return text
    text += f" ({row['low']:.{digits}f} to {row['high']:.{digits}f})"
    return f"**{text}**" if row["p_holm"] < judge.LEVEL else text


def draw(rows: pd.DataFrame, ratios: pd.DataFrame, path: Path) -> None:
    """Write a figure to the file `path`: distances during training, and both final ratios of each method.

    Curves and ratios have 95 % intervals.

    Args:
        rows: rows of `read_results`, for the distances during training.
        ratios: rows of `final_ratios`.
        path: the file.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained", dpi=120)
    curves, trade_off = figure.subplots(1, 2)

    # left: distances during training
    setting_rows = rows[rows["setting"] == SETTING]
    for method, colour in COLOURS.items():
        _draw_curve(curves, setting_rows[setting_rows["method"] == method], colour, NAMES[method])
    _mark_speed(curves, setting_rows, ratios.loc["coarse_to_fine", ("distance", "to_uniform")])
    reference = setting_rows.iloc[0]  # all rows contain the reference rows
    for name, meaning in (("ref_gaussian", "a Gaussian with the data's moments"), ("ref_floor", "real images")):
        curves.axhline(reference[name], color="0.6", lw=1, ls="--")
        curves.text(3000, reference[name] * 1.03, meaning, ha="right", va="bottom", fontsize=8, color="0.4")
    curves.set(
        xscale="log",
        yscale="log",
        xlabel="training time, in steps of uniform",
        ylabel="Fréchet distance (lower is better)",
        title="During training",
    )
    _set_ticks(curves.xaxis, [750, 1500, 3000])
    _set_ticks(curves.yaxis, [0.2, 0.5, 1, 2, 3])
    curves.legend(loc="lower left", bbox_to_anchor=(0, 0.08), fontsize=8, frameon=False)

    # right: final ratios, a cross of two intervals for each method
    for method, row in ratios.iterrows():
        colour = COLOURS.get(method, "0.5")
        distance, loss = row["distance"], row[LOSS]
        if method != "uniform":
            trade_off.plot([distance["low"], distance["high"]], [loss["ratio"]] * 2, color=colour, lw=1.2)
            trade_off.plot([distance["ratio"]] * 2, [loss["low"], loss["high"]], color=colour, lw=1.2)
        trade_off.plot(distance["ratio"], loss["ratio"], "o", color=colour, ms=5)
        trade_off.annotate(
            NAMES[method],
            (distance["ratio"], loss["ratio"]),
            LABEL_OFFSETS.get(method, (6, 6)),
            textcoords="offset points",
            ha={"uniform": "right", "two_phase": "center"}.get(method, "left"),
            fontsize=8,
            color=colour,
        )
    trade_off.axvline(1, color="0.6", lw=1, ls="--")
    trade_off.axhline(1, color="0.6", lw=1, ls="--")
    trade_off.set(
        xlabel="final distance, relative to uniform",
        ylabel="final velocity error, relative to uniform",
        title="At the end: lower left is better",
        xlim=(0.64, 1.17),
    )
    figure.savefig(path, metadata={"Software": None})


def _draw_curve(axes, rows: pd.DataFrame, colour: str, label: str) -> None:
    """Draw the geometric mean of a method's distance over seeds, by time, and its 95 % interval."""
    logs = rows.assign(log=np.log(rows["distance"])).groupby("time")["log"].agg(["mean", "sem", "count"])
    margin = logs["sem"] * stats.t.ppf(1 - judge.LEVEL / 2, logs["count"] - 1)
    low, high = np.exp(logs["mean"] - margin), np.exp(logs["mean"] + margin)
    axes.fill_between(logs.index, low, high, color=colour, alpha=0.15)
    axes.plot(logs.index, np.exp(logs["mean"]), "o-", color=colour, ms=4, lw=1.5, label=label)


def _mark_speed(axes, rows: pd.DataFrame, speed: float) -> None:
    """Draw an arrow from uniform's final distance back to the time at which `coarse_to_fine` reaches this distance.

    This time is the time of uniform's last snapshot over `speed`, which the label of the arrow contains.
    """
    uniform = rows[rows["method"] == "uniform"]
    end = uniform["time"].max()
    final_distances = uniform[uniform["time"] == end]["distance"]
    value = np.exp(np.log(final_distances).mean())
    axes.annotate(
        "", (end / speed, value), (end, value), arrowprops={"arrowstyle": "->", "color": COLOURS["coarse_to_fine"]}
    )
    axes.annotate(
        f"{speed:.1f} times as fast as uniform",
        (end / speed, value),
        (-4, -4),
        textcoords="offset points",
        ha="right",
        va="top",
        fontsize=8,
        color=COLOURS["coarse_to_fine"],
    )


def _set_ticks(axis, values: list[float]) -> None:
    """Give a logarithmic axis ticks with labels at some values, and no minor ticks."""
    from matplotlib.ticker import NullLocator

    axis.set_ticks(values, labels=[f"{value:,g}" for value in values])
    axis.set_minor_locator(NullLocator())


def main() -> None:
    """Print the table and write the figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=FIGURE, help="the figure (docs/study.png)")
    arguments = parser.parse_args()
    rows = read_results()
    ratios = final_ratios(judge.table(rows))
    draw(rows, ratios, arguments.out)
    print(markdown(ratios))


if __name__ == "__main__":
    main()
