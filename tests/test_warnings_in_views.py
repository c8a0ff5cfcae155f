"""Every view of an experiment whose methods all end above a fitted Gaussian shows that warning, and ranks no method."""

import csv
import io
import json

import pytest

import results_tree
from kairos.cli import main
from kairos.config import load
from kairos.evaluation import evaluate
from kairos.files import read_json, write_json, write_record
from kairos.report import curve_figures, findings, plot_style
from kairos.report.collect import collect
from kairos.report.ranking import MIN_SEEDS, compare_methods
from kairos.status.render import render_page as render_status
from kairos.tracking import run_content, view
from report_page import page_of

METRIC = results_tree.METRIC
WARNING = f"{METRIC} is not below the 5 of a Gaussian fitted to the data"
FAULT = "classifier32 has not learned to classify the images."


def write_tree(root, gaussian=5.0, faults=()):
    """Write results of two methods with five seeds; returns the experiment file and the folder of results."""
    config, folder = results_tree.write(root, seeds=tuple(range(MIN_SEEDS)), methods=("uniform", "min_snr"))
    file = folder / "reference/record.json"
    record = read_json(file)
    record["rows"]["floor"] |= {METRIC: 1.0, f"{METRIC}_spread": 0.1}
    record["rows"]["gaussian"] |= {METRIC: gaussian, f"{METRIC}_spread": 0.1}
    record |= {"extractor_warnings": list(faults), "warnings": list(faults)}
    write_record(file, record)
    for path in folder.glob("methods/*/seed*/evaluation/*.json"):
        evaluation = read_json(path)
        added = evaluate._find_gaussian_warnings(evaluation["metrics"], record)  # as the stage stores them
        write_record(path, evaluation | {"warnings": [*faults, *evaluation["warnings"], *added]})
    results_tree.sign(load(config), folder)
    return config, folder


@pytest.fixture(scope="module")
def above(tmp_path_factory):
    return write_tree(tmp_path_factory.mktemp("above"))


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """Results of an extractor that has learned nothing."""
    return write_tree(tmp_path_factory.mktemp("faulty"), gaussian=1000.0, faults=(FAULT,))


@pytest.mark.parametrize(("tree", "warning"), [("above", WARNING), ("faulty", FAULT)])
def test_the_report_begins_with_the_warning_and_calls_no_method_best(tree, warning, request):
    config, folder = request.getfixturevalue(tree)
    html = page_of(config, folder)
    assert warning in html[: html.index("<nav>")] and "≈ best" not in html and "Holm</small>" not in html
    assert "ends with the lowest" not in html
    results = collect(load(config), folder)
    assert findings.list_warnings(results)[0].count(warning) == 1
    assert not any(row.may_be_best or row.is_ranked for row in compare_methods(results.measurements))


@pytest.mark.parametrize(("tree", "warning"), [("above", WARNING), ("faulty", FAULT)])
def test_tables_of_all_formats_contain_the_warning_and_no_p_value(tree, warning, request, capsys, tmp_path):
    _, folder = request.getfixturevalue(tree)
    texts = {}
    for form in ("table", "md", "csv", "json"):
        assert main(["compare", str(folder), "--format", form]) == 0
        captured = capsys.readouterr()
        texts[form] = captured.out
        assert warning in captured.out and (warning in captured.err) == (form in ("csv", "json"))
    assert all(warning in row["warnings"] and row["p_value"] is None for row in json.loads(texts["json"]))
    assert all(not row["p_value"] for row in csv.DictReader(io.StringIO(texts["csv"])))
    assert main(["compare", str(folder), "--out", str(tmp_path / "table.txt")]) == 0
    assert warning in (tmp_path / "table.txt").read_text() and warning in capsys.readouterr().err
    assert main(["compare", str(folder), "--metric", "val_loss_epsilon"]) == 0  # no Gaussian has a loss, so it ranks
    assert "not ranked" not in capsys.readouterr().out
    assert main(["compare", "--index", str(folder.parent), "--out", str(tmp_path / "index.html")]) == 0
    assert warning in (tmp_path / "index.html").read_text()


@pytest.mark.parametrize(("tree", "warning"), [("above", WARNING), ("faulty", FAULT)])
def test_mlflow_the_status_page_and_figures_show_the_warning(tree, warning, request):
    config, folder = request.getfixturevalue(tree)
    results = collect(load(config), folder)
    note = view.build_note(results)
    heading = note.splitlines()[0]
    assert warning in note and "not ranked" in heading and "best" not in heading and len(note) < 5000
    assert all(warning in run_content.build_tags(results, run)["kairos.warnings"] for run in results.runs)
    assert warning in render_status(folder, 5.0, 0.0)
    styles = plot_style.assign_styles(results.methods, results.baseline)
    title = curve_figures.draw_distance(results, styles, over_time=False).axes[0].get_title(loc="left")
    assert warning in title.replace("\n", " ")


def test_a_model_card_contains_the_warnings_of_its_evaluation(above, tmp_path):
    snapshot = above[1] / "methods/uniform/seed0/snapshots/0000400"
    write_json(snapshot / "ema/config.json", {"_class_name": "DiT"})
    decoder = {"_class_name": "AutoencoderKL", "scaling_factor": 1.0, "shift_factor": 0.0}
    write_json(above[1] / "autoencoder/config.json", decoder)
    assert main(["export", "hub", str(snapshot), "--out", str(tmp_path / "card")]) == 0
    assert WARNING in (tmp_path / "card/README.md").read_text()


@pytest.mark.long
def test_tensorboard_contains_the_warning(above, tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    assert main(["export", "tensorboard", str(above[1]), "--out", str(tmp_path / "events")]) == 0
    files = list((tmp_path / "events").rglob("events*"))
    assert files and all(WARNING.encode() in file.read_bytes() for file in files)
