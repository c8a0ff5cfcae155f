"""Stage `track`: import of results into MLflow, one run per training run under a parent run per experiment.

A failing import is logged and stops nothing. A second import finds runs by their tags and logs what is missing.
"""

from contextlib import suppress
from pathlib import Path
from typing import Any

from kairos import resource_usage
from kairos.config import Experiment
from kairos.files import write_json
from kairos.progress import Progress, log
from kairos.report.collect import Results, RunResults, collect
from kairos.tracking import mlflow_store, run_content, view

_ARTIFACTS = ("report.html", "summary.csv")
_CONTENT = "kairos.content"  # tag with the hash of the content that an import has logged completely
# MLflow's runs by the values of the tags in `run_content.IDENTIFYING_TAGS`
_PresentRuns = dict[tuple[str | None, ...], list[mlflow_store.Run]]


def track(experiment: Experiment, folder: Path, out: Path) -> None:
    """Import the results of an experiment into MLflow, and write a record of the import.

    An error of the store is logged and recorded, but not raised.

    Args:
        experiment: the experiment.
        folder: folder of its results.
        out: file of the record.

    Raises:
        KairosError: the results are incomplete.
    """
    results = collect(experiment, folder)
    if not experiment.tracking.enabled:
        resource_usage.end_startup()
        write_json(out, {"imported": False, "error": "tracking.enabled is false"})
        return
    uri = mlflow_store.tracking_uri(experiment.tracking.uri)
    try:
        record = _import_results(results, uri)
    except Exception as error:  # no error of a store may stop a workflow
        public_uri = mlflow_store.without_credentials(uri)
        message = f"{public_uri}: {mlflow_store.describe_error(error, uri)}"
        log(f"kairos track: nothing is lost, but the import into MLflow failed: {message}")
        record = {"imported": False, "error": message, "uri": public_uri}
    write_json(out, record)


def _import_results(results: Results, uri: str) -> dict[str, Any]:
    """Import results into a store, and return the record of the import.

    The first requests have a short time limit, so that a missing server is reported soon.
    """
    name = run_content.mlflow_experiment_name(results.experiment)
    run_ids = {}
    with mlflow_store.lock_database(uri):
        with mlflow_store.limit_requests(seconds=4, retries=1):
            client = mlflow_store.connect(uri)
            resource_usage.end_startup()
            experiment_id = mlflow_store.find_or_create_experiment(client, name)
        with mlflow_store.limit_requests(seconds=60, retries=2):
            present = _find_present_runs(client, experiment_id, results.experiment.experiment)
            parent_id = _import_parent_run(client, experiment_id, results, present)
            progress = Progress(len(results.runs), "track", "run")
            for run in results.runs:
                run_id = _import_training_run(client, experiment_id, parent_id, results, run, present)
                run_ids[f"{run.method}/seed{run.seed}"] = run_id
                progress.advance()
            progress.close()
            for key, value in view.build_experiment_tags(results, parent_id, experiment_id).items():
                client.set_experiment_tag(experiment_id, key, value)
    return {
        "imported": True,
        "uri": mlflow_store.without_credentials(uri),
        "experiment": name,
        "parent": parent_id,
        "runs": run_ids,
    }


def _find_present_runs(client: mlflow_store.Client, experiment_id: str, name: str) -> _PresentRuns:
    """Return the runs of an experiment that the store has, by their identifying tags; the earliest comes first.

    One search for all runs takes a fraction of the time of a search for each run.

    Args:
        client: client of the store.
        experiment_id: id of the MLflow experiment.
        name: name of the experiment.
    """
    present: _PresentRuns = {}
    for run in mlflow_store.find_runs(client, experiment_id, "kairos.experiment", name):
        key = tuple(run.data.tags.get(tag) for tag in run_content.IDENTIFYING_TAGS)
        present.setdefault(key, []).append(run)
    return present


def _import_parent_run(client: mlflow_store.Client, experiment_id: str, results: Results, present: _PresentRuns) -> str:
    """Import the parent run of an experiment with its report and figures, as far as they exist, and return its id."""
    content = run_content.build_experiment_run(results)
    run_id = _write_run(client, experiment_id, content, present)
    _finish_run(client, run_id, content, present)
    client.set_tag(run_id, view.NOTE, view.build_note(results))
    figures = results.folder / "figures"
    if figures.is_dir():
        client.log_artifacts(run_id, str(figures), "figures")
    for artifact in _ARTIFACTS:
        if (results.folder / artifact).exists():
            client.log_artifact(run_id, str(results.folder / artifact))
    return run_id


def _import_training_run(
    client: mlflow_store.Client,
    experiment_id: str,
    parent_id: str,
    results: Results,
    run: RunResults,
    present: _PresentRuns,
) -> str:
    """Import a training run with its data set and sample grids, and return the id of its MLflow run.

    Args:
        client: client of the store.
        experiment_id: id of the MLflow experiment.
        parent_id: id of the experiment's parent run.
        results: results of the experiment.
        run: the training run.
        present: runs that the store has.
    """
    tags = run_content.build_tags(results, run) | {"mlflow.parentRunId": parent_id}
    points = run_content.collect_points(run)
    content = run_content.build_training_run(
        results.experiment,
        run.method,
        run.seed,
        identity=run.record["identity"],
        points=points,
        tags=tags,
    )
    run_id = _write_run(client, experiment_id, content, present)
    client.log_inputs(run_id, [mlflow_store.build_dataset_input(results.dataset, results.folder)])
    for snapshot in run.snapshots:
        client.log_artifact(run_id, str(snapshot.grid_file), "samples")
    _finish_run(client, run_id, content, present)
    return run_id


def _write_run(
    client: mlflow_store.Client, experiment_id: str, content: run_content.RunContent, present: _PresentRuns
) -> str:
    """Create an MLflow run, or log the missing content of a present one, and return its id.

    If several runs are present, the first is kept and the others are moved to MLflow's trash.
    """
    from mlflow import MlflowException

    first, *duplicates = present.get(_key_of(content), [None])
    if first is None:
        start = min(point.timestamp for point in content.points)
        # a local database is locked during an import, so that no other process creates this run; a server has no lock
        if not client.tracking_uri.startswith("http"):
            return mlflow_store.create_run(client, experiment_id, content, start)
        first = mlflow_store.find_or_create_run(client, experiment_id, content, start)
    for duplicate in duplicates:
        with suppress(MlflowException):  # another job has deleted it
            client.delete_run(duplicate.info.run_id)
    if first.data.tags.get(_CONTENT) != content.digest:
        mlflow_store.log_missing(client, first, content)
    return str(first.info.run_id)


def _finish_run(
    client: mlflow_store.Client, run_id: str, content: run_content.RunContent, present: _PresentRuns
) -> None:
    """Mark an MLflow run as finished, and record the hash of its content for the next import.

    A run that was finished with this content before the import is left as it is.
    """
    first, *_ = present.get(_key_of(content), [None])
    if first is None or first.data.tags.get(_CONTENT) != content.digest:
        client.set_tag(run_id, _CONTENT, content.digest)
    if first is None or first.info.status != "FINISHED":
        client.set_terminated(run_id, "FINISHED", max(point.timestamp for point in content.points))


def _key_of(content: run_content.RunContent) -> tuple[str | None, ...]:
    """Return the values of the tags that identify a run; a tag that it does not have is None."""
    return tuple(content.identifying.get(tag) for tag in run_content.IDENTIFYING_TAGS)
