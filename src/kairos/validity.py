"""Validity of results: what a result was computed from, and whether the present experiment, code and inputs are equal.

The record of a result contains under ``computed_from``:

    fields    fields of the experiment that its stage depends on, see `kairos.stages`
    code      hash of the stage's code
    outside   hash of the files outside of the results that the stage reads; None: it reads none
    paths     paths of these files and folders, which may be elsewhere now
    key       hash of stage, fields, code and outside; paths do not count
    inputs    content of each result that the stage reads, by stage
    seed, device    of a training run: its seed and the type of its device

`content` is the hash of the fields of a record that describe the result itself. A result is unchanged if its
record has the present key, the recorded contents of its inputs are the present ones, and its files exist. It is valid
if it and all results that it needs are unchanged. For a training run, seed and type of device must be equal too.

This module imports no torch, because the workflow uses it.
"""

import glob
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from pathlib import Path
from typing import Any

from kairos.errors import TemporaryError
from kairos.files import RecordReader, glance, read_record, sha256_json, write_json, write_record
from kairos.outside_files import hash_contents
from kairos.snapshots import hash_start_weights, step_name
from kairos.stage_keys import Sections, hash_stage_code, list_sections, select_fields
from kairos.stages import ENCODE, EXTRACTOR, TRAIN, Stage, list_stages, run_folder
from kairos_timesteps.errors import ConfigError

Record = dict[str, Any]
_DEVICE_TYPES = {"auto": ("cpu", "cuda")}  # types of device that a value of `training.device` allows
_ACCEPTED = ".state/accepted.json"  # in the folder of a training run: recorded identity by present one
_CLOCK_TOLERANCE = 60.0  # seconds by which a file may be newer than this machine's clock
_OUTSIDE = "files outside of the results"  # replaces the path of a file or folder whose content counts


@dataclass(frozen=True)
class Result:
    """A result of a stage of an experiment, which has one record.

    Attributes:
        stage: name of the stage.
        method, seed: the training run; None for a stage that all runs share.
        snapshot: name of the snapshot, such as ``0000400``; None for a stage that all runs share.
    """

    stage: str
    method: str | None = None
    seed: int | None = None
    snapshot: str | None = None


@dataclass(frozen=True)
class Change:
    """A value that a result was computed from and that differs from the present one.

    Attributes:
        field: dotted name in the experiment file, or description of what differs.
        before: value in the record; None also if the record lacks it.
        now: present value; None also if it is absent.
    """

    field: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.field}: {_format_value(self.before)} → {_format_value(self.now)}"


def format_changes(changes: Sequence[Change]) -> str:
    """Format the first three changes in one line, followed by ``and N more``; empty without changes."""
    shown = ", ".join(str(change) for change in changes[:3])
    if len(changes) <= 3:
        return shown
    return f"{shown} and {len(changes) - 3} more"


def describe_training(run: Any, latents: Record, device: str) -> Record:
    """Return ``computed_from`` of the snapshots of a training run.

    In the fields, a placeholder replaces the path `start_from`. ``outside`` is the hash of the weights there, from the
    snapshot's record; the weights are not read.

    Args:
        run: settings of the training run, a `RunSettings`.
        latents: record of the training data.
        device: type of the computing device.

    Raises:
        ConfigError: `training.start_from` is not a snapshot of this backbone.
        DamagedError: the record of that snapshot is damaged.
    """
    start = run.training.start_from
    outside = hash_start_weights(Path(start), run.model) if start else None
    parts = _build_stage_part(TRAIN, run.sections, [start] if start else [], outside)
    return {**parts, "inputs": {"encode": content(ENCODE, latents)}, "seed": run.seed, "device": device}


def training_identity(computed_from: Record) -> str:
    """Return the hash of what decides the trajectory of a training run, from ``computed_from`` of its snapshots.

    The number of steps, segments, logging, paths and versions of packages do not change it. A longer run with an equal
    identity therefore resumes where the shorter one ended. If the learning-rate schedule ends at the last milestone,
    the identity includes this step, and a longer run starts from step 0.
    """
    return sha256_json({name: computed_from[name] for name in ("key", "inputs", "seed", "device")})


def find_identity(folder: Path, computed_from: Record) -> str:
    """Return the identity of a training run: that of the state accepted for it, else `training_identity`."""
    identity = training_identity(computed_from)
    accepted: str = glance(folder / _ACCEPTED).get(identity, identity)
    return accepted


def accept_identity(folder: Path, identity: str, recorded: str) -> None:
    """Let a training run with an identity resume from the state of a recorded identity, see `find_identity`."""
    write_json(folder / _ACCEPTED, {**glance(folder / _ACCEPTED), identity: recorded})


def state_folder(folder: Path, identity: str) -> Path:
    """Return the folder of the state of a training run, which is named by the first digits of its identity."""
    return folder / ".state" / identity[:16]


def content(stage: Stage, record: Record) -> str:
    """Return the hash of a result: of the fields of its record that describe it, such as the hashes of its files."""
    return sha256_json({name: record.get(name) for name in stage.content_fields})


class Validity:
    """Comparison of the results of an experiment with its present settings, code and inputs.

    Records are read once, so an object does not notice later changes of the files.

    Args:
        experiment: the experiment. If its extractor is ``auto``, the extractor in the results counts, if there is one.
        results: folder of its results.
        reads_outside: True: hash the files outside of the results, such as images; unchanged files are not read again.
            False: use the recorded hash.

    Attributes:
        experiment, results: the arguments.
        stages: stages of the experiment by name.
        snapshot_records: reader of the snapshots' records, which share the experiment.
        record: function of a `Result`. It returns the result's record, empty if it is missing or damaged.
        content: function of a `Result`. It returns the content of the result; None if its record is missing or damaged.
        find_result: function of a path. It returns the result whose record has this path, also if the file does not
            exist; None: no record of the experiment has it.
        find_changes: function of a `Result`, see `_find_changes`.
        is_valid: function of a `Result`. It returns True if the result and all results that it needs are unchanged.
        has_other_code: function of a `Result`. It returns True if other code, accepted or not, computed the result or
            one that it needs.
        describe_stage: function of the name of a stage, and of a method for training. It returns fields, code, outside,
            paths and key. These seven functions are cached.
    """

    def __init__(self, experiment: Any, results: Path | str, reads_outside: bool = False):
        self.results = Path(results)
        self.experiment = _replace_auto(experiment, self.results)
        self.stages = list_stages(self.experiment)
        self._reads_outside = reads_outside
        self.snapshot_records = RecordReader("config")
        # caches of this object, which a decorated method would keep alive
        self.record = cache(self._read)
        self.content = cache(self._hash_content)
        self.find_result = cache(self._find_result)
        self.find_changes = cache(self._find_changes)
        self.describe_stage = cache(self._describe_stage)
        self.has_other_code = cache(self._find_other_code)
        self.is_valid = cache(self._find_validity)

    def path(self, result: Result) -> Path:
        """Return the path of the record of a result."""
        names = {"method": result.method, "seed": result.seed, "snapshot": result.snapshot}
        return self.results / self.stages[result.stage].record_path.format(**names)

    def _find_result(self, path: str) -> Result | None:
        """Return the result whose record has a path, also if the file does not exist; None: there is none."""
        relative_path = os.path.relpath(path, self.results)
        for stage, pattern in self._patterns.items():
            match = pattern.fullmatch(relative_path)
            if match:
                method, seed, snapshot = (match.groupdict().get(name) for name in ("method", "seed", "snapshot"))
                return Result(stage, method, None if seed is None else int(seed), snapshot)
        return None

    @cached_property
    def _patterns(self) -> dict[str, re.Pattern[str]]:
        groups = {"method": r"(?P<method>[^/]+)", "seed": r"(?P<seed>\d+)", "snapshot": r"(?P<snapshot>\d{7})"}
        patterns = {}
        for name, stage in self.stages.items():
            text = re.sub(r"\\{(\w+)\\}", lambda match: groups[match[1]], re.escape(stage.record_path))
            patterns[name] = re.compile(text)
        return patterns

    def list_needed(self, result: Result) -> list[Result]:
        """Return the results that a result was computed from, in the order of the stage's ``needs``.

        A result that all training runs share was computed from all runs and snapshots that its stage needs.
        """
        needed: list[Result] = []
        for name in self.stages[result.stage].needs:
            if not self.stages[name].per_snapshot:
                needed.append(Result(name))
            elif result.method is not None:
                needed.append(Result(name, result.method, result.seed, result.snapshot))
            else:
                needed += self.list_results(name)
        return needed

    def list_results(self, stage: str) -> list[Result]:
        """Return all results of a stage: one, or one for each snapshot of each training run."""
        if not self.stages[stage].per_snapshot:
            return [Result(stage)]
        methods, steps = list(self.experiment.methods), list(self.experiment.milestones)
        for analysis in self.experiment.analyses:
            if stage == f"measure_{analysis.name}":
                methods, steps = analysis.methods or methods, analysis.milestones or steps
        runs = product(methods, self.experiment.seeds, map(step_name, steps))
        return [Result(stage, method, seed, snapshot) for method, seed, snapshot in runs]

    def _hash_content(self, result: Result) -> str | None:
        """Return the content of a result; None if its record is missing or damaged."""
        record = self.record(result)
        return content(self.stages[result.stage], record) if record else None

    def describe(self, result: Result) -> Record:
        """Return ``computed_from`` of a result that is computed now, except seed and device of a training run."""
        return {**self.describe_stage_of(result), "inputs": self.describe_inputs(result)}

    def describe_stage_of(self, result: Result) -> Record:
        """Return what `describe_stage` returns for the stage of a result; training alone depends on the method."""
        return self.describe_stage(result.stage, result.method if result.stage == TRAIN.name else None)

    def describe_inputs(self, result: Result) -> dict[str, str | None]:
        """Return the content of the results that a result needs, by stage; a hash of all contents if there are many."""
        contents: dict[str, list[str | None]] = {}
        for needed in self.list_needed(result):
            contents.setdefault(needed.stage, []).append(self.content(needed))
        return {stage: values[0] if len(values) == 1 else sha256_json(values) for stage, values in contents.items()}

    def add_computed_from(self, result: Result, computed_from: Record) -> None:
        """Add what a result was computed from to its record, which its stage has written."""
        path = self.path(result)
        write_record(path, {**read_record(path), "computed_from": computed_from})

    def is_unchanged(self, result: Result) -> bool:
        """Return True if a result's own record has the present key and inputs, and its files exist.

        The results that it needs are not checked, see `is_valid`.

        Raises:
            KairosError: the record is dated in the future, so that modification times cannot be compared.
        """
        record, path = self.record(result), self.path(result)
        recorded = record.get("computed_from")
        if self._reads_outside:
            _check_age(path)
        if recorded is None or not path.is_file():
            return False
        present = self.describe(result)
        if recorded["key"] != present["key"] or recorded["inputs"] != present["inputs"]:
            return False
        if result.stage == TRAIN.name and self._compare_run(result, recorded):
            return False
        return all((path.parent / name).exists() for name in record.get("files", ()))

    def _find_validity(self, result: Result) -> bool:
        """Return True if a result and all results that it needs are unchanged."""
        return self.is_unchanged(result) and all(map(self.is_valid, self.list_needed(result)))

    def compare_stage(self, result: Result, record: Record) -> list[Change]:
        """Return what differs between a record and the present fields, outside files, seed and device.

        Code and inputs are not compared.

        Args:
            result: the result that the record should be of.
            record: a record of the result's stage.
        """
        recorded = record.get("computed_from")
        if recorded is None:
            return [Change("computed by", "a command with --out", "this experiment")]
        present = self.describe_stage_of(result)
        before, now = (_name_method(described["fields"], result) for described in (recorded, present))
        changes = list(compare_fields(before, now))
        if result.stage == TRAIN.name:
            changes += self._compare_run(result, recorded)
        if recorded["outside"] != present["outside"] and (self._reads_outside or present["outside"] is not None):
            changes.append(Change(f"{_OUTSIDE} (SHA-256)", _shorten(recorded["outside"]), _shorten(present["outside"])))
        return changes

    def differs_by_code_only(self, result: Result) -> bool:
        """Return True if a result has the present settings and inputs, and was computed by other code."""
        recorded = self.record(result).get("computed_from")
        if recorded is None or self.find_changes(result):
            return False
        return bool(recorded["code"] != self.describe_stage_of(result)["code"])

    def identities(self, method: str, seed: int) -> list[str]:
        """Return the present identities of a training run, one for each type of device that the experiment allows.

        The list is empty before the latents exist, and if `training.start_from` is not a snapshot of the backbone.

        Raises:
            DamagedError: the record of `training.start_from` is damaged.
        """
        latents = self.record(Result(ENCODE.name))
        if not latents:
            return []
        run, folder = self.experiment.run_settings(method, seed), run_folder(self.results, method, seed)
        try:
            return [find_identity(folder, describe_training(run, latents, device)) for device in self._device_types]
        except ConfigError:  # such as a missing folder of `training.start_from`
            return []

    @property
    def _device_types(self) -> tuple[str, ...]:
        device = self.experiment.training.device.partition(":")[0]  # cuda:1 has type cuda
        return _DEVICE_TYPES.get(device, (device,))

    def _read(self, result: Result) -> Record:
        """Return the record of a result; empty if it is missing or damaged."""
        path = self.path(result)
        if not path.is_file():
            return {}
        return self.snapshot_records.glance(path) if result.stage == TRAIN.name else glance(path)

    def _describe_stage(self, stage: str, method: str | None) -> Record:
        row = self.stages[stage]
        sections = list_sections(self.experiment, row, method)
        if stage == TRAIN.name:
            start, outside = self.experiment.training.start_from, None
            if start:
                try:
                    outside = hash_start_weights(Path(start), self.experiment.model)
                except ConfigError:  # such as a missing folder
                    if self._reads_outside:
                        raise
            return _build_stage_part(row, sections, [start] if start else [], outside)
        paths = list_outside_paths(self.experiment, stage)
        recorded: Record = {} if row.per_snapshot else self.record(Result(stage)).get("computed_from", {})
        if self._uses_recorded_hash(stage, paths, recorded):
            return _build_stage_part(row, sections, recorded["paths"], recorded["outside"])
        existing = [path for path in paths if expand_path(path)]
        files = [file for path in existing for file in expand_path(path)]
        outside = hash_contents(files, reads_files=self._reads_outside) if files else None
        return _build_stage_part(row, sections, existing, outside)

    def _uses_recorded_hash(self, stage: str, paths: list[str], recorded: Record) -> bool:
        """Return True if the recorded hash of files outside of the results is taken for the present one.

        All recorded paths must still be in the experiment. Images may be missing if the prepared data set is there.
        """
        recorded_paths = recorded.get("paths", [])
        if not recorded_paths or not set(recorded_paths) <= set(paths):
            return False
        is_missing = stage == "prepare" and not all(map(expand_path, recorded_paths))
        return is_missing or not self._reads_outside

    @property
    def lacks_images(self) -> bool:
        """True if files of images are missing on this machine, so that the hash in the data set's record counts."""
        paths = list_outside_paths(self.experiment, "prepare")
        recorded = self.record(Result("prepare")).get("computed_from", {})
        return self._uses_recorded_hash("prepare", paths, recorded) and not all(map(expand_path, paths))

    def _compare_run(self, result: Result, recorded: Record) -> list[Change]:
        changes = []
        if recorded["seed"] != result.seed:
            changes.append(Change("seed", recorded["seed"], result.seed))
        if recorded["device"] not in self._device_types:
            changes.append(Change("training.device", recorded["device"], self.experiment.training.device))
        return changes

    def _find_changes(self, result: Result) -> tuple[Change, ...]:
        """Return what differs from the present experiment and inputs; empty for a valid or missing result.

        Code is not compared, see `has_other_code`.
        """
        return self.compare(result, self.record(result))

    def compare(self, result: Result, record: Record) -> tuple[Change, ...]:
        """Return the changes of a result with a given record, those of the results that it needs included.

        Changes of the results that it needs come first. If there are none, other contents of these results are changes.
        Results that it needs and that are missing are not compared.
        """
        if not record:
            return ()
        needed = self.list_needed(result)
        changes = [change for other in needed for change in self.find_changes(other)]
        changes += self.compare_stage(result, record)
        if not changes:
            before, now = record["computed_from"]["inputs"], self.describe_inputs(result)
            for stage in now:
                if now[stage] is not None and before.get(stage) != now[stage]:
                    name = f"result of stage {stage} (SHA-256)"
                    changes.append(Change(name, _shorten(before.get(stage)), _shorten(now[stage])))
            if changes and result.stage == TRAIN.name:
                changes = self._explain_inputs(record["config"]) or changes
        return tuple({str(change): change for change in changes}.values())

    def _explain_inputs(self, config: Record) -> list[Change]:
        """Return the settings of the stages before training that differ from those in a snapshot's record."""
        present = self.experiment.plain()
        without_effect = {field for stage in self.stages.values() for field in stage.no_effect}
        changes: list[Change] = []
        for section in ("dataset", "autoencoder", "text_encoder"):
            changes += compare_fields(config.get(section), present[section], section)
        return [change for change in changes if change.field not in without_effect]

    def _find_other_code(self, result: Result) -> bool:
        recorded = self.record(result).get("computed_from")
        if recorded is None:
            return False
        present = self.describe_stage_of(result)
        has_other_code = recorded["code"] != present["code"] or "accepted" in recorded
        return has_other_code or any(map(self.has_other_code, self.list_needed(result)))


def _build_stage_part(stage: Stage, sections: Sections, outside_paths: Sequence[str], outside: str | None) -> Record:
    """Return the part of ``computed_from`` that a stage itself decides; the paths of files outside do not count."""
    fields = _replace_paths(select_fields(stage, sections), set(outside_paths))
    code = hash_stage_code(stage, sections)
    key = sha256_json([stage.name, fields, code, outside])
    return {"fields": fields, "code": code, "outside": outside, "paths": list(outside_paths), "key": key}


def _check_age(path: Path) -> None:
    """Raise TemporaryError if a file is dated in the future: Snakemake would take an outdated result for a new one."""
    age = time.time() - path.stat().st_mtime if path.is_file() else 0.0
    if age < -_CLOCK_TOLERANCE:
        raise TemporaryError(
            f"{path}: dated {-age:.0f} s in the future, so that later results would count as older; correct the clock "
            "of this machine, or touch the file"
        )


def _name_method(fields: Record, result: Result) -> Record:
    """Return fields in which the method has the name of its field in the experiment file."""
    if "method" not in fields:
        return fields
    others = {name: value for name, value in fields.items() if name != "method"}
    return {f"methods.{result.method}": fields["method"], **others}


def _replace_paths(value: Any, paths: set[str]) -> Any:
    """Return a nested value in which `_OUTSIDE` replaces each of the paths, also in ``PATH:NUMBER``."""
    if isinstance(value, dict):
        return {name: _replace_paths(item, paths) for name, item in value.items()}
    if isinstance(value, list):
        return [_replace_paths(item, paths) for item in value]
    if isinstance(value, str):
        path, number = split_line_number(value)
        return f"{_OUTSIDE}{number}" if path in paths else value
    return value


def split_line_number(text: str) -> tuple[str, str]:
    """Split the value that selects lines of a list, such as ``:0``, from the path of the list."""
    match = re.fullmatch(r"(.*?)(:\d+)?", text, re.DOTALL)
    assert match is not None
    return match[1], match[2] or ""


def list_outside_paths(experiment: Any, stage: str) -> list[str]:
    """Return the paths of files and folders outside of the results that a stage before training reads.

    Some may be missing: a path of a network may be a hub id. A pattern is a path like the files that match it.
    """
    paths: list[str | None] = []
    if stage == "prepare":
        dataset = experiment.dataset
        paths += dataset.caption_files
        for section in dataset.sections:
            # a list may be followed by the value that selects its lines, such as list_eval_partition.txt:0
            paths.append(split_line_number(section.files)[0] if section.files else None)
            paths.append(str(section.path) if section.path and section.source != "hub" else None)
    elif stage == "autoencoder" and experiment.autoencoder.kind == "pretrained":
        paths.append(experiment.autoencoder.path)
    elif stage == "text" and experiment.text_encoder is not None:
        paths.append(experiment.text_encoder.path)
    elif stage == "extractor":
        paths.append(getattr(experiment.evaluation.extractor, "path", None))
    elif stage in ("reference", "evaluate"):
        reference = experiment.evaluation.reference
        paths.append(reference if reference.endswith(".npz") else None)
        paths += [getattr(metric, "path", None) for metric in experiment.evaluation.metrics or ()]
    return [path for path in paths if path]


def expand_path(path: str) -> list[str]:
    """Return a path that exists, or the paths that match it as a pattern, sorted; empty if nothing exists."""
    # a name that exists may contain characters of patterns
    return [path] if os.path.exists(path) else sorted(glob.glob(path, recursive=True))


def _replace_auto(experiment: Any, results: Path) -> Any:
    """Return the experiment with the extractor of its results in place of ``auto``; unchanged without a result."""
    evaluation = experiment.evaluation
    if evaluation.extractor.name != "auto":
        return experiment
    recorded = glance(results / EXTRACTOR.record_path).get("computed_from")
    if recorded is None or recorded["paths"]:  # ``auto`` selects no extractor with a path
        return experiment
    extractor = type(evaluation).model_validate({"extractor": recorded["fields"]["evaluation"]["extractor"]}).extractor
    return experiment.model_copy(update={"evaluation": evaluation.model_copy(update={"extractor": extractor})})


def compare_fields(before: Any, now: Any, field: str = "") -> Iterator[Change]:
    """Yield a `Change` for each value that differs in nested fields; a field that one side lacks is None there.

    If components have different names, the names are the only change, because their options differ.
    """
    if before == now:
        return
    if not (isinstance(before, dict) and isinstance(now, dict)):
        yield Change(field, before, now)
        return
    if "name" in before and "name" in now and before["name"] != now["name"]:
        yield Change(f"{field}.name".removeprefix("."), before["name"], now["name"])
        return
    for name in {**before, **now}:
        yield from compare_fields(before.get(name), now.get(name), f"{field}.{name}".removeprefix("."))


def _format_value(value: Any) -> str:
    """Format a component as its name, a text unchanged, and any other value as JSON; longer than 60 characters, cut."""
    if isinstance(value, dict) and "name" in value:
        return str(value["name"])
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _shorten(digest: str | None) -> str | None:
    return digest and digest[:12]
