"""Tests of MLflow's first page after an import: the prepared comparison, the note, and `kairos ui`."""

import html
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

import results_tree
from kairos import cli
from kairos.config import load, validate
from kairos.files import read_json
from kairos.report.collect import collect
from kairos.tracking import view
from kairos.tracking.track import track
from ports import free_port

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
METHODS = ("uniform", "min_snr", "speed")


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """Collected results and import record of three methods with two seeds, in the working folder."""
    root, before = tmp_path_factory.mktemp("view"), os.getcwd()
    with pytest.MonkeyPatch.context() as patch:
        # an absolute path, since MLflow keeps a store open under its URI
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{root}/mlflow.db")
        os.chdir(root)
        config, results = results_tree.write(root, seeds=(0, 1), methods=METHODS)
        (results / "figures").mkdir()
        (results / "figures" / "density.png").write_bytes(b"")
        (results / "report.html").write_text("<html/>")
        track(load(config), results, results / "tracking.json")
        yield collect(load(config), results), read_json(results / "tracking.json")
        os.chdir(before)


@pytest.mark.long
def test_the_import_prepares_a_comparison_a_note_and_the_details_of_each_run(tree):
    from mlflow import MlflowClient

    _, record = tree
    client = MlflowClient(tracking_uri=os.environ["MLFLOW_TRACKING_URI"])
    experiment = client.get_experiment_by_name("kairos/tiny")
    shared_view = json.loads(experiment.tags["mlflow.sharedViewState.kairos"])
    assert shared_view["orderByKey"] == "metrics.`frechet_classifier32`" and shared_view["orderByAsc"]
    assert shared_view["groupBy"]["groupByKeys"] == [{"mode": "param", "groupByData": "method"}]
    run = client.get_run(record["runs"]["min_snr/seed1"])
    logged = {"params": run.data.params, "metrics": run.data.metrics, "tags": run.data.tags}
    columns = [column.removesuffix("`").split(".`") for column in shared_view["selectedColumns"]]
    for training in record["runs"].values():  # options of other samplers and weightings are logged by other methods
        data = client.get_run(training).data
        for kind, values in (("params", data.params), ("metrics", data.metrics), ("tags", data.tags)):
            logged[kind] = logged[kind] | values
    assert all(name in logged[kind] for kind, name in columns), "every column of the view is logged"
    options = {name for name in logged["params"] if name.startswith(("sampler.", "weighting."))}
    assert options <= {name for _, name in columns} and "weighting.gamma" in options
    assert "tags.`kairos.current` = 'true'" in shared_view["searchFilter"]
    assert {chart["metricKey"] for chart in shared_view["compareRunCharts"]} <= set(run.data.metrics)
    assert run.data.metrics["seconds_per_step"] == pytest.approx(0.05)

    note = experiment.tags["mlflow.note.content"]
    assert "**min_snr 16.81 ± 0.50**, speed 18" in note and "too few seeds to rank: 2" in note and len(note) < 5000
    rows = [line.split(" | ")[0].strip("| ") for line in note.splitlines() if line.startswith("|")]
    assert rows == ["method", "---", "min_snr", "speed", "uniform"]
    assert f"/runs/{record['parent']}/artifacts/report.html" in note

    (data,) = run.inputs.dataset_inputs
    assert (data.dataset.name, data.dataset.digest) == ("digits", "d" * 36)
    assert run.data.tags["mlflow.source.git.commit"] == "0123456789abcdef"
    grids = [item.path for item in client.list_artifacts(run.info.run_id, "samples")]
    assert grids == [f"samples/{step:07d}.png" for step in (0, 100, 200, 400)]
    assert [item.path for item in client.list_artifacts(record["parent"], "figures")] == ["figures/density.png"]


def test_the_note_has_the_options_that_are_no_defaults_and_the_quantity_of_each_number(tmp_path):
    edited = {
        "min_snr": {"sampler": "uniform", "weighting": {"name": "min_snr", "gamma": 1.0}},
        "min_snr_5": {"sampler": "uniform", "weighting": "min_snr"},
        "p2": {"sampler": "uniform", "weighting": "p2"},  # with an option gamma too, as default
    }
    values = results_tree.experiment(methods=("uniform", "min_snr", "p2"), edited=edited)
    options = view.select_options(validate(values))
    assert options == {
        "uniform": {},
        "p2": {},
        "min_snr": {"weighting.gamma": "1.0"},
        "min_snr_5": {"weighting.gamma": "5.0"},
    }

    del edited["min_snr_5"]
    config, results = results_tree.write(tmp_path, range(5), ("uniform", "min_snr", "p2"), edited)
    note = view.build_note(collect(load(config), results))
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in note.splitlines() if line.startswith("|")]
    first = dict(zip(table[0], table[2]))
    assert first["method"] == "min_snr" and first["options"] == "weighting.gamma=1.0"
    assert "weighting.gamma=1.0" in note.splitlines()[0]
    assert any(name.startswith("frechet_classifier32 at step 400: mean over seeds ±") for name in first)
    assert {"difference to uniform", "95 % interval from", "p value of the difference"} <= set(first)


@pytest.mark.long
def test_a_note_of_many_methods_stays_below_the_limit_of_older_servers(tree, monkeypatch):
    results, _ = tree
    table = view.compare.build_comparison_table(results.measurements)
    long = table.loc[table.index.repeat(60)].reset_index(drop=True)
    monkeypatch.setattr(view.compare, "build_comparison_table", lambda *measured: long)
    note = view.build_note(results)
    assert len(note) < 4700 and re.search(r"\d+ more are in the report\.$", note)


def test_a_single_method_without_baseline_is_imported(tree, tmp_path):
    config, results = results_tree.write(tmp_path, methods=("speed",))
    config.write_text(config.read_text() + "tracking: {experiment: alone}\n")
    track(load(config), results, results / "tracking.json")
    assert read_json(results / "tracking.json")["imported"] is True


@pytest.mark.nightly
def test_the_first_page_of_a_new_browser_shows_methods_with_their_distances(tree, tmp_path):
    if CHROMIUM is None:
        pytest.skip("no Chromium here (Debian: apt-get install chromium)")
    results, _ = tree
    port = free_port()
    command = [sys.executable, "-m", "kairos", "ui", "--no-open", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            name = ""
            while name != "kairos/tiny":  # the store may contain experiments of other tests
                name, address = server.stdout.readline().strip().split(": ")
            assert address.startswith(f"http://127.0.0.1:{port}/#/experiments/1/runs?workflowType=machine_learning")
            browser = [
                CHROMIUM,
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                f"--user-data-dir={tmp_path}/profile",
            ]
            browser += ["--window-size=1600,1000", "--virtual-time-budget=20000", "--dump-dom", address]
            for _ in range(3):  # a slow machine may answer after the end of the virtual time
                page = subprocess.run(browser, capture_output=True, text=True, timeout=120).stdout
                shown = html.unescape(re.sub(r"<(script|style).*?</\1>|<[^>]+>", " ", page, flags=re.DOTALL))
                if "min_snr seed 0" in shown:
                    break
        finally:
            server.send_signal(signal.SIGINT)
            assert server.wait(60) == 0
    for training in results.runs:
        assert f"{training.method} seed {training.seed}" in shown
        assert str(training.last_snapshot.measured_values[results.distance_metric])[:6] in shown
    positions = [shown.rindex(f"{method} seed 0") for method in ("min_snr", "speed", "uniform")]
    assert positions == sorted(positions), "the lowest distance first"
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)


@pytest.mark.long
def test_kairos_ui_reports_errors_in_one_line(tree, tmp_path, monkeypatch, capsys):
    def error_of(*arguments):
        start = time.monotonic()
        assert cli.main(["ui", "--no-open", *arguments]) != 0 and time.monotonic() - start < 10
        (line,) = capsys.readouterr().err.splitlines()
        return line

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        line = error_of("--port", str(port))
        assert "--port" in line and str(port) in line
    assert "--port: got 70000" in error_of("--port", "70000")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@tracker:5000")
    line = error_of()
    assert "http://tracker:5000" in line and "secret" not in line
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    monkeypatch.chdir(tmp_path)
    assert "mlflow.db" in error_of()
    assert not list(tmp_path.iterdir())
    (tmp_path / "mlflow.db").write_text("no database at all, but long enough to look like a file")
    command = [sys.executable, "-m", "kairos", "ui", "--no-open"]  # a new process, since MLflow keeps stores open
    answer = subprocess.run(command, capture_output=True, text=True)
    line = answer.stderr.splitlines()[-1]
    assert answer.returncode == 1 and "Traceback" not in answer.stderr
    assert "sqlite:///mlflow.db" in line
