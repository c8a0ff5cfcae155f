"""Helpers for tests of tracking: an MLflow server that can be killed, a proxy that delays it, processes that report."""

import contextlib
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from ports import free_port

PATIENCE = 400  # longest wait in seconds, also on a busy machine
JOB = Path(__file__).with_name("tracking_job.py")
RUNS = """
    select method.value, seed.value, {} from runs
    join experiments using (experiment_id)
    join tags as method on method.run_uuid = runs.run_uuid and method.key = 'kairos.method'
    join tags as seed on seed.run_uuid = runs.run_uuid and seed.key = 'kairos.seed'
    {} where runs.lifecycle_stage = 'active' and experiments.name = ?
"""
POINTS = (
    "metrics.key, metrics.step, metrics.value, metrics.timestamp",
    "join metrics on metrics.run_uuid = runs.run_uuid",
)


def wait_for(condition: Callable[[], bool], name: str) -> None:
    """Wait until a condition is true; fail with the name of the condition after `PATIENCE` seconds."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"no {name} within {PATIENCE} s"
        time.sleep(0.2)


class Server:
    """MLflow server on SQLite or on another database, which can be killed and started again."""

    def __init__(self, folder: Path, database: str | None = None):
        self.folder, self.port = folder, free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self.path = folder / "server.db"
        self.database = database or f"sqlite:///{self.path}"

    def __enter__(self) -> "Server":
        try:
            self.start()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_) -> None:
        self.kill()

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--workers", "1", "--backend-store-uri", self.database]
        command += ["--artifacts-destination", str(self.folder / "artifacts")]
        environment = {
            **os.environ,
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # eight processes for GenAI's evaluations
        }
        with open(self.folder / "server.log", "a") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        wait_for(self.answers, "MLflow server")

    def answers(self) -> bool:
        assert self.process.poll() is None, (self.folder / "server.log").read_text()[-2000:]
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.uri}/health", timeout=2) as answer:
            return answer.status == 200
        return False

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def runs(self, name: str) -> list[tuple]:
        """Return method, seed and status of the training runs in an MLflow experiment."""
        with sqlite3.connect(self.path) as connection:
            return sorted(connection.execute(RUNS.format("runs.status", ""), (name,)))

    def points(self, name: str) -> list[tuple]:
        """Return the metrics of an MLflow experiment in the server's SQLite database, as `points` does."""
        return points(self.path, name)

    def reached(self, name: str, step: int) -> Callable[[], bool]:
        """Return a condition that is true once a point of this step is in the database."""
        return lambda: any(row[3] == step for row in self.points(name))


def points(database: Path, name: str) -> list[tuple]:
    """Return all rows of metrics of an experiment's training runs: method, seed, key, step, value, timestamp."""
    with sqlite3.connect(database) as connection:
        return sorted(connection.execute(RUNS.format(*POINTS), (name,)))


class Proxy:
    """TCP proxy in front of a server: it forwards all data after `delay` seconds, or drops them if `delay` is None.

    After `close` it rejects connections, as the address of a server that has ended does.
    """

    def __init__(self, port: int):
        self.delay: float | None = 0.0
        self.connections = 0
        self.behind = ("127.0.0.1", port)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.uri = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.clients: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the listener is closed
            while True:
                client, _ = self.listener.accept()
                self.connections += 1
                self.clients.append(client)
                if self.delay is not None:
                    self._connect(client)

    def _connect(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(self.behind)
        except OSError:  # there is no server now
            client.close()
            return
        for ends in ((client, server), (server, client)):
            threading.Thread(target=self._forward, args=ends, daemon=True).start()

    def close(self) -> None:
        """Close the address and all connections."""
        for end in (self.listener, *self.clients):
            with contextlib.suppress(OSError):  # closed by the other end
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                time.sleep(self.delay or 0)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


class Job:
    """Process of tracking_job.py, which tracking cannot distinguish from a training run."""

    def __init__(self, config: Path, results: Path, method: str, seed: int, out: Path, uri: str, **environment: str):
        self.log = out.parent / f"{out.name}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        source = results / "methods" / method / f"seed{seed}"
        with open(self.log, "a") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(JOB), str(config), method, str(seed), str(source), str(out)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "MLFLOW_TRACKING_URI": uri, **environment},
            )

    def advance(self, *steps: int) -> float:
        """Record the run up to each of these steps; returns the seconds of the slowest answer."""
        seconds = []
        for step in steps:
            print(step, file=self.process.stdin, flush=True)
            seconds.append(float(self.process.stdout.readline()))
        return max(seconds)

    def end(self) -> float:
        """End the run; returns the seconds that this took."""
        self.process.stdin.close()
        seconds = float(self.process.stdout.readline())
        assert self.process.wait(timeout=PATIENCE) == 0, self.log.read_text()
        return seconds
