"""Stage `track`: import of results into MLflow, one run per training run under a parent run per experiment.

A failing import is logged and stops nothing. A second import finds runs by their tags and logs what is missing.
"""

from pathlib import Path
from typing import Any

from kairos import resource_usage
from kairos.config import Experiment
from kairos.files import write_json
from kairos.progress import Progress, log
from kairos.report.collect import Results, RunResults, collect
from kairos.tracking import mlflow_store, run_content, view

_ARTIFACTS = ("report.html", "summary.csv")


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
            parent_id = _import_parent_run(client, experiment_id, results)
            progress = Progress(len(results.runs), "track", "run")
            for run in results.runs:
                run_id = _import_training_run(client, experiment_id, parent_id, results, run)
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


def _import_parent_run(client: mlflow_store.Client, experiment_id: str, results: Results) -> str:
    """Import the parent run of an experiment with its report and figures, and return its id."""
    run_id = _write_run(client, experiment_id, run_content.build_experiment_run(results))
    client.set_tag(run_id, view.NOTE, view.build_note(results))
    figures = results.folder / "figures"
    if figures.is_dir():
        client.log_artifacts(run_id, str(figures), "figures")
    for artifact in _ARTIFACTS:
        if (results.folder / artifact).exists():
            client.log_artifact(run_id, str(results.folder / artifact))
    return run_id


def _import_training_run(
    client: mlflow_store.Client, experiment_id: str, parent_id: str, results: Results, run: RunResults
) -> str:
    """Import a training run with its data set and sample grids, and return the id of its MLflow run."""
    tags = run_content.build_tags(results, run) | {"mlflow.parentRunId": parent_id}
    points = run_content.collect_points(run)
    content = run_content.build_training_run(
        results.experiment, run.method, run.seed, identity=run.record["identity"], points=points, tags=tags
    )
    run_id = _write_run(client, experiment_id, content)
    client.log_inputs(run_id, [mlflow_store.build_dataset_input(results.dataset, results.folder)])
    for snapshot in run.snapshots:
        client.log_artifact(run_id, str(snapshot.grid_file), "samples")
    return run_id


def _write_run(client: mlflow_store.Client, experiment_id: str, content: run_content.RunContent) -> str:
    """Find or create an MLflow run, log its missing content, mark it as finished, and return its id."""
    times = [point.timestamp for point in content.points]
    run = mlflow_store.find_or_create_run(client, experiment_id, content, start=min(times))
    mlflow_store.log_missing(client, run, content)
    if run.info.status != "FINISHED":
        client.set_terminated(run.info.run_id, "FINISHED", max(times))
    return str(run.info.run_id)
