"""Tests of the import into MLflow: complete, idempotent, and without effect on the pipeline if it fails."""

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

import results_tree
from kairos.cli import main
from kairos.config import load
from kairos.files import read_json, write_record
from kairos.report.collect import collect
from kairos.tracking import mlflow_store, run_content, view
from kairos.tracking.track import track
from kairos_timesteps.errors import KairosError
from kill_at import die_at
from ports import free_port

METRIC = results_tree.METRIC


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Experiment file and results of two methods and one seed, in a working folder without tracking settings."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return results_tree.write(tmp_path, seeds=(0,), methods=("uniform", "adaptive"))


def count_rows(database="mlflow.db"):
    """Return the number of rows of each table of an MLflow database."""
    with sqlite3.connect(database) as connection:
        names = ("runs", "metrics", "params", "tags", "experiments")
        return {name: connection.execute(f"select count(*) from {name}").fetchone()[0] for name in names}


@pytest.mark.long
def test_import_is_complete_and_importing_again_adds_nothing(tree):
    from mlflow import MlflowClient

    config, results = tree
    out = results / "tracking.json"
    (results / "figures").mkdir()
    (results / "figures" / "density.svg").write_text("<svg/>")
    (results / "report.html").write_text("<html/>")
    track(load(config), results, out)
    record, first = read_json(out), count_rows()
    assert record["imported"] and record["uri"] == "sqlite:///mlflow.db"
    assert set(record["runs"]) == {"uniform/seed0", "adaptive/seed0"} and first["runs"] == 3

    client = MlflowClient(tracking_uri="sqlite:///mlflow.db")
    run = client.get_run(record["runs"]["adaptive/seed0"])
    assert run.info.status == "FINISHED"
    assert run.data.params["sampler.name"] == "adaptive" and run.data.params["sampler.frequency"] == "4"
    assert run.data.params["weighting.name"] == "none" and run.data.params["training.optimizer.name"] == "adam"
    training = collect(load(config), results).runs_of("adaptive")[0]
    assert run.data.tags["kairos.identity"] == training.record["identity"]
    assert run.data.tags["kairos.data"] == "d" * 64
    assert run.data.tags["mlflow.source.git.commit"] == "0123456789abcdef"
    assert run.data.tags["mlflow.parentRunId"] == record["parent"]
    losses = client.get_metric_history(run.info.run_id, "loss")
    assert [(m.step, m.value) for m in sorted(losses, key=lambda m: m.step)] == list(
        zip(training.metrics["step"], training.metrics["loss"])
    )
    distances = {m.step: m for m in client.get_metric_history(run.info.run_id, METRIC)}
    assert {step: m.value for step, m in distances.items()} == {
        m.step: m.measured_values[METRIC] for m in training.snapshots
    }
    assert distances[400].timestamp - distances[0].timestamp == 24_000  # 400 steps of 60 ms
    assert {"sampler.a", "val_loss_epsilon", "val_vlb", "kid", "mse", "lr", "grad_norm"} <= set(run.data.metrics)
    assert {item.path for item in client.list_artifacts(record["parent"])} == {"figures", "report.html"}

    track(load(config), results, out)
    assert count_rows() == first and read_json(out) == record

    # other clock times (of a run computed again) add nothing; a corrected value becomes the latest one
    timing = results / "methods/uniform/seed0/timing.jsonl"
    timing.write_text(timing.read_text().replace("2026-01-02", "2026-03-04"))
    path = results / "methods/uniform/seed0/evaluation/0000400.json"
    evaluation = read_json(path)
    evaluation["metrics"][METRIC] = 5.0
    write_record(path, evaluation)
    track(load(config), results, out)
    assert count_rows() == {**first, "metrics": first["metrics"] + 1}
    assert client.get_run(record["runs"]["uniform/seed0"]).data.metrics[METRIC] == 5.0

    # a sample grid that differs replaces the artifact, and an MLflow run that was deleted is imported again
    grid = results / "methods/uniform/seed0/samples/0000400.png"
    grid.write_bytes(grid.read_bytes() + b"more")
    client.delete_run(record["runs"]["adaptive/seed0"])
    track(load(config), results, out)
    runs = read_json(out)["runs"]
    assert runs["uniform/seed0"] == record["runs"]["uniform/seed0"]
    downloaded = client.download_artifacts(runs["uniform/seed0"], "samples/0000400.png", str(results))
    assert Path(downloaded).read_bytes() == grid.read_bytes()
    assert client.get_run(runs["adaptive/seed0"]).info.lifecycle_stage == "active"
    assert set(client.get_run(runs["adaptive/seed0"]).data.metrics) == set(run.data.metrics)

    # a deleted experiment is reported and does not fail the command
    client.delete_experiment(client.get_experiment_by_name("kairos/tiny").experiment_id)
    track(load(config), results, out)
    assert read_json(out)["imported"] is False and "was deleted; restore it" in read_json(out)["error"]


@pytest.mark.long
def test_an_import_that_is_killed_is_completed_by_the_next_import(tree, monkeypatch):
    from mlflow import MlflowClient

    config, results = tree
    out = results / "tracking.json"
    MlflowClient(tracking_uri="sqlite:///empty.db").search_experiments()  # creates the tables, which takes a second
    shutil.copy("empty.db", "whole.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///whole.db")
    track(load(config), results, out)
    calls = [("log_artifact", 6), ("log_inputs", 2), ("log_batch", 2), ("set_terminated", 1), ("set_tag", 1)]
    for method, count in calls:
        database = f"killed_{method}.db"
        shutil.copy("empty.db", database)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{database}")
        child = os.fork()
        if child == 0:
            setattr(MlflowClient, method, die_at(count, getattr(MlflowClient, method)))
            try:
                track(load(config), results, out)
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, method
        track(load(config), results, out)
        assert count_rows(database) == count_rows("whole.db"), method
        client = MlflowClient(tracking_uri=f"sqlite:///{database}")
        for run_id in (read_json(out)["parent"], *read_json(out)["runs"].values()):
            assert client.get_run(run_id).info.status == "FINISHED", method
        grids = client.list_artifacts(read_json(out)["runs"]["adaptive/seed0"], "samples")
        assert [item.path for item in grids] == [f"samples/{step:07d}.png" for step in (0, 100, 200, 400)]


def test_an_unreachable_server_is_reported_quickly_and_does_not_fail_the_command(tree, monkeypatch, capfd):
    config, results = tree
    uri = f"http://someone:secret@127.0.0.1:{free_port()}"
    out = results / "tracking.json"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    start = time.monotonic()
    assert main(["track", "--config", str(config), "--results", str(results), "--out", str(out)]) == 0
    assert time.monotonic() - start < 45  # with the imports of MLflow on a busy machine
    record, printed = read_json(out), "".join(capfd.readouterr())
    assert record["imported"] is False and record["uri"].startswith("http://127.0.0.1:")
    assert "import into MLflow failed" in printed and "Traceback" not in printed
    assert "secret" not in printed + out.read_text()


def test_nothing_is_imported_if_tracking_is_disabled(tree):
    config, results = tree
    config.write_text(config.read_text() + "tracking: {enabled: false}\n")
    track(load(config), results, results / "tracking.json")
    assert read_json(results / "tracking.json") == {"imported": False, "error": "tracking.enabled is false"}
    assert not Path("mlflow.db").exists()


def test_missing_mlflow_is_reported(tree, monkeypatch, capsys):
    config, results = tree
    monkeypatch.setitem(sys.modules, "mlflow", None)
    track(load(config), results, results / "tracking.json")
    assert "make setup" in read_json(results / "tracking.json")["error"]
    assert "mlflow cannot be imported" in capsys.readouterr().err


def test_missing_results_are_an_error(tree):
    config, results = tree
    (results / "methods/uniform/seed0/training.json").unlink()
    with pytest.raises(KairosError, match=r"training\.json is missing"):
        track(load(config), results, results / "tracking.json")


def test_long_curves_are_thinned_and_an_extension_keeps_their_points(tree):
    config, results = tree
    path = results / "methods/uniform/seed0/metrics.jsonl"

    def imported_steps(lines):
        path.write_text("".join(json.dumps({"step": k + 1, "loss": 1.0}) + "\n" for k in range(lines)))
        training = collect(load(config), results).runs_of("uniform")[0]
        return {point.step for point in run_content.collect_points(training) if point.key == "loss"}

    short, medium, long = imported_steps(500), imported_steps(750), imported_steps(2250)
    assert len(short) == 500 and len(medium) == 375 and 250 <= len(long) <= 500
    assert medium - short == {step for step in medium if step > 500}
    assert {step for step in long if step <= 750} <= medium


def test_the_file_takes_precedence_over_the_environment_and_credentials_are_removed(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert mlflow_store.tracking_uri(None) == "sqlite:///mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://server:5000")
    assert mlflow_store.tracking_uri(None) == "http://server:5000"
    assert mlflow_store.tracking_uri("sqlite:///other.db") == "sqlite:///other.db"
    assert mlflow_store.without_credentials("https://me:pw@host:5000/a") == "https://host:5000/a"
    assert mlflow_store.without_credentials("sqlite:///mlflow.db") == "sqlite:///mlflow.db"


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("postgresql://db/mlflow?user=me&password=hush", "postgresql://db/mlflow"),
        ("postgresql://me:hush@db/mlflow?password=hush", "postgresql://db/mlflow"),
        (
            "postgresql://me:h/u?s#hush@db/mlflow",
            "postgresql://db/mlflow",
        ),  # SQLAlchemy allows these characters in a password
        ("mssql+pyodbc:///?odbc_connect=PWD%3Dhush", "mssql+pyodbc:///"),
        ("https://host/a?token=hush#hush", "https://host/a"),
        ("sqlite:////folder/mlflow.db?timeout=5", "sqlite:////folder/mlflow.db"),
        ("https://host:5000/a@b", "https://host:5000/a@b"),
        ("ssh://me@host/a", "ssh://host/a"),
        ("/folder/what?", "/folder/what?"),
    ],
)
def test_credentials_are_removed_from_an_address(uri, expected):
    assert mlflow_store.without_credentials(uri) == expected


@pytest.mark.parametrize(
    "uri",
    [
        "unknown://db/mlflow?user=me&password=hush",  # MLflow's error quotes the URI
        "postgresql://db:none/mlflow?user=me&password=hush",
        "unknown://me:hush@db/mlflow?user=me",
    ],
)
def test_a_failed_import_does_not_record_a_password(tree, uri, monkeypatch, capfd):
    config, results = tree
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    track(load(config), results, results / "tracking.json")
    record = read_json(results / "tracking.json")
    assert not record["imported"] and "/mlflow" in record["uri"]
    assert "hush" not in str(record) + "".join(capfd.readouterr())


def test_a_quoted_password_is_removed_from_a_text():
    uri = "postgresql://db/mlflow?user=me&password=h%20ush"
    for quoted in (uri, "password=h%20ush&user=me", "password='h ush'", "password=h ush"):
        text = mlflow_store.redact_credentials(f"some failure: {quoted}", uri)
        assert "ush" not in text and "some failure" in text


GAMMA_OF_1 = {"min_snr": {"sampler": "uniform", "weighting": {"name": "min_snr", "gamma": 1.0}}}


@pytest.fixture
def edited(tmp_path, monkeypatch):
    """Function that writes experiment file and results of gamma 5 (False) or 1 (True); the store is a new database."""
    monkeypatch.chdir(tmp_path)
    # an absolute path, since MLflow keeps a store open under its URI
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")

    def write(is_edited, methods=("uniform", "min_snr"), seeds=(0, 1)):
        folder = tmp_path / f"{is_edited}-{methods}-{seeds}"
        folder.mkdir()
        return results_tree.write(folder, seeds, methods, GAMMA_OF_1 if is_edited else {})

    return write


def import_results(config, results):
    """Import results into the store of the environment, and return the record of the import."""
    track(load(config), results, results / "tracking.json")
    record = read_json(results / "tracking.json")
    assert record["imported"], record
    return record


def search_runs(search_filter=None):
    """Return the runs that MLflow shows with a filter; None: the filter of the prepared comparison."""
    client = mlflow_store.connect(os.environ["MLFLOW_TRACKING_URI"])
    (experiment,) = client.search_experiments(filter_string="name = 'kairos/tiny'")
    if search_filter is None:
        search_filter = json.loads(experiment.tags[view.TAG])["searchFilter"]
    return client.search_runs([experiment.experiment_id], search_filter)


def find_current_runs():
    """Return the training runs that the prepared comparison shows: id by method and seed, which occur once each."""
    shown = search_runs()
    training = [run for run in shown if run.data.tags["kairos.role"] == "training"]
    assert len(shown) == len(training) + 1, "the parent run with the report is shown too"
    ids = {f"{run.data.params['method']}/seed{run.data.params['seed']}": run.info.run_id for run in training}
    assert len(ids) == len(training), "a method and seed has one current run"
    return ids


def run_names():
    """Return the names of all runs, as MLflow's page without a filter shows them."""
    return sorted(run.info.run_name for run in search_runs(""))


@pytest.mark.long
def test_runs_of_earlier_options_are_not_shown_with_current_results(edited):
    before, after = edited(False), edited(True)
    first = import_results(*before)["runs"]
    assert find_current_runs() == first
    second = import_results(*after)["runs"]
    assert find_current_runs() == second
    assert {name for name in first if first[name] != second[name]} == {"min_snr/seed0", "min_snr/seed1"}
    earlier, current = ["[earlier] min_snr seed 0", "[earlier] min_snr seed 1"], ["min_snr seed 0", "min_snr seed 1"]
    names = [*earlier, *current, "tiny", "uniform seed 0", "uniform seed 1"]
    assert run_names() == names, "the page of all runs tells them apart"

    # the edit is reverted: the first runs are the current ones again, and nothing is added
    rows = count_rows()
    assert import_results(*before)["runs"] == first == find_current_runs()
    assert run_names() == names and count_rows() == rows


@pytest.mark.long
def test_runs_of_removed_methods_and_seeds_are_not_shown_with_current_results(edited):
    import_results(*edited(False, methods=("uniform", "min_snr", "p2"), seeds=(0, 1, 2)))
    record = import_results(*edited(False, seeds=(0, 2)))
    assert find_current_runs() == record["runs"] and len(record["runs"]) == 4
    assert [name for name in run_names() if name.startswith("[earlier]")] == [
        *(f"[earlier] {name}" for name in ("min_snr seed 1", "p2 seed 0", "p2 seed 1", "p2 seed 2", "uniform seed 1")),
    ]


@pytest.mark.long
def test_values_after_the_last_step_and_of_removed_metrics_are_not_shown_with_current_results(edited):
    config, results = edited(False, seeds=(0,))
    import_results(config, results)
    whole = config.read_text()
    shorter = yaml.safe_load(whole)
    shorter["training"]["milestones"] = [100, 200]
    config.write_text(yaml.safe_dump(shorter))
    for training in ("uniform/seed0", "min_snr/seed0"):
        path = results / "methods" / training / "metrics.jsonl"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:200]))
    for name in ("0000000", "0000100", "0000200"):
        path = results / f"methods/min_snr/seed0/evaluation/{name}.json"
        evaluation = read_json(path)
        del evaluation["metrics"]["kid"]
        write_record(path, evaluation)
    runs = import_results(config, results)["runs"]
    assert find_current_runs() == runs
    metrics = {run.info.run_id: run.data.metrics for run in search_runs()}
    for training, run_id in runs.items():
        assert metrics[run_id][METRIC] == results_tree.distance(training.partition("/")[0], 0, 200), training
    assert "kid" in metrics[runs["uniform/seed0"]] and "kid" not in metrics[runs["min_snr/seed0"]]
    assert [name for name in run_names() if "earlier" in name] == [
        "[earlier] min_snr seed 0",
        "[earlier] uniform seed 0",
    ]

    # an extension keeps the MLflow runs, and a further import adds nothing
    config.write_text(whole)
    rows = count_rows()["runs"]
    assert import_results(config, results)["runs"] == runs == find_current_runs()
    assert count_rows()["runs"] == rows


@pytest.mark.long
def test_an_import_that_is_killed_leaves_no_two_current_runs(edited, monkeypatch):
    from mlflow import MlflowClient

    before, after = edited(False), edited(True)
    import_results(*before)
    shutil.copy("mlflow.db", "before.db")
    for count in range(1, 8):  # two batches log the content of the new runs, and four mark runs
        database = f"killed_{count}.db"
        shutil.copy("before.db", database)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{Path(database).absolute()}")
        child = os.fork()
        if child == 0:
            MlflowClient.log_batch = die_at(count, MlflowClient.log_batch)
            try:
                import_results(*after)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        find_current_runs()  # fails if a method and seed has two
        record = import_results(*after)
        assert find_current_runs() == record["runs"]


@pytest.mark.long
def test_two_imports_at_once_into_a_fresh_database(tree):
    config, results = tree
    outs = [results / f"tracking{k}.json" for k in range(2)]
    command = [sys.executable, "-m", "kairos", "track", "--config", str(config), "--results", str(results), "--out"]
    jobs = [subprocess.Popen([*command, str(out)], stderr=subprocess.PIPE, text=True) for out in outs]
    for job in jobs:
        assert job.wait(timeout=240) == 0
    first, second = map(read_json, outs)
    assert first["imported"] and first == second and count_rows()["runs"] == 3
