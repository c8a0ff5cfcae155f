"""Stage `track`: one MLflow run per training under a parent run per experiment; a failure is said and stops nothing.

Importing twice changes nothing: runs are found again by their tags and only what they lack is logged.
"""

from pathlib import Path
from typing import Any

from kairos import resource_usage
from kairos.config import Experiment
from kairos.files import write_json
from kairos.progress import Progress, say
from kairos.report.collect import Results, RunResults, collect
from kairos.tracking import content, store, view

_ARTIFACTS = ("report.html", "summary.csv")


def track(experiment: Experiment, folder: Path, out: Path) -> None:
    """Import the results in `folder` and write what came of it to `out`.

    Raises:
        KairosError: the results are incomplete. That MLflow cannot be used is no error: it is said, and written.
    """
    results = collect(experiment, folder)
    if not experiment.tracking.enabled:
        resource_usage.end_startup()
        write_json(out, {"imported": False, "error": "tracking.enabled is false"})
        return
    uri = store.tracking_uri(experiment.tracking.uri)
    try:
        record = _import(results, uri)
    except Exception as error:  # whatever goes wrong with a store must not stop a workflow
        shown = store.without_credentials(uri)
        message = f"{shown}: {store.explained(error, uri)}"
        say(f"kairos track: nothing is lost, but the import into MLflow failed: {message}")
        record = {"imported": False, "error": message, "uri": shown}
    write_json(out, record)


def _import(results: Results, uri: str) -> dict[str, Any]:
    name, runs = content.experiment_name(results.experiment), {}
    with store.exclusive(uri):
        with store.patience(seconds=4, retries=1):
            client = store.connect(uri)
            resource_usage.end_startup()
            experiment = store.experiment_id(client, name)
        with store.patience(seconds=60, retries=2):
            parent = _parent(client, experiment, results)
            progress = Progress(len(results.runs), "track", "run")
            for training in results.runs:
                runs[f"{training.method}/seed{training.seed}"] = _child(client, experiment, parent, results, training)
                progress.advance()
            progress.close()
            for key, value in view.tags(results, parent, experiment).items():
                client.set_experiment_tag(experiment, key, value)
    shown = store.without_credentials(uri)
    return {"imported": True, "uri": shown, "experiment": name, "parent": parent, "runs": runs}


def _parent(client: store.Client, experiment: str, results: Results) -> str:
    run, folder = _write(client, experiment, content.parent_entry(results)), results.folder
    client.set_tag(run, view.NOTE, view.note(results))
    if (folder / "figures").is_dir():
        client.log_artifacts(run, str(folder / "figures"), "figures")
    for artifact in _ARTIFACTS:
        if (folder / artifact).exists():
            client.log_artifact(run, str(folder / artifact))
    return run


def _child(client: store.Client, experiment: str, parent: str, results: Results, training: RunResults) -> str:
    which = training.method, training.seed, training.record["identity"]
    points, tags = content.points(training), content.tags(results, training) | {"mlflow.parentRunId": parent}
    run = _write(client, experiment, content.training_entry(results.experiment, *which, points, tags))
    client.log_inputs(run, [store.dataset_input(results.dataset, results.folder)])
    for milestone in training.snapshots:
        client.log_artifact(run, str(milestone.grid_file), "samples")
    return run


def _write(client: store.Client, experiment: str, entry: content.Entry) -> str:
    """Id of the entry's run, which afterwards has what it lacked and has ended."""
    times = [point.timestamp for point in entry.points]
    run = store.find_run(client, experiment, entry, min(times))
    store.fill(client, run, entry)
    if run.info.status != "FINISHED":
        client.set_terminated(run.info.run_id, "FINISHED", max(times))
    return str(run.info.run_id)
