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

import results_tree
from kairos.cli import main
from kairos.config import load
from kairos.files import read_json, write_json
from kairos.report.collect import collect
from kairos.tracking import mlflow_store, run_content
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
    timing = results / "uniform/seed0/timing.jsonl"
    timing.write_text(timing.read_text().replace("2026-01-02", "2026-03-04"))
    path = results / "uniform/seed0/evaluation/0000400.json"
    evaluation = read_json(path)
    evaluation["metrics"][METRIC] = 5.0
    write_json(path, evaluation)
    track(load(config), results, out)
    assert count_rows() == {**first, "metrics": first["metrics"] + 1}
    assert client.get_run(record["runs"]["uniform/seed0"]).data.metrics[METRIC] == 5.0

    # a sample grid that differs replaces the artifact, and an MLflow run that was deleted is imported again
    grid = results / "uniform/seed0/samples/0000400.png"
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
    (results / "uniform/seed0/training.json").unlink()
    with pytest.raises(KairosError, match=r"training\.json is missing"):
        track(load(config), results, results / "tracking.json")


def test_long_curves_are_thinned_and_an_extension_keeps_their_points(tree):
    config, results = tree
    path = results / "uniform/seed0/metrics.jsonl"

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
