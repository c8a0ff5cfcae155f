"""Whether MLflow and DVC can be used here: each is asked itself, in a process of its own, for they import slowly."""

import json
import os
import re
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

from kairos.tracking.store import tracking_uri, without_credentials

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


class Tools:
    """MLflow and DVC, asked when this is made; `findings` waits for their answers."""

    def __init__(self, configured: str | None = None):
        """`configured` is an experiment's tracking.uri."""
        self.uri = tracking_uri(configured)
        database = re.fullmatch(r"sqlite(?:\+\w+)?:///(.+)", self.uri)
        path = Path(database[1]).absolute() if database else None
        self.fault = _why_read_only(path) if path else None
        new = path is not None and not path.exists()  # asking for it would make it
        self.mlflow = None if new or self.fault else _start(_ASK_MLFLOW, MLFLOW_TRACKING_URI=self.uri)
        self.dvc = _start(_ASK_DVC)

    def findings(self) -> list[Finding]:
        """A finding for the store of MLflow, for DVC's repository, its cache and its remote."""
        return [self._mlflow(), *self._dvc()]

    def _mlflow(self) -> Finding:
        shown, fault = without_credentials(self.uri), self.fault
        if self.mlflow is not None:
            good, answer = _answer(self.mlflow)
            fault = None if good else answer
        if not fault:
            found = "opened" if self.mlflow else "not there yet, the first import makes it"
            return True, "mlflow store", f"{shown}: {found}"
        secret = self.uri.split("//")[-1].rpartition("@")[0]
        fault = fault.replace(f"{secret}@", "") if secret else fault
        advice = "set MLFLOW_TRACKING_URI (or tracking.uri) to a store that can be written, or tracking.enabled: false"
        return False, "mlflow store", f"{shown}: {fault[:500]}; {advice}"

    def _dvc(self) -> list[Finding]:
        good, answer = _answer(self.dvc)
        if not good:
            advice = "git init and dvc init make one, a clone of kairos is one"
            return [(False, "dvc repository", f"{answer[:300]}; {advice}")]
        found = json.loads(answer)
        cache = Path(found["cache"])
        fault = _cannot_write(cache)
        how = "dvc cache dir --local PATH names a folder that can be written"
        remote = "none: dvc remote add --local --default NAME PATH_OR_URL names where to share results"
        if found["remote"]:
            remote = f"{found['remote']}, {without_credentials(found['url'] or '')}"
        return [
            (True, "dvc repository", "dvc.yaml" if Path("dvc.yaml").exists() else "no dvc.yaml in this folder"),
            (not fault, "dvc cache", f"{fault}; {how}" if fault else str(cache)),
            (True, "dvc remote", remote),
        ]


def _start(code: str, **environment: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", f"try:{code}{_IN_ONE_LINE}"],
        env={**_QUIET, **os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _answer(process: "subprocess.Popen[str]") -> tuple[bool, str]:
    """Whether a process could do what it was asked, and the last line of its output or of its complaint."""
    try:
        output, complaint = process.communicate(timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return False, f"no answer within {_PATIENCE} s"
    good = process.returncode == 0
    lines = (output if good else complaint).strip().splitlines()
    return good, lines[-1] if lines else f"exit status {process.returncode}"


def _why_read_only(database: Path) -> str | None:
    """Why nothing can be written into a database; None where it can."""
    if not database.exists():
        return _cannot_write(database.parent)
    try:
        with sqlite3.connect(database, timeout=4) as connection:
            connection.execute("BEGIN IMMEDIATE")  # takes the lock for writing, and gives it back
            connection.rollback()
    except sqlite3.Error as error:
        return f"cannot be written: {error}"
    return _cannot_write(database.parent)  # where its journal goes


def _cannot_write(folder: Path) -> str | None:
    """Why no file can be made in a folder, or in the nearest one above it that is there; None where one can."""
    while not folder.exists():
        folder = folder.parent
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return f"cannot write in {folder}: {error.strerror}"
    return None
