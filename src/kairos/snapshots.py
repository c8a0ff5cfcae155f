"""Snapshots: weights exported at a training step, in self-describing folders that diffusers opens.

Sampling, evaluation and users read them. A milestone is the length of
training at which a snapshot is exported; `Experiment.milestones` converts milestones to steps, and adds step 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kairos.diffusion import DiffusionConfig
from kairos.files import (
    atomic_folder,
    check_files,
    hash_folder,
    open_record,
    sha256_json,
    write_json,
    write_record,
    write_text,
)
from kairos.finite import demand_finite
from kairos.forward_process import build_process, output_channels
from kairos.section import check
from kairos.strategy_file import strategy_csv
from kairos_timesteps.diffusion.processes import Process
from kairos_timesteps.errors import ConfigError, KairosError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kairos.models.backbone import Backbone
    from kairos.models.settings import BackboneOptions

# options of section `model` that decide the shapes of the weights
_SHAPE_OPTIONS = ("patch", "width", "depth", "heads", "channels", "multipliers", "blocks", "attention", "conditions")


def step_name(step: int) -> str:
    """Return the name of a step in folders and files, with leading zeros up to 7 digits."""
    return f"{step:07d}"


def write_snapshot(
    folder: Path,
    model: "Backbone",
    average: dict[str, "Tensor"],
    facts: dict[str, Any],
    *,
    columns: Mapping[str, NDArray[np.float64]],
    scheduler: dict[str, Any] | None,
) -> None:
    """Write the folder of a snapshot atomically, in place of an existing one.

    The files are the average weights in ``ema/``, the raw weights in ``raw/``, the strategy's table ``strategy.csv``,
    and the record ``snapshot.json`` with the hashes of all other files. Unless `scheduler` is None, its configuration
    is in folder ``scheduler/``.

    Args:
        folder: folder of the snapshot.
        model: a backbone with the raw weights.
        average: average of the weights (EMA), which is sampled.
        facts: all fields of the record except ``files``, which contains the hashes: step, shape, conditions,
            sigma_data, configuration, identity, provenance and others.
        columns: columns of the strategy's table by name, each (T,).
        scheduler: configuration of diffusers' scheduler; None: diffusers has none for the process.
    """
    from kairos import models

    with atomic_folder(folder) as temporary:
        models.save(model, temporary / "ema", average)
        models.save(model, temporary / "raw")
        if scheduler is not None:
            write_json(temporary / "scheduler" / "scheduler_config.json", scheduler)
        write_text(temporary / "strategy.csv", strategy_csv(columns))
        # last, since it contains the hashes of the others
        write_record(temporary / "snapshot.json", {**facts, "files": hash_folder(temporary)})


def check_snapshot(folder: Path) -> dict[str, Any]:
    """Compare the files that a snapshot's record lists with their hashes there, and return the record.

    All files are read. Further files are not checked.

    Raises:
        KairosError: the folder contains no snapshot.
        DamagedError: the record is damaged, or a file is missing or has changed.
    """
    record = open_record(folder, "train", "snapshot.json")
    check_files(folder, record["files"], "train again, or pull it with dvc")
    return record


def load_start_weights(folder: Path, weights: dict[str, "Tensor"]) -> dict[str, "Tensor"]:
    """Check a snapshot, and load its averaged weights, from which another run starts, by name and on the CPU.

    Args:
        folder: folder of the snapshot.
        weights: initial weights of the training run's model, whose names and shapes the loaded ones must have.

    Raises:
        KairosError: the folder contains no snapshot, or its weights have other names or shapes.
        DamagedError: the record is damaged, or a file is missing or has changed.
        NotFiniteError: a weight is not finite.
    """
    from safetensors.torch import load_file

    from kairos.models import DIVERGED_REMEDY, WEIGHTS
    from kairos.models.backbone import describe_mismatch

    check_snapshot(folder)
    loaded = load_file(folder / "ema" / WEIGHTS)
    demand_finite(loaded, f"training.start_from: {folder / 'ema' / WEIGHTS}: weights", DIVERGED_REMEDY)
    problem = describe_mismatch(weights, loaded)  # empty if they fit
    if problem:
        raise KairosError(f"training.start_from: the weights in {folder} do not fit the model; {problem}")
    return loaded


def hash_start_weights(folder: Path, model: "BackboneOptions") -> str:
    """Return a hash of the weights that `load_start_weights` loads, from the snapshot's record alone.

    The weights are neither read nor compared with the record. Backbones are compared by name and `_SHAPE_OPTIONS`; an
    option that one of the two lacks is treated as None.

    Args:
        folder: folder of the snapshot.
        model: backbone of the training run that starts from it.

    Raises:
        ConfigError: the folder contains no snapshot, or one of another backbone or with other `_SHAPE_OPTIONS`.
        DamagedError: the record is damaged.
    """
    path = folder / "snapshot.json"
    if not path.is_file():
        raise ConfigError(
            f"training.start_from: got {str(folder)!r}, allowed: the folder of a snapshot (it contains snapshot.json) "
            "of a training run or of kairos import-weights"
        )
    record = open_record(folder, "train", path.name)
    snapshot_model, expected_model = record["config"]["model"], model.plain()
    for name in ("name", *_SHAPE_OPTIONS):
        if snapshot_model.get(name) != expected_model.get(name):
            raise ConfigError(
                f"training.start_from: got model.{name}: {snapshot_model.get(name)} in {str(folder)!r}, allowed: "
                f"{expected_model.get(name)}, the value in this experiment"
            )
    # the raw weights and the other files do not decide the start
    ema_hashes = {name: sha256 for name, sha256 in record["files"].items() if name.startswith("ema/")}
    return sha256_json(ema_hashes)


@dataclass(frozen=True)
class Snapshot:
    """An opened snapshot.

    Attributes:
        model: the network in evaluation mode.
        process: the forward process.
        record: content of snapshot.json.
        diffusion: section `diffusion` of the experiment of the training run.
        config: the whole experiment, as plain values of the version of kairos that trained.
    """

    model: "Backbone"
    process: Process
    record: dict[str, Any]
    diffusion: DiffusionConfig
    config: dict[str, Any]


def open_snapshot(folder: Path, weights: str = "ema", device: "torch.device | str" = "cpu") -> Snapshot:
    """Check all files of a snapshot against its record, and load one of its networks, in evaluation mode.

    Torch's global generator advances, see `models.load`.

    Args:
        folder: folder of the snapshot.
        weights: ``ema`` (averaged) or ``raw``.
        device: device for the network.

    Raises:
        KairosError: the snapshot is missing or damaged, or `weights` has another value.
        ConfigError: section `diffusion` or `model` of its experiment is not valid in this version of kairos.
    """
    from kairos import models
    from kairos.models.settings import BACKBONES

    record = check_snapshot(folder)
    if weights not in ("ema", "raw"):
        raise KairosError(f"weights: got {weights!r}, allowed: ema, raw")
    config = record["config"]
    diffusion = check(DiffusionConfig, config["diffusion"], f"{folder}/snapshot.json: diffusion")
    process = build_process(diffusion.process, diffusion.prediction, record["sigma_data"])
    channels, height, width = record["shape"]
    model = models.load(
        folder / weights,
        BACKBONES.select(config["model"]),
        shape=(channels, height, width),
        conditions=record["conditions"],
        outputs=output_channels(process, channels),
    )
    return Snapshot(model=model.to(device), process=process, record=record, diffusion=diffusion, config=config)
