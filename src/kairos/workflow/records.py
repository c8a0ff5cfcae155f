"""Changes of the records of results: accept results of other code, or discard results to compute them again."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kairos.files import glance, list_by_step, read_record, write_record
from kairos.stages import TRAIN, run_folder
from kairos.validity import Result, Validity, accept_identity, format_changes, state_folder, training_identity
from kairos.workflow.controller import lock_results
from kairos_timesteps.errors import ConfigError, demand


def accept(experiment: Any, results: Path, stage: str | None, method: str | None) -> list[str]:
    """Give the present key to results whose settings and inputs are the present ones, and whose code alone differs.

    A training run resumes from the state of the accepted results. Their records list the hashes of the code that
    computed them under ``accepted``.

    Args:
        experiment: the experiment.
        results: folder of its results.
        stage: name of a stage; None: all stages.
        method: name of a method; None: all methods, and the stages that all training runs share.

    Returns:
        The paths of the changed records.

    Raises:
        ConfigError: settings or inputs of a result differ, or there is no such stage or method. No record is changed.
        KairosError: a run of the workflow computes these results.
    """
    validity = Validity(experiment, results, reads_outside=True)
    selected = list(_select(validity, stage, method))
    with lock_results(results):
        for result in selected:
            changes = validity.find_changes(result)
            if changes:
                what = format_changes(changes)
                remedy = "run the workflow, or select other results by --stage and --method"
                raise ConfigError(
                    f"{validity.path(result)}: {what} changed, and accept is for changes of code alone; {remedy}"
                )
        changed = []
        for result in selected:
            record = validity.record(result)
            present = validity.describe_stage(result.stage, result.method if result.stage == TRAIN.name else None)
            if record and record["computed_from"]["key"] != present["key"]:
                changed += _accept_result(validity, result, present)
        return changed


def _accept_result(validity: Validity, result: Result, present: dict[str, Any]) -> list[str]:
    path = validity.path(result)
    paths = [path]
    if result.stage == TRAIN.name:
        folder = run_folder(validity.results, str(result.method), str(result.seed))
        record = read_record(path)
        paths += [folder / "training.json", *_find_state_records(folder, record["identity"])]
        accepted = {**record["computed_from"], "key": present["key"]}
        accept_identity(folder, training_identity(accepted), record["identity"])
    changed = []
    for file in paths:
        recorded = glance(file).get("computed_from")
        if recorded is not None and recorded["key"] != present["key"]:
            codes = [*recorded.get("accepted", ()), recorded["code"]]
            computed_from = {**recorded, "code": present["code"], "key": present["key"], "accepted": codes}
            write_record(file, {**read_record(file), "computed_from": computed_from})
            changed.append(str(file))
    return changed


def _find_state_records(folder: Path, identity: str) -> list[Path]:
    """Return the paths of the records of all snapshots in the state of a training run."""
    snapshots = list_by_step(state_folder(folder, identity) / "milestones")
    return [snapshot / "milestone.json" for snapshot in snapshots]


def discard(experiment: Any, results: Path, stage: str | None, method: str | None) -> list[str]:
    """Delete records, and states of training runs, so that the next run of the workflow computes the results anew.

    Arguments and errors are those of `accept`; differing settings are no error.

    Returns:
        The deleted paths.
    """
    validity = Validity(experiment, results)
    deleted = []
    with lock_results(results):
        for result in _select(validity, stage, method):
            paths = [validity.path(result)]
            if result.stage == TRAIN.name:
                folder = run_folder(results, str(result.method), str(result.seed))
                identity = validity.record(result).get("identity", "")
                identities = {identity, *validity.identities(str(result.method), int(result.seed or 0))} - {""}
                paths += [folder / "training.json", *(state_folder(folder, name) for name in sorted(identities))]
            for path in paths:
                if path.is_dir():
                    shutil.rmtree(path)
                elif path.exists():
                    path.unlink()
                else:
                    continue
                deleted.append(str(path))
    return deleted


def _select(validity: Validity, stage: str | None, method: str | None) -> Iterator[Result]:
    """Yield the results of one stage or all stages, and of one method or all.

    Raises:
        ConfigError: there is no such stage or method.
    """
    if stage is not None:
        demand(stage in validity.stages, "--stage", repr(stage), ", ".join(validity.stages))
    if method is not None:
        demand(method in validity.experiment.methods, "--method", repr(method), ", ".join(validity.experiment.methods))
    # the report and the import into MLflow are made anew whenever another result changes
    for name in (name for name in validity.stages if name not in ("report", "track")) if stage is None else [stage]:
        for result in validity.list_results(name):
            if method is None or result.method == method:
                yield result
