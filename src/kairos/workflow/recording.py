"""Recording of an experiment's results for git and DVC, and comparison of results with a recording.

A recording is a small JSON file. It contains the hash of the content of every result, what the stages depend on, and
the machines that computed. DVC stores the results themselves.
"""

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd

from kairos.config import Experiment
from kairos.files import (
    DamagedError,
    atomic_folder,
    glance,
    read_json,
    sha256_json,
    write_json,
    write_record,
    write_text,
)
from kairos.report.collect import Results, collect
from kairos.stages import TRAIN, run_folder
from kairos.validity import Change, Result, Validity, compare_fields, format_changes
from kairos_timesteps.errors import KairosError

_FOLDERS = ("text", "analyses")  # outputs in dvc.yaml that an experiment may lack
# facts of a machine's record (`portable.machine`) in which two recordings are compared
_MACHINE_FACTS = ("processor", "instruction_set", "torch", "numpy", "libc", "python")


def record(experiment: Experiment, results: Path, out: Path) -> None:
    """Write the recording of complete results to a file, and DVC's metrics and curves into the folder of results.

    The metrics are in ``summary/metrics.json``, and the curve of each method in ``summary/curves``. A folder that
    dvc.yaml lists and the experiment lacks gets a placeholder ``record.json``.

    Args:
        experiment: the experiment, with a definite extractor.
        results: folder of its results.
        out: the file.

    Raises:
        KairosError: results are missing, damaged or outdated.
    """
    _write_summary(collect(experiment, results), results / "summary")
    for name in _FOLDERS:
        if not (results / name).exists():
            write_record(results / name / "record.json", {"reason": f"the experiment has no {name}"})
    validity = Validity(experiment, results)
    contents, stages = {}, {}
    for stage in (row.name for row in validity.stages.values() if not row.is_summary):
        for result in validity.list_results(stage):
            path = validity.path(result)
            if not validity.is_unchanged(result):
                raise KairosError(
                    f"{path}: missing, outdated or of other code; run the workflow first, or kairos accept"
                )
            contents[path.relative_to(results).as_posix()] = validity.content(result)
            described = validity.describe_stage_of(result)
            stages[_stage_name(result)] = {name: described[name] for name in ("fields", "code", "outside")}
    for method, seed in product(experiment.methods, experiment.seeds):
        path = run_folder(results, method, seed) / "training.json"
        contents[path.relative_to(results).as_posix()] = _hash_content(validity, path)
    machines = _list_machines(results) or glance(out).get("machines", [])  # pulled results have no times of jobs
    write_json(out, {"contents": contents, "stages": stages, "machines": machines})


def _write_summary(results: Results, folder: Path) -> None:
    columns = {"distance": results.distance_metric, "val_loss": results.validation_metric}
    measurements = results.measurements
    metrics, tables = {}, {}
    for method in results.methods:
        curves = {}
        for name, column in columns.items():
            values = measurements.values_of(method, column).mean()  # over seeds, by step
            if values.notna().any():
                curves[name] = values
        table = pd.DataFrame(curves).rename_axis("step")
        tables[method] = table.to_csv(float_format="%.6g", lineterminator="\n")
        metrics[method] = {name: float(f"{value:.6g}") for name, value in table.iloc[-1].items()}
    write_json(folder / "metrics.json", metrics)
    with atomic_folder(folder / "curves") as curves_folder:  # without those of earlier methods
        for method, text in tables.items():
            write_text(curves_folder / f"{method}.csv", text)


def compare(recording: Path, experiment: Experiment, results: Path) -> Iterator[tuple[str, str, str]]:
    """Compare the results of an experiment with a recording.

    Args:
        recording: file of `record`.
        experiment: the experiment.
        results: folder of its results.

    Yields:
        The path of a record; ``same``, ``differs`` or ``missing``; and the reason, empty for ``same``.

    Raises:
        KairosError: the file is no recording; raised when the first result is requested.
    """
    try:
        recorded = read_json(recording)
        contents, stages, machines = recorded["contents"], recorded["stages"], recorded["machines"]
    except (OSError, DamagedError) as error:
        raise KairosError(f"--against: {recording} is no recording ({error}); pass a file of kairos record") from None
    validity = Validity(experiment, results)
    present = {path: _hash_content(validity, results / path) for path in contents if (results / path).is_file()}
    different = {path for path in contents if present.get(path) != contents[path]}
    machine_changes = _compare_machines(machines, _list_machines(results))
    for path in contents:
        if path not in different:
            yield path, "same", ""
        elif present.get(path) is None:
            yield path, "missing", ""
        else:
            changes = _find_changes(validity, results / path, stages)
            inputs = _find_different_inputs(validity, results / path, different)
            reasons = [f"settings or code: {format_changes(changes)}"] if changes else []
            reasons += [f"follows from {', '.join(inputs[:3])}"] if inputs else []
            yield path, "differs", "; ".join(reasons or machine_changes) or "no record gives the reason"


def _find_changes(validity: Validity, path: Path, stages: dict[str, Any]) -> list[Change]:
    """Return the changes of fields, code and outside files of a result since the recording."""
    result = _find_result(validity, path)
    if result is None:
        return []
    recorded = stages.get(_stage_name(result), {})
    computed_from = validity.record(result).get("computed_from", {})
    present = {name: computed_from.get(name) for name in recorded}
    before, now = ({**(values.get("fields") or {}), **values, "fields": None} for values in (recorded, present))
    return list(compare_fields(before, now))


def _find_different_inputs(validity: Validity, path: Path, different: set[str]) -> list[str]:
    result = _find_result(validity, path)
    if result is None:
        return []
    needed = (validity.path(other).relative_to(validity.results).as_posix() for other in validity.list_needed(result))
    return [other for other in needed if other in different]


def _find_result(validity: Validity, path: Path) -> Result | None:
    """Return the result of a record; for the record of a training run, that of its last snapshot.

    None: the experiment has no such stage any more, such as an analysis.
    """
    if path.name == "training.json":
        path = path.parent / "snapshots" / f"{glance(path).get('steps', 0):07d}" / "snapshot.json"
    return validity.find_result(str(path))


def _hash_content(validity: Validity, path: Path) -> str | None:
    """Return the hash of the content of a result or training run, given its record; None: it is missing or damaged."""
    if path.name == "training.json":
        components = glance(path).get("components")
        return sha256_json(components) if components else None
    result = _find_result(validity, path)
    return validity.content(result) if result else None


def _stage_name(result: Result) -> str:
    return f"{result.stage}.{result.method}" if result.stage == TRAIN.name else result.stage


def _compare_machines(before: list[dict[str, str]], now: list[dict[str, str]]) -> list[str]:
    """Return a text for each fact that differs between machines, such as ``torch: 2.8 when recorded, 2.9 now``."""
    reasons = []
    for fact in _MACHINE_FACTS:
        then, today = ("/".join(sorted({machine.get(fact, "?") for machine in side})) or "?" for side in (before, now))
        if then != today:
            reasons.append(f"{fact.replace('_', ' ')}: {then} when recorded, {today} now")
    return reasons


def _list_machines(results: Path) -> list[dict[str, str]]:
    """Return the facts of each machine that computed an experiment (CPU, instruction set, versions), each machine once.

    They are read from the times of the jobs, in the order of their paths.

    Raises:
        DamagedError: a file of times is damaged.
    """
    machines = [read_json(path).get("machine") for path in sorted(results.glob("timing/**/*.json"))]
    # equal machines have equal JSON texts
    machine_by_text = {json.dumps(machine, sort_keys=True): machine for machine in machines if machine is not None}
    return list(machine_by_text.values())
