"""Live reports of a training run to an MLflow server; a slow or missing server does not affect the run.

A thread reads what the run has written (metrics.jsonl up to the last entry of timing.jsonl, which is the last
checkpoint) and sends it by MLflow's client. Reports that do not arrive are not kept: the import, `kairos track`, finds
the MLflow run by its tags and adds what is missing. Live reports and import use the recorded times, so both write the
same points.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kairos.files import read_lines
from kairos.progress import say
from kairos.tracking import content, store
from kairos.training.job import read_progress
from kairos.training.launch import is_reporting_process

if TYPE_CHECKING:
    from kairos.config import Experiment

_POLL, _LONGEST_POLL = 5.0, 60.0  # seconds between two looks; the pause doubles while the server does not answer
_TIMEOUT = 15  # seconds that one request may take: many trainings may start at once, and nobody waits for it
_SETTLING = 1.0  # seconds after which a run that somebody else created at the same moment can be found
_STATUS = {"complete": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}  # by the state of a training that ended
_REFUSALS = (401, 403)


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
    if not (is_reporting_process() and experiment.tracking.enabled and uri.startswith(("http://", "https://"))):
        yield
        return
    reporter = Reporter(experiment, method, seed, out, uri)
    with store.patience(_TIMEOUT, retries=0):
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
        self.stride = 0  # lines of metrics.jsonl per point; 0: not known before the first line
        self.client: store.Client | None = None
        self.run_id: str | None = None  # of the run that takes the points
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
        pause, ended = _POLL, False
        while True:
            try:
                self._report(ended)
            except Exception as error:  # nothing that happens here may reach the training
                self.run_id = None
                status = error.get_http_status_code() if hasattr(error, "get_http_status_code") else None
                self._complain(f"HTTP {status}" if status in _REFUSALS else store.explained(error, self.uri))
                if status in _REFUSALS:
                    return
                pause = min(2 * pause, _LONGEST_POLL)
            else:
                pause, self.failed = _POLL, self.failed and ended
            if ended:
                return
            ended = self.ended.wait(pause)

    def _complain(self, reason: str) -> None:
        if not self.failed:
            self.failed = True
            shown, comfort = store.without_credentials(self.uri), "the training goes on and nothing is lost"
            say(f"tracking: {shown}: {reason}; {comfort}: `kairos track` imports what is missing there")

    def _report(self, ended: bool) -> None:
        self.client = self.client or store.connect(self.uri)
        progress = self._progress()
        if progress is None:  # waits for its turn, or another process of this training reports
            return
        if self.run_id is None and progress["state"] in ("stopped", "failed"):
            return  # perhaps before it knew which training it is
        end = self._read(self.out / ".state" / progress["identity"][:16])
        self.run_id = self._send(self.client, progress["identity"])
        if ended and progress["state"] in _STATUS:
            self.client.set_terminated(self.run_id, _STATUS[progress["state"]], end)

    def _progress(self) -> dict[str, Any] | None:
        """Return the progress file of the training run if this process wrote it, else None."""
        found = read_progress(self.out)
        mine = found and (found["pid"], found["host"]) == (os.getpid(), socket.gethostname())
        return found if mine and found["updated"] >= self.begun else None

    def _send(self, client: store.Client, identity: str) -> str:
        """Send what is pending to this training's run, whose id is returned; one that had ended is running again."""
        run_id = self.run_id
        if run_id is None:
            experiment = store.experiment_id(client, content.experiment_name(self.experiment))
            entry = content.training_entry(self.experiment, self.method, self.seed, identity, self.pending, {})
            settling = 0 if self.ended.is_set() else _SETTLING
            run = store.find_run(client, experiment, entry, round(1000 * self.begun), settling)
            store.fill(client, run, entry)
            run_id = str(run.info.run_id)
            if run.info.status != "RUNNING":
                client.update_run(run_id, "RUNNING")
        else:
            client.log_batch(run_id, store.metrics(self.pending))
        self.pending.clear()
        return run_id

    def _read(self, state: Path) -> int | None:
        """Take the new lines of metrics, as far as a checkpoint holds them; returns when the last was written."""
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
                if not self.stride:  # the step of the first line is the number of steps between two lines
                    lines = self.experiment.milestones[-1] // json.loads(text)["step"]
                    self.stride = content.stride(lines)
                if self.lines % self.stride == self.stride - 1:
                    line = json.loads(text)
                    if line["step"] > reached:
                        break
                    self.pending += content.points_of(line, line["step"], when)
                self.lines += 1
                self.offset += len(text)
        return when(reached)
