"""`kairos report PATH`: a page of what is there of an experiment, which nobody takes for its report."""

import base64
import gzip
import json
import re
import shutil

import numpy as np
import pytest

import results_tree
from kairos.cli import main
from kairos.config import load
from kairos.files import read_json, write_json
from kairos.report import curve_figures, interactive, plot_style, ranking
from kairos.report.collect import collect
from kairos.report.sample_figures import draw_image_by_image
from kairos.sampling.samples_file import write_samples
from report_page import page_of


@pytest.fixture
def small(tmp_path):
    """Three methods and two seeds; free to be changed."""
    return results_tree.write(tmp_path, seeds=(0, 1), methods=("uniform", "min_snr", "adaptive"))


def missing_of(tree):
    return collect(load(tree[0]), tree[1], unfinished=True).missing


@pytest.mark.long
def test_what_is_there_is_shown_and_what_is_missing_said(small, capsys):
    config, results = small
    for name in ("evaluation", "training.json", "metrics.jsonl"):
        place = results / "adaptive/seed1" / name
        shutil.rmtree(place) if place.is_dir() else place.unlink()
    (results / "uniform/seed1/evaluation/0000400.json").unlink()
    assert main(["report", str(results)]) == 0
    page = results / "report_unfinished.html"
    assert str(page) in capsys.readouterr().out
    content = page.read_text()
    assert "<title>tiny, unfinished: timestep strategies compared</title>" in content
    assert "This is not the finished report" in content
    assert "adaptive seed 1: not evaluated yet" in content and "uniform seed 1: evaluated up to step 200;" in content
    assert "So far, at step 400, the last that all methods here have:" in content
    assert not any((results / name).exists() for name in ("report.html", "summary.csv", "figures"))
    assert main(["report", "--config", str(config), "--results", str(results)]) == 1  # the workflow's way
    assert "is missing" in capsys.readouterr().err and not (results / "report.html").exists()


@pytest.mark.long
def test_the_finished_report_takes_its_place_and_needs_no_network(tmp_path):
    _, results = results_tree.write(tmp_path, seeds=(0,), methods=("uniform", "p2"))
    (results / "report_unfinished.html").write_text("")
    assert main(["report", str(results)]) == 0
    assert not (results / "report_unfinished.html").exists()
    content = (results / "report.html").read_text()
    without_library = content.partition("<script>")[0]
    assert "unfinished" not in without_library
    assert len(content) < 5e6 and content.count('class="live" id="live-') == 4
    assert not re.search(r'(src|href)="(https?:)?//', without_library)


def test_nothing_damaged_or_of_another_training_counts(small):
    _, results = small
    (results / "uniform/seed0/evaluation/0000200.json").write_text('{"step": 200, "metr')
    path = results / "min_snr/seed0/milestones/0000400/milestone.json"
    write_json(path, read_json(path) | {"identity": "1" * 64})  # trained anew, its evaluation is of the one before
    path = results / "min_snr/seed1/training.json"
    write_json(path, read_json(path) | {"identity": "2" * 64})
    found = collect(load(small[0]), results, unfinished=True)
    steps = {(one.method, one.seed): [own.step for own in one.snapshots] for one in found.runs}
    assert steps["uniform", 0] == [0, 100, 400] and steps["min_snr", 0] == [0, 100, 200]
    assert [line.partition(":")[0] for line in found.missing] == ["uniform seed 0", "min_snr seed 0"]
    assert "damaged" in found.missing[0] and "another training run" in found.missing[1]
    assert found.runs_of("min_snr")[1].metrics.empty  # of the training before


def test_milestones_with_other_settings_do_not_count(small):
    text = small[0].read_text()
    small[0].write_text(text.replace("  min_snr:\n    sampler: uniform\n", "  min_snr:\n    sampler: log_normal\n"))
    assert small[0].read_text() != text
    assert [line.partition(";")[0] for line in missing_of(small)] == [
        "min_snr seed 0: not evaluated yet", "min_snr seed 1: not evaluated yet",
    ]  # fmt: skip


def test_methods_without_a_common_seed_are_shown_and_not_tested(small):
    shutil.rmtree(small[1] / "uniform/seed0/evaluation")
    for method in ("min_snr", "adaptive"):
        shutil.rmtree(small[1] / method / "seed1/evaluation")
    found = collect(load(small[0]), small[1], unfinished=True)
    rows = {row.method: row for row in ranking.compare_methods(found)}
    assert {row.seed_count for row in rows.values()} == {0}
    assert rows["uniform"].curve.mean[-1] == results_tree.distance("uniform", 1, 400)
    assert np.isnan(rows["min_snr"].ratio_to_baseline.value) and not any(row.is_ranked for row in rows.values())
    assert "Not ranked" in page_of(*small, unfinished=True)


def arrays(value):
    """All arrays of a JSON of Bokeh's."""
    if isinstance(value, dict):
        if value.get("type") == "ndarray":
            yield np.frombuffer(gzip.decompress(base64.b64decode(value["array"]["data"])), value["dtype"])
        for part in value.values():
            yield from arrays(part)
    elif isinstance(value, list):
        for part in value:
            yield from arrays(part)


def test_curves_for_a_browser_have_the_numbers_of_the_figure(small):
    found = collect(load(small[0]), small[1])
    looks = plot_style.assign_looks(found.methods, found.baseline)
    items = [
        interactive.convert_figure(curve_figures.draw_distance(found, looks, over_time=False), looks) for _ in range(2)
    ]
    assert items[0] == items[1] and "<" not in items[0]
    drawn = list(arrays(json.loads(items[0])))
    for method in found.methods:
        own = ranking.build_curve(found.measurements, method)
        for wanted in (own.steps, own.mean, own.mean + own.std):
            assert any(len(wanted) == len(array) and np.allclose(wanted, array) for array in drawn), method
    assert all(f'"value": "{name}"' in items[0] for name in (*found.methods, "floor", "noise"))
    assert '"click_policy": "hide"' in items[0] and "HoverTool" in items[0]


def test_the_same_image_by_method_and_milestone(small):
    images = np.arange(5, dtype=np.uint8)[:, None, None, None] * np.ones((1, 8, 8, 1), np.uint8)
    found = collect(load(small[0]), small[1])
    for number, (_, milestone) in enumerate(found.run_snapshots):
        write_samples(milestone.grid_file.with_suffix(".npz"), images + 10 * number, {})
    drawing = draw_image_by_image(found, {})
    assert [axes.get_title() for axes in drawing.axes] == [f"image {number}" for number in (1, 2, 3, 4)]
    for number, axes in enumerate(drawing.axes):
        picture = axes.images[0].get_array()
        side = (len(picture) + 2) // len(found.methods)
        for row, method in enumerate(found.methods):
            first = found.run_snapshots.index(next(one for one in found.run_snapshots if one[0].method == method))
            values = picture[row * side, ::side][: len(found.experiment.milestones)]
            assert list(values) == [(10 * (first + k) + number) for k in range(4)]
    assert [label.get_text() for label in drawing.axes[0].get_yticklabels()] == found.methods
