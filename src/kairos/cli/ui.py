"""``kairos ui``: MLflow's pages of the project's store, from a prepared comparison on."""

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

from kairos.cli.common import listen
from kairos_timesteps.errors import KairosError

_SECONDS = 120  # that MLflow may take to start


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--port", type=int, default=5000, metavar="N", help="on this machine alone; default: 5000")
    parser.add_argument("--no-open", action="store_true", help="print the address, open no browser")


def run(arguments: argparse.Namespace) -> None:
    """Serve the store until Ctrl-C."""
    from kairos.tracking import store

    uri = store.tracking_uri(None)
    _check(uri, arguments.port)
    places = _places(uri)
    base = f"http://127.0.0.1:{arguments.port}/"
    what = ["--backend-store-uri", uri, "--host", "127.0.0.1", "--port", str(arguments.port), "--workers", "1"]
    command = [sys.executable, "-m", "mlflow", "server", *what]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the server never outlives us
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            _wait(server, base, log)
            for name, place in places.items():
                print(f"{name}: {base}{place}")
            if not places:
                print(f"{base}: no comparison there; the import of results (make run, kairos track) prepares it")
            print("Ctrl-C ends it", flush=True)
            if not arguments.no_open and ({"DISPLAY", "WAYLAND_DISPLAY"} & set(os.environ) or sys.platform == "darwin"):
                webbrowser.open(base + next(iter(places.values()), ""))
            server.wait()
        except KeyboardInterrupt:
            pass
        finally:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGTERM)
                server.wait()


def _check(uri: str, port: int) -> None:
    from kairos.tracking.store import without_credentials

    if uri.startswith(("http://", "https://", "databricks")):
        shown = without_credentials(uri)
        raise KairosError(f"MLFLOW_TRACKING_URI: {shown} is a server, which shows its runs itself: open that address")
    path = re.sub(r"^(sqlite(\+\w+)?:///|file://)", "", uri)
    if "://" not in path and not Path(path).exists():
        raise KairosError(f"{path}: no store of runs here yet; the import of results (make run, kairos track) makes it")
    listen("127.0.0.1", port).close()


def _places(uri: str) -> dict[str, str]:
    from kairos.tracking import store, view

    try:
        with store.exclusive(uri), store.patience(seconds=4, retries=1):
            return view.prepared(store.connect(uri))
    except Exception as error:  # of whatever kind of store
        raise KairosError(f"{store.without_credentials(uri)}: {store.explained(error, uri)}") from None


def _wait(server: "subprocess.Popen[bytes]", base: str, log: IO[str]) -> None:
    """Return when the server answers."""
    deadline = time.monotonic() + _SECONDS
    while server.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{base}health", timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    log.seek(0)
    lines = [line.strip() for line in log if line.strip()] or ["no answer"]
    reasons = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b", line)]
    raise KairosError(f"MLflow's server did not start: {[*lines, *reasons][-1][:300]}")
