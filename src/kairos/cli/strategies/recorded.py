"""``kairos strategies show --checkpoint``: a strategy as recorded in a snapshot or a checkpoint.

A snapshot contains the table of its strategy, `strategy.csv`. For samplers whose density differs between images, the
table is the mean over training images. Only for a checkpoint between snapshots is the state loaded, which needs torch.
"""

import argparse
from pathlib import Path
from typing import Any

from kairos.cli.strategies.show import (
    ForwardProcess,
    StrategySettings,
    View,
    build_process_with_warnings,
    build_strategy_view,
    parse_strategy,
)
from kairos.files import DamagedError, read_record, sha256_file
from kairos.forward_process import with_sigma_data
from kairos.library_components import LibraryComponent
from kairos.strategy_file import parse_strategy_csv
from kairos_timesteps.components import PROCESSES, SAMPLERS
from kairos_timesteps.errors import ConfigError, KairosError
from kairos_timesteps.lookup import parse_name
from kairos_timesteps.options import options_without_name

_RECORD_PATTERN = "snapshots/*/snapshot.json"  # records of snapshots in the folder of a training run
_PER_IMAGE_NOTE = (
    "p(t) differs between images; shown is the mean over the first images of the training set, at most 256"
)


def build_recorded_view(arguments: argparse.Namespace) -> View:
    """Return the view of the strategy that ``--checkpoint`` refers to, as recorded in a snapshot or in a checkpoint.

    A snapshot's folder refers to that snapshot. A training run's folder refers to the last snapshot, or without one to
    its checkpoint.pt. A checkpoint file refers to the run's snapshot at the step of the checkpoint, or without one to
    the state in the file. Settings of the strategy are then read from any other snapshot of the run; if the run has no
    snapshot, the arguments describe the strategy.

    Raises:
        ConfigError: arguments contradict the record of the run, or are missing without a record.
        KairosError: there is no checkpoint, or it does not contain this strategy.
        DamagedError: the table or the record of the snapshot is damaged.
    """
    path: Path = arguments.checkpoint
    if (path / "snapshot.json").is_file():
        return _view_of_snapshot(path / "snapshot.json", arguments)
    record_files = sorted(path.glob(_RECORD_PATTERN))  # sorted by step: names of snapshots have leading zeros
    if record_files:
        return _view_of_snapshot(record_files[-1], arguments)
    file = path / "checkpoint.pt" if path.is_dir() else path
    if not file.is_file():
        allowed = "the folder of a training run or of a snapshot, or a checkpoint"
        raise KairosError(f"--checkpoint {path}: no checkpoint found; allowed: {allowed}")
    content = _read_checkpoint(file)
    record_of_run = None  # record of any snapshot of the run: all contain the run's settings
    for record_file in _find_snapshots_of_run(file, content):
        record_of_run = read_record(record_file)
        if record_of_run["step"] == content["step"]:
            return _view_of_snapshot(record_file, arguments)
    return _view_of_checkpoint(file, content, record_of_run, arguments)


def _find_snapshots_of_run(file: Path, content: dict[str, Any]) -> list[Path]:
    """Return the records of the snapshots from the training run that wrote a checkpoint.

    Records in the checkpoint's folder come first, then records in the folder above, each sorted by path. A checkpoint
    of another training loop has no identity, hence no snapshots.

    Raises:
        DamagedError: a record in one of the folders is damaged.
    """
    if "identity" not in content:
        return []
    records_of_run = []
    for folder in (file.parent, file.parent.parent):  # the folder of the training run is one of them
        for record_file in sorted(folder.glob(_RECORD_PATTERN)):
            # the identity is a hash of everything that decides the trajectory of a run
            if read_record(record_file)["identity"] == content["identity"]:
                records_of_run.append(record_file)
    return records_of_run


def _view_of_snapshot(record_file: Path, arguments: argparse.Namespace) -> View:
    """Return the view of the strategy of a snapshot, with a note on its step and file.

    Raises:
        ConfigError: the arguments contradict the record.
        DamagedError: the snapshot's record or its strategy.csv is damaged, or strategy.csv is missing.
    """
    record = read_record(record_file)
    file = record_file.with_name("strategy.csv")
    try:
        sampler, weighting, diffusion = _recorded_settings(record, arguments)
        if sha256_file(file) != record["files"]["strategy.csv"]:
            raise ValueError("does not match the snapshot's checksum")  # becomes a DamagedError below
        columns = parse_strategy_csv(file.read_text(encoding="utf-8"))
        step = record["step"]
    except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"{file}: damaged ({error}); train again, or pull it with dvc") from None
    notes = [f"state after {step} steps: {file}"]
    if _is_per_image(sampler["name"]):
        notes.append(_PER_IMAGE_NOTE)
    return build_strategy_view(sampler, weighting, diffusion, columns, tuple(notes))


def _read_checkpoint(file: Path) -> dict[str, Any]:
    """Return the content of a checkpoint; entry ``strategy`` is the state of the strategy, ``step`` its step.

    The file is a checkpoint of kairos, or a file that another training loop has saved with torch. The latter contains
    `Strategy.state_dict()`, alone or as entry ``strategy``; its other content is left out. Tensors are on the CPU.

    Raises:
        KairosError: the file is neither, or is damaged.
    """
    import pickle

    import torch

    from kairos.training import checkpoint

    with open(file, "rb") as opened:
        saved_by_torch = opened.read(2) == b"PK"  # torch writes zip archives, which begin with these bytes
    if not saved_by_torch:
        return checkpoint.read(file)
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
        state = content.get("strategy", content)  # without this entry, the file contains the state alone
        return {"strategy": state, "step": state["step"]}
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, TypeError, AttributeError, ValueError):
        missing = "no Strategy.state_dict(), neither alone nor as 'strategy'"
        raise KairosError(f"{file}: saved by torch, but contains {missing}") from None


def _view_of_checkpoint(
    file: Path, content: dict[str, Any], record: dict[str, Any] | None, arguments: argparse.Namespace
) -> View:
    """Return the view of the strategy whose state is in a checkpoint.

    The plugins that the record lists are imported first. Without a record, the arguments describe the strategy. A note
    contains the step and the file.

    Raises:
        ConfigError: arguments contradict the record, or are missing without one.
        KairosError: the checkpoint contains the state of another strategy, or the density differs between images.
    """
    from kairos.config.plugins import load_plugins
    from kairos_timesteps import Strategy

    if record is not None:
        load_plugins(record["config"].get("plugins", []))
        sampler, weighting, diffusion = _recorded_settings(record, arguments)
    else:
        sampler, weighting, diffusion = parse_strategy(arguments)
    process = build_process_with_warnings(diffusion.process, diffusion.prediction)
    if _is_per_image(sampler["name"]):
        problem = f"p(t) of {sampler['name']} differs between images, and step {content['step']} has no snapshot"
        raise KairosError(f"{file}: {problem} with the mean over training images; pass the folder of a snapshot")
    name = f"{sampler['name']}+{weighting['name']}"
    strategy = Strategy(name, process, sampler=options_without_name(sampler), weighting=options_without_name(weighting))
    try:
        state = content["strategy"]
        settings = dict(state.get("settings", {}))
        for name_of_setting in ("seed", "coupling"):  # the table does not depend on these
            settings.pop(name_of_setting, None)
        strategy.load_state_dict({**state, "settings": settings})
        columns = strategy.table()
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        expected = f"{name} with T = {process.schedule.timesteps}"
        raise KairosError(f"{file}: does not contain the state of {expected} ({error})") from None
    notes = (f"state after {content['step']} steps: {file}",)
    return build_strategy_view(sampler, weighting, diffusion, columns, notes)


def _recorded_settings(record: dict[str, Any], arguments: argparse.Namespace) -> StrategySettings:
    """Return sampler and weighting with their options, and the forward process, from the record of a snapshot.

    The process has the recorded `sigma_data` if its option is null.

    Raises:
        ConfigError: the arguments contain another strategy, or set an option of it, see `_check_arguments`.
        KeyError: the record lacks an entry.
    """
    method = record["config"]["methods"][record["method"]]
    _check_arguments(arguments, method["sampler"]["name"], method["weighting"]["name"])
    diffusion = record["config"]["diffusion"]
    process = LibraryComponent.select(PROCESSES, diffusion["process"])
    process = with_sigma_data(process, record["sigma_data"])
    return method["sampler"], method["weighting"], ForwardProcess(process, diffusion["prediction"])


def _check_arguments(arguments: argparse.Namespace, recorded_sampler: str, recorded_weighting: str) -> None:
    """Check that the arguments contain no other strategy than the recorded one, and no option that is recorded.

    No strategy, the recorded one, and the name of its sampler alone are allowed.

    Raises:
        ConfigError: the arguments contain another strategy, or set the process, the prediction target or an option of
            the strategy, even to the recorded value.
    """
    if arguments.strategy is not None:
        sampler, weighting = parse_name(arguments.strategy)
        # `parse_name` completes the name of a sampler by a default weighting, which need not be the recorded one
        names_only_sampler = arguments.strategy.strip() in SAMPLERS
        agrees = sampler == recorded_sampler and (names_only_sampler or weighting == recorded_weighting)
        if not agrees:
            problem = f"got {arguments.strategy!r}, but the checkpoint contains {recorded_sampler}+{recorded_weighting}"
            raise ConfigError(f"strategy: {problem}; omit the name")
    recorded_options = ("process", "schedule", "timesteps", "prediction", "set")
    repeated = [f"--{option}" for option in recorded_options if getattr(arguments, option) not in (None, [])]
    if repeated:
        raise ConfigError(f"{', '.join(repeated)}: not allowed with --checkpoint, which contains it; omit it")


def _is_per_image(sampler: str) -> bool:
    """Return True if the density of a sampler differs between images; False for an unknown name of a sampler."""
    return sampler in SAMPLERS and SAMPLERS[sampler].component.per_image
