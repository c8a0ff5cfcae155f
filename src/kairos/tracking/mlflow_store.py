"""The MLflow store: its address, access by several processes at once, and writing of runs."""

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import unquote_plus

from kairos.files import try_lock
from kairos.tracking.run_content import COMMIT, CURRENT, IDENTITY, TRAINING, Point, RunContent
from kairos_timesteps.errors import KairosError

# classes of MLflow, which is imported in functions alone because its import takes a second
Client: TypeAlias = Any
Run: TypeAlias = Any

DEFAULT_URI = "sqlite:///mlflow.db"
ARTIFACTS = "mlartifacts"
_DATABASE_SERVERS = ("postgresql", "mysql", "mssql")  # MLflow supports these databases and SQLite
_LOCK_SECONDS = 120
_RUNS_PER_PAGE = 500
_EARLIER = "[earlier] "  # start of the name of a training run that is no current result
_RUN_NAME = "mlflow.runName"
_DATASET_SIZES = ("count", "height", "width", "channels")
DATASET_FIELDS = ("source", "content_sha256", *_DATASET_SIZES)  # fields of the record, see `build_dataset_input`
_EARLIEST_FIRST = "attributes.start_time ASC"  # MLflow orders equal times by run id, so all processes see one order


def tracking_uri(configured: str | None) -> str:
    """Return the URI of the MLflow store: the configured one, else the one in the environment, else a default.

    The environment variable is MLFLOW_TRACKING_URI. The default is the SQLite database mlflow.db in the working
    directory. An empty text is treated as not set.
    """
    return configured or os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_URI


def find_database_file(uri: str) -> Path | None:
    """Return the absolute path of the file of an SQLite database; None if the URI is of another kind of store."""
    match = re.fullmatch(r"sqlite(?:\+\w+)?:///(.+)", uri)  # sqlite:///mlflow.db, sqlite+pysqlite:////tmp/mlflow.db
    return Path(match[1]).absolute() if match else None


def without_credentials(uri: str) -> str:
    """Return the URI without user name, password, query and fragment; a path without ``://`` is returned unchanged."""
    scheme, separator, after_scheme = uri.partition("://")
    if not separator:
        return uri
    address = after_scheme.removeprefix(_user_info(uri))
    before_query = re.split("[?#]", address)[0]
    return f"{scheme}://{before_query}"


def redact_credentials(text: str, uri: str) -> str:
    """Return a text, such as an error message, without the credentials of a URI that the text may quote.

    Libraries quote the whole URI, its user information, or parameters of its query, such as ``password='secret'``.
    User information is removed, and each value of the query is replaced by ``***``.
    """
    # the whole URI and the user information
    text = text.replace(uri, without_credentials(uri))
    user_info = _user_info(uri)
    if user_info:
        text = text.replace(user_info, "")

    # parameters of the query, as written in the URI or decoded
    query = uri.partition("?")[2].partition("#")[0]
    for parameter in query.split("&"):
        name, _, value = parameter.partition("=")
        if not value:
            continue
        for secret in (value, unquote_plus(value)):
            quoted_parameter = rf"\b{re.escape(name)}=(['\"]?){re.escape(secret)}\1"  # \1: equal quotes, or none
            text = re.sub(quoted_parameter, f"{name}=***", text)
    return text


def _user_info(uri: str) -> str:
    """Return the text ``user:password@`` of a URI, which may lack the password; empty if the URI has no user."""
    scheme, _, after_scheme = uri.partition("://")
    is_database = scheme.partition("+")[0] in _DATABASE_SERVERS  # such as postgresql+psycopg2
    pattern = r"[^/?#]*@"
    if is_database:  # SQLAlchemy, unlike HTTP clients, allows "/", "?" and "#" in a password
        pattern = rf"[^:/]*:[^@]*@|{pattern}"  # user:pass/word@, or the pattern without a password
    match = re.match(pattern, after_scheme)
    return match[0] if match else ""


def describe_error(error: Exception, uri: str) -> str:
    """Return the cause of an error in one line, without the credentials of the store's URI.

    The message of a KairosError is returned unchanged; other messages are cut to 500 characters and follow the name of
    the error's class.
    """
    if isinstance(error, KairosError):
        return str(error)
    text = redact_credentials(" ".join(str(error).split()), uri)
    return f"{type(error).__name__}: {text[:500]}"


@contextmanager
def limit_requests(seconds: int, retries: int) -> Iterator[None]:
    """Limit the time of MLflow requests to a server inside the block, by environment variables.

    Inside the block MLflow also sends no telemetry and prints no URL, and GitPython accepts a missing git. Variables
    that are set already are kept. The other variables are deleted at the end of the block.

    Args:
        seconds: time limit of a request.
        retries: number of repetitions of a failed request.
    """
    defaults = {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
        "GIT_PYTHON_REFRESH": "quiet",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": str(seconds),
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": str(retries),
        "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    }
    added = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


@contextmanager
def lock_database(uri: str) -> Iterator[None]:
    """Lock an SQLite database for this process inside the block; nothing is locked for another kind of store.

    Without a lock, processes that create the tables at once crash. The lock is a file next to the database, whose
    folder is created if it does not exist.

    Raises:
        KairosError: another process holds the lock for more than two minutes, or the file system has no locks.
    """
    path = find_database_file(uri)
    if path is None:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(f"{path.name}.lock"), "w") as lock:
        if not try_lock(lock, _LOCK_SECONDS, conflict="two imports creating tables at once", to_move="the database"):
            raise KairosError(f"{path}: another process has locked it for {_LOCK_SECONDS} s; end that process or wait")
        yield


def connect(uri: str) -> Client:
    """Return MLflow's client of a store; imports MLflow, which takes a second or more.

    Raises:
        KairosError: MLflow cannot be imported.
    """
    try:
        from mlflow import MlflowClient
    except ImportError as error:
        raise KairosError(f"mlflow cannot be imported ({error}); run make setup") from None
    return MlflowClient(tracking_uri=uri)


def find_or_create_experiment(client: Client, name: str) -> str:
    """Return the id of the MLflow experiment with a name; it is created if it does not exist.

    Unless the store is a server, a new experiment keeps its artifacts in ``mlartifacts`` in the working directory.

    Raises:
        KairosError: the MLflow experiment was deleted.
        MlflowException: the store does not answer, or does not create the experiment.
    """
    from mlflow import MlflowException

    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        is_server = client.tracking_uri.startswith("http")
        artifact_location = None if is_server else Path(ARTIFACTS).absolute().as_uri()  # None: the server decides
        try:
            return str(client.create_experiment(name, artifact_location=artifact_location))
        except MlflowException:
            # another job may have created it in the meantime; if not, the error counts
            experiment = client.get_experiment_by_name(name)
            if experiment is None:
                raise
    if experiment.lifecycle_stage == "deleted":
        command = f"`mlflow experiments restore --experiment-id {experiment.experiment_id}`"
        advice = f"restore it ({command}) or choose another name in tracking.experiment"
        raise KairosError(f"MLflow experiment {name!r} was deleted; {advice}")
    return str(experiment.experiment_id)


def find_or_create_run(
    client: Client, experiment_id: str, content: RunContent, start_milliseconds: int, settle_seconds: float = 0.0
) -> Run:
    """Return the MLflow run with the identifying tags of `content`; it is created if it does not exist.

    Processes that create it at once may leave several such runs. The earliest is kept, and the others are moved to
    MLflow's trash. No content is lost, because the import logs everything from the results.

    Args:
        client: client of the store.
        experiment_id: id of the MLflow experiment.
        content: content of the run; a new run receives only its name and its identifying tags.
        start_milliseconds: start of a new run, in milliseconds since 1970.
        settle_seconds: seconds to wait after the creation, for runs that other processes create at the same time.
    """
    from mlflow import MlflowException

    runs = find_runs(client, experiment_id, content.identifying_tags)
    if not runs:
        client.create_run(
            experiment_id, start_time=start_milliseconds, tags=content.identifying_tags, run_name=content.name
        )
        time.sleep(settle_seconds)
        # the new run, and runs that other processes have created
        runs = find_runs(client, experiment_id, content.identifying_tags)
    for duplicate in runs[1:]:
        with suppress(MlflowException):  # another job has deleted it
            client.delete_run(duplicate.info.run_id)
    return runs[0]


def find_runs(client: Client, experiment_id: str, tags: Mapping[str, str]) -> list[Run]:
    """Return all runs of the MLflow experiment `experiment_id` with these tags, the earliest first."""
    condition = filter_by_tags(tags)
    runs: list[Run] = []
    page_token = None  # None: the first page
    while True:
        page = client.search_runs(
            [experiment_id], condition, max_results=_RUNS_PER_PAGE, order_by=[_EARLIEST_FIRST], page_token=page_token
        )
        runs += page
        page_token = page.token
        if not page_token:
            return runs


def filter_by_tags(tags: Mapping[str, str]) -> str:
    """Return the filter of MLflow's search that selects the runs with these tags."""
    return " and ".join(f"tags.`{tag}` = '{value}'" for tag, value in tags.items())


def mark_current_runs(
    client: Client, experiment_id: str, tags: Mapping[str, str], judge: Callable[[Run], bool | None]
) -> None:
    """Mark training runs as current or earlier, by tag `kairos.current` and by the start of their name.

    Runs become earlier before others become current, so an interruption leaves no two current runs of a method and
    seed. If two processes mark runs at once, the last started of several current runs stays current.

    Args:
        client: client of the store.
        experiment_id: id of the MLflow experiment.
        tags: tags of the training runs that are judged; the name of the kairos experiment is one of them.
        judge: returns True for a current run, False for an earlier one, and None to leave a run unchanged.
    """
    tags = {**tags, "kairos.role": TRAINING}
    runs = find_runs(client, experiment_id, tags)
    to_mark = {True: list[Run](), False: list[Run]()}
    for run in runs:
        is_current = judge(run)
        if is_current is not None and run.data.tags.get(CURRENT) != _tag_value(is_current):
            to_mark[is_current].append(run)
    for is_current in (False, True):
        for run in to_mark[is_current]:
            _mark(client, run, is_current)

    # another process may have marked other runs of a method and seed as current meanwhile
    if to_mark[True]:
        current_runs = find_runs(client, experiment_id, {**tags, CURRENT: _tag_value(True)})
        last_started = {_method_and_seed(run): run.info.run_id for run in current_runs}  # the earliest run comes first
        for run in current_runs:
            if run.info.run_id != last_started[_method_and_seed(run)]:
                _mark(client, run, is_current=False)


def retire_run_with_other_points(client: Client, run: Run, content: RunContent) -> bool:
    """Make a training run with points that `content` lacks an earlier one, and return True; else return False.

    Such points are of metrics that the experiment no longer measures, or of steps after its last one. MLflow would show
    them as the run's latest values, and cannot delete them. Later searches for the identity do not find the run.
    """
    last_steps = {point.key: point.step for point in sorted(content.points, key=lambda point: point.step)}
    keys = set(run.data.metrics)
    has_other_points = not keys <= set(last_steps) or any(
        metric.step > last_steps[key] for key in keys for metric in client.get_metric_history(run.info.run_id, key)
    )
    if has_other_points:
        identity = content.identifying_tags[IDENTITY]
        _mark(client, run, is_current=False, further_tags={IDENTITY: f"{identity} [earlier]"})
    return has_other_points


def _method_and_seed(run: Run) -> tuple[str, str]:
    """Return method and seed of a training run, as texts."""
    return run.data.tags["kairos.method"], run.data.tags["kairos.seed"]


def _tag_value(is_current: bool) -> str:
    """Return the value of tag `kairos.current`."""
    return "true" if is_current else "false"


def _mark(client: Client, run: Run, is_current: bool, further_tags: Mapping[str, str] | None = None) -> None:
    """Set tags and name of a training run in one request; a run that another process has deleted is left out."""
    from mlflow import MlflowException
    from mlflow.entities import RunTag

    run_id, name = run.info.run_id, run.info.run_name.removeprefix(_EARLIER)
    tags = {CURRENT: _tag_value(is_current), _RUN_NAME: name if is_current else _EARLIER + name, **(further_tags or {})}
    try:
        client.log_batch(run_id, tags=[RunTag(tag, value) for tag, value in tags.items()])
    except MlflowException:
        if client.get_run(run_id).info.lifecycle_stage != "deleted":
            raise


def create_run(client: Client, experiment_id: str, content: RunContent, start_milliseconds: int) -> Run:
    """Create an MLflow run with the tags of `content`, but without its parameters and metric values.

    `start_milliseconds` counts from 1970.
    """
    tags = {**content.tags, **content.identifying_tags}
    return client.create_run(experiment_id, start_time=start_milliseconds, tags=tags, run_name=content.name)


def log_missing(client: Client, run: Run, content: RunContent) -> None:
    """Log the parameters, points and tags of `content` that an MLflow run lacks.

    A value that differs from the recorded value of its step is logged with a later timestamp, so that MLflow shows it.
    Tags are overwritten, except the commit. Parameters that the run has are kept, since MLflow cannot change them.
    Parameters and tags are compared with `run` as it was found or created. Name and identifying tags are not compared.
    """
    from mlflow.entities import Param, RunTag

    recorded = run.data
    points = _find_missing_points(client, run, content.points)
    params = [Param(key, value) for key, value in content.params.items() if key not in recorded.params]
    tags = {key: value for key, value in content.tags.items() if recorded.tags.get(key) != value}
    if COMMIT in recorded.tags:  # the commit of the training run, not of a later import
        tags.pop(COMMIT, None)
    client.log_batch(
        run.info.run_id,
        metrics=to_mlflow_metrics(points),
        params=params,
        tags=[RunTag(key, value) for key, value in tags.items()],
    )


def _find_missing_points(client: Client, run: Run, points: Sequence[Point]) -> list[Point]:
    """Return the points whose value the store does not show for their key and step, in the order of `points`.

    The store shows the latest value of a key and step. A returned point that replaces a recorded value has a later
    timestamp than that value. The recorded values of the run are read from the store.
    """
    # latest recorded values; `run.data.metrics` contains the keys that the run has
    latest: dict[tuple[str, int], tuple[int, float]] = {}  # timestamp and value by key and step
    for key in {point.key for point in points} & set(run.data.metrics):
        for metric in client.get_metric_history(run.info.run_id, key):
            key_and_step = key, metric.step
            timestamp_and_value = metric.timestamp, metric.value
            # of several values of a step, MLflow shows the one with the latest timestamp
            latest[key_and_step] = max(latest.get(key_and_step, timestamp_and_value), timestamp_and_value)

    missing = []
    for point in points:
        recorded = latest.get((point.key, point.step))
        if recorded is None:
            missing.append(point)
            continue
        recorded_timestamp, recorded_value = recorded
        if point.value != recorded_value:
            missing.append(point._replace(timestamp=max(point.timestamp, recorded_timestamp + 1)))
    return missing


def to_mlflow_metrics(points: Sequence[Point]) -> list[Any]:
    """Convert points to MLflow's metrics; its client splits them into requests of the size that a server accepts."""
    from mlflow.entities import Metric

    return [Metric(*point) for point in points]


def build_dataset_input(record: dict[str, Any], folder: Path) -> Any:
    """Return the prepared data set of an experiment as an ``mlflow.entities.DatasetInput`` with context ``training``.

    Its name is the kind of source, such as ``folder``. Its digest is the first 36 characters of the hash of the
    content, the most that MLflow accepts. The ``uri`` of its source is a text with path and size, which MLflow's page
    shows. `record` is the record of the data set, and `folder` the folder of the experiment's results.
    """
    from mlflow.entities import Dataset, DatasetInput, InputTag

    size = ", ".join(f"{name} {record[name]}" for name in _DATASET_SIZES)
    path_and_size = f"{folder}/dataset ({size})"
    dataset = Dataset(
        name=record["source"],
        digest=record["content_sha256"][:36],
        source_type="local",  # MLflow's page shows the uri of a local source as its path
        source=json.dumps({"uri": path_and_size}),
    )
    return DatasetInput(dataset, [InputTag("mlflow.data.context", "training")])
