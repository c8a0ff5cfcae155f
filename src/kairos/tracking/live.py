"""What a training tells an MLflow server while it runs. The server may be slow or gone: the training does not notice.

A thread reads what the training has written down (metrics.jsonl up to the last entry of timing.jsonl, which is the last
checkpoint) and sends it through MLflow's REST interface; mlflow is not imported. What does not arrive is not kept: the
import, `kairos track`, finds the same run by its tags and adds what is missing. Times are those that were recorded, so
both write the same points.
"""

import base64
import json
import math
import os
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlencode, urlsplit

from kairos.files import read_lines
from kairos.progress import say
from kairos.tracking import content, store
from kairos.training.job import last_word

if TYPE_CHECKING:
    from kairos.config import Experiment

_POLL, _LONGEST_POLL = 5.0, 60.0  # seconds between two looks; the pause doubles while the server does not answer
_TIMEOUT = 15.0  # seconds that one request may take: many trainings may start at once, and nobody waits for it
_SETTLING = 1.0  # seconds after which a run that somebody else created at the same moment can be found
_STATUS = {"complete": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}  # by the state of a training that ended
_NOT_FOUND, _REFUSALS = 404, (401, 403)


@contextmanager
def reporting(experiment: "Experiment", method: str, seed: int, out: Path) -> Iterator[None]:
    """Report the training inside the block, where results go to a server; it raises nothing and delays nothing.

    Args:
        experiment: the experiment; its `tracking` says where to, and how long the end of the block may take.
        method: name of the method.
        seed: of the training.
        out: folder of the training; the process that writes ``.state/progress.json`` in it is the one that reports.
    """
    uri = store.tracking_uri(experiment.tracking.uri)
    if not (experiment.tracking.enabled and uri.startswith(("http://", "https://"))):
        yield
        return
    reporter = Reporter(experiment, method, seed, out, uri)
    reporter.start()
    try:
        yield
    finally:
        reporter.finish(experiment.tracking.flush_seconds)


class Reporter(threading.Thread):
    """The thread that reports one training."""

    def __init__(self, experiment: "Experiment", method: str, seed: int, out: Path, uri: str):
        super().__init__(name="kairos tracking", daemon=True)
        self.experiment, self.method, self.seed, self.out = experiment, method, seed, out
        self.uri, self.ended = uri, threading.Event()
        self.begun = time.time()
        self.stride = content.stride(experiment.milestones[-1] // experiment.training.log_every)
        self.run_id: str | None = None
        self.reported = 0  # last step that the run had when it was found
        self.lines = self.offset = 0  # of metrics.jsonl, already read
        self.pending: list[content.Point] = []
        self.failed = False

    def finish(self, seconds: float) -> None:
        """Send what is left, for so many seconds at most."""
        self.ended.set()
        self.join(seconds)
        if self.is_alive():
            self._complain(f"no answer within {seconds:g} s")  # and the thread, which ends with the process, no more

    def run(self) -> None:
        """Report until the training has ended; what goes wrong is said once and tried again later."""
        pause = _POLL
        while True:
            ended = self.ended.wait(pause)
            try:
                self._report(ended)
            except Exception as error:  # nothing that happens here may reach the training
                self.run_id = None
                self._complain(_explained(error))
                if isinstance(error, urllib.error.HTTPError) and error.code in _REFUSALS:
                    return
                pause = min(2 * pause, _LONGEST_POLL)
            else:
                pause, self.failed = _POLL, self.failed and ended
            if ended:
                return

    def _complain(self, reason: str) -> None:
        if not self.failed:
            self.failed = True
            shown, comfort = store.without_credentials(self.uri), "the training goes on and nothing is lost"
            say(f"tracking: {shown}: {reason}; {comfort}: `kairos track` imports what is missing there")

    def _report(self, ended: bool) -> None:
        progress = self._progress()
        if progress is None:  # waits for its turn, or another process of this training reports
            return
        if self.run_id is None:
            if progress["state"] in ("stopped", "failed"):  # perhaps before it knew which training it is
                return
            self.run_id = self._open(progress["identity"])
        end = self._read(self.out / ".state" / progress["identity"][:16])
        while part := self.pending[: store.METRICS_PER_BATCH]:
            _call(self.uri, "runs/log-batch", run_id=self.run_id, metrics=[vars(point) for point in part])
            del self.pending[: len(part)]
        if ended and progress["state"] in _STATUS:
            _call(self.uri, "runs/update", run_id=self.run_id, status=_STATUS[progress["state"]], end_time=end)

    def _progress(self) -> dict[str, Any] | None:
        """What the training says of itself, if it is this process that trains."""
        found = last_word(self.out)
        mine = found and (found["pid"], found["host"]) == (os.getpid(), socket.gethostname())
        return found if mine and found["updated"] >= self.begun else None

    def _open(self, identity: str) -> str:
        """The id of this training's run, created where there is none; a run that had ended is running again."""
        experiment = _experiment_id(self.uri, content.experiment_name(self.experiment))
        tags = content.identifying_tags(self.experiment.experiment, (self.method, self.seed, identity))
        query = {"experiment_ids": [experiment], "filter": store.condition(tags), "order_by": [store.FIRST]}
        runs = _call(self.uri, "runs/search", **query).get("runs")
        if not runs:
            facts = {"run_name": content.run_name(self.method, self.seed), "start_time": round(1000 * self.begun)}
            answer = _call(self.uri, "runs/create", experiment_id=experiment, tags=_pairs(tags), **facts)
            created = answer["run"]["info"]["run_id"]
            self.ended.wait(_SETTLING)
            runs = _call(self.uri, "runs/search", **query)["runs"]
            if runs[0]["info"]["run_id"] != created:
                _call(self.uri, "runs/delete", run_id=created)
        run_id: str = runs[0]["info"]["run_id"]
        data = runs[0].get("data", {})
        known = {item["key"] for item in data.get("params", [])}
        wanted = _pairs(content.parameters(self.experiment, self.method, self.seed))
        lacking = [item for item in wanted if item["key"] not in known]
        for part in store.batches(lacking, store.ENTRIES_PER_BATCH):
            _call(self.uri, "runs/log-batch", run_id=run_id, params=part)
        if runs[0]["info"]["status"] != "RUNNING":
            _call(self.uri, "runs/update", run_id=run_id, status="RUNNING")
        self.reported = max((int(item["step"]) for item in data.get("metrics", []) if item["key"] == "loss"), default=0)
        return run_id

    def _read(self, state: Path) -> int | None:
        """Take the lines of metrics that a checkpoint holds and the run does not; returns when the last was written."""
        timing = [json.loads(line) for line in read_lines(state / "timing.jsonl")]
        if not timing:
            return None
        clock = {line["step"]: line["seconds"] for line in timing}
        when, reached = content.moments(datetime.fromisoformat(timing[0]["started"]), clock), max(clock)
        with open(state / "metrics.jsonl", "rb") as file:
            file.seek(self.offset)
            for text in file:
                if not text.endswith(b"\n"):
                    break
                if self.lines % self.stride == self.stride - 1:
                    line = json.loads(text)
                    if line["step"] > reached:
                        break
                    if line["step"] > self.reported:
                        self.pending += _points(line, when(line["step"]))
                self.lines += 1
                self.offset += len(text)
        return when(reached)


def _experiment_id(uri: str, name: str) -> str:
    """Id of the experiment of that name, created where there is none."""
    path = f"experiments/get-by-name?{urlencode({'experiment_name': name})}"
    try:
        found = _call(uri, path)["experiment"]
    except urllib.error.HTTPError as error:
        if error.code != _NOT_FOUND:
            raise
        try:
            return str(_call(uri, "experiments/create", name=name)["experiment_id"])
        except urllib.error.HTTPError as refused:
            if refused.code in _REFUSALS:
                raise
        found = _call(uri, path)["experiment"]  # another training was faster
    if found["lifecycle_stage"] == "deleted":
        raise RuntimeError(f"experiment {name!r} was deleted")
    return str(found["experiment_id"])


def _call(uri: str, path: str, **values: Any) -> Any:
    """The answer of MLflow's REST interface (mlflow.org/docs/latest/rest-api.html): to a post where values are given.

    Raises:
        OSError: the server cannot be reached, does not answer in time, or refuses (HTTPError).
        ValueError: the answer is not of an MLflow server.
    """
    address = f"{store.without_credentials(uri).rstrip('/')}/api/2.0/mlflow/{path}"
    request = urllib.request.Request(address, json.dumps(values).encode() if values else None)
    request.add_header("Content-Type", "application/json")
    if authorization := _authorization(uri):
        request.add_unredirected_header("Authorization", authorization)
    with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
        return json.load(answer)


def _authorization(uri: str) -> str | None:
    """The header that MLflow's own client would send: name and password, else a token, else what the URI holds."""
    name, password = (os.environ.get(f"MLFLOW_TRACKING_{key}") for key in ("USERNAME", "PASSWORD"))
    token = os.environ.get("MLFLOW_TRACKING_TOKEN")
    if not (name and password):
        if token:
            return f"Bearer {token}"
        parts = urlsplit(uri)
        name, password = unquote(parts.username or ""), unquote(parts.password or "")
    return "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode() if name else None


def _explained(error: Exception) -> str:
    """The cause in one line."""
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code} {error.reason}"
    reason = getattr(error, "reason", error)
    return f"{type(error).__name__}: {reason}"[:200]


def _pairs(values: dict[str, str]) -> list[dict[str, str]]:
    return [{"key": key, "value": value} for key, value in values.items()]


def _points(line: dict[str, Any], timestamp: int) -> Iterator[content.Point]:
    for key, value in content.flat(line):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if key not in ("step", "images") and number and math.isfinite(value):
            yield content.Point(key, float(value), line["step"], timestamp)
