"""The study's statistics against tables whose truth is known, and its experiment files."""

import math
import os
import re
import runpy
from pathlib import Path

import judge
import numpy as np
import page
import pandas as pd
import pytest
import torch
from scipy import stats

from kairos.config.experiment import load

STUDIES = Path(__file__).parent.parent / "studies"
run = runpy.run_path(str(STUDIES / "run.py"))
why = runpy.run_path(str(STUDIES / "why/measure.py"))


def trainings(methods, seeds=8, spread=0.0, metrics=judge.METRICS):
    """Curves value = 100 f / time: method -> (f, cost of a step), with paired noise of the logarithm."""
    noise, rows = np.random.default_rng(0).normal(0, spread, (len(methods), seeds)), []
    for (method, (factor, cost)), own in zip(methods.items(), noise):
        for seed in range(seeds):
            for step in (100, 200, 400, 800):
                value = 100 * factor * math.exp(own[seed] + 0.3 * seed) / (step * cost)
                line = {"setting": "s", "method": method, "seed": seed, "step": step, "time": step * cost}
                rows.append({**line, **dict.fromkeys(metrics, value), "ref_floor": 0.01, "ref_gaussian": 10.0})
    return pd.DataFrame(rows)


def test_equal_time_is_not_equal_steps():
    found = judge.table(trainings({"uniform": (1, 1), "min_snr": (0.8, 1), "gradient_norm": (0.5, 1.5)}, 4, 1e-9))
    found = found[found["metric"] == "distance"].set_index("method")
    assert found["ratio"].to_dict() == pytest.approx({"uniform": 1, "min_snr": 0.8, "gradient_norm": 0.5})
    assert found.loc["gradient_norm", "to_uniform"] == pytest.approx(2)  # a value in inverse proportion to time
    assert found.loc["gradient_norm", "to_fixed"] == pytest.approx(1.6) and set(found["best_fixed"]) == {"min_snr"}
    assert found.loc["uniform", "to_fixed"] == pytest.approx(
        0.8
    )  # it does not get there: min_snr is where it ends so much sooner


def test_the_goal_is_judged_against_the_best_fixed_method_and_over_all_settings():
    here = trainings({"uniform": (1, 1), "min_snr": (0.8, 1), "p2": (2, 1), "auto": (0.4, 1)}, 5, 1e-6)
    there = trainings({"uniform": (1, 1), "min_snr": (1.2, 1), "p2": (0.5, 1), "auto": (1, 1)}, 5, 1e-6)
    found = judge.goal(pd.concat([here, there.assign(setting="t")]), "auto")
    found = found[found["metric"] == "distance"].set_index(["question", "setting"])
    assert found["best_fixed"].tolist() == ["min_snr", "p2", ""] * 3
    ratios = found["ratio"].unstack()
    assert ratios.loc["value over the best fixed"].to_dict() == pytest.approx({"s": 0.5, "t": 2, "all": 1}, rel=1e-4)
    assert ratios.loc["speed to the best fixed", "s"] == pytest.approx(2, rel=1e-4)
    assert ratios.loc["speed to the best fixed", "t"] == pytest.approx(0.5, rel=1e-4)  # as if the two changed places
    assert ratios.loc["speed to uniform"].to_dict() == pytest.approx({"s": 2.5, "t": 1, "all": 2.5**0.5}, rel=1e-4)
    assert found.loc[("speed to uniform", "s"), "p_holm"] < 1e-6 < 0.5 < found.loc[("speed to uniform", "t"), "p"]


def test_a_method_too_slow_for_the_time_is_judged_before_its_end_and_no_further():
    rows = trainings({"uniform": (1, 1), "gradient_norm": (1, 2)}, 3)
    half = rows[(rows["method"] == "uniform") & (rows["step"] <= 400)]
    assert (
        judge.log_values_at(half, "distance", 800).isna().all()
        and judge.log_values_at(half, "distance", 400).notna().all()
    )
    at = judge.log_values_at(rows[rows["method"] == "gradient_norm"], "distance", 800)
    assert at.tolist() == pytest.approx([math.log(100 / 800) + 0.3 * seed for seed in range(3)])


def test_page_and_picture_show_every_method_the_best_first(tmp_path):
    rows = trainings({"uniform": (1, 1), "p2": (1.5, 1), "min_snr": (0.8, 1)}, 4, 1e-3)
    there = rows[(rows["setting"] == "s") & ((rows["method"] != "p2") | (rows["step"] < 800))].assign(setting="other")
    judged = judge.table(pd.concat([rows, there]))
    lines = page.of_ratios(judged).splitlines()
    assert lines[0] == "| distance | other | s |" and [line.split()[1] for line in lines[2:5]] == [
        "min_snr",
        "uniform",
        "p2",
    ]
    assert re.match(r"\| min_snr \| (0\.\d{3} \((0\.\d{3}) to 0\.8\d\d, p \d\.\de-\d\d\) \| ?){2}$", lines[2])
    assert lines[4].startswith("| p2 | not so far | 1.")
    page.draw(judged, tmp_path / "it.png", judge.METRICS[:2], judge.LEVEL)
    assert (tmp_path / "it.png").stat().st_size > 10_000


def test_holms_correction_by_hand():
    corrected = judge.holm(np.array([0.01, math.nan, 0.04, 0.03, 0.5]))
    np.testing.assert_allclose(corrected, [0.04, math.nan, 0.09, 0.09, 0.5])


def test_the_smallest_difference_is_found_as_often_as_it_says():
    deviation, seeds, level = 0.2, 8, 0.05 / 27
    shift = judge.smallest_detectable_difference(deviation, seeds, level)
    drawn = np.random.default_rng(1).normal(shift, deviation, (20_000, seeds))
    found = (stats.ttest_1samp(drawn, 0, axis=1).pvalue < level).mean()
    assert found == pytest.approx(0.8, abs=0.012)  # four standard errors


def test_power_pools_the_spread_of_the_methods():
    rows = trainings({"uniform": (1, 1), **{f"m{k}": (0.9, 1) for k in range(40)}}, 10, 0.1)
    found = judge.power(rows, 8, 27).set_index("metric").loc["distance"]
    assert found["spread_of_log_ratio"] == pytest.approx(0.1 * math.sqrt(2), rel=0.4)  # uniform's own noise is in all
    assert (found["floor"], found["gaussian"]) == (0.01, 10)


def test_every_round_is_an_experiment_that_can_be_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seeds = []
    for which, (own, factors) in run["ROUNDS"].items():
        paths = run["write_experiments"](which, run["SETTINGS"], None)
        assert len(paths) == len(run["SETTINGS"]) * len(factors)
        rates = {load(path).plain()["training"]["optimizer"]["lr"] for path in paths}
        assert rates == {factor * 1e-3 for factor in factors}
        seeds.append({*own})
    assert not seeds[0] & seeds[1]
    with pytest.raises(SystemExit, match=r"--methods: got other, allowed: uniform"):
        run["write_experiments"]("first", ["digits"], ["uniform", "other"])


def test_a_setting_that_is_not_complete_is_left_out_with_the_reason(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (path,) = run["write_experiments"]("first", ["digits"], ["uniform"])
    (path.parent / "report.html").touch()  # of fewer methods
    assert judge.read_round("first").empty
    assert re.search(
        r"study_first_digits is skipped: results/study_first_digits/.* is missing", capsys.readouterr().err
    )


def test_the_optimum_by_heart_is_the_nearest_image_without_noise_and_the_mean_in_it():
    known, one = torch.randn(5, 1, 2, 2, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    for image in known:
        found = why["posterior_mean"](0.9 * image[None], 0.9 * one, 1e-3 * one, known)
        torch.testing.assert_close(found[0], image)
    torch.testing.assert_close(
        why["posterior_mean"](known[:1], 1e-4 * one, one, known)[0], known.mean(0), atol=1e-3, rtol=0
    )
    weights = torch.tensor([1.0, math.exp(-2)], dtype=torch.float64)  # a pair at a distance of 2, seen at the first
    pair = torch.tensor([0.0, 2.0], dtype=torch.float64).view(2, 1, 1, 1)
    assert why["posterior_mean"](pair[:1], one, one, pair).item() == pytest.approx(
        float(2 * weights[1] / weights.sum())
    )


def test_the_best_density_leaves_less_noise_where_the_levels_differ():
    levels = pd.DataFrame(
        {"loss": "training", "step": 5, "u_low": [0, 0.5], "u_high": [0.5, 1], "variance": [1.0, 9.0]}
    )
    other = levels.assign(loss="preconditioned", variance=1.0)
    left = why["relative_noise_of_best_density"](pd.concat([levels, other, levels.assign(step=7, variance=2.0)]))
    assert left.to_dict() == pytest.approx({5: 0.8, 7: 1.0})


def rounds(*names):
    return pd.concat((pd.read_csv(STUDIES / f"results/{name}.csv") for name in names), ignore_index=True)


@pytest.mark.long
def test_the_page_shows_the_tables_of_the_rounds():
    said = (STUDIES / "README.md").read_text(encoding="utf-8")
    assert page.of_ratios(judge.table(rounds("second", "third"))) in said
    assert page.of_rates(judge.rates(rounds("second", "third", "rates"))) in said


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["--table", "absent.csv"], "--table: absent.csv cannot be read (No such file or directory)"),
        (["--table", os.devnull], "--table: a file is not CSV"),
        (["--table", str(STUDIES / "README.md")], "--table: a file is not CSV"),
        (["--table", str(STUDIES / "why/digits.csv")], "--table: no column distance, "),
        (["--goal", "other"], "--goal: got other, allowed: auto, "),
        (["--goal", "auto", "--page"], "--page and --figure show the table"),
    ],
)
def test_a_mistake_is_said_without_a_traceback(monkeypatch, capsys, asked, said):
    monkeypatch.setattr("sys.argv", ["judge.py", "second", "--table", str(STUDIES / "results/second.csv"), *asked])
    with pytest.raises(SystemExit, match="2"):
        judge.main()
    assert said in capsys.readouterr().err


def test_values_by_learning_rate_are_over_those_of_uniform_at_its_own():
    own = trainings({"uniform": (1, 1), "min_snr": (0.8, 1), "p2": (0.8, 1)}, 2)
    half = trainings({"uniform": (0.9, 1), "min_snr": (1.2, 1)}, 1).assign(setting="s_lr0.5")
    lines = page.of_rates(judge.rates(pd.concat([own, half], ignore_index=True))).splitlines()
    assert lines[0] == "| distance | s at 0.5, 1 |" and len(lines) == 3 * 4 + 2
    assert lines[2:4] == ["| min_snr | 1.200, 0.800 |", "| uniform | 0.900, 1.000 |"]
