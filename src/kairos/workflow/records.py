"""Changes of the records of results: accept results of other code, or discard results to compute them again."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kairos.files import glance, write_record
from kairos.progress import log
from kairos.stages import ENCODE, TRAIN, run_folder
from kairos.training.run_folder import lock_run_folder
from kairos.validity import (
    Result,
    Validity,
    accept_identity,
    find_identity,
    format_changes,
    state_folder,
    training_identity,
)
from kairos.workflow.controller import lock_results
from kairos_timesteps.errors import ConfigError, KairosError, demand


def accept(experiment: Any, results: Path, stage: str | None, method: str | None) -> list[str]:
    """Mark results as valid whose code alone differs: their records get the present key.

    A training run resumes from the state of its accepted snapshot or, without a published one, from a state that other
    code wrote. Under ``accepted``, a record lists the hashes of the code that computed its result.

    Args:
        experiment: the experiment.
        results: folder of its results.
        stage: name of a stage; None: all stages.
        method: name of a method; None: all methods, and the stages that all training runs share.

    Returns:
        The paths of the changed records, and of states that are accepted.

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
            key = validity.describe_stage_of(result)["key"]
            if result.stage == TRAIN.name:
                changed += _accept_states(validity, result, key)
            if record and record["computed_from"]["key"] != key:
                _accept_record(validity, result, record)
                changed.append(str(validity.path(result)))
        return changed


def _accept_record(validity: Validity, result: Result, record: dict[str, Any]) -> None:
    recorded = record["computed_from"]
    present = validity.describe_stage_of(result)
    codes = sorted({*recorded.get("accepted", ()), recorded["code"]} - {present["code"]})
    computed_from = {**recorded, "code": present["code"], "key": present["key"], "accepted": codes}
    write_record(validity.path(result), {**record, "computed_from": computed_from})


def _accept_states(validity: Validity, result: Result, key: str) -> list[str]:
    """Let a training run resume from a state that other code has written; returns the state's folder, if there is one.

    If several states qualify, the state of the published snapshot is used.
    """
    folder = run_folder(validity.results, str(result.method), int(result.seed or 0))
    paths = [*sorted(folder.glob(".state/*/snapshots/*/snapshot.json")), validity.path(result)]
    changed = []
    for path in paths:  # the last one counts: that of the published snapshot
        record = glance(path)
        if record and record["computed_from"]["key"] != key and not validity.compare(result, record):
            identity = training_identity({**record["computed_from"], "key": key})
            if find_identity(folder, {**record["computed_from"], "key": key}) != record["identity"]:
                accept_identity(folder, identity, record["identity"])
                changed.append(str(state_folder(folder, record["identity"])))
    return changed


def discard(experiment: Any, results: Path, stage: str | None, method: str | None) -> list[str]:
    """Delete records, and states of training runs, so that the next run of the workflow computes the results anew.

    Arguments and errors are those of `accept`, but differing settings are no error. KairosError is also raised while a
    process trains one of the runs.

    Returns:
        The deleted paths.
    """
    validity = Validity(experiment, results)
    deleted = []
    with lock_results(results):
        for result in _select(validity, stage, method):
            if result.stage != TRAIN.name:
                deleted += _delete([validity.path(result)])
                continue
            folder = run_folder(results, str(result.method), str(result.seed))
            identity = validity.record(result).get("identity", "")
            identities = {identity, *validity.identities(str(result.method), int(result.seed or 0))} - {""}
            states = [state_folder(folder, name) for name in sorted(identities)]
            with lock_run_folder(folder / ".state"):  # jobs of a cluster outlive their controller
                paths = [validity.path(result), folder / "training.json", folder / ".state/accepted.json"]
                deleted += _delete([*paths, *states])
    return deleted


def discard_unused_states(experiment: Any, results: Path, method: str | None) -> list[str]:
    """Delete the states of training runs that no run resumes, since they are of earlier settings or code.

    Published results stay. A run that a process trains is left out, with a message. The name of a state
    is a hash that includes the data, so nothing is deleted unless the latents are valid.

    Args:
        experiment: the experiment.
        results: folder of its results.
        method: name of a method; None: all methods.

    Returns:
        The deleted folders.

    Raises:
        ConfigError: there is no such method.
        KairosError: a run of the workflow computes these results.
    """
    validity = Validity(experiment, results)
    runs = {(result.method, result.seed) for result in _select(validity, TRAIN.name, method)}
    deleted: list[str] = []
    if not validity.is_valid(Result(ENCODE.name)):
        return deleted
    with lock_results(results):
        for name, seed in sorted((str(name), int(seed or 0)) for name, seed in runs):
            folder = run_folder(results, name, seed)
            used = {state_folder(folder, identity) for identity in validity.identities(name, seed)}
            unused = sorted({*folder.glob(f".state/{'?' * 16}")} - used) if used else []
            if unused:
                try:
                    with lock_run_folder(folder / ".state"):
                        deleted += _delete(unused)
                except KairosError as error:  # such as a process that trains the run
                    log(str(error))
    return deleted


def _delete(paths: list[Path]) -> list[str]:
    """Delete files and folders; returns the paths of those that existed."""
    existing = [path for path in paths if path.exists()]
    for path in existing:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    return [str(path) for path in existing]


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
    for name in (row.name for row in validity.stages.values() if not row.is_summary) if stage is None else [stage]:
        for result in validity.list_results(name):
            if method is None or result.method == method:
                yield result
