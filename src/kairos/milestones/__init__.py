"""Milestones: the weights after a number of steps, in folders that diffusers opens and that describe themselves.

They are what training hands to sampling and evaluation, and to others.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kairos.files import atomic_folder, check_files, hash_folder, open_record, sha256_json, write_json, write_text
from kairos.strategy_file import strategy_csv
from kairos_timesteps.errors import ConfigError, KairosError

_SHAPING = ("patch", "width", "depth", "heads", "channels", "multipliers", "blocks", "attention", "conditions")


def step_name(step: int) -> str:
    """A step as folders and files name it: 7 digits."""
    return f"{step:07d}"


def write_milestone(folder: Path, model: Any, average: dict[str, Any], facts: dict[str, Any], **parts: Any) -> None:
    """Write a milestone folder: average and raw weights, noise schedule, strategy as it now is, and the record last.

    Args:
        folder: where it goes; whole or not at all.
        model: a backbone.
        average: the weights that are sampled.
        facts: of the record: step, shape, conditions, sigma_data, configuration, identity, provenance ...
        parts: ``columns`` of the strategy's table and ``scheduler``, a configuration of diffusers, or None.
    """
    from kairos import models

    with atomic_folder(folder) as temporary:
        models.save(model, temporary / "ema", average)
        models.save(model, temporary / "raw")
        if parts["scheduler"] is not None:
            write_json(temporary / "scheduler" / "scheduler_config.json", parts["scheduler"])
        write_text(temporary / "strategy.csv", strategy_csv(parts["columns"]))
        write_json(temporary / "milestone.json", {**facts, "files": hash_folder(temporary)})


def check_milestone(folder: Path) -> dict[str, Any]:
    """Check a milestone's files against its record and return the record.

    Raises:
        KairosError: there is no milestone.
        DamagedError: a file is missing or has changed.
    """
    record = open_record(folder, "train", "milestone.json")
    check_files(folder, record["files"], "train again, or pull it with dvc")
    return record


def load_start_weights(folder: Path, own: dict[str, Any]) -> dict[str, Any]:
    """The average that a milestone keeps, for another training to start from, whose model's `own` weights it replaces.

    Raises:
        KairosError: there is no milestone, or its weights have other names or shapes.
        DamagedError: a file is missing or has changed.
    """
    from safetensors.torch import load_file

    from kairos.models import WEIGHTS
    from kairos.models.backbone import describe_mismatch

    check_milestone(folder)
    found = load_file(folder / "ema" / WEIGHTS)
    if fault := describe_mismatch(own, found):
        raise KairosError(f"training.start_from: the weights in {folder} do not fit the model; {fault}")
    return found


def hash_start_weights(folder: Path, model: dict[str, Any]) -> str:
    """Which weights `load_start_weights` gives, by its record alone.

    Raises:
        ConfigError: there is no milestone, or one of another backbone or size than the section `model` has.
    """
    path = folder / "milestone.json"
    if not path.is_file():
        raise ConfigError(
            f"training.start_from: got {str(folder)!r}, allowed: the folder of a milestone (it holds milestone.json), "
            "of a training or of kairos import-weights"
        )
    record = open_record(folder, "train", path.name)
    other = record["config"]["model"]
    if differing := [name for name in ("name", *_SHAPING) if other.get(name) != model.get(name)]:
        name = differing[0]
        got = f"got one with model.{name}: {other.get(name)} in {str(folder)!r}"
        raise ConfigError(f"training.start_from: {got}, allowed: one with {model.get(name)}, as this model has")
    return sha256_json({name: value for name, value in record["files"].items() if name.startswith("ema/")})


@dataclass(frozen=True)
class Snapshot:
    """A milestone opened for use: the network in evaluation mode, its forward process, its record.

    `config` is the whole experiment that the weights come from, as plain values.
    """

    model: Any
    process: Any
    record: dict[str, Any]
    config: dict[str, Any]


def open_milestone(folder: Path, weights: str = "ema", device: Any = "cpu") -> Snapshot:
    """Check and load a milestone.

    Args:
        folder: of the milestone.
        weights: ``ema`` or ``raw``.
        device: where the network goes.

    Raises:
        KairosError: it is missing or damaged.
    """
    from kairos import models
    from kairos.forward_process import build_process

    record = check_milestone(folder)
    if weights not in ("ema", "raw"):
        raise KairosError(f"weights: got {weights!r}, allowed: ema, raw")
    config = record["config"]
    process, shape = build_process(config["diffusion"], record["sigma_data"]), tuple(record["shape"])
    model = models.load(folder / weights, config["model"], shape, record["conditions"], process.channels(shape[0]))
    return Snapshot(model.to(device), process, record, config)
