"""Published numbers beside ours: what compares, what does not and why, and how much faster methods are by both."""

import csv
import html
import json
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import results_tree
from kairos.config import load, validate
from kairos.report import published_numbers
from kairos.report.build import build_report
from kairos.report.collect import collect
from kairos.report.ranking import highest_cost_ratio
from report_page import page_of

ROOT = Path(__file__).resolve().parents[1]
SEEDS = (0, 1, 2, 3, 4)
BLOCK = {
    "source": "paper", "table": "7", "dataset": "digits", "backbone": "dit", "schedule": "linear", "metric": "fid400",
    "extractor": "classifier32", "samples": 400, "sampling_steps": 20, "reference": "train",
    "steps": [100, 200, 400], "rows": {"uniform": [100.0, 50.0, 20.0], "ours": [60.0, 25.0, None]},
    "methods": {"ours": "speed"},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Results of two methods and five seeds; not to be changed."""
    return results_tree.write(tmp_path_factory.mktemp("tree"), SEEDS, ("uniform", "speed"))[1]


def recipe(*blocks, **values):
    return validate({**results_tree.experiment(SEEDS, ("uniform", "speed")), "published": [*blocks], **values})


def mean(method, step):
    return np.mean([results_tree.distance(method, seed, step) for seed in SEEDS])


def test_what_was_measured_alike_is_compared(folder):
    rows = published_numbers.compare_published_numbers(collect(recipe(BLOCK), folder))
    assert [(one.row.row, one.row.step, one.row.value) for one in rows] == [
        ("uniform", 100, 100.0), ("uniform", 200, 50.0), ("uniform", 400, 20.0), ("ours", 100, 60.0),
        ("ours", 200, 25.0),
    ]  # fmt: skip
    assert not any(one.obstacle for one in rows)
    assert rows[2].measured == pytest.approx(mean("uniform", 400)) and rows[3].measured == pytest.approx(
        mean("speed", 100)
    )
    seeds = [results_tree.distance("uniform", seed, 400) for seed in SEEDS]
    assert rows[2].std == pytest.approx(np.std(seeds, ddof=1))


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"extractor": "inception"}, "extractor classifier32, published inception"),
        ({"samples": 50000}, "samples 400, published 50000"),
        ({"sampling_steps": 250}, "sampling steps 20, published 250"),
        ({"reference": "all"}, "reference train, published all"),
        ({"steps": [100, 200, 900]}, "training steps 400, published 900"),
        ({"differs": "another data set"}, "another data set"),
        ({"samples": 50000, "reference": "all"}, "samples 400, published 50000; reference train, published all"),
    ],
)
def test_what_was_measured_otherwise_is_shown_and_not_compared(folder, changed, why):
    rows = published_numbers.compare_published_numbers(collect(recipe(BLOCK | changed), folder))
    one = next(row for row in rows if row.row.row == "uniform" and row.row.value == 20.0)
    assert one.obstacle == why and one.measured == pytest.approx(mean("uniform", 400))
    others = [row.obstacle for row in rows if row is not one]
    assert not any(others) if "steps" in changed else set(others) == {why}


def test_what_a_paper_leaves_open_is_no_reason(folder):
    open_ = dict.fromkeys(("extractor", "samples", "sampling_steps", "reference"))
    assert not any(
        one.obstacle for one in published_numbers.compare_published_numbers(collect(recipe(BLOCK | open_), folder))
    )


def test_rows_without_a_number_of_ours_say_why(folder):
    lost = BLOCK | {"rows": {"bs": [1.0, 2.0, 3.0]}, "methods": {}, "missing": {"bs": "its density is not published"}}
    rows = published_numbers.compare_published_numbers(collect(recipe(lost, BLOCK | {"column": "isc"}), folder))
    assert [one.obstacle for one in rows] == 3 * ["its density is not published"] + 5 * ["isc is not measured"]
    assert all(np.isnan(one.measured) for one in rows)
    kid = published_numbers.compare_published_numbers(
        collect(recipe(BLOCK | {"column": "kid", "scale": 0.001}), folder)
    )
    assert kid[2].measured == pytest.approx(mean("uniform", 400))  # in the paper's unit


def test_the_lowest_so_far_where_the_paper_gives_that(tmp_path):
    """The lowest value so far is taken per seed, without the untrained network and without later steps."""
    folder = results_tree.write(tmp_path, SEEDS, ("uniform", "speed"))[1]
    for seed, value in ((0, 1e-3), (1, 5000.0)):
        file = folder / f"uniform/seed{seed}/evaluation/0000200.json"
        record = json.loads(file.read_text())
        record["metrics"][results_tree.METRIC] = value
        file.write_text(json.dumps(record))
    plain, so_far = (
        [
            one.measured
            for one in published_numbers.compare_published_numbers(
                collect(recipe(BLOCK | {"best_so_far": best}), folder)
            )
        ][:3]
        for best in (False, True)
    )
    at = np.array([[results_tree.distance("uniform", seed, step) for step in (100, 200, 400)] for seed in SEEDS])
    at[0, 1], at[1, 1] = 1e-3, 5000.0
    assert plain == pytest.approx(at.mean(axis=0))
    assert so_far == pytest.approx(np.minimum.accumulate(at, axis=1).mean(axis=0))
    assert so_far[1] < plain[1] and so_far[2] < plain[2] and so_far[0] == plain[0]


def test_the_acceleration_is_the_highest_ratio_off_the_curves():
    steps = np.array([10.0, 20.0, 30.0])
    base, own = np.array([9.0, 6.0, 3.0]), np.array([6.0, 3.0, 2.0])
    assert highest_cost_ratio(steps, base, steps, own) == 2  # at 6: 20 over 10; at 3: 30 over 20; 2 is never reached
    assert highest_cost_ratio(steps, own, steps, base) == pytest.approx(1)  # both begin at 10
    assert highest_cost_ratio(steps, base, steps, base) == 1
    between = np.array([9.0, 4.5, 3.0])  # 6 is reached after 10 + 10 * 3/4.5
    assert highest_cost_ratio(steps, base, steps, between) == pytest.approx(max(20 / (10 + 30 / 4.5), 25 / 20))


def test_accelerations_have_an_interval_over_seeds(folder):
    results = collect(recipe(BLOCK), folder)
    (found,) = published_numbers.compute_accelerations(results)
    assert (found.method, found.baseline) == ("speed", "uniform")
    assert found.published == pytest.approx(
        highest_cost_ratio(*(np.array(x) for x in ([100, 200], [100, 50], [100, 200], [60, 25])))
    )
    steps = np.array([100.0, 200.0, 400.0])
    curves = {
        m: [np.array([results_tree.distance(m, seed, int(s)) for s in steps]) for seed in SEEDS]
        for m in results.methods
    }
    each = [highest_cost_ratio(steps, base, steps, own) for base, own in zip(curves["uniform"], curves["speed"])]
    test = stats.ttest_1samp(np.log(each), 0).confidence_interval()
    assert found.measured.value == pytest.approx(np.exp(np.mean(np.log(each)))) and found.measured.seed_count == 5
    assert [found.measured.low, found.measured.high] == pytest.approx(np.exp(test))


def test_speed_s_own_table_read_as_its_paper_reads_it():
    """MetFaces: uniform's 29.3 after 50K is met between 367.3 at 10K and 23.4 at 20K."""
    blocks = load(ROOT / "recipes/speed/table1_metfaces.yaml").published
    at = 10_000 + 10_000 * (367.3 - 29.3) / (367.3 - 23.4)
    assert published_numbers._published_acceleration(blocks, "speed", "uniform") == pytest.approx(50_000 / at)


def test_claims_are_judged_by_the_interval(folder):
    said = {}
    for factor in (1.05, 1.3, 20.0):
        claim = {"factor": factor, "method": "speed", "baseline": "uniform"}
        said[factor] = published_numbers.judge_claim(collect(recipe(claim=claim), folder))
        assert said[factor].startswith(f"Claimed: speed needs {factor:g} times fewer steps for the final distance of")
    assert "confirmed at this length" in said[1.05] and "refuted at this length" in said[20.0]
    assert published_numbers.judge_claim(collect(recipe(), folder)) == ""
    never = {"factor": 2.0, "method": "uniform", "baseline": "speed", "cost": "time"}
    assert "Measured: not reached, in 5 of 5 seeds." in published_numbers.judge_claim(
        collect(recipe(claim=never), folder)
    )


@pytest.mark.long
def test_report_and_table(tmp_path):
    config, folder = results_tree.write(tmp_path, SEEDS, ("uniform", "speed"))
    assert "published numbers" not in page_of(config, folder)
    claim = {"factor": 1.05, "method": "speed", "baseline": "uniform"}
    build_report(recipe(BLOCK, BLOCK | {"table": "8", "samples": 7}, claim=claim), folder)
    with open(folder / "published.csv", newline="") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
    assert reader.fieldnames == ["table", "method", "step", "metric", "published", "measured", "comparable", "why"]
    assert [row["comparable"] for row in rows] == 5 * ["true"] + 5 * ["false"]
    assert rows[2]["method"] == "uniform" and rows[2]["step"] == "400" and float(rows[2]["published"]) == 20
    assert float(rows[2]["measured"]) == pytest.approx(mean("uniform", 400), rel=1e-12)
    page = html.unescape((folder / "report.html").read_text())
    assert "Published numbers</h2>" in page and "samples 400, published 7" in page and "confirmed at" in page
    assert "Acceleration over uniform" in page and "here speed" in page


def test_an_unfinished_experiment_has_what_there_is(tmp_path):
    folder = results_tree.write(tmp_path, SEEDS, ("uniform", "speed"))[1]
    for seed in SEEDS:
        (folder / f"speed/seed{seed}/evaluation/0000200.json").unlink()
    rows = published_numbers.compare_published_numbers(collect(recipe(BLOCK), folder, unfinished=True))
    assert [one.obstacle for one in rows] == ["", "", "", "", "not measured yet"]
