"""Compare the adaptive sampler of Kim et al. (2025), as printed, with uniform timesteps at equal time.

    python studies/adaptive.py tuning --settings digits   # every sampler with every learning rate, two seeds
    python studies/adaptive.py power                      # smallest detectable differences, from the tuning seeds
    python studies/adaptive.py final --settings digits    # the paper's rate and the tuned one, ten fresh seeds
    python studies/adaptive.py judge                      # ratios to uniform by three clocks, in Markdown

studies/adaptive.yaml contains settings, samplers and learning rates of the policy. `tuning` and `final` append their
finished runs to studies/results/adaptive_<round>.csv. A repeated command skips the runs in this table, also on another
machine.

The three clocks: ``time`` counts passes of samples through the network, as studies/judge.py does. ``time_128`` counts
them for a batch of 128, the paper's for CIFAR-10, of which measurements are a smaller part. ``step`` counts steps, as
if measuring were free.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import page
import pandas as pd
import yaml
from judge import log_values_at, power, read_experiment, relative_step_cost, table, write_table
from run import run_experiment
from tuned import has_diverged

from kairos.config.experiment import load
from kairos.files import write_text
from kairos.forward_process import build_process

HERE = Path(__file__).parent
STUDY = yaml.safe_load((HERE / "adaptive.yaml").read_text(encoding="utf-8"))
METRICS = ("distance", "val_loss_epsilon", "val_vlb")
RUN = ["setting", "method", "seed", "step"]  # columns that identify a row
CLOCKS = ("time", "time_128", "step")
CIFAR10_BATCH = 128  # Kim et al. 2025, table 7; tables 8 and 9 (latents) have 24 and 256
SEEDS_PER_EXPERIMENT = 5  # rows are saved after each experiment, so an interruption costs at most these seeds
COMPARISONS = 2 * len(STUDY["samplers"]) * len(STUDY["settings"])  # ratios to uniform in one metric; size of Holm's


def name_method(sampler: str, rate: float) -> str:
    """Return the name of a sampler with a learning rate, for example ``adaptive-lr=0.001``."""
    return f"{sampler}-lr={rate:g}"


def list_methods(round_name: str, setting: str) -> dict[str, dict[str, Any]]:
    """Return the methods of a round in a setting, by name: uniform, and samplers with learning rates.

    Raises:
        SystemExit: the tuning is not finished, which the final round needs.
    """
    methods: dict[str, dict[str, Any]] = {"uniform": {"sampler": "uniform"}}
    for sampler in STUDY["samplers"]:
        rates = STUDY["rates"]
        if round_name == "final":
            rates = sorted({STUDY["settings"][setting]["paper_rate"], select_rate(sampler, setting)})
        for rate in rates:
            methods[name_method(sampler, rate)] = {"sampler": {"name": sampler, "lr": rate}}
    return methods


def select_rate(sampler: str, setting: str) -> float:
    """Return the learning rate with the lowest geometric mean over the tuning seeds, at equal time.

    Raises:
        SystemExit: the tuning is not finished.
    """
    rows = read_table("tuning")
    rows = rows[rows["setting"] == setting]
    if missing := missing_seeds("tuning", setting, list_methods("tuning", setting)):
        raise SystemExit(f"{setting}: seeds {missing} are missing; run python studies/adaptive.py tuning first")
    end_time = rows.loc[rows["method"] == "uniform", "time"].max()
    means = {}
    for rate in STUDY["rates"]:
        method_rows = rows[rows["method"] == name_method(sampler, rate)]
        means[rate] = log_values_at(method_rows, STUDY["settings"][setting]["selected_by"], end_time).mean(skipna=False)
    return min(means, key=lambda rate: math.inf if math.isnan(means[rate]) else means[rate])


def read_table(round_name: str) -> pd.DataFrame:
    """Return the finished runs of a round, a row per snapshot; empty without any."""
    path = HERE / "results" / f"adaptive_{round_name}.csv"
    return pd.read_csv(path) if path.exists() else pd.DataFrame(columns=["setting", "method", "seed"])


def missing_seeds(round_name: str, setting: str, methods: dict[str, Any]) -> list[int]:
    """Return the seeds of a round that lack a method in the table."""
    rows = read_table(round_name)
    rows = rows[rows["setting"] == setting]
    finished = set(zip(rows["method"], rows["seed"]))
    return [seed for seed in STUDY["seeds"][round_name] if any((name, seed) not in finished for name in methods)]


def run_round(round_name: str, setting: str, cores: str) -> int:
    """Run the missing seeds of a round in a setting; save rows after each experiment. Returns Snakemake's status."""
    methods = list_methods(round_name, setting)
    while seeds := missing_seeds(round_name, setting, methods)[:SEEDS_PER_EXPERIMENT]:
        if status := run_block(round_name, setting, methods, seeds, cores):
            return status
    return 0


def run_block(round_name: str, setting: str, methods: dict[str, Any], seeds: list[int], cores: str) -> int:
    """Run some seeds of a round and save their rows. Returns Snakemake's status.

    If a run of a method diverges, the method gets rows without values for all these seeds, and the others run without
    it.
    """
    path = write_experiment(round_name, setting, methods, seeds)
    if status := run_experiment(path, cores):
        diverged = [
            name for name in methods if any(has_diverged(path.parent / "methods" / name, seed) for seed in seeds)
        ]
        if not diverged:
            return status
        steps = load(path).milestones[1:]
        runs = [(setting, name, seed, step) for name in diverged for seed in seeds for step in steps]
        save_rows(round_name, pd.DataFrame(runs, columns=["setting", "method", "seed", "step"]))
        others = {name: method for name, method in methods.items() if name not in diverged}
        return run_block(round_name, setting, others, seeds, cores)
    save_rows(round_name, read_rows(setting, path.parent))
    return 0


def write_experiment(round_name: str, setting: str, methods: dict[str, Any], seeds: list[int]) -> Path:
    """Write the experiment file of some seeds of a round."""
    definition = STUDY["settings"][setting]
    plain: dict[str, Any] = {key: dict(section) for key, section in STUDY["experiment"].items()}
    for section in ("dataset", "autoencoder", "model", "diffusion", "training", "sampling", "evaluation"):
        merged = plain.get(section, {}) | definition.get(section, {})
        plain[section] = definition["model"] if section == "model" and "model" in definition else merged
    name = f"study_adaptive_{round_name}_{setting}_seed{seeds[0]}"
    path = Path("results") / name / "experiment.yaml"
    write_text(path, yaml.safe_dump({"experiment": name, "seeds": seeds, "methods": methods, **plain}, sort_keys=False))
    return path


def read_rows(setting: str, folder: Path) -> pd.DataFrame:
    """Return a row per method, seed and snapshot of an experiment, with the clock ``time_128`` and the last policy."""
    experiment = load(folder / "experiment.yaml")
    schedule = build_process(experiment.diffusion.process, experiment.diffusion.prediction, sigma_data=1.0).schedule
    rows = read_experiment(folder).assign(setting=setting)
    for name, method in experiment.methods.items():
        of_method = rows["method"] == name
        cost = relative_step_cost(method.sampler.build(schedule), CIFAR10_BATCH)
        rows.loc[of_method, "time_128"] = rows.loc[of_method, "step"] * cost
        for seed in experiment.seeds:
            last = (
                (folder / "methods" / name / f"seed{seed}" / "metrics.jsonl")
                .read_text(encoding="utf-8")
                .splitlines()[-1]
            )
            for key, value in json.loads(last).get("sampler", {}).items():
                rows.loc[of_method & (rows["seed"] == seed), f"policy_{key}"] = value
    return rows


def save_rows(round_name: str, rows: pd.DataFrame) -> None:
    """Append rows to the table of a round; rows of equal runs are replaced."""
    write_table(HERE / "results" / f"adaptive_{round_name}.csv", [read_table(round_name), rows], RUN)


def judge_by_clock(clock: str) -> pd.DataFrame:
    """Return the comparison with uniform in the final round by a clock, see ``judge.table``.

    A method is a sampler with the ``paper's rate`` or ``tuned``. If both rates are equal, the runs are in both rows.
    """
    rows = read_table("final")
    parts = []
    for setting, setting_rows in rows.groupby("setting"):
        parts.append(setting_rows[setting_rows["method"] == "uniform"])
        paper_rate = STUDY["settings"][setting]["paper_rate"]
        for sampler in STUDY["samplers"]:
            for label, rate in (("paper's rate", paper_rate), ("tuned", select_rate(sampler, setting))):
                method_rows = setting_rows[setting_rows["method"] == name_method(sampler, rate)]
                parts.append(method_rows.assign(method=f"{sampler}, {label}"))
    rows = pd.concat(parts, ignore_index=True)
    return table(rows.assign(time=rows[clock]), correct_each_metric=True, metrics=METRICS)


def main() -> int:
    """Run a round, or print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["tuning", "final", "power", "judge"])
    parser.add_argument("--settings", nargs="+", choices=STUDY["settings"], default=[*STUDY["settings"]])
    parser.add_argument("--cores", default="2")
    arguments = parser.parse_args()
    if arguments.command == "power":
        rows = read_table("tuning")
        collapsing = [name_method(sampler, max(STUDY["rates"])) for sampler in STUDY["samplers"]]
        rows = rows[~rows["method"].isin(collapsing)]  # runs with and without a collapse vary in another way
        evaluation = power(rows, len(STUDY["seeds"]["final"]), COMPARISONS, METRICS)
        print(evaluation.to_string(index=False, float_format=lambda value: f"{value:.3g}"))
        return 0
    if arguments.command == "judge":
        for clock in CLOCKS:
            print(f"By {clock}:\n\n{page.format_ratios(judge_by_clock(clock))}\n")
        return 0
    for setting in arguments.settings:
        if status := run_round(arguments.command, setting, arguments.cores):
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
