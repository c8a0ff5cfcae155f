"""Detection of outdated results: files that were computed with settings which their experiment no longer has.

The report, `kairos compare`, `kairos export` and `kairos status` use this module.
"""

import io
import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kairos.config import Experiment
from kairos.config.sweeps import METHOD_COMPONENTS
from kairos.files import RecordReader, glance
from kairos.sampling.settings import GUIDANCE, resolve_solver
from kairos.stages import TRAIN, resolve_schedule, run_folder, select_fields
from kairos.training.identity import compute_identity
from kairos_timesteps.diffusion.schedule import CELLS
from kairos_timesteps.errors import ConfigError
from kairos_timesteps.options import options_without_name

Record = dict[str, Any]
_NO_EFFECT = ("images", "unmatched", "store", "broken", "train_images")  # fields of dataset: images stay equal
_READ_BY_ENCODE = ("dataset.flips", "dataset.low_resolution")  # stage prepare does not use these fields
_ROUNDING = (  # settings that change no more than rounding
    "training.threads", "training.deterministic", "training.compile", "autoencoder.encode_batch_size",
    "text_encoder.batch_size",
)  # fmt: skip
_EVALUATION_FIELDS = {  # setting: field of an evaluation's protocol
    "num_samples": "n_samples",
    "sets": "sets",
    "seed": "eval_seed",
    "precision": "eval_precision",
}
_DEVICES = {"auto": ("cpu", "cuda")}  # a snapshot does not record which of these two kinds of device computed it


class _StageHash(NamedTuple):
    """Manifest and fields that contain the hash of a stage's result.

    Attributes:
        manifest: manifest of the stage, which contains the present hash.
        manifest_field: field of the hash in the manifest.
        record_field: field of the hash in a snapshot's record.
    """

    manifest: str
    manifest_field: str
    record_field: str


_STAGE_HASHES = {  # hashes by section of the experiment file
    "dataset": _StageHash("dataset/manifest.json", "content_sha256", "dataset_sha256"),
    "autoencoder": _StageHash("autoencoder/manifest.json", "sha256", "autoencoder_sha256"),
}
_STAGE_SECTIONS = ("dataset", "autoencoder", "text_encoder")  # sections of the stages before training


@dataclass(frozen=True)
class Change:
    """A setting whose value in a record differs from its value in the experiment.

    Attributes:
        field: dotted name in the experiment file, or name of a hash.
        before: value in the record.
        now: value in the experiment.
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


class ExpectedSettings:
    """Settings that results must have to be included in an experiment's results.

    Manifests and records of snapshots are read once, so that an object does not find later changes of these files.

    Args:
        experiment: the experiment.
        results: its results folder, whose manifests contain the hashes of the present data, autoencoder and latents.

    Attributes:
        experiment, results: the arguments.
        plain: the experiment as plain values.
        identities: function of method and seed. It returns the present identities of a run, one per kind of device.
        snapshot_record: function of a record's path. It returns the record of the snapshot, with settings of its method
            alone. The record is empty if the file is missing or damaged.
        find_changes: function of method, seed and a record's path. It returns the settings that make the snapshot
            outdated. These three functions are cached.
        records: reader of the snapshots' records, which share their settings.
    """

    def __init__(self, experiment: Experiment, results: Path):
        self.experiment, self.results = experiment, results
        self.plain = experiment.plain()
        self._manifests: dict[str, Record] = {}
        # Caches of this object. A decorated method would keep every object alive, and a cache of the module would keep
        # defaults of components that are registered again.
        self._settings_of = cache(self._collect_settings)
        self.identities = cache(self._compute_identities)
        self.snapshot_record = cache(self._read_snapshot_record)
        self.find_changes = cache(self._find_changes)
        self.records = RecordReader("config")

    def _find_changes(self, method: str, seed: int, path: Path) -> list[Change]:
        """Return the settings that have changed since a snapshot and that change results; a valid snapshot has none.

        `path` is the file of the snapshot's record; a missing or damaged one has no changes. Settings that only change
        rounding are ignored. So are settings of the training with an equal identity, and settings of an earlier stage
        whose result has an equal hash. A hash that differs although no setting has changed is a change too, and so is
        another seed in the record.
        """
        record = self.snapshot_record(path)
        if not record:
            return []
        all_changes = self._find_all_changes(method, record)
        changes = [change for change in all_changes if change.field not in _ROUNDING]
        if changes and record["identity"] in self.identities(method, seed):
            # the training settings are equal by content, e.g. after training.start_from has moved
            changes = [change for change in changes if _section(change) in _STAGE_SECTIONS]
        for section in _STAGE_HASHES:
            changes = self._compare_stage_hashes(section, changes, record, path)
        if record["seed"] != seed:
            changes.append(Change("seed", record["seed"], seed))
        if changes:  # these changes may be the reason for other latents
            return changes
        return self._find_latents_change(method, seed, record)

    def find_rounding_changes(self, method: str, record: Record) -> list[Change]:
        """Return the settings that differ from a snapshot's record and change no more than rounding."""
        return [change for change in self._find_all_changes(method, record) if change.field in _ROUNDING]

    def find_sampling_changes(self, protocol: Record) -> list[Change]:
        """Return the settings of sampling that differ from the protocol in a file of samples.

        The total number of samples, over all sets, is compared too. Settings that the protocol lacks are ignored.
        """
        evaluation = self.experiment.evaluation
        now = {"sampling": self._sampling_settings, "number of samples": evaluation.num_samples * evaluation.sets}
        before = {"sampling": protocol, **_select_fields(protocol, {"number of samples": "num"})}
        return _compare_settings(now, before)

    def find_evaluation_changes(self, evaluation: Record) -> list[Change]:
        """Return the settings of sampling and evaluation that differ from those in an evaluation record.

        Settings that the record lacks are ignored. The validation losses' numbers of images and strata are compared
        with those of the experiment, limited by the data set and the process.
        """
        settings = self.experiment.evaluation
        evaluation_before = _select_fields(evaluation["protocol"], _EVALUATION_FIELDS)
        evaluation_now = {name: getattr(settings, name) for name in _EVALUATION_FIELDS}
        validation = evaluation.get("validation") or {}
        image_count = validation.get("images")
        if image_count:
            evaluation_before["loss_images"] = image_count
            # the data set may have fewer held-out images than requested; without its manifest, the recorded number
            # is the limit
            heldout_count = self._read_manifest("dataset").get("heldout_count", image_count)
            evaluation_now["loss_images"] = min(settings.loss_images, heldout_count)
        losses_by_time = validation.get("per_timestep")
        if losses_by_time:
            evaluation_before["strata"] = len(losses_by_time) - 2  # the first and the last cell are separate strata
            # a process without timesteps is divided into a fixed number of cells
            cell_count = self.experiment.diffusion.process.get("timesteps", CELLS)
            evaluation_now["strata"] = min(settings.strata, max(cell_count - 2, 0))
        sampling_before = self._recorded_sampling_settings(evaluation["protocol"])
        return _compare_settings(
            now={"sampling": self._sampling_settings, "evaluation": evaluation_now},
            before={"sampling": sampling_before, "evaluation": evaluation_before},
        )

    def _recorded_sampling_settings(self, protocol: Record) -> Record:
        """Return the sampling settings in an evaluation's protocol, in the form of `_sampling_settings`.

        Settings that the protocol lacks are left out, and so are options that the experiment's solver does not have.
        """
        # each dictionary maps the name of a setting to its name in the protocol, which is equal for most
        solver_fields = {name: name for name in options_without_name(self._sampling_settings["scheduler"])}
        solver_fields["name"] = "scheduler"
        other_fields = {name: name for name in ("steps", "weights", *GUIDANCE)}
        other_fields |= {"seed": "sample_seed", "precision": "sample_precision"}
        solver = _select_fields(protocol, solver_fields)
        return {"scheduler": solver, **_select_fields(protocol, other_fields)}

    def _compute_identities(self, method: str, seed: int) -> list[str]:
        """Compute the present identities of a run, one per kind of device that ``training.device`` allows.

        The list is empty before the latents exist, and if ``training.start_from`` is not a snapshot of the backbone.

        Raises:
            DamagedError: the record of ``training.start_from`` is damaged.
        """
        latents = self._read_manifest("latents")
        if not latents:
            return []
        device = self.experiment.training.device.partition(":")[0]  # cuda:1 is of kind cuda
        device_kinds = _DEVICES.get(device, (device,))
        try:
            run = self.experiment.run_settings(method, seed)
            return [compute_identity(run, latents, kind)["identity"] for kind in device_kinds]
        except ConfigError:  # such as a missing file of training.start_from
            return []

    def _collect_settings(self, method: str) -> Record:
        """Return the settings that decide a method's snapshots, as plain values by section of the experiment file.

        Section `methods` contains this method alone. Settings of sampling and evaluation are not included.
        """
        dataset = self.plain["dataset"]
        autoencoder = self.plain["autoencoder"]
        return {
            "dataset": {name: value for name, value in dataset.items() if name not in _NO_EFFECT},
            "autoencoder": _select_used_fields(autoencoder),
            "text_encoder": self.plain["text_encoder"],
            "model": self.plain["model"],
            "diffusion": self.plain["diffusion"],
            "methods": {method: self._strategy_of(method)},
            "training": select_fields(TRAIN, self.experiment.run_settings(method, seed=0).sections)["training"],
        }

    def _strategy_of(self, method: str) -> Record:
        """Return sampler, weighting and coupling of a method as plain values, defaults included."""
        strategy = self.experiment.methods[method]
        return {kind: getattr(strategy, kind).plain() for kind in METHOD_COMPONENTS}

    @cached_property
    def _sampling_settings(self) -> Record:
        """Settings that decide the images that are sampled from a snapshot, by field of section `sampling`.

        Field `scheduler` is the result of `resolve_solver` as plain values. The number of images is not included.
        """
        sampling = self.experiment.sampling
        names = ("steps", "weights", "precision", "seed", *GUIDANCE)
        scheduler = resolve_solver(sampling.scheduler, self.experiment.diffusion.process).plain()
        return {"scheduler": scheduler, **{name: getattr(sampling, name) for name in names}}

    def _read_snapshot_record(self, path: Path) -> Record:
        """Read the record of a snapshot; section `methods` of its settings is reduced to the snapshot's method.

        The record is empty if the file is missing or damaged. Section `methods` is empty if it lacks the method.
        """
        record = self.records.glance(path)
        if not record:
            return record
        method, config = record["method"], record["config"]
        methods = {method: config["methods"][method]} if method in config["methods"] else {}
        return {**record, "config": {**config, "methods": methods}}

    def _find_all_changes(self, method: str, record: Record) -> list[Change]:
        """Return all settings that decide the snapshots of a method and differ from a snapshot's record.

        Settings that change no more than rounding are included. The record's method is compared with `method`, even if
        its name differs.
        """
        recorded = dict(record["config"])  # a copy: records share their settings
        recorded["methods"] = {method: recorded["methods"].get(record["method"], {})}
        recorded["training"] = {**recorded["training"], "schedule": resolve_schedule(recorded["training"])}
        return _compare_settings(self._settings_of(method), recorded)

    def _compare_stage_hashes(self, section: str, changes: list[Change], record: Record, path: Path) -> list[Change]:
        """Return `changes`, corrected by a comparison of the recorded and the present hash of a stage's result.

        If the hashes differ although no setting of the section has changed, the hash is added as a change. If they are
        equal and the stage ran again after the snapshot (by modification times), the section's changes are removed.
        Fields that stage encode reads are kept. Otherwise, or if a hash is unknown, the list is returned unchanged.

        Args:
            section: section of the stage's settings, a key of `_STAGE_HASHES`.
            changes: changed settings of all sections.
            record: the snapshot's record.
            path: file of this record.
        """
        stage_hash = _STAGE_HASHES[section]
        before = record[stage_hash.record_field]
        now = self._read_manifest(section).get(stage_hash.manifest_field)
        if not before or not now:  # unknown
            return changes
        if before != now:
            has_changed_setting = any(_section(change) == section for change in changes)
            if has_changed_setting:  # it explains the other hash
                return changes
            return [*changes, Change(f"{section} (SHA-256)", before[:12], now[:12])]
        if not _is_newer(self.results / stage_hash.manifest, path):  # the stage did not run with the present settings
            return changes
        return [change for change in changes if _section(change) != section or change.field in _READ_BY_ENCODE]

    def _find_latents_change(self, method: str, seed: int, record: Record) -> list[Change]:
        """Return the change of the latents' hash since a snapshot's training run, as a list of at most one change.

        The list is empty if the hashes are equal or one is unknown. The run's hash is in training.json. It is unknown
        until the run has ended: the file is then missing or of an earlier run.
        """
        run_record = glance(run_folder(self.results, method, seed) / "training.json")
        if run_record.get("identity") != record["identity"]:  # missing, or of another run than the snapshot
            return []
        before = run_record.get("parts", {}).get("data")  # part `data` is the hash of the latents
        now = self._read_manifest("latents").get("content_sha256")
        if not before or not now or before == now:
            return []
        return [Change("latents (SHA-256)", before[:12], now[:12])]

    def _read_manifest(self, stage: str) -> Record:
        """Read the manifest of a stage once; it is empty if it is missing or damaged."""
        if stage not in self._manifests:
            self._manifests[stage] = glance(self.results / stage / "manifest.json")
        return self._manifests[stage]


def _select_used_fields(autoencoder: Record) -> Record:
    """Return the fields of section `autoencoder` that decide the latents; they depend on the kind of autoencoder.

    Kind ``none`` has the kind alone. Kind ``pretrained`` has five fields, and a trained one has all except path,
    scaling and shards. Fields that the section lacks are left out.
    """
    match autoencoder["kind"]:
        case "none":
            names: Sequence[str] = ("kind",)
        case "pretrained":
            names = ("kind", "path", "scaling", "encode_batch_size", "dtype")
        case _:  # train: `path` and `scaling` are for pretrained ones, and `shards` does not change the latents
            names = [name for name in autoencoder if name not in ("path", "scaling", "shards")]
    return {name: autoencoder[name] for name in names if name in autoencoder}


def _compare_settings(now: Any, before: Any, field: str = "") -> list[Change]:
    """Compare nested settings and return a `Change` per differing value; empty if there are none.

    A field that one side lacks is ignored. If components have different names, the names are the only change, because
    their options differ. `field` is the dotted name of these settings, empty for all sections; it
    begins the names of fields.
    """
    if now == before:
        return []
    if not (isinstance(now, dict) and isinstance(before, dict)):
        return [Change(field, before, now)]
    names = [name for name in now if name in before]
    if "name" in names and now["name"] != before["name"]:
        names = ["name"]
    changes = []
    for name in names:
        dotted_name = f"{field}.{name}" if field else name
        changes += _compare_settings(now[name], before[name], dotted_name)
    return changes


def _select_fields(record: Record, fields: dict[str, str]) -> Record:
    """Return those `fields` that a record has, under new names; `fields` maps a new name to the name in the record."""
    return {name: record[field] for name, field in fields.items() if field in record}


def _section(change: Change) -> str:
    """Return the section of the experiment file that contains the changed setting: its name up to the first dot."""
    return change.field.partition(".")[0]


def _format_value(value: Any) -> str:
    """Format a component as its name, a text unchanged, and any other value as JSON; longer than 60 characters, cut."""
    if isinstance(value, dict) and "name" in value:
        return str(value["name"])
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _is_newer(file: Path, other: Path) -> bool:
    """Return True if `file` was written after `other`, by modification time; both must exist."""
    return file.stat().st_mtime_ns > other.stat().st_mtime_ns


def read_samples_protocol(path: Path) -> Record:
    """Read the protocol, the settings of sampling, in a file of samples; it is empty if the file is damaged.

    The images are not read. The result is shared by all calls for an unchanged file, so the caller must not change it.

    Raises:
        FileNotFoundError: there is no file.
    """
    stat = path.stat()
    return _read_protocol(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=10_000)
def _read_protocol(path: Path, modified_ns: int, size: int) -> Record:
    """Read the protocol in a file of samples; it is empty if the file is damaged.

    Results are cached. The modification time and the size only belong to the key of the cache, so that a file that has
    changed is read again.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return dict(json.loads(_decode_text_array(archive.read("protocol.npy"))))
    except Exception:  # numpy and zipfile raise many kinds for a damaged file
        return {}


def _decode_text_array(content: bytes) -> str:
    """Return the string in the content of a .npy file that contains a single string.

    The usual form is decoded here, faster than by numpy, which parses headers as Python code. Other forms are read by
    numpy, which raises ValueError for damaged content.
    """
    # version 1 of the format: 8 bytes that identify it, 2 bytes with the header's length, the header, the data
    start = 10 + int.from_bytes(content[8:10], "little")
    if content[:8] == b"\x93NUMPY\x01\x00" and b"'<U" in content[:start]:
        return content[start:].decode("utf-32-le").rstrip("\0")
    return str(np.lib.format.read_array(io.BytesIO(content), allow_pickle=False))
