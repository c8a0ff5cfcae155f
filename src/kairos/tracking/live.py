"""Live reports of a training run to an MLflow server; a slow or missing server does not affect the run.

A thread reads what the run has written (metrics.jsonl up to the last entry of timing.jsonl, which is the last
checkpoint) and sends it by MLflow's client. Reports that do not arrive are not kept: the import, `kairos track`, finds
the MLflow run by its tags and adds what is missing. Live reports and import use the recorded times, so both write the
same points.

The thread replaces MLflow's asynchronous logging, which waits at exit without a time limit.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from kairos.files import read_entries
from kairos.progress import log
from kairos.tracking import mlflow_store, run_content
from kairos.training.job import ProgressRecord, read_progress
from kairos.training.launch import is_reporting_process
from kairos.validity import state_folder

if TYPE_CHECKING:
    from kairos.config import Experiment

_POLL_SECONDS = 5.0  # pause between two reports
_LONGEST_POLL_SECONDS = 60.0  # the pause doubles up to this limit while the server does not answer
_REQUEST_SECONDS = 15  # time limit of a request: many runs may start at once, and nothing waits for the answer
_SETTLING_SECONDS = 1.0  # pause before a second search, which finds runs that other processes created meanwhile
_STATUS = {"complete": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}  # MLflow's status by a run's last state
_ACCESS_DENIED = (401, 403)


@contextmanager
def reporting(experiment: "Experiment", method: str, seed: int, out: Path) -> Iterator[None]:
    """Report the training run inside the block to an MLflow server, if there is one; raises nothing.

    Without a server, with `tracking.enabled` false, or in a process that does not report, the block runs alone.

    The end of the block waits for the last report, at most ``tracking.flush_seconds``. Inside the block, environment
    variables limit MLflow's requests.

    Args:
        experiment: the experiment; its section `tracking` contains the server and the time limit for the last report.
        out: folder of the training run; the process that writes its ``.state/progress.json`` reports.
    """
    uri = mlflow_store.tracking_uri(experiment.tracking.uri)
    has_server = experiment.tracking.enabled and uri.startswith(("http://", "https://"))
    if not has_server or not is_reporting_process():
        yield
        return
    reporter = Reporter(experiment, method, seed, out, uri)
    with mlflow_store.limit_requests(_REQUEST_SECONDS, retries=0):
        reporter.start()
        try:
            yield
        finally:
            reporter.finish(experiment.tracking.flush_seconds)


class Reporter(threading.Thread):
    """Thread that reports one training run, whose folder is `out`, to the MLflow server at address `uri`."""

    def __init__(self, experiment: "Experiment", method: str, seed: int, out: Path, uri: str):
        super().__init__(name="kairos tracking", daemon=True)
        self._experiment = experiment
        self._method = method
        self._seed = seed
        self._out = out
        self._uri = uri
        self._training_ended = threading.Event()
        self._begun = time.time()  # Unix time
        self._stride = 0  # lines of metrics.jsonl per point; 0: unknown before the first line
        self._client: mlflow_store.Client | None = None
        self._run_id: str | None = None  # id of the MLflow run that receives the points
        self._lines_read = 0  # of metrics.jsonl
        self._bytes_read = 0  # of metrics.jsonl
        self._unsent: list[run_content.Point] = []
        self._has_warned = False

    def finish(self, seconds: float) -> None:
        """Make the thread send its last report; return when the thread has ended, or after `seconds`.

        If the thread is slower, a message is logged, unless the previous report failed and was logged. Such a thread
        ends with the process.
        """
        self._training_ended.set()
        self.join(seconds)
        if self.is_alive():
            self._warn(f"no answer within {seconds:g} s")

    def run(self) -> None:
        """Report every 5 seconds until `finish` is called, and then once more; raises nothing.

        The first of several errors in a row is logged. Each error doubles the pause until the next report, up to a
        minute. If the server denies access (HTTP 401 or 403), the thread ends.
        """
        pause = _POLL_SECONDS
        is_last_report = False
        while True:
            try:
                self._report(is_last_report)
            except Exception as error:  # no error of tracking may stop the training run
                self._run_id = None  # the next report looks for the MLflow run again, and for what it lacks
                status = error.get_http_status_code() if hasattr(error, "get_http_status_code") else None
                if status in _ACCESS_DENIED:
                    self._warn(f"HTTP {status}")
                    return
                self._warn(mlflow_store.describe_error(error, self._uri))
                pause = min(2 * pause, _LONGEST_POLL_SECONDS)
            else:
                pause = _POLL_SECONDS
                if not is_last_report:  # warn again if a later report fails; `finish` does not warn a second time
                    self._has_warned = False
            if is_last_report:
                return
            is_last_report = self._training_ended.wait(pause)  # True: the run has ended, one more report follows

    def _warn(self, reason: str) -> None:
        """Log the server, the reason of a failed report and its consequence, unless the previous report failed too."""
        if self._has_warned:
            return
        self._has_warned = True
        public_uri = mlflow_store.without_credentials(self._uri)
        consequence = "training continues and nothing is lost: `kairos track` imports what is missing there"
        log(f"tracking: {public_uri}: {reason}; {consequence}")

    def _report(self, is_last_report: bool) -> None:
        """Send what the run has written since the previous report; the last report also sets status and end.

        Nothing is sent before the run's first step, or while another process writes the progress file. Nothing is sent
        either if the run has stopped or failed and its MLflow run is unknown: at the first report, or after an error.
        The first report imports MLflow and creates the client. Errors of MLflow are raised.
        """
        if self._client is None:
            self._client = mlflow_store.connect(self._uri)
        progress = self._read_progress_of_this_process()
        if progress is None:  # the run waits for its lock, or another of its processes reports
            return
        identity = progress["identity"]
        if self._run_id is None and progress["state"] in ("stopped", "failed"):
            return
        if identity is None or progress["state"] == "starting":  # metrics may be those of an earlier job
            return
        end = self._read_metrics(state_folder(self._out, identity))
        self._run_id = self._send_points(self._client, identity)
        if is_last_report and progress["state"] in _STATUS:
            self._client.set_terminated(self._run_id, _STATUS[progress["state"]], end)

    def _read_progress_of_this_process(self) -> ProgressRecord | None:
        """Return the content of the run's progress file; None if this process has not written it since the start.

        The start is the time at which this reporter was created.
        """
        progress = read_progress(self._out)
        if not progress or progress["updated"] < self._begun:
            return None
        is_of_this_process = progress["pid"] == os.getpid() and progress["host"] == socket.gethostname()
        return progress if is_of_this_process else None

    def _send_points(self, client: mlflow_store.Client, identity: str) -> str:
        """Send the unsent points to the MLflow run of this training run, clear them, and return the run's id.

        The first call, and a call after an error, find or create the MLflow run, and log the parameters and unsent
        points that it lacks.
        """
        run_id = self._run_id
        if run_id is None:
            run_id = self._find_or_create_run(client, identity)
        else:
            client.log_batch(run_id, mlflow_store.to_mlflow_metrics(self._unsent))
        self._unsent.clear()
        return run_id

    def _find_or_create_run(self, client: mlflow_store.Client, identity: str) -> str:
        """Return the id of the MLflow run of this training run, which is created if it does not exist.

        The parameters and unsent points that the MLflow run lacks are logged. If it had ended, it is marked as running
        again. It becomes the current run of its method and seed, and current runs of the method with other options
        become earlier ones.
        """
        name = run_content.mlflow_experiment_name(self._experiment)
        experiment_id = mlflow_store.find_or_create_experiment(client, name)
        content = run_content.build_training_run(
            self._experiment,
            self._method,
            self._seed,
            identity,
            self._unsent,
            tags={},  # the import sets them
        )
        settle_seconds = (
            0 if self._training_ended.is_set() else _SETTLING_SECONDS
        )  # the end of the run waits: no pause then
        start_milliseconds = round(1000 * self._begun)
        run = mlflow_store.find_or_create_run(
            client, experiment_id, content, start_milliseconds, settle_seconds=settle_seconds
        )
        mlflow_store.log_missing(client, run, content)
        run_id = str(run.info.run_id)
        if run.info.status != "RUNNING":
            client.update_run(run_id, "RUNNING")
        self._mark_as_current(client, experiment_id, run_id, content.params)
        return run_id

    def _mark_as_current(
        self, client: mlflow_store.Client, experiment_id: str, run_id: str, params: Mapping[str, str]
    ) -> None:
        """Mark the MLflow run `run_id`, with parameters `params`, as current, and those that it replaces as earlier.

        It replaces the other runs of its seed, and current runs of the method with other options.
        """

        def judge(run: mlflow_store.Run) -> bool | None:
            if run.info.run_id == run_id:
                return True
            is_of_seed = run.data.tags["kairos.seed"] == str(self._seed)
            is_current = run.data.tags.get(run_content.CURRENT) == "true"  # others may not have their parameters yet
            has_other_options = _options(run.data.params) != _options(params)
            return False if is_of_seed or (is_current and has_other_options) else None

        tags = {"kairos.experiment": self._experiment.experiment, "kairos.method": self._method}
        mlflow_store.mark_current_runs(client, experiment_id, tags, judge)

    def _read_metrics(self, state: Path) -> int | None:
        """Add the new lines of metrics.jsonl to the unsent points; return the time of the last checkpoint.

        The time is in milliseconds since 1970. Without a checkpoint the result is None, and nothing is read. The last
        line of each stride becomes points, as in `run_content.collect_points`. Lines after the last checkpoint are left
        to a later call. `state` is the folder with the state of the training run.
        """
        # recorded times up to the last checkpoint
        timing = read_entries(state / "timing.jsonl")
        if not timing:
            return None
        seconds_by_step = {entry["step"]: entry["seconds"] for entry in timing}
        last_step = max(seconds_by_step)
        started = datetime.fromisoformat(timing[0]["started"])
        time_of_step = run_content.build_step_clock(started, seconds_by_step)

        # new lines; a line that is not read now, or not completely written, is read by a later report
        with open(state / "metrics.jsonl", "rb") as file:
            file.seek(self._bytes_read)
            for line in file:
                is_incomplete = not line.endswith(b"\n")
                if is_incomplete:
                    break
                if self._stride == 0:
                    self._stride = self._choose_stride(first_line=line)
                is_last_of_stride = (self._lines_read + 1) % self._stride == 0
                if is_last_of_stride:
                    metrics = json.loads(line)
                    if metrics["step"] > last_step:  # after the last checkpoint: a later report reads the line again
                        break
                    self._unsent += run_content.convert_record(metrics, metrics["step"], time_of_step)
                self._lines_read += 1
                self._bytes_read += len(line)
        return time_of_step(last_step)

    def _choose_stride(self, first_line: bytes) -> int:
        """Return the number of lines of metrics.jsonl per point, which follows from the length of the complete run.

        The step in the first line is the number of steps between two lines.
        """
        # not from the present number of lines: the import, which reads the complete file, must have the same stride
        steps_between_lines = json.loads(first_line)["step"]  # the first line is written after this number of steps
        line_count = self._experiment.milestones[-1] // steps_between_lines
        return run_content.choose_stride(line_count)


def _options(params: Mapping[str, str]) -> dict[str, str]:
    """Return the parameters of a training run without its seed: they are equal for all current runs of a method."""
    return {key: value for key, value in params.items() if key != "seed"}
