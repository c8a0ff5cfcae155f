"""The MLflow store: where it is, how it is opened by several processes at once, and how runs are found and filled."""

import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import unquote_plus

from kairos.files import locked
from kairos.tracking.content import COMMIT, Entry, Point
from kairos_timesteps.errors import KairosError

# MLflow's own classes, under the names that they have there; it is imported where it is used, for it takes a second
Client: TypeAlias = Any
Run: TypeAlias = Any

DEFAULT_URI = "sqlite:///mlflow.db"
ARTIFACTS = "mlartifacts"
_DATABASE_SERVERS = ("postgresql", "mysql", "mssql")  # with SQLite, the databases that MLflow supports
_LOCK_SECONDS = 120
_FIRST = "attributes.start_time ASC"  # and by run id where that is the same: everybody's order


def tracking_uri(configured: str | None) -> str:
    """Where results go: the configuration's URI, else MLFLOW_TRACKING_URI, else a database in this folder."""
    return configured or os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_URI


def database(uri: str) -> Path | None:
    """The file of a database of SQLite's; None: the store is something else."""
    found = re.fullmatch(r"sqlite(?:\+\w+)?:///(.+)", uri)
    return Path(found[1]).absolute() if found else None


def without_credentials(uri: str) -> str:
    """Return the URI without user name, password, query and fragment; a path without ``://`` is returned unchanged."""
    scheme, separator, rest = uri.partition("://")
    if not separator:
        return uri
    address = rest[len(_user_info(uri)) :]
    return f"{scheme}://{re.split('[?#]', address)[0]}"


def uncredentialed(text: str, uri: str) -> str:
    """Return a text, such as an error message, without the credentials of a URI that the text may quote."""
    text = text.replace(uri, without_credentials(uri))
    if user := _user_info(uri):
        text = text.replace(user, "")
    query = uri.partition("?")[2].partition("#")[0]
    for parameter in query.split("&"):
        name, _, value = parameter.partition("=")
        for secret in filter(None, (value, unquote_plus(value))):
            text = re.sub(rf"\b{re.escape(name)}=(['\"]?){re.escape(secret)}\1", f"{name}=***", text)
    return text


def _user_info(uri: str) -> str:
    """Return ``user:password@`` of a URI, or an empty string."""
    scheme, _, rest = uri.partition("://")
    # SQLAlchemy, unlike HTTP clients, allows "/", "?" and "#" in a password
    is_database = scheme.partition("+")[0] in _DATABASE_SERVERS
    match = re.match(r"[^:/]*:[^@]*@|[^/?#]*@" if is_database else r"[^/?#]*@", rest)
    return match[0] if match else ""


def explained(error: Exception, uri: str) -> str:
    """The cause in one line, without credentials."""
    if isinstance(error, KairosError):
        return str(error)
    text = uncredentialed(" ".join(str(error).split()), uri)
    return f"{type(error).__name__}: {text[:500]}"


@contextmanager
def patience(seconds: int, retries: int) -> Iterator[None]:
    """How long a request of MLflow's client to a server may take; what the user has set is left as it is."""
    wanted = {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
        "GIT_PYTHON_REFRESH": "quiet",
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
    if (path := database(uri)) is None:
        yield  # a server takes care of itself
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(f"{path.name}.lock"), "w") as lock:
        if not locked(lock, _LOCK_SECONDS, "imports from making its tables at once; put the database on"):
            raise KairosError(f"{path}: another process has held it for {_LOCK_SECONDS} s")
        yield


def connect(uri: str) -> Client:
    """MLflow's own client; it is imported here, which takes a second or more.

    Raises:
        KairosError: it cannot be imported.
    """
    try:
        from mlflow import MlflowClient
    except ImportError as error:
        raise KairosError(f"mlflow cannot be imported ({error}); run make setup") from None
    return MlflowClient(tracking_uri=uri)


def experiment_id(client: Client, name: str) -> str:
    """The MLflow experiment of that name, created where there is none.

    Raises:
        KairosError: it was deleted.
    """
    from mlflow import MlflowException

    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        place = None if client.tracking_uri.startswith("http") else Path(ARTIFACTS).absolute().as_uri()
        try:
            return str(client.create_experiment(name, artifact_location=place))
        except MlflowException:
            if (experiment := client.get_experiment_by_name(name)) is None:  # else another job was faster
                raise
    if experiment.lifecycle_stage == "deleted":
        how = f"`mlflow experiments restore --experiment-id {experiment.experiment_id}`"
        advice = f"restore it ({how}) or name another in tracking.experiment"
        raise KairosError(f"MLflow experiment {name!r} was deleted; {advice}")
    return str(experiment.experiment_id)


def find_run(client: Client, experiment: str, entry: Entry, start: int, settling: float = 0.0) -> Run:
    """The run of an entry, created where there is none.

    Of several (that began at the same moment) the first is kept. The others are put into MLflow's trash: all they can
    hold is in the results that the import reads.

    Args:
        client: of the store.
        experiment: id of the MLflow experiment.
        entry: says by which tags the run is found.
        start: when a run that is created began, in milliseconds since 1970.
        settling: seconds after which a run that somebody else created at the same moment can be found.
    """
    from mlflow import MlflowException

    def search() -> list[Run]:
        condition = " and ".join(f"tags.`{key}` = '{value}'" for key, value in entry.identifying.items())
        return list(client.search_runs([experiment], condition, order_by=[_FIRST]))

    if not (found := search()):
        client.create_run(experiment, start_time=start, tags=entry.identifying, run_name=entry.name)
        time.sleep(settling)
        found = search()
    for double in found[1:]:
        with suppress(MlflowException):  # another job was faster
            client.delete_run(double.info.run_id)
    return found[0]


def fill(client: Client, run: Run, entry: Entry) -> None:
    """Log what the run did not have when it was found: nothing the second time.

    A value that differs from the one recorded for its step is logged with a later timestamp, which makes it the latest.
    """
    from mlflow.entities import Param, RunTag

    run_id, had = run.info.run_id, run.data
    latest: dict[tuple[str, int], tuple[int, float]] = {}  # timestamp and value by key and step
    for key in {point.key for point in entry.points} & set(had.metrics):
        for metric in client.get_metric_history(run_id, key):
            place = key, metric.step
            latest[place] = max(latest.get(place, (-1, 0.0)), (metric.timestamp, metric.value))
    new_points = []
    for point in entry.points:
        then, value = latest.get((point.key, point.step), (-1, None))
        if value != point.value:
            new_points.append(point._replace(timestamp=max(point.timestamp, then + 1)))
    new_params = [Param(key, value) for key, value in entry.params.items() if key not in had.params]
    new_tags = {key: value for key, value in entry.tags.items() if had.tags.get(key) != value}
    if COMMIT in had.tags:
        new_tags.pop(COMMIT, None)
    client.log_batch(run_id, metrics(new_points), new_params, [RunTag(*tag) for tag in new_tags.items()])


def metrics(points: Sequence[Point]) -> list[Any]:
    """The points as MLflow's client takes them, which sends them in parts of the size that a server takes."""
    from mlflow.entities import Metric

    return [Metric(*point) for point in points]


def dataset_input(manifest: dict[str, Any], folder: Path) -> Any:
    """The data set of a folder of results as what a run was trained on; its digest begins that of the content."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    size = ", ".join(f"{name} {manifest[name]}" for name in ("count", "height", "width", "channels"))
    source = json.dumps({"uri": f"{folder}/dataset ({size})"})
    dataset = Dataset(manifest["source"], manifest["content_sha256"][:36], "local", source)
    return DatasetInput(dataset, [InputTag("mlflow.data.context", "training")])
