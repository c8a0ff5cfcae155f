"""Stage `track`: one MLflow run per training under a parent run per experiment; a failure is said and stops nothing.

Importing twice changes nothing: runs are found again by their tags and only what they lack is logged.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kairos import clock
from kairos.config import Experiment
from kairos.errors import KairosError
from kairos.files import write_json
from kairos.progress import Progress, say
from kairos.report.collect import Results, Training, collect
from kairos.tracking import content, store

if TYPE_CHECKING:
    from mlflow import MlflowClient

_ARTIFACTS = ("report.html", "summary.csv")


def track(experiment: Experiment, folder: Path, out: Path) -> None:
    """Import the results in `folder` and write what came of it to `out`.

    Raises:
        KairosError: the results are incomplete. That MLflow cannot be used is no error: it is said, and written.
    """
    results = collect(experiment, folder)
    if not experiment.tracking.enabled:
        clock.work_begins()
        write_json(out, {"imported": False, "error": "tracking.enabled is false"})
        return
    uri = store.tracking_uri(experiment.tracking.uri)
    try:
        record = _import(results, uri)
    except Exception as error:  # whatever goes wrong with a store must not stop a workflow
        message = _explained(error, uri)
        say(f"kairos track: nothing is lost, but the import into MLflow failed: {message}")
        record = {"imported": False, "error": message, "uri": store.without_credentials(uri)}
    write_json(out, record)


def _import(results: Results, uri: str) -> dict[str, Any]:
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
    try:
        from mlflow import MlflowClient
    except ImportError as error:
        raise KairosError(f"mlflow cannot be imported ({error}); install kairos[pipeline]") from None
    clock.work_begins()
    with store.exclusive(uri):
        client = MlflowClient(tracking_uri=uri)
        name = content.experiment_name(results.experiment)
        with store.patience(seconds=4, retries=1):
            experiment = store.experiment_id(client, name, uri)
        with store.patience(seconds=60, retries=2):
            parent = _parent(client, experiment, results)
            progress = Progress(len(results.trainings), "track", "run")
            runs = {}
            for training in results.trainings:
                runs[f"{training.method}/seed{training.seed}"] = _child(client, experiment, parent, results, training)
                progress.advance()
            progress.close()
    shown = store.without_credentials(uri)
    return {"imported": True, "uri": shown, "experiment": name, "parent": parent, "runs": runs}


def _parent(client: "MlflowClient", experiment: str, results: Results) -> str:
    folder, name = results.folder, results.experiment.experiment
    params = {"methods": ", ".join(results.methods), "model": results.experiment.model["name"]}
    points, tags = content.reference_points(results), {"kairos.data": results.dataset["content_sha256"]}
    run = store.write_run(client, experiment, name, content.identifying_tags(name), params, points, tags)
    if (folder / "figures").is_dir():
        client.log_artifacts(run, str(folder / "figures"), "figures")
    for artifact in _ARTIFACTS:
        if (folder / artifact).exists():
            client.log_artifact(run, str(folder / artifact))
    return run


def _child(client: "MlflowClient", experiment: str, parent: str, results: Results, training: Training) -> str:
    method, seed = training.method, training.seed
    identifying = content.identifying_tags(results.experiment.experiment, (method, seed, training.record["identity"]))
    tags = {**content.tags(results, training), "mlflow.parentRunId": parent}
    params, points = content.parameters(results.experiment, method, seed), content.points(training)
    return store.write_run(client, experiment, content.run_name(method, seed), identifying, params, points, tags)


def _explained(error: Exception, uri: str) -> str:
    """The cause in one line, without credentials."""
    if isinstance(error, KairosError):
        return str(error)
    text = store.uncredentialed(" ".join(str(error).split()), uri)
    return f"{store.without_credentials(uri)}: {type(error).__name__}: {text[:300]}"
