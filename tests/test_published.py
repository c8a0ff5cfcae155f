"""Published and measured numbers: comparable rows, obstacles, and accelerations."""

import csv
import dataclasses
import html
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from scipy import stats

import results_tree
from kairos.config import load, validate
from kairos.files import read_record, write_record, write_text
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
    """Results of two methods and five seeds; tests must not change them."""
    return results_tree.write(tmp_path_factory.mktemp("tree"), SEEDS, ("uniform", "speed"))[1]


def make_recipe(*blocks, **values):
    return validate({**results_tree.experiment(SEEDS, ("uniform", "speed")), "published": [*blocks], **values})


def compute_mean_distance(method, step):
    return np.mean([results_tree.distance(method, seed, step) for seed in SEEDS])


def test_rows_with_equal_protocols_are_compared(folder):
    rows = published_numbers.compare_published_numbers(collect(make_recipe(BLOCK), folder))
    assert [(row.row.row, row.row.step, row.row.value) for row in rows] == [
        ("uniform", 100, 100.0), ("uniform", 200, 50.0), ("uniform", 400, 20.0), ("ours", 100, 60.0),
        ("ours", 200, 25.0),
    ]  # fmt: skip
    assert not any(row.obstacle for row in rows)
    assert rows[2].measured == pytest.approx(compute_mean_distance("uniform", 400))
    assert rows[3].measured == pytest.approx(compute_mean_distance("speed", 100))
    seeds = [results_tree.distance("uniform", seed, 400) for seed in SEEDS]
    assert rows[2].std == pytest.approx(np.std(seeds, ddof=1))


@pytest.mark.parametrize(
    ("changed", "obstacle"),
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
def test_rows_with_other_protocols_are_shown_and_not_compared(folder, changed, obstacle):
    rows = published_numbers.compare_published_numbers(collect(make_recipe(BLOCK | changed), folder))
    changed_row = next(compared for compared in rows if compared.row.row == "uniform" and compared.row.value == 20.0)
    assert changed_row.obstacle == obstacle
    assert changed_row.measured == pytest.approx(compute_mean_distance("uniform", 400))
    others = [compared.obstacle for compared in rows if compared is not changed_row]
    assert not any(others) if "steps" in changed else set(others) == {obstacle}


def test_settings_that_a_paper_omits_are_no_obstacle(folder):
    omitted = dict.fromkeys(("extractor", "samples", "sampling_steps", "reference"))
    assert not any(
        row.obstacle
        for row in published_numbers.compare_published_numbers(collect(make_recipe(BLOCK | omitted), folder))
    )


@pytest.mark.parametrize(
    ("published", "obstacle"),
    [(None, "guidance 1.5, published: not stated"), (3.0, "guidance 1.5, published 3.0"), (1.5, "")],
)
def test_conditional_images_are_comparable_only_with_the_published_guidance(folder, published, obstacle):
    recipe = make_recipe(BLOCK | {"guidance": published})
    assert not any(row.obstacle for row in published_numbers.compare_published_numbers(collect(recipe, folder)))
    results = collect(recipe, folder)
    model = recipe.model.model_copy(update={"conditions": ["class"]})
    sampling = recipe.sampling.model_copy(update={"guidance_scale": 1.5})
    guided = recipe.model_copy(update={"model": model, "sampling": sampling})
    rows = published_numbers.compare_published_numbers(dataclasses.replace(results, experiment=guided))
    assert {row.obstacle for row in rows} == {obstacle}


def test_rows_without_a_measured_number_report_the_reason(folder):
    lost = BLOCK | {"rows": {"bs": [1.0, 2.0, 3.0]}, "methods": {}, "missing": {"bs": "its density is not published"}}
    rows = published_numbers.compare_published_numbers(collect(make_recipe(lost, BLOCK | {"column": "isc"}), folder))
    assert [row.obstacle for row in rows] == 3 * ["its density is not published"] + 5 * ["isc is not measured"]
    assert all(np.isnan(row.measured) for row in rows)
    kid = published_numbers.compare_published_numbers(
        collect(make_recipe(BLOCK | {"column": "kid", "scale": 0.001}), folder)
    )
    assert kid[2].measured == pytest.approx(compute_mean_distance("uniform", 400))  # in the unit of the paper


def test_the_lowest_value_so_far_is_compared_if_the_paper_reports_it(tmp_path):
    """The lowest value so far is taken per seed, without the untrained network and without later steps."""
    folder = results_tree.write(tmp_path, SEEDS, ("uniform", "speed"))[1]
    for seed, value in ((0, 1e-3), (1, 5000.0)):
        file = folder / f"methods/uniform/seed{seed}/evaluation/0000200.json"
        record = read_record(file)
        record["metrics"][results_tree.METRIC] = value
        write_record(file, record)
    plain, so_far = (
        [
            row.measured
            for row in published_numbers.compare_published_numbers(
                collect(make_recipe(BLOCK | {"best_so_far": best}), folder)
            )
        ][:3]
        for best in (False, True)
    )
    at = np.array([[results_tree.distance("uniform", seed, step) for step in (100, 200, 400)] for seed in SEEDS])
    at[0, 1], at[1, 1] = 1e-3, 5000.0
    assert plain == pytest.approx(at.mean(axis=0))
    assert so_far == pytest.approx(np.minimum.accumulate(at, axis=1).mean(axis=0))
    assert so_far[1] < plain[1] and so_far[2] < plain[2] and so_far[0] == plain[0]


def test_the_acceleration_is_the_highest_ratio_of_costs_along_the_curves():
    steps = np.array([10.0, 20.0, 30.0])
    base, method = np.array([9.0, 6.0, 3.0]), np.array([6.0, 3.0, 2.0])
    assert highest_cost_ratio(steps, base, steps, method) == 2  # at 6: 20 over 10; at 3: 30 over 20; 2 is never reached
    assert highest_cost_ratio(steps, method, steps, base) == pytest.approx(1)  # both begin at 10
    assert highest_cost_ratio(steps, base, steps, base) == 1
    between = np.array([9.0, 4.5, 3.0])  # 6 is reached after 10 + 10 * 3/4.5
    assert highest_cost_ratio(steps, base, steps, between) == pytest.approx(max(20 / (10 + 30 / 4.5), 25 / 20))


def test_accelerations_have_an_interval_over_seeds(folder):
    results = collect(make_recipe(BLOCK), folder)
    (acceleration,) = published_numbers.compute_accelerations(results)
    assert (acceleration.method, acceleration.baseline) == ("speed", "uniform")
    assert acceleration.published == pytest.approx(
        highest_cost_ratio(*(np.array(x, float) for x in ([100, 200], [100, 50], [100, 200], [60, 25])))
    )
    steps = np.array([100.0, 200.0, 400.0])
    curves = {
        m: [np.array([results_tree.distance(m, seed, int(s)) for s in steps]) for seed in SEEDS]
        for m in results.methods
    }
    ratios = []
    for uniform_curve, speed_curve in zip(curves["uniform"], curves["speed"]):
        ratios.append(highest_cost_ratio(steps, uniform_curve, steps, speed_curve))
    test = stats.ttest_1samp(np.log(ratios), 0).confidence_interval()
    assert acceleration.measured.value == pytest.approx(np.exp(np.mean(np.log(ratios))))
    assert acceleration.measured.seed_count == 5
    assert [acceleration.measured.low, acceleration.measured.high] == pytest.approx(np.exp(test))


def test_snapshots_that_a_method_lacks_are_left_out_of_its_acceleration(tmp_path):
    folder = results_tree.write(tmp_path, SEEDS, ("uniform", "speed"))[1]
    for seed in SEEDS:
        (folder / f"methods/speed/seed{seed}/evaluation/0000200.json").unlink()  # of all seeds
    (folder / "methods/uniform/seed1/evaluation/0000100.json").unlink()  # of one seed
    results = collect(make_recipe(BLOCK), folder, unfinished=True)
    (acceleration,) = published_numbers.compute_accelerations(results)
    ratios = []
    for seed in SEEDS:
        steps = np.array([400.0] if seed == 1 else [100.0, 400.0])
        uniform_curve, speed_curve = (
            np.array([results_tree.distance(method, seed, int(step)) for step in steps])
            for method in ("uniform", "speed")
        )
        ratios.append(highest_cost_ratio(steps, uniform_curve, steps, speed_curve))
    assert acceleration.measured.value == pytest.approx(stats.gmean(ratios))


def test_without_a_common_seed_the_measured_acceleration_is_unknown(tmp_path):
    folder = results_tree.write(tmp_path, (0, 1), ("uniform", "speed"))[1]
    shutil.rmtree(folder / "methods/uniform/seed0/evaluation")
    shutil.rmtree(folder / "methods/speed/seed1/evaluation")
    recipe = make_recipe(BLOCK, seeds=[0, 1])
    (acceleration,) = published_numbers.compute_accelerations(collect(recipe, folder, unfinished=True))
    assert acceleration.measured is None and acceleration.published is not None
    write_text(tmp_path / "recipe.yaml", yaml.safe_dump(recipe.plain()))
    assert "Acceleration over uniform" in page_of(tmp_path / "recipe.yaml", folder, unfinished=True)


def test_published_curves_without_a_common_step_have_no_acceleration(folder):
    rows = {"uniform": [None, 20.0], "ours": [15.0, None]}
    block = BLOCK | {"steps": [200, 400], "rows": rows}
    (acceleration,) = published_numbers.compute_accelerations(collect(make_recipe(block), folder))
    assert acceleration.published is None and acceleration.measured.value > 1
    (acceleration,) = published_numbers.compute_accelerations(collect(make_recipe(block, BLOCK), folder))
    assert acceleration.published is not None


def test_the_published_acceleration_is_interpolated_as_in_speeds_paper():
    """On MetFaces SpeeD reaches the 29.3 of uniform at 50K between its 367.3 at 10K and 23.4 at 20K."""
    blocks = load(ROOT / "recipes/speed/table1_metfaces.yaml").published
    at = 10_000 + 10_000 * (367.3 - 29.3) / (367.3 - 23.4)
    assert published_numbers._published_acceleration(blocks, "speed", "uniform") == pytest.approx(50_000 / at)


def make_claim(**values):
    claim = {"sentence": '"faster" (section 1)', "factor": 2.0, "method": "speed", "baseline": "uniform"}
    return claim | {"quantity": "final_distance"} | values


def test_claims_are_judged_by_the_interval(folder):
    verdicts = {}
    for factor in (1.05, 1.3, 20.0):
        verdicts[factor] = published_numbers.judge_claim(collect(make_recipe(claim=make_claim(factor=factor)), folder))
        claimed = f"a speed-up in steps of {factor:g} for speed until the final distance of uniform"
        assert verdicts[factor].startswith(f'The paper: "faster" (section 1). Claimed: {claimed}')
    assert "confirmed at this length" in verdicts[1.05] and "refuted at this length" in verdicts[20.0]
    assert published_numbers.judge_claim(collect(make_recipe(), folder)) == ""
    unreached = make_claim(method="uniform", baseline="speed", cost="time")
    assert "Measured: not reached, in 5 of 5 seeds." in published_numbers.judge_claim(
        collect(make_recipe(claim=unreached), folder)
    )


def test_a_claim_of_the_highest_ratio_is_judged_by_it_and_shown_with_its_size_by_chance(folder):
    recipe = make_recipe(BLOCK, claim=make_claim(quantity="highest_ratio"))
    results = collect(recipe, folder)
    (acceleration,) = published_numbers.compute_accelerations(results)
    verdict = published_numbers.judge_claim(results)
    assert f"Measured: {acceleration.measured.value:.2f}" in verdict
    assert f"The published rows give {acceleration.published:.2f}" in verdict
    steps = np.array([100.0, 200.0, 400.0])
    curves = [np.array([results_tree.distance("uniform", seed, int(step)) for step in steps]) for seed in SEEDS]
    pairs = zip([curves[-1], *curves[:-1]], curves)
    by_chance = stats.gmean([highest_cost_ratio(steps, curve, steps, other) for other, curve in pairs])
    assert by_chance > 1
    assert f"uniform against uniform of other seeds, by this rule: {by_chance:.2f}" in verdict


@pytest.mark.long
def test_the_report_and_its_table_contain_published_numbers(tmp_path):
    config, folder = results_tree.write(tmp_path, SEEDS, ("uniform", "speed"))
    assert "published numbers" not in page_of(config, folder)
    claim = make_claim(factor=1.05)
    build_report(make_recipe(BLOCK, BLOCK | {"table": "8", "samples": 7}, claim=claim), folder)
    with open(folder / "published.csv", newline="") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
    assert reader.fieldnames == ["table", "method", "step", "metric", "published", "measured", "comparable", "why"]
    assert [row["comparable"] for row in rows] == 5 * ["true"] + 5 * ["false"]
    assert rows[2]["method"] == "uniform" and rows[2]["step"] == "400" and float(rows[2]["published"]) == 20
    assert float(rows[2]["measured"]) == pytest.approx(compute_mean_distance("uniform", 400), rel=1e-12)
    page = html.unescape((folder / "report.html").read_text())
    assert "Published numbers</h2>" in page and "samples 400, published 7" in page and "confirmed at" in page
    assert "Acceleration over uniform" in page and "here speed" in page and "uniform</b> with other seeds" in page


def test_an_unfinished_experiment_compares_its_finished_steps(tmp_path):
    folder = results_tree.write(tmp_path, SEEDS, ("uniform", "speed"))[1]
    for seed in SEEDS:
        (folder / f"methods/speed/seed{seed}/evaluation/0000200.json").unlink()
    rows = published_numbers.compare_published_numbers(collect(make_recipe(BLOCK), folder, unfinished=True))
    assert [row.obstacle for row in rows] == ["", "", "", "", "not measured yet"]
