"""Helpers for tests of tracking: an MLflow server that can be killed, a proxy that delays it, processes that report."""

import contextlib
import multiprocessing
import os
import signal
import socket
import sqlite3
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import tracking_job
from ports import free_port

PATIENCE = 400  # longest wait in seconds, also on a busy machine
# processes that are forks of one process that has imported MLflow, since its import takes seconds
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["mlflow.cli", "kairos.tracking.live"])
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


def _run_mlflow(command: list[str], log: Path) -> None:
    """Run a command of MLflow in this process, in a process group of its own."""
    from mlflow.cli import cli

    os.setsid()
    _append_output(log)
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    os.environ["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"  # eight processes for GenAI's evaluations
    cli(command)


def _run_job(orders: Connection, answers: Connection, log: Path, arguments: list[Any], environment: dict) -> None:
    """Run `tracking_job.main` in this process, with the pipes as its standard input and output."""
    os.environ.update(environment)
    _append_output(log)
    sys.stdin, sys.stdout = _text_file(orders, "r"), _text_file(answers, "w")
    tracking_job.main(*arguments)
    assert "torch" not in sys.modules


def _append_output(log: Path) -> None:
    """Append standard output and standard error of this process to a file."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)


def _text_file(end: Connection, mode: str) -> Any:
    """Return an end of a pipe as a text file, and close the original."""
    file = os.fdopen(os.dup(end.fileno()), mode)
    end.close()
    return file


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
        command = ["server", "--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"]
        command += ["--backend-store-uri", self.database]
        command += ["--artifacts-destination", str(self.folder / "artifacts")]
        self.process = _FORKS.Process(target=_run_mlflow, args=(command, self.folder / "server.log"))
        self.process.start()
        wait_for(self.answers, "MLflow server")

    def answers(self) -> bool:
        assert self.process.is_alive(), (self.folder / "server.log").read_text()[-2000:]
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.uri}/health", timeout=2) as answer:
            return answer.status == 200
        return False

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()

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
    """TCP proxy in front of a server: it forwards all data after `delay` seconds, or drops them if `delay` is None."""

    def __init__(self, port: int):
        self.delay: float | None = 0.0
        self.connections = 0
        self.behind = ("127.0.0.1", port)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.uri = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.clients: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self.listener.accept()
            self.connections += 1
            self.clients.append(client)
            if self.delay is not None:
                server = socket.create_connection(self.behind)
                for ends in ((client, server), (server, client)):
                    threading.Thread(target=self._forward, args=ends, daemon=True).start()

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
        arguments = [str(config), method, str(seed), results / method / f"seed{seed}", out]
        (orders, send), (receive, answers) = _FORKS.Pipe(duplex=False), _FORKS.Pipe(duplex=False)
        environment = {"MLFLOW_TRACKING_URI": uri, **environment}
        self.process = _FORKS.Process(target=_run_job, args=(orders, answers, self.log, arguments, environment))
        self.process.start()
        orders.close()
        answers.close()
        self.orders, self.answers = _text_file(send, "w"), _text_file(receive, "r")

    def advance(self, *steps: int) -> float:
        """Record the run up to each of these steps; returns the seconds of the slowest answer."""
        seconds = []
        for step in steps:
            print(step, file=self.orders, flush=True)
            seconds.append(float(self.answers.readline()))
        return max(seconds)

    def end(self) -> float:
        """End the run; returns the seconds that this took."""
        self.orders.close()
        seconds = float(self.answers.readline())
        self.process.join(PATIENCE)
        assert self.process.exitcode == 0, self.log.read_text()
        return seconds
