"""Tests of `kairos report PATH`: a page of the results of an unfinished experiment, marked as unfinished."""

import re
import shutil

import numpy as np
import pytest

import results_tree
from kairos.cli import main
from kairos.config import load
from kairos.files import read_json, write_record
from kairos.report import findings, ranking
from kairos.report.collect import collect
from kairos.report.curve_figures import draw_distance, draw_validation_loss
from kairos.report.plot_style import assign_styles
from kairos.report.sample_figures import draw_image_by_image
from kairos.sampling.samples_file import write_samples
from report_page import page_of


@pytest.fixture
def tree(tmp_path):
    """Experiment file and results of three methods and two seeds, which the test may change."""
    return results_tree.write(tmp_path, seeds=(0, 1), methods=("uniform", "min_snr", "adaptive"))


def list_missing(tree):
    """Return a line for each run with missing results."""
    return collect(load(tree[0]), tree[1], unfinished=True).missing


@pytest.mark.long
def test_existing_results_are_shown_and_missing_ones_listed(tree, capsys):
    config, results = tree
    for name in ("evaluation", "training.json", "metrics.jsonl"):
        path = results / "methods/adaptive/seed1" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (results / "methods/uniform/seed1/evaluation/0000400.json").unlink()
    assert main(["report", str(results)]) == 0
    page = results / "report_unfinished.html"
    assert str(page) in capsys.readouterr().out
    content = page.read_text()
    assert "<title>tiny, unfinished: timestep strategies compared</title>" in content
    assert "This is not the finished report" in content
    assert "adaptive seed 1: not evaluated yet" in content and "uniform seed 1: evaluated up to step 200;" in content
    assert "So far, at step 400, the last that all methods here have:" in content
    assert not any((results / name).exists() for name in ("report.html", "summary.csv", "figures"))
    assert main(["report", "--config", str(config), "--results", str(results)]) == 1  # as in the workflow
    assert "is missing" in capsys.readouterr().err and not (results / "report.html").exists()


def test_the_page_shows_a_run_that_has_snapshots_and_has_not_ended(tmp_path):
    config, results = results_tree.write(tmp_path, seeds=(0,), methods=("uniform", "p2"))
    for name in ("training.json", "metrics.jsonl", "evaluation/0000400.json"):
        (results / "methods/p2/seed0" / name).unlink()
    content = page_of(config, results, unfinished=True)
    assert "p2 seed 0: evaluated up to step 200;" in content
    assert re.search(r"<td><b>p2</b></td><td[^>]*>0</td><td[^>]*>200</td>", content)


@pytest.mark.long
def test_the_finished_report_replaces_the_unfinished_one_and_needs_no_network(tmp_path):
    _, results = results_tree.write(tmp_path, seeds=(0,), methods=("uniform", "p2"))
    (results / "report_unfinished.html").write_text("")
    assert main(["report", str(results)]) == 0
    assert not (results / "report_unfinished.html").exists()
    content = (results / "report.html").read_text()
    assert "unfinished" not in content
    assert len(content) < 2e6
    assert not re.search(r'(src|href)="(https?:)?//', content)


def test_damaged_results_and_those_of_another_run_do_not_count(tree):
    _, results = tree
    (results / "methods/uniform/seed0/evaluation/0000200.json").write_text('{"step": 200, "metr')
    path = results / "methods/min_snr/seed0/snapshots/0000400/snapshot.json"
    write_record(path, read_json(path) | {"files": {"ema": "1" * 64}})  # of a new run
    path = results / "methods/min_snr/seed1/training.json"
    write_record(path, read_json(path) | {"identity": "2" * 64})
    collected = collect(load(tree[0]), results, unfinished=True)
    steps = {(run.method, run.seed): [snapshot.step for snapshot in run.snapshots] for run in collected.runs}
    assert steps["uniform", 0] == [0, 100, 400] and steps["min_snr", 0] == [0, 100, 200]
    assert [line.partition(":")[0] for line in collected.missing] == ["uniform seed 0", "min_snr seed 0"]
    assert "damaged" in collected.missing[0] and "result of stage train" in collected.missing[1]
    # metrics and times are of the earlier run
    run = collected.runs_of("min_snr")[1]
    assert run.metrics.empty and not run.seconds_by_step and run.started is None
    assert collected.runs_of("min_snr")[0].seconds_by_step


def test_times_of_an_earlier_run_are_not_those_of_a_run_that_has_not_ended(tree):
    """Until its end, a run publishes snapshots only, and metrics and times of an earlier run stay."""
    _, results = tree
    (results / "methods/uniform/seed0/training.json").unlink()
    collected = collect(load(tree[0]), results, unfinished=True)
    run, other_run = collected.runs_of("uniform")
    assert not run.seconds_by_step and run.started is None and other_run.seconds_by_step


def test_a_damaged_table_of_a_strategy_excludes_its_snapshot_alone(tree):
    """Damaged metrics leave out the metrics of their run, and its snapshots count."""
    _, results = tree
    (results / "methods/uniform/seed0/snapshots/0000200/strategy.csv").write_text("")
    (results / "methods/min_snr/seed1/metrics.jsonl").write_text("{")
    collected = collect(load(tree[0]), results, unfinished=True)
    steps = {(run.method, run.seed): [snapshot.step for snapshot in run.snapshots] for run in collected.runs}
    assert steps["uniform", 0] == [0, 100, 400] and steps["min_snr", 1] == [0, 100, 200, 400]
    assert any("strategy.csv" in line or "damaged" in line for line in collected.missing)
    assert collected.runs_of("min_snr")[1].metrics.empty


@pytest.mark.parametrize("damage", ["other content", "cut off", "changed"])
def test_a_damaged_sample_grid_excludes_its_snapshot_alone(tree, damage):
    _, results = tree
    path = results / "methods/uniform/seed0/samples/0000200.png"
    content = path.read_bytes()
    middle = len(content) // 2
    changed = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    path.write_bytes({"other content": b"{", "cut off": content[:middle], "changed": changed}[damage])
    collected = collect(load(tree[0]), results, unfinished=True)
    assert [snapshot.step for snapshot in collected.runs_of("uniform")[0].snapshots] == [0, 100, 400]
    assert len(collected.missing) == 1 and "0000200.png" in collected.missing[0]


@pytest.mark.long
def test_a_page_and_a_comparison_are_made_in_spite_of_damaged_files(tree, capsys):
    _, results = tree
    (results / "methods/uniform/seed0/samples/0000200.png").write_text("{")
    with open(results / "methods/min_snr/seed0/timing.jsonl", "ab") as file:
        file.write(b"\xff{\n")
    assert main(["report", str(results)]) == 0
    assert "0000200.png" in (results / "report_unfinished.html").read_text()
    assert main(["compare", str(results)]) == 0
    assert "1 training run: uniform seed 0" in capsys.readouterr().err


@pytest.mark.parametrize("unfinished", [True, False])
def test_a_damaged_line_of_times_is_left_out_alone(tree, unfinished):
    path = tree[1] / "methods/uniform/seed0/timing.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:-1], '{"step": 4\n']))
    collected = collect(load(tree[0]), tree[1], unfinished)
    assert list(collected.runs_of("uniform")[0].seconds_by_step) == [0, 100, 200] and not collected.missing
    assert [snapshot.step for snapshot in collected.runs_of("uniform")[0].snapshots] == [0, 100, 200, 400]


def test_snapshots_with_other_settings_do_not_count(tree):
    text = tree[0].read_text()
    tree[0].write_text(text.replace("  min_snr:\n    sampler: uniform\n", "  min_snr:\n    sampler: log_normal\n"))
    assert tree[0].read_text() != text
    assert [line.partition(";")[0] for line in list_missing(tree)] == [
        "min_snr seed 0: not evaluated yet", "min_snr seed 1: not evaluated yet",
    ]  # fmt: skip


def test_methods_without_a_common_seed_are_shown_and_not_tested(tree):
    shutil.rmtree(tree[1] / "methods/uniform/seed0/evaluation")
    for method in ("min_snr", "adaptive"):
        shutil.rmtree(tree[1] / "methods" / method / "seed1/evaluation")
    collected = collect(load(tree[0]), tree[1], unfinished=True)
    rows = {row.method: row for row in ranking.compare_methods(collected.measurements)}
    assert {row.seed_count for row in rows.values()} == {0}
    assert rows["uniform"].curve.mean[-1] == results_tree.distance("uniform", 1, 400)
    assert np.isnan(rows["min_snr"].ratio_to_baseline.value) and not any(row.is_ranked for row in rows.values())
    assert "Not ranked" in page_of(*tree, unfinished=True)


@pytest.mark.parametrize("seeds_without_results", [(12, 13, 14), (13,)])
def test_with_enough_configured_seeds_the_outcome_reports_missing_results(tmp_path, seeds_without_results):
    config, folder = results_tree.write(tmp_path, (10, 11, 12, 13, 14), ("uniform", "min_snr"))
    for seed in seeds_without_results:
        shutil.rmtree(folder / f"methods/min_snr/seed{seed}/evaluation")
        if len(seeds_without_results) > 1:
            shutil.rmtree(folder / f"methods/uniform/seed{seed}/evaluation")
    results = collect(load(config), folder, unfinished=True)
    outcome = " ".join(findings.summarise_outcome(results, ranking.compare_methods(results.measurements)))
    seed_count = 5 - len(seeds_without_results)
    assert f"results of {seed_count} of the experiment's 5 seeds" in outcome
    assert "missing results" in outcome and "set seeds" not in outcome


def test_advised_seeds_include_configured_seeds_without_results(tmp_path):
    config, folder = results_tree.write(tmp_path, (10, 11, 12), ("uniform", "min_snr"))
    for method in ("uniform", "min_snr"):
        shutil.rmtree(folder / f"methods/{method}/seed12/evaluation")
    results = collect(load(config), folder, unfinished=True)
    outcome = " ".join(findings.summarise_outcome(results, ranking.compare_methods(results.measurements)))
    assert "2 of the experiment's 3 seeds" in outcome and "set seeds: [0, 1, 10, 11, 12]" in outcome


def test_a_method_without_a_known_time_has_no_curve_over_time(tree):
    """The time of step 0 is known without a clock, and its evaluation may be missing."""
    for seed in (0, 1):
        run_folder = tree[1] / f"methods/min_snr/seed{seed}"
        (run_folder / "timing.jsonl").unlink()
        (run_folder / "evaluation/0000000.json").unlink()
    collected = collect(load(tree[0]), tree[1], unfinished=True)
    styles = assign_styles(collected.methods, collected.baseline)
    for shown_methods in (["uniform", "min_snr", "adaptive"], ["uniform", "adaptive"]):
        shown_styles = {method: styles[method] for method in shown_methods}
        over_time = draw_distance(collected, shown_styles, over_time=True)
        texts = {text.get_text() for text in over_time.axes[0].texts}
        assert {"uniform", "adaptive"} <= texts and not texts & {"min_snr", "1 others: range, median"}
    over_steps = draw_distance(collected, styles, over_time=False)
    assert "min_snr" in {text.get_text() for text in over_steps.axes[0].texts}


def test_validation_losses_of_unequally_long_runs_are_compared_at_their_last_common_snapshot(tree):
    for step in (200, 400):
        (tree[1] / f"methods/uniform/seed1/evaluation/{step:07d}.json").unlink()
    (tree[1] / "methods/adaptive/seed1/evaluation/0000400.json").unlink()
    collected = collect(load(tree[0]), tree[1], unfinished=True)
    figure = draw_validation_loss(collected, assign_styles(collected.methods, collected.baseline))
    records = {
        method: read_json(tree[1] / "methods" / method / "seed0/evaluation/0000400.json")["validation"]["per_timestep"]
        for method in collected.methods
    }
    curves = {line.get_label(): line.get_ydata() for line in figure.axes[-1].get_lines()}
    for method, record in records.items():  # of seed 0, the only one that all methods have at step 400
        ratios = [
            entry["loss_epsilon"] / baseline["loss_epsilon"] for entry, baseline in zip(record, records["uniform"])
        ]
        assert curves[method] == pytest.approx(ratios)


def test_one_image_is_shown_by_method_and_snapshot(tree):
    images = np.arange(5, dtype=np.uint8)[:, None, None, None] * np.ones((1, 8, 8, 1), np.uint8)
    collected = collect(load(tree[0]), tree[1])
    for number, (_, snapshot) in enumerate(collected.run_snapshots):
        write_samples(snapshot.grid_file.with_suffix(".npz"), images + 10 * number, {})
    figure = draw_image_by_image(collected, assign_styles(collected.methods, collected.baseline))
    assert [axes.get_title() for axes in figure.axes] == [f"image {number}" for number in (1, 2, 3, 4)]
    for number, axes in enumerate(figure.axes):
        picture = axes.images[0].get_array()
        side = (len(picture) + 2) // len(collected.methods)
        for row, method in enumerate(collected.methods):
            first = [run.method for run, _ in collected.run_snapshots].index(method)
            values = picture[row * side, ::side][: len(collected.experiment.milestones)]
            assert list(values) == [(10 * (first + k) + number) for k in range(4)]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == collected.methods
