"""Draw the figure of docs/choosing.md, and print its table, from the committed results of equal tuning.

    python studies/tuned_figure.py                 # prints the table in Markdown and writes docs/tuned.png

Left: final distance of each strategy relative to tuned uniform, by setting. Right: performance profiles, the share of
settings in which a strategy reaches uniform's final distance within a multiple of the fastest strategy's time.

Unfinished settings are left out. The digits are in the table with their validation loss, and not in the figure: ten
seeds cannot detect 25 % in distance there.
"""

import argparse
from pathlib import Path

import judge
import numpy as np
import page
import pandas as pd

STUDIES = Path(__file__).resolve().parent
FIGURE = STUDIES.parent / "docs/tuned.png"
COLUMNS = {  # setting: metric and title of its column
    "fashion_mnist_latents": ("distance", "v in latents (Fashion-MNIST)"),
    "cifar10": ("distance", "flow matching in pixels (CIFAR-10)"),
    "cifar10_edm": ("distance", "EDM in pixels (CIFAR-10)"),
    "digits": ("val_loss_epsilon", "error of epsilon in pixels (digits)"),
}
NAMES = {  # method in the results: name in the figure; for options and weightings see studies/tuning.yaml
    "log_normal": "log_normal",
    "info_noise": "info_noise",
    "coarse_to_fine": "auto+coarse_to_fine",
    "auto": "auto",
    "coarse_to_fine_untuned": "auto+coarse_to_fine, untuned",
    "min_snr": "min_snr",
    "speed": "speed",
    "auto_untuned": "auto, untuned",
    "gradient_norm": "gradient_norm",
    "adaptive": "adaptive",
    "uniform": "uniform",
}
COLOURS_OF_SETTINGS = ("black", "#882255", "#999933")  # left panel
COLOURS_OF_METHODS = (
    "#0072B2",
    "#D55E00",
    "#E69F00",
    "#CC79A7",
    "#56B4E9",
    "#009E73",
    "#999999",
    "#9467BD",
    "black",
    "#882255",
    "#999933",
)


def select_ratios(judged: pd.DataFrame) -> pd.DataFrame:
    """Return the ratios of each setting in its metric, with a row per method, the lowest mean distance first.

    `judged` is the result of ``judge.table``. Columns are pairs of a setting and a column of `judged`, such as
    ``("cifar10_edm", "ratio")``.
    """
    shown = judged[judged["method"] != "uniform_untuned"]
    tables = {}
    for setting, (metric, _) in COLUMNS.items():
        rows = shown[(shown["setting"] == setting) & (shown["metric"] == metric)]
        if not rows.empty:
            tables[setting] = rows.set_index("method")
    distances = shown[(shown["metric"] == "distance") & shown["setting"].isin(_settings_of_figure())]
    return pd.concat(tables, axis="columns").loc[page.mean_ratios(distances).index]


def _settings_of_figure() -> list[str]:
    """Return the settings whose distance is drawn."""
    return [setting for setting, (metric, _) in COLUMNS.items() if metric == "distance"]


def markdown(ratios: pd.DataFrame) -> str:
    """Return the table of the page in Markdown: ratios to uniform, bold if the corrected p is below 0.05.

    uniform's row contains the values. `ratios` is the result of `select_ratios`.
    """
    settings = ratios.columns.unique(0)
    distances = _settings_of_figure()
    lines = [f"| strategy | {' | '.join(COLUMNS[setting][1] for setting in settings)} |"]
    lines.append("|---" * (len(settings) + 1) + "|")
    for method, row in ratios.iterrows():
        cells = [_cell(row[setting], method, decimals=2 if setting in distances else 3) for setting in settings]
        lines.append(f"| {NAMES[method]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(row: pd.Series, method: str, decimals: int) -> str:
    """Return the ratio with its interval, or the value if the method is uniform."""
    if method == "uniform":
        return f"{row['value']:.3g}"
    text = f"{row['ratio']:.{decimals}f} ({row['low']:.{decimals}f} to {row['high']:.{decimals}f})"
    return f"**{text}**" if row["p_holm"] < judge.LEVEL else text


def draw(ratios: pd.DataFrame, times: pd.DataFrame, path: Path) -> None:
    """Write the figure to the file `path`.

    Args:
        ratios: result of `select_ratios`.
        times: times to uniform's final distance relative to the fastest strategy's, by method and setting; inf if it
            is not reached. See ``judge.relative_times_to_target``.
        path: the file.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    figure = Figure(figsize=(11, 4.2), layout="constrained", dpi=120)
    left, right = figure.subplots(1, 2)
    settings = [setting for setting in _settings_of_figure() if setting in ratios.columns.unique(0)]

    # left: an interval per strategy and setting
    methods = [method for method in ratios.index[::-1] if method != "uniform"]  # from the bottom to the top
    for number, (setting, colour) in enumerate(zip(settings, COLOURS_OF_SETTINGS)):
        shift = 0.2 * ((len(settings) - 1) / 2 - number)
        for height, method in enumerate(methods):
            row = ratios.loc[method, setting]
            left.plot([row["low"], row["high"]], [height + shift] * 2, color=colour, lw=1.5)
            face = colour if row["p_holm"] < judge.LEVEL else "white"
            left.plot(row["ratio"], height + shift, "o", color=colour, mfc=face, ms=5)
        left.plot([], [], "o-", color=colour, lw=1.5, ms=5, label=COLUMNS[setting][1])  # for the legend
    left.axvline(1, color="0.5", lw=1, ls="--")
    left.set(
        xscale="log",
        xlim=(0.15, 1.35),  # leaves space for the legend
        yticks=range(len(methods)),
        yticklabels=[NAMES[method] for method in methods],
        xlabel="Fréchet distance / tuned uniform's\n95 % interval; filled: corrected p < 0.05",
        title="At equal time: left is better",
    )
    ticks = [0.2, 0.3, 0.5, 0.7, 1]
    left.xaxis.set_ticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    left.xaxis.set_minor_locator(NullLocator())
    left.legend(fontsize=8, frameon=False, loc="lower left")

    # right: performance profiles
    times = times.loc[ratios.index, settings]
    values = times.to_numpy()
    largest = values[np.isfinite(values)].max() * 1.05
    for number, (method, colour) in enumerate(zip(times.index, COLOURS_OF_METHODS)):
        multiples, shares = page.profile_curve(times.loc[method], largest)
        shifted = [share - 0.008 * number for share in shares]  # so that equal curves stay visible
        right.step(multiples, shifted, where="post", color=colour, lw=1.5, label=NAMES[method])
    right.set(
        xscale="log",
        xlabel="time to tuned uniform's distance\n/ fastest strategy's time",
        ylabel="settings",
        title="Performance profiles: upper left is better",
        yticks=np.arange(len(settings) + 1) / len(settings),
        yticklabels=[f"{number} of {len(settings)}" for number in range(len(settings) + 1)],
    )
    ticks = [tick for tick in (1, 1.5, 2, 3, 4, 6) if tick <= largest]
    right.xaxis.set_ticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    right.xaxis.set_minor_locator(NullLocator())
    right.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, metadata={"Software": None})


def main() -> None:
    """Print the table and write the figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=FIGURE, help="the figure (docs/tuned.png)")
    arguments = parser.parse_args()
    rows = judge.drop_unfinished_settings(pd.read_csv(STUDIES / "results/tuned_final.csv"))
    ratios = select_ratios(judge.table(rows, correct_each_metric=True))
    draw(ratios, judge.relative_times_to_target(rows, "distance"), arguments.out)
    print(markdown(ratios))


if __name__ == "__main__":
    main()
