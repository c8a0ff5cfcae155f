"""Checks that MLflow and DVC can be used here, each in a separate process, because they import slowly."""

import json
import os
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

from kairos.tracking.store import database, tracking_uri, uncredentialed, without_credentials

Finding = tuple[bool, str, str]  # whether it is well, what it is, what was found or what is to be done
_PATIENCE = 60  # seconds for an answer; a server that is not there is given up after four
_ASK_MLFLOW = """
    from mlflow import MlflowClient
    MlflowClient().search_experiments(max_results=1)
"""
_ASK_DVC = """
    import json
    from dvc.repo import Repo
    with Repo() as repo:
        remote = repo.config["core"].get("remote")
        url = repo.config["remote"].get(remote, {}).get("url")
        print(json.dumps({"cache": repo.cache.local.path, "remote": remote, "url": url}))
"""
_IN_ONE_LINE = """
except Exception as error:
    raise SystemExit(f"{type(error).__name__}: {str(error).strip().splitlines()[0]}")
"""
_QUIET = {
    "DVC_NO_ANALYTICS": "1",
    "GIT_PYTHON_REFRESH": "quiet",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "4",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
}


def mlflow(configured: str | None) -> list[Finding]:
    """The store of MLflow; `configured` is an experiment's tracking.uri."""
    uri = tracking_uri(configured)
    path = database(uri)
    fault, found = _why_read_only(path) if path else None, "opened"
    if path and not path.exists():  # asking for it would make it
        found = "not there yet, the first import makes it"
    elif not fault:
        good, answer = _ask(_ASK_MLFLOW, MLFLOW_TRACKING_URI=uri)
        fault = None if good else answer
    shown = without_credentials(uri)
    if not fault:
        return [(True, "mlflow store", f"{shown}: {found}")]
    advice = "set MLFLOW_TRACKING_URI (or tracking.uri) to a store that can be written, or tracking.enabled: false"
    return [(False, "mlflow store", f"{shown}: {uncredentialed(fault, uri)[:500]}; {advice}")]


def dvc() -> list[Finding]:
    """DVC's repository, its cache and its remote."""
    good, answer = _ask(_ASK_DVC)
    if not good:
        advice = "git init and dvc init make one, a clone of kairos is one"
        return [(False, "dvc repository", f"{answer[:300]}; {advice}")]
    found = json.loads(answer)
    fault = _cannot_write(Path(found["cache"]))
    how = "dvc cache dir --local PATH names a folder that can be written"
    remote = "none: dvc remote add --local --default NAME PATH_OR_URL names where to share results"
    if found["remote"]:
        remote = f"{found['remote']}, {without_credentials(found['url'] or '')}"
    return [
        (True, "dvc repository", "dvc.yaml" if Path("dvc.yaml").exists() else "no dvc.yaml in this folder"),
        (not fault, "dvc cache", f"{fault}; {how}" if fault else found["cache"]),
        (True, "dvc remote", remote),
    ]


def _ask(code: str, **environment: str) -> tuple[bool, str]:
    """Run code in a separate process; return True and its last line of output, or False and the error."""
    command = [sys.executable, "-c", f"try:{code}{_IN_ONE_LINE}"]
    own = {**_QUIET, **os.environ, **environment}
    try:
        done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=_PATIENCE, check=False)
    except subprocess.TimeoutExpired:
        return False, f"no answer within {_PATIENCE} s"
    good = done.returncode == 0
    lines = (done.stdout if good else done.stderr).strip().splitlines()
    return good, lines[-1] if lines else f"exit status {done.returncode}"


def _why_read_only(path: Path) -> str | None:
    """Return why a database cannot be written; None if it can."""
    if not path.exists():
        return _cannot_write(path.parent)
    try:
        with sqlite3.connect(path, timeout=4) as connection:
            connection.execute("BEGIN IMMEDIATE")  # takes the lock for writing, and gives it back
            connection.rollback()
    except sqlite3.Error as error:
        return f"cannot be written: {error}"
    return _cannot_write(path.parent)  # where its journal goes


def _cannot_write(folder: Path) -> str | None:
    """Return why no file can be created in a folder, or in its nearest existing parent; None if one can."""
    folder = existing(folder)
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return f"cannot write in {folder}: {error.strerror}"
    return None


def existing(path: Path) -> Path:
    """A path, or the nearest folder above it that is there."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.exists())
