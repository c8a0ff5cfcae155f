"""Checks of `kairos doctor` that MLflow and DVC work, each in a separate process, because they import slowly."""

import json
import os
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

from kairos.tracking.mlflow_store import find_database_file, redact_credentials, tracking_uri, without_credentials

Finding = tuple[bool, str, str]  # success, name of the check, result or advice
_TIMEOUT = 60  # seconds for an answer; requests to a missing server end after four
# code for `_run_python`, the body of a try statement that _IN_ONE_LINE completes
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
_QUIET = {  # environment variables: no telemetry, and no repeated requests to a missing server
    "DVC_NO_ANALYTICS": "1",
    "GIT_PYTHON_REFRESH": "quiet",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "4",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
}


def check_mlflow(configured: str | None) -> list[Finding]:
    """Check that MLflow's store can be written, and return a list with one finding; the check creates no database.

    An SQLite database that does not exist is usable if a file can be created at its path. An existing database must be
    writable and answer a request. Any other store must answer a request. The finding contains no credentials.

    Args:
        configured: setting `tracking.uri` of an experiment; None: MLFLOW_TRACKING_URI or the default store.
    """
    uri = tracking_uri(configured)
    path = find_database_file(uri)
    fault = _why_read_only(path) if path else None  # a server is tested by the request alone
    status = "opened"
    if path and not path.exists():  # no request, which would create it; `fault` is about its folder
        status = "does not exist yet, the first import creates it"
    elif not fault:
        succeeded, answer = _run_python(_ASK_MLFLOW, MLFLOW_TRACKING_URI=uri)
        fault = None if succeeded else answer
    public_uri = without_credentials(uri)
    if not fault:
        return [(True, "mlflow store", f"{public_uri}: {status}")]
    advice = "set MLFLOW_TRACKING_URI (or tracking.uri) to a store that can be written, or tracking.enabled: false"
    return [(False, "mlflow store", f"{public_uri}: {redact_credentials(fault, uri)[:500]}; {advice}")]


def check_dvc() -> list[Finding]:
    """Check that the working directory is in a DVC repository whose cache can be written, and report its remote.

    The findings are repository, cache and remote; without a repository there is only the first, which fails. A
    repository without a remote or without dvc.yaml is usable. The remote is not contacted, and its finding contains no
    credentials.
    """
    succeeded, answer = _run_python(_ASK_DVC)
    if not succeeded:
        advice = "git init and dvc init create one, a clone of kairos is one"
        return [(False, "dvc repository", f"{answer[:300]}; {advice}")]
    repository = json.loads(answer)
    stages_file = "dvc.yaml" if Path("dvc.yaml").exists() else "no dvc.yaml in this folder"
    cache = repository["cache"]
    fault = _why_folder_is_read_only(Path(cache))
    advice = "dvc cache dir --local PATH selects a folder that can be written"
    remote = "none: dvc remote add --local --default NAME PATH_OR_URL adds one, to share results"
    if repository["remote"]:
        remote = f"{repository['remote']}, {without_credentials(repository['url'] or '')}"
    return [
        (True, "dvc repository", stages_file),
        (not fault, "dvc cache", f"{fault}; {advice}" if fault else cache),
        (True, "dvc remote", remote),
    ]


def _run_python(code: str, **environment: str) -> tuple[bool, str]:
    """Run Python code in a separate process; return True and its last line of output, or False and the error.

    The error is the last line of stderr. A process that runs for more than `_TIMEOUT` seconds is ended, which is an
    error. Without output, the text is ``exit status`` and its number. `code` contains indented statements, the body of
    a try statement. `environment` replaces variables of this process, which replace `_QUIET`.
    """
    command = [sys.executable, "-c", f"try:{code}{_IN_ONE_LINE}"]
    variables = {**_QUIET, **os.environ, **environment}
    try:
        process = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return False, f"no answer within {_TIMEOUT} s"
    succeeded = process.returncode == 0
    output = process.stdout if succeeded else process.stderr
    lines = output.strip().splitlines()
    answer = lines[-1] if lines else f"exit status {process.returncode}"
    return succeeded, answer


def _why_read_only(path: Path) -> str | None:
    """Return why an SQLite database cannot be written or created; None if it can.

    An existing database is locked for writing for a moment; another lock on it is awaited for 4 s. In both cases files
    must be writable in the database's folder. No database is created.
    """
    if not path.exists():
        return _why_folder_is_read_only(path.parent)
    try:
        with sqlite3.connect(path, timeout=4) as connection:
            connection.execute("BEGIN IMMEDIATE")  # takes the lock for writing
            connection.rollback()
    except sqlite3.Error as error:
        return f"cannot be written: {error}"
    return _why_folder_is_read_only(path.parent)  # the database writes its journal there


def _why_folder_is_read_only(folder: Path) -> str | None:
    """Return why no file can be created in a folder, or in its nearest existing parent; None if a file can be created.

    The check creates and deletes a temporary file.
    """
    folder = nearest_existing(folder)
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return f"cannot write in {folder}: {error.strerror}"
    return None


def nearest_existing(path: Path) -> Path:
    """Return a path if it exists, else its nearest parent folder that exists, as an absolute path."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.exists())
