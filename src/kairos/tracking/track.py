"""Stage `track`: import of results into MLflow, one run per training run under a parent run per experiment.

A failing import is logged and stops nothing. The last step of importing a run sets its tag `kairos.content`: a hash of
everything that the run is built from. The next import skips runs with the expected hash, finds the others by their
identifying tags, and logs what they lack.
"""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kairos import resource_usage
from kairos.config import Experiment
from kairos.files import hash_folder, sha256_file, sha256_json, write_record
from kairos.progress import ProgressBar, log
from kairos.report.collect import Results, RunResults, collect
from kairos.stage_keys import hash_modules
from kairos.tracking import mlflow_store, run_content, view

# files of the report that the parent run gets as artifacts, with the folder of figures
_ARTIFACTS = ("report.html", "summary.csv")
_CONTENT_TAG = "kairos.content"  # tag with the hash of the content that an import has logged completely


def track(experiment: Experiment, folder: Path, out: Path) -> None:
    """Import the results of an experiment into MLflow, and write a record of the import.

    If `tracking.enabled` is false, only the record is written. An error of the store is logged and recorded, but not
    raised. After an import the record is the result of `_import_results`. Otherwise it contains ``imported`` (False),
    ``error`` and, if the store failed, its ``uri`` without credentials. The end of start-up is marked, see
    `resource_usage.end_startup`.

    Args:
        folder: folder of the experiment's results.
        out: JSON file of the record.

    Raises:
        KairosError: the results are incomplete, also if `tracking.enabled` is false.
    """
    results = collect(experiment, folder)
    if not experiment.tracking.enabled:
        resource_usage.end_startup()
        write_record(out, {"imported": False, "error": "tracking.enabled is false"})
        return
    uri = mlflow_store.tracking_uri(experiment.tracking.uri)
    try:
        record = _import_results(results, uri)
    except Exception as error:  # no error of a store may stop a workflow
        public_uri = mlflow_store.without_credentials(uri)
        message = f"{public_uri}: {mlflow_store.describe_error(error, uri)}"
        log(f"kairos track: nothing is lost, but the import into MLflow failed: {message}")
        record = {"imported": False, "error": message, "uri": public_uri}
    write_record(out, record)


def _import_results(results: Results, uri: str) -> dict[str, Any]:
    """Import results into a store, log the progress, and return the record of the import.

    The first requests have a short time limit, so that a missing server is reported soon. An SQLite database is locked
    during the import. The end of start-up is marked when MLflow is imported.

    Returns:
        ``imported`` (True), ``uri`` without credentials, ``experiment`` (name of the MLflow experiment), ``parent`` (id
        of the parent run) and ``runs`` (id of each training run by ``<method>/seed<seed>``).
    """
    name = run_content.mlflow_experiment_name(results.experiment)
    with mlflow_store.lock_database(uri):
        with mlflow_store.limit_requests(seconds=4, retries=1):
            client = mlflow_store.connect(uri)
            resource_usage.end_startup()
            experiment_id = mlflow_store.find_or_create_experiment(client, name)
        with mlflow_store.limit_requests(seconds=60, retries=2):
            store = _open_store(client, experiment_id, results.experiment.experiment)
            parent_content = run_content.build_experiment_run(results)
            parent_run = store.find_or_create(parent_content)
            parent_id = str(parent_run.info.run_id)

            run_ids, digests = {}, []
            progress = ProgressBar(len(results.runs), "track", "run")
            for run in results.runs:
                digest = _hash_training_run(results, run, parent_id)
                run_ids[f"{run.method}/seed{run.seed}"] = _import_training_run(store, parent_id, results, run, digest)
                digests.append(digest)
                progress.advance()
            progress.close()

            # earlier runs are those of other options, or of methods and seeds that the experiment no longer has
            current_ids = set(run_ids.values())
            tags = {"kairos.experiment": results.experiment.experiment}
            mlflow_store.mark_current_runs(client, experiment_id, tags, lambda run: run.info.run_id in current_ids)
            _complete_parent_run(store, parent_content, parent_run, results, digests)
    return {
        "imported": True,
        "uri": mlflow_store.without_credentials(uri),
        "experiment": name,
        "parent": parent_id,
        "runs": run_ids,
    }


@dataclass(frozen=True)
class _Store:
    """MLflow experiment that receives the runs.

    Attributes:
        client: client of the store.
        experiment_id: id of the MLflow experiment.
        runs_by_tags: runs of the store at the start of the import, by their identifying tags; among runs with equal
            tags, the earliest comes first.
    """

    client: mlflow_store.Client
    experiment_id: str
    runs_by_tags: dict[tuple[str | None, ...], list[mlflow_store.Run]]

    def find_and_delete_duplicates(self, identifying_tags: dict[str, str]) -> mlflow_store.Run | None:
        """Return the earliest MLflow run with these identifying tags, or None; move later ones to MLflow's trash.

        Runs that were created after the start of the import are ignored.
        """
        from mlflow import MlflowException

        key = tuple(identifying_tags.get(tag) for tag in run_content.IDENTIFYING_TAGS)
        earliest, *duplicates = self.runs_by_tags.get(key, [None])  # None: there is no such run
        for duplicate in duplicates:
            with suppress(MlflowException):  # another job has deleted it
                self.client.delete_run(duplicate.info.run_id)
        return earliest

    def find_or_create(self, content: run_content.RunContent) -> mlflow_store.Run:
        """Return the MLflow run with the identifying tags of `content`; it is created if it does not exist."""
        run = self.find_and_delete_duplicates(content.identifying_tags)
        return run if run is not None else self.create(content)

    def create(self, content: run_content.RunContent) -> mlflow_store.Run:
        """Create an MLflow run with the identifying tags of `content`, and return it.

        On a server, a run that another process has created meanwhile is returned instead.

        A new run has no parameters and metrics yet; its start is the time of the earliest point of `content`. The
        caller ensures that `content` has points.
        """
        start = min(point.timestamp for point in content.points)
        # a local database is locked during an import, so that no other process creates this run; a server has no lock
        if self.client.tracking_uri.startswith("http"):
            return mlflow_store.find_or_create_run(self.client, self.experiment_id, content, start)
        return mlflow_store.create_run(self.client, self.experiment_id, content, start)

    def finish(self, run: mlflow_store.Run, content: run_content.RunContent, digest: str) -> None:
        """Log the content that an MLflow run lacks, and mark the run as finished and complete.

        A run that is not finished yet ends at the time of the latest point of `content`. `digest`, the hash of
        everything that the run is built from, becomes tag `kairos.content`.
        """
        mlflow_store.log_missing(self.client, run, content)
        if run.info.status != "FINISHED":
            last = max(point.timestamp for point in content.points)
            self.client.set_terminated(run.info.run_id, "FINISHED", last)
        self.client.set_tag(run.info.run_id, _CONTENT_TAG, digest)  # last, since it marks the content as complete


def _open_store(client: mlflow_store.Client, experiment_id: str, name: str) -> _Store:
    """Return the `_Store` of an MLflow experiment, with the runs of the kairos experiment `name` in it."""
    # one search for all runs takes a fraction of the time of a search for each run
    runs_by_tags: dict[tuple[str | None, ...], list[mlflow_store.Run]] = {}
    for run in mlflow_store.find_runs(client, experiment_id, {"kairos.experiment": name}):
        key = tuple(run.data.tags.get(tag) for tag in run_content.IDENTIFYING_TAGS)
        runs_by_tags.setdefault(key, []).append(run)
    return _Store(client, experiment_id, runs_by_tags)


def _is_complete(run: mlflow_store.Run, digest: str) -> bool:
    """Return True if an earlier import has logged all content with this hash, and the run is marked as finished."""
    return bool(run.data.tags.get(_CONTENT_TAG) == digest and run.info.status == "FINISHED")


def _hash_training_run(results: Results, run: RunResults, parent_id: str) -> str:
    """Return the hash of everything that a training run's MLflow run is built from, the importing code included.

    The files of the run are read, but its curves are not built.
    """
    # the bytes of files stand for the points of the curves, which would take several times as long to build
    snapshots = [
        [snapshot.step, snapshot.measured_values, sha256_file(snapshot.grid_file)] for snapshot in run.snapshots
    ]
    return sha256_json(
        [
            hash_modules([__name__]),
            parent_id,
            run_content.identify_training_run(results.experiment, run.method, run.seed, run.record["identity"]),
            run_content.flatten_parameters(results.experiment, run.method, run.seed),
            run_content.build_tags(results, run),
            [results.dataset[key] for key in mlflow_store.DATASET_FIELDS],
            sha256_file(run.metrics_file) if run.metrics_file else None,
            run.started.isoformat() if run.started else None,
            sorted(run.seconds_by_step.items()),
            snapshots,
        ]
    )


def _import_training_run(store: _Store, parent_id: str, results: Results, run: RunResults, digest: str) -> str:
    """Import a training run with its data set and sample grids, and return the id of its MLflow run.

    If an earlier import has completed the MLflow run with this digest, nothing is logged. An MLflow run with values
    that the results no longer have becomes an earlier run, and a new one is created. `digest` is the result of
    `_hash_training_run`, and `parent_id` the id of the parent run.
    """
    identity = run.record["identity"]
    identifying_tags = run_content.identify_training_run(results.experiment, run.method, run.seed, identity)
    existing_run = store.find_and_delete_duplicates(identifying_tags)
    if existing_run is not None and _is_complete(existing_run, digest):
        return str(existing_run.info.run_id)
    content = run_content.build_training_run(
        results.experiment,
        run.method,
        run.seed,
        identity=identity,
        points=run_content.collect_points(run),
        tags=run_content.build_tags(results, run) | {"mlflow.parentRunId": parent_id},
    )
    if existing_run is not None and mlflow_store.retire_run_with_other_points(store.client, existing_run, content):
        existing_run = None
    mlflow_run = existing_run if existing_run is not None else store.create(content)
    run_id = str(mlflow_run.info.run_id)
    # MLflow reads the whole run to log its first artifact, which is fast before the run has metrics
    for snapshot in run.snapshots:
        store.client.log_artifact(run_id, str(snapshot.grid_file), "samples")
    store.client.log_inputs(run_id, [mlflow_store.build_dataset_input(results.dataset, results.folder)])
    store.finish(mlflow_run, content, digest)
    return run_id


def _complete_parent_run(
    store: _Store,
    content: run_content.RunContent,
    run: mlflow_store.Run,
    results: Results,
    digests: list[str],
) -> None:
    """Log the parent run with its report and figures, as far as they exist, and the view of the MLflow experiment.

    Nothing is logged if an earlier import has completed the run with the present content, files and training runs.
    `digests` are the hashes of the training runs.
    """
    # skip a complete run
    figures = results.folder / "figures"
    artifacts = [results.folder / name for name in _ARTIFACTS if (results.folder / name).exists()]
    digest = sha256_json(
        [
            content.digest,
            digests,
            hash_folder(figures) if figures.is_dir() else None,
            {path.name: sha256_file(path) for path in artifacts},
        ]
    )
    if _is_complete(run, digest):
        return

    # files of the run
    run_id = str(run.info.run_id)
    if figures.is_dir():
        store.client.log_artifacts(run_id, str(figures), "figures")
    for path in artifacts:
        store.client.log_artifact(run_id, str(path))

    # note of the run, and note and view of the MLflow experiment
    note = view.build_note(results)
    store.client.set_tag(run_id, view.NOTE, note)
    for key, value in view.build_experiment_tags(results, note, run_id, store.experiment_id).items():
        store.client.set_experiment_tag(store.experiment_id, key, value)
    store.finish(run, content, digest)
