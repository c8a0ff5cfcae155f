"""The MLflow store: where it is, how it is opened by several processes at once, and how runs are found and filled."""

import fcntl
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from kairos.errors import KairosError
from kairos.tracking.content import COMMIT, Point

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

DEFAULT_URI = "sqlite:///mlflow.db"
ARTIFACTS = "mlartifacts"
_LOCK_SECONDS = 120
METRICS_PER_BATCH, ENTRIES_PER_BATCH = 1000, 100  # MLflow's limits
FIRST = "attributes.start_time ASC"  # and by run id where that is the same: everybody's order


def tracking_uri(configured: str | None) -> str:
    """Where results go: the configuration's URI, else MLFLOW_TRACKING_URI, else a database in this folder."""
    return configured or os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_URI


def without_credentials(uri: str) -> str:
    """The URI without user name, password and query."""
    parts = urlsplit(uri)
    if "@" not in parts.netloc:
        return uri
    return urlunsplit((parts.scheme, parts.netloc.rsplit("@", 1)[1], parts.path, "", ""))


def uncredentialed(text: str, uri: str) -> str:
    """A text without the user name and the password of a URI that it may quote."""
    secret = uri.split("//")[-1].rpartition("@")[0]
    return text.replace(f"{secret}@", "") if secret else text


@contextmanager
def patience(seconds: int, retries: int) -> Iterator[None]:
    """How long a request to a server may take; what the user has set is left as it is."""
    wanted = {
        "MLFLOW_HTTP_REQUEST_TIMEOUT": str(seconds),
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": str(retries),
        "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    }
    mine = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(mine)
    try:
        yield
    finally:
        for name in mine:
            del os.environ[name]


@contextmanager
def exclusive(uri: str) -> Iterator[None]:
    """Hold a database for this process alone: of several that create its tables at once, all but one would crash.

    Raises:
        KairosError: another process holds it for longer than two minutes.
    """
    database = re.fullmatch(r"sqlite(?:\+\w+)?:///(.+)", uri)
    if database is None:
        yield  # a server takes care of itself
        return
    path = Path(database[1]).absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(f"{path.name}.lock"), "w") as lock:
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise KairosError(f"{path}: another process has held it for {_LOCK_SECONDS} s") from None
                time.sleep(0.1)
        yield


def experiment_id(client: "MlflowClient", name: str, uri: str) -> str:
    """The MLflow experiment of that name, created where there is none.

    Raises:
        KairosError: it was deleted.
    """
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        place = None if uri.startswith("http") else Path(ARTIFACTS).absolute().as_uri()
        return str(client.create_experiment(name, artifact_location=place))
    if experiment.lifecycle_stage == "deleted":
        how = f"`mlflow experiments restore --experiment-id {experiment.experiment_id}`"
        advice = f"restore it ({how}) or name another in tracking.experiment"
        raise KairosError(f"MLflow experiment {name!r} was deleted; {advice}")
    return str(experiment.experiment_id)


def write_run(
    client: "MlflowClient",
    experiment: str,
    name: str,
    identifying: dict[str, str],
    params: dict[str, str],
    points: Sequence[Point],
    tags: dict[str, str],
) -> str:
    """Id of the run with all `identifying` tags, which afterwards has what it lacked and has ended.

    Where there is none it is created. Of several (two that began at the same moment) the first is kept. The others are
    put into MLflow's trash: all they can hold is in the results that the import reads.
    """

    def search() -> "list[Run]":
        return list(client.search_runs([experiment], condition(identifying), order_by=[FIRST]))

    times = [point.timestamp for point in points]
    if not (found := search()):
        client.create_run(experiment, start_time=min(times), tags={**identifying, **tags}, run_name=name)
        found = search()
    for double in found[1:]:
        client.delete_run(double.info.run_id)
    run = found[0]
    _fill(client, run, params, points, {key: value for key, value in tags.items() if key != COMMIT})
    if run.info.status != "FINISHED":
        client.set_terminated(run.info.run_id, "FINISHED", max(times))
    return str(run.info.run_id)


def condition(identifying: dict[str, str]) -> str:
    """The search for runs with all these tags."""
    return " and ".join(f"tags.`{key}` = '{value}'" for key, value in identifying.items())


def _fill(
    client: "MlflowClient", run: "Run", params: dict[str, str], points: Sequence[Point], tags: dict[str, str]
) -> None:
    """Log what the run does not have yet: nothing the second time.

    A value that differs from the one recorded for its step is logged with a later timestamp, which makes it the latest.
    """
    from mlflow.entities import Metric, Param, RunTag

    run_id = run.info.run_id
    new_params = [Param(key, value) for key, value in params.items() if key not in run.data.params]
    new_tags = [RunTag(key, value) for key, value in tags.items() if run.data.tags.get(key) != value]
    recorded = {key: _latest(client, run_id, key) for key in {point.key for point in points} & set(run.data.metrics)}
    metrics = []
    for point in points:
        then, value = recorded.get(point.key, {}).get(point.step, (-1, None))
        if value != point.value:
            metrics.append(Metric(point.key, point.value, max(point.timestamp, then + 1), point.step))
    lacking: dict[str, list[Any]] = {"params": new_params, "tags": new_tags, "metrics": metrics}
    for kind, items in lacking.items():
        for part in batches(items, METRICS_PER_BATCH if kind == "metrics" else ENTRIES_PER_BATCH):
            client.log_batch(run_id, **{kind: part})


def _latest(client: "MlflowClient", run_id: str, key: str) -> dict[int, tuple[int, float]]:
    """Timestamp and value of a metric's last record per step."""
    table: dict[int, tuple[int, float]] = {}
    for metric in client.get_metric_history(run_id, key):
        table[metric.step] = max(table.get(metric.step, (-1, 0.0)), (metric.timestamp, metric.value))
    return table


def batches(items: list[Any], size: int) -> Iterator[list[Any]]:
    """The items in lists of at most `size`."""
    for start in range(0, len(items), size):
        yield items[start : start + size]
