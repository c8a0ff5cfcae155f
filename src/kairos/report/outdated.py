"""Results of earlier settings: files in an experiment's folder that were computed with settings it no longer has.

The report, `kairos compare`, `kairos export` and `kairos status` use this module to detect outdated results.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from kairos.config import Experiment
from kairos.files import glance
from kairos.sampling.registries import resolve_solver
from kairos.sampling.settings import GUIDANCE
from kairos.training.identity import compute_identity, trajectory_settings
from kairos_timesteps.diffusion.schedule import CELLS
from kairos_timesteps.errors import ConfigError
from kairos_timesteps.options import but_name

Record = dict[str, Any]
_NO_EFFECT = ("images", "unmatched", "store", "broken", "train_images")  # of section dataset: equal images
_READ_BY_ENCODE = ("dataset.flips", "dataset.low_resolution")  # stage prepare does not use these two
_ROUNDING = (
    "training.threads", "training.deterministic", "training.compile", "autoencoder.encode_batch_size",
    "text_encoder.batch_size",
)  # fmt: skip
_HASHES = {  # section: record of its stage, the hash there, and the field of a milestone that repeats the hash
    "dataset": ("dataset/manifest.json", "content_sha256", "dataset_sha256"),
    "autoencoder": ("autoencoder/manifest.json", "sha256", "autoencoder_sha256"),
}
_DEVICES = {"auto": ("cpu", "cuda")}  # a milestone does not record which of them computed it


@dataclass(frozen=True)
class Change:
    """A setting whose value in a record is not the experiment's.

    Attributes:
        field: dotted name in the experiment file, or the name of a hash.
        before: value in the record.
        now: value in the experiment.
    """

    field: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.field}: {_written(self.before)} → {_written(self.now)}"


def listed(changes: Sequence[Change]) -> str:
    """The first three changes in one line, and the number of the others."""
    more = f" and {len(changes) - 3} more" if len(changes) > 3 else ""
    return ", ".join(str(change) for change in changes[:3]) + more


class ExpectedSettings:
    """Settings that results must have to count as results of an experiment.

    Args:
        experiment: its settings.
        results: its folder, whose manifests contain the hashes of the present data, autoencoder and latents.
    """

    def __init__(self, experiment: Experiment, results: Path):
        self.experiment, self.results = experiment, results
        self.plain = experiment.plain()
        self._manifests: dict[str, Record] = {}
        self._settings = cache(self._settings_of)
        self.identities = cache(self._identities)
        self.milestone = cache(_read_milestone)

    def changes(self, method: str, seed: int, path: Path) -> list[Change]:
        """Return the settings of a milestone that changed since and that change results; none: the milestone counts.

        Args:
            method, seed: the training whose milestone is expected.
            path: the milestone's record; a record that cannot be read has no changes.
        """
        record = self.milestone(path)
        if not record:
            return []
        changes = [change for change in self._all_changes(method, record) if change.field not in _ROUNDING]
        if changes and record["identity"] in self.identities(method, seed):  # equal by content, e.g. a moved start_from
            changes = [change for change in changes if _section(change) in ("dataset", "autoencoder", "text_encoder")]
        for section, (manifest, _, _) in _HASHES.items():
            before, now = self._hashes(section, record)
            if before != now:
                explained = any(_section(change) == section for change in changes)
                changes += [] if explained else [Change(f"{section} (SHA-256)", before[:12], now[:12])]
            elif now and _newer(self.results / manifest, path):  # the stage ran again with an equal result
                changes = [one for one in changes if _section(one) != section or one.field in _READ_BY_ENCODE]
        if record["seed"] != seed:
            changes.append(Change("seed", record["seed"], seed))
        return changes + ([] if changes else self._latents_change(method, seed, record))

    def rounding_changes(self, method: str, record: Record) -> list[Change]:
        """Return the settings of a milestone that changed since and that change no more than rounding."""
        return [change for change in self._all_changes(method, record) if change.field in _ROUNDING]

    def sampling_changes(self, protocol: Record) -> list[Change]:
        """Return the settings of sampling whose values differ in the protocol of a file of samples."""
        asked = self.experiment.evaluation
        now = {"sampling": self._sampling, "number of samples": asked.num_samples * asked.sets}
        return _changes(now, {"sampling": protocol, **_renamed(protocol, {"number of samples": "num"})})

    def evaluation_changes(self, evaluation: Record) -> list[Change]:
        """Return the settings of sampling and evaluation whose values differ in an evaluation's protocol."""
        protocol, asked = evaluation["protocol"], self.experiment.evaluation
        names = {name: name for name in ("steps", "weights", *GUIDANCE)}
        options = {name: name for name in but_name(self._sampling["scheduler"])}
        sampling = {
            "scheduler": _renamed(protocol, {"name": "scheduler", **options}),
            **_renamed(protocol, {**names, "seed": "sample_seed", "precision": "sample_precision"}),
        }
        names = {"num_samples": "n_samples", "sets": "sets", "seed": "eval_seed", "precision": "eval_precision"}
        now = {name: getattr(asked, name) for name in names}
        before = _renamed(protocol, names)
        if used := (evaluation.get("validation") or {}).get("images"):
            before["loss_images"] = used
            now["loss_images"] = min(asked.loss_images, self._manifest("dataset").get("heldout_count", used))
        if rows := (evaluation.get("validation") or {}).get("per_timestep"):
            before["strata"] = len(rows) - 2  # the first and the last cell are strata of their own
            cells = self.plain["diffusion"]["process"].get("timesteps", CELLS)
            now["strata"] = min(asked.strata, max(cells - 2, 0))
        return _changes({"sampling": self._sampling, "evaluation": now}, {"sampling": sampling, "evaluation": before})

    def _identities(self, method: str, seed: int) -> list[str]:
        """Identities that a training would have now, one per kind of device; none before there are latents."""
        latents = self._manifest("latents")
        if not latents:
            return []
        device = self.plain["training"]["device"].partition(":")[0]
        kinds = _DEVICES.get(device, (device,))
        with suppress(ConfigError):  # training.start_from is not there
            return [compute_identity(self.plain, method, seed, latents, kind)["identity"] for kind in kinds]
        return []

    def _settings_of(self, method: str) -> Record:
        """Settings that decide the results of a method, by section."""
        dataset, autoencoder = self.plain["dataset"], self.plain["autoencoder"]
        unused = ("path", "scaling") if autoencoder["kind"] == "train" else ()
        only = {"none": ("kind",), "pretrained": ("kind", "path", "scaling", "encode_batch_size")}
        used = only.get(autoencoder["kind"], [name for name in autoencoder if name not in (*unused, "shards")])
        return {
            "dataset": {name: value for name, value in dataset.items() if name not in _NO_EFFECT},
            "autoencoder": {name: autoencoder[name] for name in used},
            "text_encoder": self.plain["text_encoder"],
            "model": self.plain["model"],
            "diffusion": self.plain["diffusion"],
            "methods": {method: self.plain["methods"][method]},
            "training": trajectory_settings(self.plain, method),
        }

    @cached_property
    def _sampling(self) -> Record:
        """Settings that decide the images drawn from a milestone."""
        sampling = self.experiment.sampling
        names = ("steps", "weights", "precision", "seed", *GUIDANCE)
        scheduler = resolve_solver(sampling.scheduler, self.plain["diffusion"]["process"])
        return {"scheduler": scheduler, **{name: getattr(sampling, name) for name in names}}

    def _all_changes(self, method: str, record: Record) -> list[Change]:
        recorded = record["config"] | {"methods": {method: record["config"]["methods"].get(record["method"], {})}}
        return _changes(self._settings(method), recorded)

    def _hashes(self, section: str, record: Record) -> tuple[str, str]:
        """The hash of a stage's result in a milestone's record, and the present one; empty where one is unknown."""
        _, present, recorded = _HASHES[section]
        before, now = record[recorded], self._manifest(section).get(present)
        return (before, now) if before and now else ("", "")

    def _latents_change(self, method: str, seed: int, record: Record) -> list[Change]:
        """A change of the latents that no setting explains; known once the training has ended."""
        ended = glance(self.results / method / f"seed{seed}" / "training.json")
        before = ended.get("parts", {}).get("data") if ended.get("identity") == record["identity"] else None
        now = self._manifest("latents").get("content_sha256")
        return [Change("latents (SHA-256)", before[:12], now[:12])] if before and now and before != now else []

    def _manifest(self, stage: str) -> Record:
        """The manifest of a stage, empty where there is none."""
        if stage not in self._manifests:
            self._manifests[stage] = glance(self.results / stage / "manifest.json")
        return self._manifests[stage]


def _changes(now: Any, before: Any, field: str = "") -> list[Change]:
    """Compare nested settings; a field that one side lacks belongs to another version of kairos and does not count."""
    if not (isinstance(now, dict) and isinstance(before, dict)):
        return [] if now == before else [Change(field, before, now)]
    names = [name for name in now if name in before]
    if "name" in names and now["name"] != before["name"]:  # another component, which has other options
        names = ["name"]
    parts = [_changes(now[name], before[name], f"{field}.{name}" if field else name) for name in names]
    return [change for part in parts for change in part]


def _renamed(record: Record, names: dict[str, str]) -> Record:
    """The fields that a record has, under new names (name: field)."""
    return {name: record[field] for name, field in names.items() if field in record}


def _section(change: Change) -> str:
    return change.field.partition(".")[0]


def _written(value: Any) -> str:
    """A value as an experiment file has it, shortened; a component by its name."""
    if isinstance(value, dict) and "name" in value:
        return str(value["name"])
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _newer(one: Path, other: Path) -> bool:
    """True if a file was written after another one."""
    return one.stat().st_mtime_ns > other.stat().st_mtime_ns


def _read_milestone(path: Path) -> Record:
    """The record of a milestone, without the other methods of its experiment; empty where there is no file."""
    record = glance(path)
    if not record:
        return record
    methods = {name: method for name, method in record["config"]["methods"].items() if name == record["method"]}
    return {**record, "config": {**record["config"], "methods": methods}}


def samples_protocol(path: Path) -> Record:
    """The protocol in a file of samples, whose images are not read; empty where it cannot be read."""
    stat = path.stat()
    return _read_protocol(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=10_000)
def _read_protocol(path: Path, changed: int, size: int) -> Record:
    """Read the protocol of a file once for each time that the file `changed` and each `size` of it."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return dict(json.loads(str(file["protocol"])))
    except Exception:  # numpy and zipfile raise many kinds for a damaged file
        return {}
