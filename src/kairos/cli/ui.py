"""``kairos ui``: serve MLflow's pages of the imported runs and open a prepared comparison."""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
import webbrowser
from pathlib import Path
from typing import IO

from kairos.cli.common import open_listening_socket
from kairos_timesteps.errors import KairosError

_START_SECONDS = 120  # time limit for the start of MLflow


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `kairos ui`."""
    parser.add_argument(
        "--port", type=int, default=5000, metavar="N", help="port of the pages, for this machine only; default: 5000"
    )
    parser.add_argument("--no-open", action="store_true", help="print the address without opening a browser")


def run(arguments: argparse.Namespace) -> None:
    """Start MLflow's server, print the address of each experiment's comparison, and serve until Ctrl-C or SIGTERM.

    The first comparison is opened in a browser, or MLflow's first page if there is none, unless ``--no-open`` is set or
    this machine has no display. The function also returns if the server ends by itself. The store, MLFLOW_TRACKING_URI
    or the default database, is read. Output of the server goes to a temporary file.

    Raises:
        KairosError: the store cannot be used, the port is not available, or the server does not start.
    """
    from kairos.tracking import mlflow_store

    uri = mlflow_store.tracking_uri(None)
    _check_store(uri, arguments.port)
    comparisons = _find_comparisons(uri)
    base = f"http://127.0.0.1:{arguments.port}/"
    options = ["--backend-store-uri", uri, "--host", "127.0.0.1", "--port", str(arguments.port), "--workers", "1"]
    command = [sys.executable, "-m", "mlflow", "server", *options]
    # SIGTERM raises KeyboardInterrupt, as Ctrl-C does, so that the server ends with this process
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryFile("w+") as log:
        # a separate session: MLflow starts workers, and `os.killpg` reaches all of them
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            _wait_until_ready(server, base, log)
            _print_addresses(comparisons, base)
            if not arguments.no_open and _has_display():
                first_path = next(iter(comparisons.values()), "")  # "": MLflow's first page
                webbrowser.open(base + first_path)
            server.wait()
        except KeyboardInterrupt:  # the usual end
            pass
        finally:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGTERM)
                server.wait()


def _print_addresses(comparisons: dict[str, str], base: str) -> None:
    """Print a line with the address of each comparison, or a line that there is none; then print how to end the server.

    Args:
        comparisons: path of the comparison by experiment, relative to `base`.
        base: address of the server, with a slash at its end.
    """
    for name, path in comparisons.items():
        print(f"{name}: {base}{path}")
    if not comparisons:
        print(f"{base}: no comparison yet; the import of results (make run, kairos track) prepares it")
    print("Ctrl-C ends it", flush=True)


def _has_display() -> bool:
    """Return True if a browser can open a window: on macOS, or if the environment has a display of X11 or Wayland."""
    return sys.platform == "darwin" or "DISPLAY" in os.environ or "WAYLAND_DISPLAY" in os.environ


def _check_store(uri: str, port: int) -> None:
    """Check that the store is not a server, that its file or folder exists, and that the port is free.

    A database that is not a file, such as PostgreSQL, passes the second check.

    Raises:
        KairosError: the store is a server, the store does not exist, or the port is not available.
    """
    from kairos.tracking.mlflow_store import without_credentials

    if uri.startswith(("http://", "https://", "databricks")):
        address = without_credentials(uri)
        raise KairosError(f"MLFLOW_TRACKING_URI: {address} is a server with pages of its runs; open that address")
    # sqlite:///mlflow.db, sqlite+pysqlite:///mlflow.db and file:///data/mlruns are paths; other databases are not
    path = re.sub(r"^(sqlite(\+\w+)?:///|file://)", "", uri)
    if "://" not in path and not Path(path).exists():
        raise KairosError(f"{path}: no runs have been imported yet; make run or kairos track imports results")
    open_listening_socket("127.0.0.1", port).close()  # raises an error if the port is in use


def _find_comparisons(uri: str) -> dict[str, str]:
    """Return the path of the prepared comparison by name of the MLflow experiment, relative to the server's address.

    The experiment that was changed last comes first; experiments without a prepared comparison are left out. An SQLite
    database is locked meanwhile.

    Raises:
        KairosError: the store cannot be read.
    """
    from kairos.tracking import mlflow_store, view

    try:
        with mlflow_store.lock_database(uri), mlflow_store.limit_requests(seconds=4, retries=1):
            return view.find_prepared_comparisons(mlflow_store.connect(uri))
    except Exception as error:  # its type depends on the kind of store
        reason = mlflow_store.describe_error(error, uri)
        raise KairosError(f"{mlflow_store.without_credentials(uri)}: {reason}") from None


def _wait_until_ready(server: "subprocess.Popen[bytes]", base: str, log: IO[str]) -> None:
    """Wait until the server answers, at most `_START_SECONDS`; the caller ends a server that does not answer.

    Args:
        server: process of the server.
        base: address of the server.
        log: file with the output of the server, opened for reading too.

    Raises:
        KairosError: the server ended or did not answer in time; the message contains its last error, or else the last
            line of its output, cut to 300 characters.
    """
    deadline = time.monotonic() + _START_SECONDS
    while server.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{base}health", timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise KairosError(f"MLflow's server did not start: {_find_reason(log)[:300]}")


def _find_reason(log: IO[str]) -> str:
    """Return the last error in the output of the server, or else its last line, or ``no answer`` without output.

    The file is read from its start, blank lines are ignored.
    """
    log.seek(0)  # the server has written to the file
    lines = [line.strip() for line in log if line.strip()]
    if not lines:
        return "no answer"
    # last lines of tracebacks, such as "mlflow.exceptions.MlflowException: ..."
    errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b", line)]
    return errors[-1] if errors else lines[-1]
