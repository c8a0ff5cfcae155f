"""Compare strategies after equal tuning, as AlgoPerf does: trials, selection, and a final round with fresh seeds.

    python studies/tuned.py rates --settings digits      # learning rates
    python studies/tuned.py options --settings digits    # two values of an option of the strategy, at the best rate
    python studies/tuned.py selection                    # the selected trial of each strategy
    python studies/tuned.py final --settings digits      # the selected trials, and untuned ones
    python studies/tuned.py power                        # three strategies, for `show-power`: which measures count
    python studies/judge.py final --table studies/results/tuned_final.csv --page

studies/tuning.yaml contains strategies and trials. Each round appends its finished runs to
studies/results/tuned_<round>.csv. A repeated command skips the runs in this table, also on another machine.
"""

import argparse
import copy
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from judge import METRICS, final_seeds, log_values_at, power, read_experiment, write_table
from run import run_experiment, write_experiment

from kairos.training.job import read_progress

HERE = Path(__file__).parent
TUNING = yaml.safe_load((HERE / "tuning.yaml").read_text(encoding="utf-8"))
SETTINGS = ["fashion_mnist_latents", "cifar10_edm", "cifar10", "digits", "coco_patches"]
SEEDS = {"power": range(20, 24), "rates": range(30, 32), "options": range(30, 32)}  # of the final round: `final_seeds`
SEEDS_PER_EXPERIMENT = 2  # rows are saved after each experiment, so an interruption costs at most this many seeds
POWER = ("uniform", "log_normal", "coarse_to_fine")  # strategies of the round power
UNTUNED = ("uniform", "auto", "coarse_to_fine")  # strategies that also run at the setting's learning rate
# ratios to uniform in one metric; the size of Holm's correction
COMPARISONS = (len(TUNING["strategies"]) - 1 + len(UNTUNED)) * len(SETTINGS)


@dataclass(frozen=True)
class Trial:
    """A strategy with a factor of the learning rate and, optionally, a value of its tuned option.

    Attributes:
        name: name of the method in experiments and tables.
        strategy: key of studies/tuning.yaml.
        factor: factor of the setting's learning rate.
        value: value of the tuned option; None: its default.
    """

    name: str
    strategy: str
    factor: float = 1
    value: float | None = None

    def method(self, setting: str) -> dict[str, Any]:
        """Return the method of an experiment file: sampler and weighting with their options."""
        definition = define_strategy(self.strategy, setting)
        method = copy.deepcopy(definition["method"])
        if self.value is not None:
            kind, option = definition["option"].split(".")
            component = method.get(kind)
            method[kind] = component if isinstance(component, dict) else {"name": component}
            method[kind][option] = self.value
        return method


def define_strategy(strategy: str, setting: str) -> dict[str, Any]:
    """Return the entry of studies/tuning.yaml of a strategy in a setting."""
    by_name: dict[str, dict[str, Any]] = TUNING["strategies"] | TUNING.get(setting, {})
    return by_name[strategy]


def list_trials(round_name: str, setting: str) -> list[Trial]:
    """Return the trials of a round in a setting, or in the setting in which its strategies are tuned.

    Raises:
        SystemExit: a round that determines the trials is not finished: `rates` for `options`, both for `final`.
    """
    if round_name == "power":
        return [Trial(name, name) for name in POWER]
    setting = TUNING["tuned_in"].get(setting, setting)
    rates = [Trial(name, name, factor) for name in TUNING["strategies"] for factor in TUNING["factors"][setting]]
    if round_name == "rates":
        return rates
    best_rates = select_trials(rates, read_table("rates"), setting)
    options = []
    for name, best in best_rates.items():
        definition = define_strategy(name, setting)
        option = definition.get("option", "").rpartition(".")[2]
        for value in definition.get("values", []):
            options.append(Trial(f"{name}-{option}={value:g}", name, best.factor, value))
    if round_name == "options":
        return options
    tuning_rows = pd.concat([read_table("rates"), read_table("options")], ignore_index=True)
    selected = select_trials([*rates, *options], tuning_rows, setting)
    tuned = [Trial(name, name, best.factor, best.value) for name, best in selected.items()]
    return [*tuned, *(Trial(f"{name}_untuned", name) for name in UNTUNED)]


def select_trials(trials: list[Trial], table: pd.DataFrame, setting: str) -> dict[str, Trial]:
    """Return the best trial of each strategy: the lowest geometric mean over the tuning seeds, at equal time.

    The metric is the setting's `selected_by` in studies/tuning.yaml, or the distance. Time is that of uniform's last
    snapshot. A trial without a value there, because a run diverged, is not selected.

    Raises:
        SystemExit: the table lacks a trial or a seed, or all trials of a strategy diverged.
    """
    rows = table[table["setting"] == setting]
    if not all(is_finished(table, setting, trials, seed) for seed in SEEDS["rates"]):
        raise SystemExit(
            f"{setting}: tuning is not finished; run python studies/tuned.py rates --settings {setting}, then options"
        )
    metric = TUNING.get("selected_by", {}).get(setting, "distance")
    time = rows.loc[rows["method"] == "uniform", "time"].max()
    best: dict[str, Trial] = {}
    best_means: dict[str, float] = {}
    for trial in trials:
        trial_rows = rows[(rows["method"] == trial.name) & (rows["factor"] == trial.factor)]
        mean = log_values_at(trial_rows, metric, time).mean(skipna=False)
        if mean < best_means.get(trial.strategy, math.inf):
            best[trial.strategy], best_means[trial.strategy] = trial, mean
    if diverged := sorted({trial.strategy for trial in trials} - {*best}):
        raise SystemExit(f"{setting}: all trials of {', '.join(diverged)} diverged; lower the factors in tuning.yaml")
    return best


def read_table(round_name: str) -> pd.DataFrame:
    """Return the finished runs of a round, a row per snapshot; empty without any."""
    path = HERE / "results" / f"tuned_{round_name}.csv"
    return (
        pd.read_csv(path) if path.exists() else pd.DataFrame(columns=["setting", "method", "factor", "seed", "value"])
    )


def seeds_of(round_name: str, setting: str) -> range:
    """Return the seeds of a round in a setting."""
    return final_seeds(setting) if round_name == "final" else SEEDS[round_name]


def run_round(round_name: str, setting: str, cores: str) -> int:
    """Run the missing runs of a round in a setting, and save the rows after each experiment.

    Returns Snakemake's exit status.
    """
    trials, seeds = list_trials(round_name, setting), seeds_of(round_name, setting)
    for factor in sorted({trial.factor for trial in trials}):
        for start in range(0, len(seeds), SEEDS_PER_EXPERIMENT):
            table, missing = read_table(round_name), {}  # seeds that the table lacks, by trial
            for trial in trials:
                for seed in seeds[start : start + SEEDS_PER_EXPERIMENT]:
                    if trial.factor == factor and not is_finished(table, setting, [trial], seed):
                        missing.setdefault(trial, []).append(seed)
            missing_seeds = sorted({seed for seeds_of_trial in missing.values() for seed in seeds_of_trial})
            if missing and (status := run_block(round_name, setting, [*missing], missing_seeds, cores)):
                return status
    return 0


def run_block(round_name: str, setting: str, trials: list[Trial], seeds: list[int], cores: str) -> int:
    """Run trials of one factor with some seeds as an experiment, and save their rows. Returns Snakemake's exit status.

    A trial with a diverged run gets rows without values for these seeds, and the others run without it.
    """
    name = f"study_tuned_{round_name}_{setting}_lr{trials[0].factor:g}_seed{seeds[0]}"
    methods = {trial.name: trial.method(setting) for trial in trials}
    path = write_experiment(name, setting, methods, seeds, trials[0].factor)
    if status := run_experiment(path, cores):
        diverged = [
            trial for trial in trials if any(has_diverged(path.parent / "methods" / trial.name, seed) for seed in seeds)
        ]
        if not diverged:
            return status
        steps = yaml.safe_load(path.read_text(encoding="utf-8"))["training"]["milestones"]
        runs = [(trial.name, seed, step) for trial in diverged for seed in seeds for step in steps]
        rows = pd.DataFrame(runs, columns=["method", "seed", "step"])
        rows["time"] = rows["step"].astype(float)
        save_rows(round_name, setting, diverged, rows.assign(**dict.fromkeys(METRICS, math.nan)))
        others = [trial for trial in trials if trial not in diverged]
        return run_block(round_name, setting, others, seeds, cores) if others else 0
    save_rows(round_name, setting, trials, read_experiment(path.parent))
    return 0


def has_diverged(method_folder: Path, seed: int) -> bool:
    """Return True if a training run has ended with a loss or gradient that is not finite."""
    progress = read_progress(method_folder / f"seed{seed}")
    return progress.get("state") == "failed" and not progress["again"] and "not finite" in progress["message"]


def is_finished(table: pd.DataFrame, setting: str, trials: list[Trial], seed: int) -> bool:
    """Return True if the table has rows of every trial with this seed, with the trial's factor and option value."""
    rows = table[(table["setting"] == setting) & (table["seed"] == seed)]
    values = [None if pd.isna(value) else value for value in rows["value"]]
    finished = set(zip(rows["method"], rows["factor"], values))
    return all((trial.name, trial.factor, trial.value) in finished for trial in trials)


def save_rows(round_name: str, setting: str, trials: list[Trial], rows: pd.DataFrame) -> None:
    """Append rows of an experiment to the table of a round; rows of equal runs are replaced.

    In the final round a method has one trial, so all rows of a trial that an earlier tuning selected are dropped.
    """
    by_name = {trial.name: trial for trial in trials}
    rows = rows.assign(
        setting=setting,
        strategy=rows["method"].map(lambda name: by_name[name].strategy),
        factor=rows["method"].map(lambda name: by_name[name].factor),
        value=rows["method"].map(lambda name: by_name[name].value),
    )
    earlier = read_table(round_name)
    for trial in trials if round_name == "final" else ():
        is_method = (earlier["setting"] == setting) & (earlier["method"] == trial.name)
        has_value = earlier["value"].isna() if trial.value is None else earlier["value"] == trial.value
        earlier = earlier[~is_method | ((earlier["factor"] == trial.factor) & has_value)]
    run = ["setting", "method", "seed", "step", "factor", "value"]
    write_table(HERE / "results" / f"tuned_{round_name}.csv", [earlier, rows], run)


def describe_selection(settings: list[str]) -> pd.DataFrame:
    """Return the selected factors and option values: a row per method of the final round, a column per setting.

    Raises:
        SystemExit: the tuning in a setting is not finished.
    """
    columns = {}
    for setting in settings:
        columns[setting] = {trial.name: describe_trial(trial, setting) for trial in list_trials("final", setting)}
    return pd.DataFrame(columns)


def describe_trial(trial: Trial, setting: str) -> str:
    """Return factor and option of a trial, for a table."""
    if trial.value is None:
        return f"{trial.factor:g}"
    option = define_strategy(trial.strategy, setting)["option"].split(".")[1]
    return f"{trial.factor:g}, {option}={trial.value:g}"


def main() -> int:
    """Run a round, or print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=[*SEEDS, "final", "selection", "show-power"])
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=SETTINGS)
    parser.add_argument("--cores", default="2")
    arguments = parser.parse_args()
    if arguments.command == "selection":
        print(describe_selection(arguments.settings).to_string())
        return 0
    if arguments.command == "show-power":
        tables = []
        for setting, rows in read_table("power").groupby("setting"):
            tables.append(power(rows, len(final_seeds(setting)), COMPARISONS))
        if not tables:
            parser.error("show-power: no runs; run python studies/tuned.py power first")
        table = pd.concat(tables)
        print(table.to_string(index=False, float_format=lambda value: f"{value:.3g}"))
        return 0
    for setting in arguments.settings:
        if setting in TUNING["tuned_in"] and arguments.command in ("rates", "options"):
            continue
        if status := run_round(arguments.command, setting, arguments.cores):
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
