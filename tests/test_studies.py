"""Tests of the studies: statistics of tables with known ratios, and the experiment files."""

import math
import os
import re
import runpy
from pathlib import Path

import adaptive
import judge
import numpy as np
import page
import pandas as pd
import pytest
import torch
import tuned

from kairos.config.experiment import load
from kairos.training import job
from marks import mark_long

STUDIES = Path(__file__).parent.parent / "studies"
run = runpy.run_path(str(STUDIES / "run.py"))
why = runpy.run_path(str(STUDIES / "why/measure.py"))
TUNED_SETTINGS = [setting for setting in tuned.SETTINGS if setting not in tuned.TUNING["tuned_in"]]


def curves(methods, seeds=8, deviation=0.0, metrics=judge.METRICS):
    """Return curves value = 100 f / time with log-normal noise per run.

    Args:
        methods: f and cost of a step, by method.
        seeds: number of seeds.
        deviation: standard deviation of the noise of the logarithm.
        metrics: names of the metrics, which all have these values.
    """
    noise, rows = np.random.default_rng(0).normal(0, deviation, (len(methods), seeds)), []
    for (method, (factor, cost)), method_noise in zip(methods.items(), noise):
        for seed in range(seeds):
            for step in (100, 200, 400, 800):
                value = 100 * factor * math.exp(method_noise[seed] + 0.3 * seed) / (step * cost)
                line = {"setting": "s", "method": method, "seed": seed, "step": step, "time": step * cost}
                rows.append({**line, **dict.fromkeys(metrics, value), "ref_floor": 0.01, "ref_gaussian": 10.0})
    return pd.DataFrame(rows)


def test_methods_are_compared_at_equal_time_and_not_at_equal_steps():
    table = judge.table(curves({"uniform": (1, 1), "min_snr": (0.8, 1), "gradient_norm": (0.5, 1.5)}, 4, 1e-9))
    table = table[table["metric"] == "distance"].set_index("method")
    assert table["ratio"].to_dict() == pytest.approx({"uniform": 1, "min_snr": 0.8, "gradient_norm": 0.5})
    assert table.loc["gradient_norm", "to_uniform"] == pytest.approx(2)  # values are inversely proportional to time
    assert table.loc["gradient_norm", "to_fixed"] == pytest.approx(1.6) and set(table["best_fixed"]) == {"min_snr"}
    # uniform does not reach the final value of min_snr; min_snr reaches the final value of uniform earlier
    assert table.loc["uniform", "to_fixed"] == pytest.approx(0.8)


def test_any_method_can_be_the_baseline():
    rows = curves({"uniform": (1, 1), "min_snr": (0.8, 1), "p2": (2, 1)}, 4, 1e-9)
    table = judge.table(rows, baseline="min_snr").query("metric == 'distance'").set_index("method")
    assert table["ratio"].to_dict() == pytest.approx({"uniform": 1.25, "min_snr": 1, "p2": 2.5})
    lines = page.format_ratios(judge.table(rows, baseline="min_snr")).splitlines()
    assert lines[2].startswith("| min_snr |") and "(" not in lines[2]  # a value
    assert lines[3].startswith("| uniform | 1.250 (")


def test_the_goal_is_judged_against_the_best_fixed_method_and_over_all_settings():
    first = curves({"uniform": (1, 1), "min_snr": (0.8, 1), "p2": (2, 1), "auto": (0.4, 1)}, 5, 1e-6)
    second = curves({"uniform": (1, 1), "min_snr": (1.2, 1), "p2": (0.5, 1), "auto": (1, 1)}, 5, 1e-6)
    table = judge.goal(pd.concat([first, second.assign(setting="t")]), "auto")
    table = table[table["metric"] == "distance"].set_index(["question", "setting"])
    assert table["best_fixed"].tolist() == ["min_snr", "p2", ""] * 3
    ratios = table["ratio"].unstack()
    assert ratios.loc["value over the best fixed"].to_dict() == pytest.approx({"s": 0.5, "t": 2, "all": 1}, rel=1e-4)
    assert ratios.loc["speed to the best fixed", "s"] == pytest.approx(2, rel=1e-4)
    assert ratios.loc["speed to the best fixed", "t"] == pytest.approx(
        0.5, rel=1e-4
    )  # the reciprocal, as for two methods in exchanged roles
    assert ratios.loc["speed to uniform"].to_dict() == pytest.approx({"s": 2.5, "t": 1, "all": 2.5**0.5}, rel=1e-4)
    assert table.loc[("speed to uniform", "s"), "p_holm"] < 1e-6 < 0.5 < table.loc[("speed to uniform", "t"), "p"]


def test_a_slow_method_is_compared_within_the_common_time_only():
    rows = curves({"uniform": (1, 1), "gradient_norm": (1, 2)}, 3)
    half = rows[(rows["method"] == "uniform") & (rows["step"] <= 400)]
    assert judge.log_values_at(half, "distance", 800).isna().all()
    assert judge.log_values_at(half, "distance", 400).notna().all()
    values = judge.log_values_at(rows[rows["method"] == "gradient_norm"], "distance", 800)
    assert values.tolist() == pytest.approx([math.log(100 / 800) + 0.3 * seed for seed in range(3)])


def test_page_and_figure_show_every_method_in_order_of_its_distance(tmp_path):
    rows = curves({"uniform": (1, 1), "p2": (1.5, 1), "min_snr": (0.8, 1)}, 4, 1e-3)
    shorter = rows[(rows["setting"] == "s") & ((rows["method"] != "p2") | (rows["step"] < 800))].assign(setting="other")
    table = judge.table(pd.concat([rows, shorter]))
    lines = page.format_ratios(table).splitlines()
    assert lines[0] == "| distance | other | s |" and [line.split()[1] for line in lines[2:5]] == [
        "min_snr",
        "uniform",
        "p2",
    ]
    assert re.match(r"\| min_snr \| (0\.\d{3} \((0\.\d{3}) to 0\.8\d\d, p \d\.\de-\d\d\) \| ?){2}$", lines[2])
    cells = lines[4].split(" | ")
    assert cells[0] == "| p2" and cells[2].startswith("1.")
    page.draw(table, tmp_path / "figure.png", judge.METRICS[:2], judge.LEVEL)
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_settings_without_all_seeds_of_all_methods_are_left_out(capsys):
    rows = curves({"uniform": (1, 1), "p2": (1.5, 1)}, len(judge.final_seeds("s")))
    rows["seed"] += judge.final_seeds("s").start
    first = rows["seed"].min()
    lacks_method = rows[rows["method"] == "p2"].assign(setting="lacks a method")
    lacks_seed = rows[(rows["method"] == "p2") | (rows["seed"] > first)].assign(setting="lacks a seed")
    two_seeds = rows[rows["seed"] < first + 2].assign(setting="has two seeds of each method")
    kept = judge.drop_unfinished_settings(pd.concat([lacks_method, rows, lacks_seed, two_seeds]))
    assert set(kept["setting"]) == {"s"} and len(kept) == len(rows)
    assert capsys.readouterr().err.count("left out") == 3


def test_a_profile_shows_in_how_many_settings_a_method_is_as_fast_as_the_fastest(tmp_path):
    # values are inversely proportional to time: a factor f reaches uniform's value after f times its time
    first = curves({"uniform": (1, 1), "min_snr": (0.5, 1), "p2": (2, 1)})
    second = curves({"uniform": (1, 1), "min_snr": (0.8, 1), "p2": (0.4, 1)})
    times = judge.relative_times_to_target(pd.concat([first, second.assign(setting="t")]), "distance")
    assert times["s"].to_dict() == pytest.approx({"uniform": 2, "min_snr": 1, "p2": math.inf})
    assert times["t"].to_dict() == pytest.approx({"uniform": 2.5, "min_snr": 2, "p2": 1})
    assert page.profile_curve(times.loc["min_snr"], 4) == ([1, pytest.approx(1), pytest.approx(2), 4], [0, 0.5, 1, 1])
    assert page.profile_curve(times.loc["p2"], 4) == ([1, pytest.approx(1), 4], [0, 0.5, 0.5])
    # a method that costs twice the time of uniform's step reaches the value only after uniform's last snapshot
    costly = curves({"uniform": (1, 1), "gradient_norm": (1.5, 2)})
    assert judge.relative_times_to_target(costly, "distance")["s"]["gradient_norm"] == math.inf
    page.draw_profile({"distance": times}, tmp_path / "profile.png")
    unfinished = times.assign(t=math.nan)  # no method has run in this setting
    page.draw_profile({"distance": unfinished, "val_loss_epsilon": unfinished[["t"]]}, tmp_path / "unfinished.png")
    assert (tmp_path / "profile.png").stat().st_size > 1000
    first_row = page.format_times({"distance": times}).splitlines()[2]
    assert first_row == "| min_snr | 1.00 | 2.00 |"


def test_power_pools_the_standard_deviations_of_the_methods():
    rows = curves({"uniform": (1, 1), **{f"m{k}": (0.9, 1) for k in range(40)}}, 10, 0.1)
    row = judge.power(rows, 8, 27).set_index("metric").loc["distance"]
    # all ratios share the noise of uniform
    assert row["spread_of_log_ratio"] == pytest.approx(0.1 * math.sqrt(2), rel=0.4)
    assert (row["floor"], row["gaussian"]) == (0.01, 10)


def test_every_round_has_valid_experiment_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seeds = []
    for name, (round_seeds, factors) in run["ROUNDS"].items():
        paths = run["write_round"](name, run["SETTINGS"], None)
        assert len(paths) == len(run["SETTINGS"]) * len(factors)
        rates = {load(path).plain()["training"]["optimizer"]["lr"] for path in paths}
        assert rates == {factor * 1e-3 for factor in factors}
        seeds.append({*round_seeds})
    assert not seeds[0] & seeds[1]
    with pytest.raises(SystemExit, match=r"--methods: got other, allowed: uniform"):
        run["write_round"]("first", ["digits"], ["uniform", "other"])


def test_a_final_round_runs_what_is_missing_and_has_one_trial_of_a_method(tables, monkeypatch):
    finish("rates", "digits", {("speed", 2): 1.0})
    finish("options", "digits", {})
    runs = []

    def run_block(round_name, setting, trials, seeds, cores):
        runs.extend((trial.name, trial.factor, trial.value, seed) for trial in trials for seed in seeds)
        rows = [{"method": trial.name, "seed": seed, "step": 9, "time": 9} for trial in trials for seed in seeds]
        tuned.save_rows(round_name, setting, trials, pd.DataFrame(rows).assign(**dict.fromkeys(judge.METRICS, 1.0)))
        return 0

    monkeypatch.setattr(tuned, "run_block", run_block)
    assert tuned.run_round("final", "digits", "1") == 0
    trials = tuned.list_trials("final", "digits")
    assert len(runs) == len(trials) * len(judge.final_seeds("digits"))
    runs.clear()
    finish("options", "digits", {("speed-k=10", 2): 0.5})  # another trial of speed is the best
    assert tuned.run_round("final", "digits", "1") == 0
    assert {run[:3] for run in runs} == {("speed", 2, 10)} and len(runs) == len(judge.final_seeds("digits"))
    rows = tuned.read_table("final")
    assert len(rows) == len(trials) * len(judge.final_seeds("digits")) and not rows.duplicated(["method", "seed"]).any()


def test_a_setting_in_which_nothing_is_tuned_has_the_trials_of_another(tables):
    finish("rates", "cifar10", {("speed", 2): 1.0})
    finish("options", "cifar10", {("speed-k=10", 2): 0.5})
    final = tuned.list_trials("final", "coco_patches")
    assert final == tuned.list_trials("final", "cifar10") and final[3].value == 10
    path = tuned.write_experiment("x", "coco_patches", {"speed": final[3].method("coco_patches")}, [40], 2)
    assert load(path).plain()["dataset"]["path"] == "data/coco_patches.parquet"


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """Let the rounds of equal tuning write their tables and experiments to an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tuned, "HERE", tmp_path)
    (tmp_path / "results").mkdir()
    return tmp_path


def finish(which, setting, values):
    """Save rows of all trials of a round, in the time of uniform; `values` has the distance by name and factor."""
    for seed in tuned.SEEDS[which]:
        for trial in tuned.list_trials(which, setting):
            value = values.get((trial.name, trial.factor), 2.0)
            rows = [{"method": trial.name, "seed": seed, "step": step, "time": step} for step in (10, 20)]
            metrics = dict.fromkeys(judge.METRICS, value)
            tuned.save_rows(which, setting, [trial], pd.DataFrame([{**row, **metrics} for row in rows]))


@pytest.mark.parametrize("setting", mark_long(TUNED_SETTINGS, ["fashion_mnist_latents"]))
def test_trials_of_every_round_are_valid_and_the_best_ones_are_judged(tables, setting):
    with pytest.raises(SystemExit, match=rf"{setting}: tuning is not finished"):
        tuned.list_trials("options", setting)
    finish(
        "rates",
        setting,
        {
            ("speed", 2): 1.0,
            ("adaptive", 4): math.nan,
            ("min_snr", 4): 1.5,
            ("auto", 4): 1.5,
            ("coarse_to_fine", 2): 1.5,
        },
    )
    options = tuned.list_trials("options", setting)
    assert {trial.factor for trial in options if trial.strategy == "speed"} == {2}
    assert {trial.factor for trial in options if trial.strategy == "min_snr"} == {4}
    with pytest.raises(SystemExit, match=rf"{setting}: tuning is not finished"):
        tuned.list_trials("final", setting)
    finish("options", setting, {("speed-k=10", 2): 0.5, ("min_snr-gamma=1", 4): 1.9})
    final = {trial.name: trial for trial in tuned.list_trials("final", setting)}
    assert (final["speed"].factor, final["speed"].value) == (2, 10)  # an option improved on the best rate
    assert (final["min_snr"].factor, final["min_snr"].value) == (4, None)  # here neither value did
    assert final["adaptive"].factor != 4  # diverged
    assert (final["auto"].factor, final["coarse_to_fine"].factor) == (4, 2)  # without options, but with rates
    untuned = [final[f"{name}_untuned"] for name in tuned.UNTUNED]
    assert [(trial.strategy, trial.factor) for trial in untuned] == [(name, 1) for name in tuned.UNTUNED]
    for which in ("rates", "options", "final"):
        for trial in tuned.list_trials(which, setting):
            path = tuned.write_experiment(
                "x", setting, {trial.name: trial.method(setting)}, tuned.seeds_of(which, setting), trial.factor
            )
            assert load(path).plain()["training"]["optimizer"]["lr"] == trial.factor * 1e-3
    assert len(tuned.describe_selection([setting])) == len(final)


def test_seeds_of_tuning_and_of_the_final_round_differ():
    final = {seed for setting in tuned.SETTINGS for seed in judge.final_seeds(setting)}
    earlier = {seed for which in ("power", "rates", "options") for seed in tuned.SEEDS[which]}
    assert not final & earlier and not final & {seed for seeds, _ in run["ROUNDS"].values() for seed in seeds}


def test_a_round_continues_from_its_table(tables, monkeypatch):
    started = []

    def run_experiment(path, cores):
        started.append(load(path))
        return 0

    def read_experiment(folder):
        experiment = started[-1]
        runs = [(method, seed) for method in experiment.methods for seed in experiment.seeds]
        rows = [{"method": method, "seed": seed, "step": 10, "time": 10.0, "distance": 1.0} for method, seed in runs]
        return pd.DataFrame(rows).assign(val_loss_epsilon=1.0, val_mlperf8=1.0)

    monkeypatch.setattr(tuned, "run_experiment", run_experiment)
    monkeypatch.setattr(tuned, "read_experiment", read_experiment)
    assert tuned.run_round("rates", "cifar10", "1") == 0
    assert [experiment.plain()["training"]["optimizer"]["lr"] for experiment in started] == [1e-3, 2e-3, 4e-3]
    table = tuned.read_table("rates")
    assert tuned.run_round("rates", "cifar10", "1") == 0 and len(started) == 3  # nothing is missing
    table[(table["factor"] != 2) | (table["seed"] != 31)].to_csv("results/tuned_rates.csv", index=False)
    assert tuned.run_round("rates", "cifar10", "1") == 0
    assert [*started[3].seeds] == [31] and len(started) == 4
    pd.testing.assert_frame_equal(
        tuned.read_table("rates").sort_values(["factor", "method", "seed"], ignore_index=True),
        table.sort_values(["factor", "method", "seed"], ignore_index=True),
    )


def test_a_diverged_trial_does_not_stop_its_round(tables, monkeypatch):
    """The simulated Snakemake fails while a diverging method is part of the experiment."""
    experiments = []

    def run_experiment(path, cores):
        experiments.append(load(path))
        diverging = "speed" in experiments[-1].methods and path.parent.name.endswith("lr4_seed30")
        if diverging:
            state = path.parent / "methods" / "speed" / "seed31" / ".state"
            state.mkdir(parents=True)
            job.ProgressFile(state, 10).write_end("failed", "step 7: loss nan: not finite", again=False)
        return int(diverging)

    def read_experiment(folder):
        methods = [method for method in experiments[-1].methods for _ in range(2)]
        rows = pd.DataFrame({"method": methods, "seed": [30, 31] * (len(methods) // 2), "step": 10, "time": 10.0})
        return rows.assign(**dict.fromkeys(judge.METRICS, 1.0))

    monkeypatch.setattr(tuned, "run_experiment", run_experiment)
    monkeypatch.setattr(tuned, "read_experiment", read_experiment)
    assert tuned.run_round("rates", "cifar10", "1") == 0
    assert "speed" not in experiments[-1].methods and len(experiments) == 4
    rows = tuned.read_table("rates").query("method == 'speed' and factor == 4")
    assert {*rows["seed"]} == {30, 31} and rows["distance"].isna().all()
    assert tuned.run_round("rates", "cifar10", "1") == 0 and len(experiments) == 4  # nothing is missing
    monkeypatch.setattr(tuned, "run_experiment", lambda path, cores: 3)  # a failure that is no divergence
    assert tuned.run_round("rates", "digits", "1") == 3


@pytest.mark.parametrize("setting", adaptive.STUDY["settings"])
def test_the_adaptive_samplers_run_with_the_paper_s_rate_and_the_selected_one(setting, tmp_path, monkeypatch):
    """In the table, the rate 1e-4 is best for one sampler, and the paper's rate for the other two."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(adaptive, "HERE", tmp_path)
    with pytest.raises(SystemExit, match="tuning first"):
        adaptive.list_methods("final", setting)
    methods = adaptive.list_methods("tuning", setting)
    assert len(methods) == 1 + 3 * 3
    path = adaptive.write_experiment("tuning", setting, methods, [60, 61])
    experiment = load(path)
    assert experiment.seeds == [60, 61] and {*experiment.methods} == {*methods}
    assert experiment.plain()["methods"]["adaptive_paper-lr=0.01"]["sampler"]["lr"] == 0.01

    paper_rate = adaptive.STUDY["settings"][setting]["paper_rate"]
    best = {"adaptive_paper": 1e-4, "adaptive_official": paper_rate, "adaptive": paper_rate}
    rows = []
    for name, method in methods.items():
        is_best = method["sampler"] != "uniform" and best[method["sampler"]["name"]] == method["sampler"]["lr"]
        for seed in (60, 61):
            for step in (500, 1000):
                value = 100 / step * (0.5 if is_best else 1)
                times = dict.fromkeys(adaptive.CLOCKS, step)
                run = {"setting": setting, "method": name, "seed": seed}
                rows.append({**run, **times, **dict.fromkeys(adaptive.METRICS, value)})
    (tmp_path / "results").mkdir(exist_ok=True)
    pd.DataFrame(rows).to_csv(tmp_path / "results/adaptive_tuning.csv", index=False)
    final = adaptive.list_methods("final", setting)
    assert final.keys() == {
        "uniform",
        "adaptive_paper-lr=0.0001",
        *(f"{sampler}-lr={paper_rate:g}" for sampler in best),
    }
    assert adaptive.missing_seeds("tuning", setting, methods) == []
    assert adaptive.missing_seeds("final", setting, final) == list(range(70, 80))

    finals = pd.DataFrame(rows).query("method in @final")
    pd.DataFrame(finals).to_csv(tmp_path / "results/adaptive_final.csv", index=False)
    table = adaptive.judge_by_clock("step").query("metric == 'val_vlb'").set_index("method")
    assert table.loc["adaptive_paper, tuned", "ratio"] == pytest.approx(0.5)
    assert table.loc["adaptive_paper, paper's rate", "ratio"] == pytest.approx(1)
    assert table.loc["adaptive, tuned", "ratio"] == table.loc["adaptive, paper's rate", "ratio"]


def test_a_collapsed_policy_does_not_stop_the_round_of_the_adaptive_samplers(tmp_path, monkeypatch):
    """The simulated Snakemake fails while a diverging method is part of the experiment."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(adaptive, "HERE", tmp_path)
    diverging, experiments = "adaptive_paper-lr=0.01", []

    def run_experiment(path, cores):
        experiments.append(load(path))
        if diverging in experiments[-1].methods:
            state = path.parent / "methods" / diverging / "seed60" / ".state"
            state.mkdir(parents=True)
            job.ProgressFile(state, 10).write_end("failed", "step 7: the gradient is not finite", again=False)
            return 1
        return 0

    def read_rows(setting, folder):
        runs = [(setting, name, seed, 1000) for name in experiments[-1].methods for seed in experiments[-1].seeds]
        return pd.DataFrame(runs, columns=["setting", "method", "seed", "step"]).assign(distance=1.0)

    monkeypatch.setattr(adaptive, "run_experiment", run_experiment)
    monkeypatch.setattr(adaptive, "read_rows", read_rows)
    assert adaptive.run_round("tuning", "digits", "1") == 0 and len(experiments) == 2
    table = adaptive.read_table("tuning")
    assert table.loc[table["method"] == diverging, "distance"].isna().all()
    assert table.loc[table["method"] != diverging, "distance"].notna().sum() == 9 * 2
    assert adaptive.run_round("tuning", "digits", "1") == 0 and len(experiments) == 2  # nothing is missing


def test_holms_correction_is_over_all_rows_or_over_those_of_a_metric():
    rows = curves({"uniform": (1, 1), "min_snr": (0.9, 1), "p2": (0.8, 1)}, 6, 0.1)
    p_values = judge.table(rows).dropna(subset="p").groupby("metric")["p"]
    corrected = judge.table(rows, correct_each_metric=True).groupby("metric")["p_holm"]
    assert 6 * p_values.min().min() < 1 and (p_values.count() == 2).all() and len(p_values) == 3
    assert corrected.min().tolist() == pytest.approx((2 * p_values.min()).clip(upper=1).tolist())
    assert judge.table(rows)["p_holm"].min() == pytest.approx(6 * p_values.min().min())


def test_an_incomplete_setting_is_skipped_with_a_reason(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (path,) = run["write_round"]("first", ["digits"], ["uniform"])
    (path.parent / "report.html").touch()  # a report of fewer methods
    assert judge.read_round("first").empty
    assert re.search(
        r"study_first_digits is skipped: results/study_first_digits/.* is missing", capsys.readouterr().err
    )


def test_the_posterior_mean_is_the_nearest_image_at_low_noise_and_the_mean_at_high_noise():
    images, one = torch.randn(5, 1, 2, 2, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    for image in images:
        mean = why["posterior_mean"](0.9 * image[None], 0.9 * one, 1e-3 * one, images)
        torch.testing.assert_close(mean[0], image)
    torch.testing.assert_close(
        why["posterior_mean"](images[:1], 1e-4 * one, one, images)[0], images.mean(0), atol=1e-3, rtol=0
    )
    weights = torch.tensor(
        [1.0, math.exp(-2)], dtype=torch.float64
    )  # two images at a distance of 2; x_t is the first one
    pair = torch.tensor([0.0, 2.0], dtype=torch.float64).view(2, 1, 1, 1)
    assert why["posterior_mean"](pair[:1], one, one, pair).item() == pytest.approx(
        float(2 * weights[1] / weights.sum())
    )


def test_the_best_density_reduces_noise_if_the_variance_differs_between_levels():
    levels = pd.DataFrame(
        {"loss": "training", "step": 5, "u_low": [0, 0.5], "u_high": [0.5, 1], "variance": [1.0, 9.0]}
    )
    other = levels.assign(loss="preconditioned", variance=1.0)
    noise = why["relative_noise_of_best_density"](pd.concat([levels, other, levels.assign(step=7, variance=2.0)]))
    assert noise.to_dict() == pytest.approx({5: 0.8, 7: 1.0})


def read_rounds(*names):
    """Return the tables of some rounds as one table."""
    return pd.concat((pd.read_csv(STUDIES / f"results/{name}.csv") for name in names), ignore_index=True)


@pytest.mark.long
def test_the_readme_contains_the_tables_of_the_rounds():
    text = "".join((STUDIES / name).read_text(encoding="utf-8") for name in ("README.md", "rejected.md"))
    assert page.format_ratios(judge.table(read_rounds("second", "third"))) in text
    assert page.format_rates(judge.rates(read_rounds("second", "third", "rates"))) in text


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--table", "absent.csv"], "--table: absent.csv cannot be read (No such file or directory)"),
        (["--table", os.devnull], "--table: a file is not CSV"),
        (["--table", str(STUDIES / "README.md")], "--table: a file is not CSV"),
        (["--table", str(STUDIES / "why/digits.csv")], "--table: no column distance, "),
        (["--goal", "other"], "--goal: got other, allowed: auto, "),
        (["--power", "--seeds", "1"], "--seeds: got 1, allowed: at least 2"),
        (["--power", "--comparisons", "0"], "--comparisons: got 0, allowed: at least 1"),
        (["--goal", "auto", "--page"], "--page and --figure show the table"),
    ],
)
def test_bad_arguments_are_rejected_without_a_traceback(monkeypatch, capsys, arguments, error):
    monkeypatch.setattr("sys.argv", ["judge.py", "second", "--table", str(STUDIES / "results/second.csv"), *arguments])
    with pytest.raises(SystemExit, match="2"):
        judge.main()
    assert error in capsys.readouterr().err


def run_judge(monkeypatch, capsys, tmp_path, rows, *arguments):
    """Run the program on a table of the second round, and return what it prints to standard output and error."""
    rows.to_csv(tmp_path / "table.csv", index=False)
    monkeypatch.setattr("sys.argv", ["judge.py", "second", "--table", str(tmp_path / "table.csv"), *arguments])
    judge.main()
    return capsys.readouterr()


PARTIAL_METHODS = {"uniform": (1, 1), "min_snr": (0.8, 1), "auto": (0.7, 1)}


@pytest.mark.parametrize("method", ["uniform", "auto", "min_snr"])
@pytest.mark.parametrize("evaluation", ["--page", "--goal", "--power", "--profile", "--figure"])
def test_a_method_may_lack_a_seed(monkeypatch, capsys, tmp_path, method, evaluation):
    rows = curves(PARTIAL_METHODS, 3, 0.1)
    rows = rows[(rows["method"] != method) | (rows["seed"] > 0)]
    values = {"--goal": ["auto"], "--profile": [str(tmp_path / "out.png")], "--figure": [str(tmp_path / "out.png")]}
    output = run_judge(monkeypatch, capsys, tmp_path, rows, evaluation, *values.get(evaluation, []))
    assert "distance" in output.out and not output.err
    if evaluation == "--page":
        cells = dict(re.findall(r"^\| (\w+) \| (.*) \|$", output.out.split("\n\n")[0], re.MULTILINE))
        unfinished = {name for name, cell in cells.items() if cell == "unfinished"}
        assert "nan" not in output.out and unfinished == ({"auto", "min_snr"} if method == "uniform" else set())


@pytest.mark.parametrize("absent", ["uniform", "auto"])
def test_a_setting_without_a_required_method_is_left_out(monkeypatch, capsys, tmp_path, absent):
    rows = curves(PARTIAL_METHODS, 3, 0.1)
    partial = rows[rows["method"] != absent].assign(setting="partial")
    output = run_judge(monkeypatch, capsys, tmp_path, pd.concat([rows, partial]), "--goal", "auto")
    assert f"partial: no {absent}, left out" in output.err and "partial" not in output.out
    expected = run_judge(monkeypatch, capsys, tmp_path, rows, "--goal", "auto")
    assert output.out == expected.out
    with pytest.raises(SystemExit, match="2"):
        run_judge(monkeypatch, capsys, tmp_path, partial, "--goal", "min_snr" if absent == "uniform" else "auto")


def test_page_and_figure_show_a_single_seed_and_a_setting_without_a_metric(monkeypatch, capsys, tmp_path):
    rows = curves(PARTIAL_METHODS, 1, 0.1)
    rows = pd.concat([rows, rows.assign(setting="t", val_loss_epsilon=math.nan)])
    arguments = ["--page", "--figure", str(tmp_path / "figure.png")]
    output = run_judge(monkeypatch, capsys, tmp_path, rows, *arguments)
    assert "nan" not in output.out and re.search(r"\| auto \| 0\.\d{3} \| 0\.\d{3} \|", output.out)
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_rates_leave_out_a_setting_without_uniform(monkeypatch, capsys, tmp_path):
    rows = curves(PARTIAL_METHODS, 2)
    partial = rows[rows["method"] != "uniform"].assign(setting="t")
    rows = pd.concat([rows, rows.assign(setting="s_lr0.5"), partial])
    assert "| distance | s at 0.5, 1 |" in run_judge(monkeypatch, capsys, tmp_path, rows, "--rates").out
    with pytest.raises(SystemExit, match="2"):
        run_judge(monkeypatch, capsys, tmp_path, partial, "--rates")
    assert "no setting has uniform" in capsys.readouterr().err


def test_values_by_learning_rate_are_relative_to_uniform_at_its_learning_rate():
    full_rate = curves({"uniform": (1, 1), "min_snr": (0.8, 1), "p2": (0.8, 1)}, 2)
    half_rate = curves({"uniform": (0.9, 1), "min_snr": (1.2, 1)}, 1).assign(setting="s_lr0.5")
    lines = page.format_rates(judge.rates(pd.concat([full_rate, half_rate], ignore_index=True))).splitlines()
    assert lines[0] == "| distance | s at 0.5, 1 |" and len(lines) == 3 * 4 + 2
    assert lines[2:4] == ["| min_snr | 1.200, 0.800 |", "| uniform | 0.900, 1.000 |"]
