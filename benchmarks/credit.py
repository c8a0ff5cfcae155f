"""Measure signal and cost of each estimator of the benefit of timesteps, in a training run on real images.

    python benchmarks/credit.py --out benchmarks/results/credit.csv

A small DiT is trained with uniform timesteps, and is frozen at several steps. Every estimator is measured there many
times on new batches. The data of each measurement are split into two halves.

`correlation` compares the estimates A and B of the two halves, each accumulated over n measurements: it is
sum A·B / sqrt(sum A·A  sum B·B) over groups of n. Estimates by bins of t are centred over t, because their level moves
no density. With signal S and noise N per component in one measurement (both halves), the correlation is
n S/(n S + 2 N). This gives the number of measurements, and so their cost, until an estimate correlates 0.5 with its
repetition: `forwards_for_half`. Costs are forward passes of a batch through the network beyond those of the training
step. A backward pass counts two, a training step 3.

A high correlation shows that an estimator measures something that exists, not that a density made from it trains
better. The root mean squares of losses and gradients estimate noise. The other estimators estimate what a step at t
does to the target. `with_first_order` and `with_regression` are their correlations, over bins and from all
measurements, with the first-order inner product and with the regression of the plain loss. The noise of both lowers
these correlations.

--config replaces the digits by another experiment, whose latents must exist (kairos encode).
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from result_file import write_rows

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))  # the digits as latents are the tests'

from credit_estimators import Array, Estimator, FrozenRun, measure_all
from credit_features import agreement, correlation, feature_vectors
from credit_rewards import reward_noise

from kairos import compute
from kairos.config import load
from kairos.data.latents import open_latents
from kairos.training.loop import train_steps as train
from kairos.training.settings import read_run_settings
from kairos.training.state import TrainingState

BLOCKS = 10  # of measurements, for the jackknife
TRUTHS = {"with_first_order": "first order", "with_regression": "regression, loss"}


def digits(folder: Path, schedule: str) -> tuple[dict[str, Any], Path]:
    """Return an experiment on scikit-learn's digits as 4x4x4 latents, and the folder of the latents.

    The latents are written below `folder` at the first call. `schedule` is the noise schedule.
    """
    from training_case import experiment, make_latents

    plain = experiment(
        {"uniform": {}},
        diffusion__process={"name": "discrete", "timesteps": 1000, "schedule": schedule},
        model={"name": "dit", "patch": 2, "width": 64, "depth": 2, "heads": 4},
        training__batch_size=128,
    )
    latents = folder / "latents"
    return plain, latents if latents.exists() else make_latents(folder, 1797)


def configured(path: Path, schedule: str) -> tuple[dict[str, Any], Path]:
    """Return the experiment of a file with another noise schedule and method uniform, and its folder of latents."""
    experiment = load(path)
    plain = experiment.plain()
    plain["diffusion"]["process"]["schedule"] = schedule
    plain["methods"] = {"uniform": {"sampler": {"name": "uniform"}, "weighting": {"name": "none"}}}
    return plain, Path("results") / experiment.experiment / "latents"


def split_half(estimator: Estimator, n: int, measurements: Array) -> float:
    """Return the correlation of the estimates of the two halves, over groups of about n measurements each.

    Estimates by bins are centred over the bins. The result is 0 if the estimates of a half are all 0. `measurements`
    are indices.
    """
    groups = np.array_split(measurements, max(1, round(len(measurements) / n)))
    estimates = np.array([estimator.estimate(group) for group in groups])  # (groups, 2, components)
    if estimator.profile:
        estimates = estimates - estimates.mean(-1, keepdims=True)
    first, second = estimates[:, 0], estimates[:, 1]
    scale = np.sqrt((first**2).sum() * (second**2).sum())
    return float((first * second).sum() / scale) if scale > 0 else 0.0


def with_error(estimator: Estimator, n: int) -> tuple[float, float]:
    """Return the result of `split_half` for all measurements and its standard error, by a jackknife over blocks."""
    measurements = np.arange(estimator.count)
    blocks = min(BLOCKS, estimator.count)
    without_block = [split_half(estimator, n, measurements[measurements % blocks != block]) for block in range(blocks)]
    return split_half(estimator, n, measurements), float(np.std(without_block) * (blocks - 1) ** 0.5)


def rows_of(run: FrozenRun, schedule: str, count: int) -> list[dict[str, Any]]:
    """Return the table rows of all estimators at one step of a training run, one for each n, see `summaries`.

    The columns `TRUTHS` are empty, except at the largest n of estimators of the target's reduction.
    """
    rows = []
    profiles = {}  # estimate from all measurements, by name
    comparable = {}  # number of measurements of the estimators of the target's reduction, by name
    for estimator in measure_all(run, count):
        if estimator.profile and "rms" not in estimator.name:
            comparable[estimator.name] = estimator.count
        profiles[estimator.name] = estimator.estimate(np.arange(estimator.count)).mean(0)
        # the two components of a policy gradient are correlated: a single pair of estimates would give only a sign
        group_sizes = {1, 10, estimator.count} if estimator.profile else {1, min(10, estimator.count // 2)}
        for n in sorted(group_sizes):
            if n < estimator.least:
                continue
            value, error = with_error(estimator, n)
            rows.append(
                {
                    "schedule": schedule, "step": run.training.step, "estimator": estimator.name, "n": n,
                    "correlation": value, "standard_error": error,
                    "forwards_per_measurement": estimator.cost,
                    **dict.fromkeys(TRUTHS, ""),
                }
            )  # fmt: skip
    for row in rows:
        if row["estimator"] in comparable and row["n"] == comparable[row["estimator"]]:
            for column, name in TRUTHS.items():
                row[column] = correlation(profiles[row["estimator"]], profiles[name])
    return rows


def summaries(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the means of rows over the training steps, one for each schedule, estimator and n.

    Standard errors are combined. The last row of an estimator has the cost of a correlation of 0.5, see `cost_of_half`.
    """
    means = []
    for key in dict.fromkeys((row["schedule"], row["estimator"], row["n"]) for row in rows):  # distinct, in order
        group = [row for row in rows if (row["schedule"], row["estimator"], row["n"]) == key]
        value = float(np.mean([row["correlation"] for row in group]))
        error = float(np.sqrt(np.sum([row["standard_error"] ** 2 for row in group])) / len(group))
        means.append(
            {
                "schedule": key[0], "step": "mean", "estimator": key[1], "n": key[2],
                "correlation": value, "standard_error": error,
                "forwards_per_measurement": group[0]["forwards_per_measurement"],
                **{name: float(np.mean([r[name] for r in group])) if group[0][name] != "" else "" for name in TRUTHS},
            }
        )  # fmt: skip
    for row in means:
        rows_of_estimator = [
            other for other in means if (other["schedule"], other["estimator"]) == (row["schedule"], row["estimator"])
        ]
        is_last = row is rows_of_estimator[-1]
        row["forwards_for_half"] = cost_of_half(rows_of_estimator) if is_last else ""
    return means


def cost_of_half(rows: list[dict[str, Any]]) -> str:
    """Return the forward passes until an estimate correlates 0.5 with its repetition, from the most informative n.

    Two halves of n measurements with correlation r have n S/2 N = r/(1 - r), so whole ones need n (1 - r)/(2 r). A
    correlation below two standard errors gives a lower bound, computed from two standard errors above it.
    """
    if not rows[0]["forwards_per_measurement"]:
        return "0"
    # the most informative row: a correlation near 0.5 with a small error
    best = min(rows, key=lambda row: abs(row["correlation"] - 0.5) + row["standard_error"])
    r, error = best["correlation"], best["standard_error"]
    is_significant = r > 2 * error
    if not is_significant:  # an upper bound of the correlation gives a lower bound of the cost
        r = max(r, 0.0) + 2 * error
    if r >= 1:
        return "unknown"
    forwards = best["n"] * best["forwards_per_measurement"] * (1 - r) / (2 * r)
    return f"{'' if is_significant else '>'}{forwards:.3g}"


def write(path: Path, how: str, rows: list[dict[str, Any]]) -> None:
    """Write rows as CSV, floats with four decimals; `how`, the command and the setting, is the comment in line 1."""
    rounded = []
    for row in rows:
        rounded.append({key: f"{value:.4f}" if isinstance(value, float) else value for key, value in row.items()})
    write_rows(path, rounded, how)


def main() -> None:
    """Measure, print tables and write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, help="an experiment file; default: scikit-learn's digits")
    parser.add_argument("--schedules", nargs="*", default=["linear", "cosine"])
    parser.add_argument("--steps", nargs="*", type=int, default=[100, 300, 900], help="steps of training")
    parser.add_argument("--measurements", type=int, default=45, help="per estimator and step")
    parser.add_argument("--features", action="store_true", help="only the feature vectors of the adaptive sampler")
    parser.add_argument("--rewards", action="store_true", help="only size and noise of the rewards of `adaptive_paper`")
    parser.add_argument("--quick", action="store_true", help="a test run: one schedule, little of everything")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.schedules, arguments.steps, arguments.measurements = ["linear"], [10, 20], 10
    device = compute.setup(1, "auto" if arguments.config else "cpu")
    begun = time.perf_counter()
    rows: list[dict[str, Any]] = []
    features: list[dict[str, Any]] = []
    rewards: list[dict[str, Any]] = []
    steps = 10 if arguments.quick else max(60, arguments.measurements)
    with tempfile.TemporaryDirectory() as folder:
        for schedule in arguments.schedules:
            if arguments.config:
                plain, latents = configured(arguments.config, schedule)
            else:
                plain, latents = digits(Path(folder), schedule)
            training = TrainingState(read_run_settings(plain, "uniform", 0), open_latents(latents), device)
            for until in sorted(arguments.steps):
                for _ in train(training, until):
                    pass
                run = FrozenRun(training)
                if arguments.rewards:
                    row = {"schedule": schedule, "step": until, **reward_noise(run, arguments.measurements)}
                    rewards.append(
                        {key: f"{value:.3g}" if isinstance(value, float) else value for key, value in row.items()}
                    )
                    print(rewards[-1], flush=True)
                    continue
                if not arguments.features:
                    rows += rows_of(run, schedule, arguments.measurements)
                agreement_rows = agreement(feature_vectors(run, steps), min(20, steps // 3), 3, 1 / run.size)
                features += [{"schedule": schedule, "step": until, **row} for row in agreement_rows]
                print(f"{schedule}, step {until}: {time.perf_counter() - begun:.0f} s", flush=True)
    means = summaries(rows)
    for schedule in arguments.schedules:
        print(f"\n{schedule}: correlation of two halves (± standard error), mean over steps {arguments.steps}")
        header = f"{'estimator':<50} {'cost':>5} {'n = 1':>14} {'n = 10':>14} {'all (n)':>20}"
        print(f"{header} {'for 0.5':>7} {'1st':>5} {'regr':>5}")
        for name in dict.fromkeys(row["estimator"] for row in means):
            matching = [row for row in means if (row["schedule"], row["estimator"]) == (schedule, name)]
            last = matching[-1]
            cells = {r["n"]: f"{r['correlation']:.3f} ± {r['standard_error']:.3f}" for r in matching}
            every = f"{cells[last['n']]} ({last['n']})" if last["n"] > 10 else ""
            agree = [f"{last[truth]:.2f}" if last[truth] != "" else "" for truth in TRUTHS]
            print(
                f"{name:<50} {last['forwards_per_measurement']:5.1f} {cells.get(1, ''):>14} {cells.get(10, ''):>14} "
                f"{every:>20} {last['forwards_for_half']:>7} {agree[0]:>5} {agree[1]:>5}"
            )
        header = f"{'features':<50} {'cost':>5} {'VLB':>5} {'Delta, one':>12} {'Delta, batch':>13}"
        print(f"{header} {'S apart':>8} {'S predicts':>11}")
        for name in dict.fromkeys(row["features"] for row in features):
            matching = [row for row in features if (row["schedule"], row["features"]) == (schedule, name)]
            cells = [
                f"{np.mean([row[column] for row in matching]):.2f}" if matching[0][column] != "" else ""
                for column in (
                    "forwards", "vlb_ratio", "delta_with_one_image", "delta_with_batch", "distance_of_S", "S_predicts",
                )
            ]  # fmt: skip
            print(f"{name:<50} {cells[0]:>5} {cells[1]:>5} {cells[2]:>12} {cells[3]:>13} {cells[4]:>8} {cells[5]:>11}")
    print(f"{time.perf_counter() - begun:.0f} s")
    if arguments.out:
        options = f"--steps {' '.join(map(str, arguments.steps))} --measurements {arguments.measurements}"
        options += f" --config {arguments.config}" if arguments.config else ""
        options += " --features" if arguments.features else ""
        options += " --rewards" if arguments.rewards else ""
        how = (
            f"python benchmarks/credit.py {options}: batch "
            f"{run.size}, T {run.schedule.timesteps}, {sum(p.numel() for p in run.network.parameters())} "
            f"parameters, torch {torch.__version__}, {device.type}, 1 thread"
        )
        if rewards:
            write(arguments.out.with_stem(f"{arguments.out.stem}_rewards"), how, rewards)
            return
        if rows:
            write(arguments.out, how, [*means, *rows])
        write(arguments.out.with_stem(f"{arguments.out.stem}_features"), how, features)


if __name__ == "__main__":
    main()
