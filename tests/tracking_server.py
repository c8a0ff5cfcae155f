"""For tests of tracking: an MLflow server that can be killed, a proxy that makes it slow, processes that report."""

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

PATIENCE = 400  # seconds that anything may take on a busy machine
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


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def wait_for(what: Callable[[], bool], why: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < deadline, f"no {why} within {PATIENCE} s"
        time.sleep(0.2)


class Server:
    """An MLflow server on SQLite, or on the database named; it can be killed and started again."""

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
        """Method, seed and status of the runs of trainings in an MLflow experiment."""
        with sqlite3.connect(self.path) as connection:
            return sorted(connection.execute(RUNS.format("runs.status", ""), (name,)))

    def points(self, name: str) -> list[tuple]:
        """Return the metrics of an MLflow experiment in the server's SQLite database, as `points` does."""
        return points(self.path, name)

    def reached(self, name: str, step: int) -> Callable[[], bool]:
        """Return a condition that is true once a point of this step is in the database."""
        return lambda: any(row[3] == step for row in self.points(name))


def points(database: Path, name: str) -> list[tuple]:
    """All rows of metrics of an experiment's trainings: method, seed, key, step, value, timestamp."""
    with sqlite3.connect(database) as connection:
        return sorted(connection.execute(RUNS.format(*POINTS), (name,)))


class Proxy:
    """A TCP proxy in front of a server: hands everything on after `delay` seconds, or swallows it (None)."""

    def __init__(self, port: int):
        self.delay: float | None = 0.0
        self.connections = 0
        self.behind = ("127.0.0.1", port)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.uri = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.kept: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self.listener.accept()
            self.connections += 1
            self.kept.append(client)
            if self.delay is not None:
                server = socket.create_connection(self.behind)
                for ends in ((client, server), (server, client)):
                    threading.Thread(target=self._hand_on, args=ends, daemon=True).start()

    def _hand_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                time.sleep(self.delay or 0)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


class Job:
    """A process that trains, as far as tracking can see; tracking_job.py."""

    def __init__(self, config: Path, results: Path, method: str, seed: int, out: Path, uri: str, **environment: str):
        self.log = out.parent / f"{out.name}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        source = results / method / f"seed{seed}"
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
        """Train up to each of these steps; the seconds that the slowest took."""
        seconds = []
        for step in steps:
            print(step, file=self.process.stdin, flush=True)
            seconds.append(float(self.process.stdout.readline()))
        return max(seconds)

    def end(self) -> float:
        """Let the training end; the seconds that it took."""
        self.process.stdin.close()
        seconds = float(self.process.stdout.readline())
        assert self.process.wait(timeout=PATIENCE) == 0, self.log.read_text()
        return seconds
