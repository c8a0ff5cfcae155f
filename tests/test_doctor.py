"""``kairos doctor`` opens the tracking store and asks DVC: it tells what can be used from what cannot."""

import socket
import subprocess

import pytest

from kairos.cli import main


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working folder without any tracking set up."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return tmp_path


def doctor(capsys) -> tuple[int, dict[str, tuple[str, str]]]:
    """Exit status, and of every line its mark and what it says."""
    status = main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    return status, {line[4:26].strip(): (line[:3].strip(), line[27:]) for line in lines}


def test_usable(folder, capsys):
    from mlflow import MlflowClient

    (folder / ".dvc").mkdir()
    (folder / ".dvc/config").write_text(
        "[core]\n  remote = store\n['remote \"store\"']\n  url = https://me:secret@host/x\n"
    )
    subprocess.run(["git", "init", "-q"], check=True)
    status, found = doctor(capsys)
    assert status == 0
    assert found["mlflow store"] == ("ok", "sqlite:///mlflow.db: not there yet, the first import makes it")
    assert found["dvc repository"][0] == "ok"
    assert found["dvc cache"] == ("ok", str(folder / ".dvc/cache/files/md5"))
    assert found["dvc remote"] == ("ok", "store, https://host/x")
    assert not (folder / "mlflow.db").exists()

    MlflowClient(f"sqlite:///{folder}/mlflow.db").search_experiments()  # makes it; MLflow keeps stores by their URI
    status, found = doctor(capsys)
    assert status == 0 and found["mlflow store"] == ("ok", "sqlite:///mlflow.db: opened")


def test_not_usable(folder, capsys, monkeypatch):
    (folder / "mlflow.db").write_text("no database, though it has the name of one")
    status, found = doctor(capsys)
    assert status == 1
    mark, what = found["mlflow store"]
    assert mark == "NO" and "file is not a database" in what and "set MLFLOW_TRACKING_URI" in what
    mark, what = found["dvc repository"]
    assert mark == "NO" and "not inside of a DVC repository" in what and "dvc init" in what

    with socket.socket() as listener:  # bound, but nobody listens
        listener.bind(("127.0.0.1", 0))
        server = f"127.0.0.1:{listener.getsockname()[1]}"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:secret@{server}")
        (folder / "cache").write_text("a file where a folder should be")
        (folder / ".dvc").mkdir()
        (folder / ".dvc/config").write_text("[core]\n  no_scm = true\n[cache]\n  dir = ../cache/below\n")
        status, found = doctor(capsys)
    assert status == 1
    mark, what = found["mlflow store"]
    assert mark == "NO" and what.startswith(f"http://{server}: ") and "refused" in what and "secret" not in what
    assert found["dvc repository"][0] == "ok"
    mark, what = found["dvc cache"]
    assert mark == "NO" and "cannot write" in what and "dvc cache dir" in what
    assert found["dvc remote"] == (
        "ok",
        "none: dvc remote add --local --default NAME PATH_OR_URL names where to share results",
    )
