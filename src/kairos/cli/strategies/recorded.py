"""The strategy of a training as it was at a milestone or a checkpoint.

A milestone holds its table, `strategy.csv`, with what a sampler that looks at images drew on average over the images of
the training; it is preferred where there is one. Only a checkpoint between milestones has its state loaded, with torch.
"""

import argparse
from pathlib import Path
from typing import Any

from kairos.cli.strategies.show import (
    StrategySettings,
    View,
    build_process_with_warnings,
    build_strategy_view,
    parse_strategy,
)
from kairos.files import read_json, sha256_file
from kairos.forward_process import measured
from kairos.strategy_file import parse_strategy_csv
from kairos_timesteps.components import SAMPLERS
from kairos_timesteps.errors import ConfigError, DamagedError, KairosError
from kairos_timesteps.lookup import parse_name
from kairos_timesteps.options import but_name

_MILESTONES = "milestones/*/milestone.json"
_IMAGES = "p(t) differs from image to image; it is the mean over the first images of the training set, 256 at most"


def build_recorded_view(arguments: argparse.Namespace) -> View:
    """Return the strategy that ``--checkpoint`` refers to, as recorded in a milestone or in a checkpoint.

    A milestone's folder stands for that milestone, a training run's folder for the last milestone. A checkpoint file
    stands for the run's milestone at the step of the checkpoint; without one, for the state that the file contains.

    Raises:
        ConfigError: arguments contradict the record of the run, or are missing where there is no record.
        KairosError: there is no checkpoint, or it does not contain this strategy.
    """
    place: Path = arguments.checkpoint
    if (place / "milestone.json").is_file():
        return _view_of_snapshot(place / "milestone.json", arguments)
    if found := sorted(place.glob(_MILESTONES)):
        return _view_of_snapshot(found[-1], arguments)
    file = place / "checkpoint.pt" if place.is_dir() else place
    if not file.is_file():
        allowed = "a training's folder, a milestone's, or a checkpoint"
        raise KairosError(f"--checkpoint {place}: no checkpoint there; allowed: {allowed}")
    content = _read_checkpoint(file)
    record = None
    for path in (*sorted(file.parent.glob(_MILESTONES)), *sorted(file.parent.parent.glob(_MILESTONES))):
        beside = read_json(path)
        if "identity" in content and beside["identity"] == content["identity"]:
            record = beside
            if beside["step"] == content["step"]:
                return _view_of_snapshot(path, arguments)
    return _view_of_checkpoint(file, content, record, arguments)


def _view_of_snapshot(path: Path, arguments: argparse.Namespace) -> View:
    record = read_json(path)
    file = path.with_name("strategy.csv")
    try:
        sampler, weighting, diffusion = _recorded_settings(record, arguments)
        if sha256_file(file) != record["files"]["strategy.csv"]:
            raise ValueError("does not match the milestone's checksum")
        columns = parse_strategy_csv(file.read_text(encoding="utf-8"))
        step = record["step"]
    except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"{file}: damaged ({error}); train again, or pull it with dvc") from None
    notes = [f"as it was after {step} steps: {file}", *([_IMAGES] if _is_per_image(sampler["name"]) else [])]
    return build_strategy_view(sampler, weighting, diffusion, columns, tuple(notes))


def _read_checkpoint(file: Path) -> dict[str, Any]:
    """A checkpoint of ours, or what someone's own loop saved with torch: `Strategy.state_dict()`, maybe under
    ``strategy``; with ``strategy`` and ``step`` at least.

    Raises:
        KairosError: it is neither.
    """
    import pickle

    import torch

    from kairos.training import checkpoint

    with open(file, "rb") as opened:
        saved_by_torch = opened.read(2) == b"PK"
    if not saved_by_torch:
        return checkpoint.read(file)
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
        state = content.get("strategy", content)
        return {"strategy": state, "step": state["step"]}
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, TypeError, AttributeError, ValueError):
        lacking = "no Strategy.state_dict(), neither alone nor as 'strategy'"
        raise KairosError(f"{file}: saved by torch, but holds {lacking}") from None


def _view_of_checkpoint(
    file: Path, content: dict[str, Any], record: dict[str, Any] | None, arguments: argparse.Namespace
) -> View:
    from kairos.config.plugins import load_plugins
    from kairos_timesteps.strategy import Strategy

    if record is not None:
        load_plugins(record["config"].get("plugins", []))
    sampler, weighting, diffusion = (
        parse_strategy(arguments) if record is None else _recorded_settings(record, arguments)
    )
    process = build_process_with_warnings(diffusion)
    if _is_per_image(sampler["name"]):
        fault = f"p(t) of {sampler['name']} differs from image to image, and there is no milestone at step"
        told = f"{content['step']} that holds its mean over the training's images; name a milestone's folder"
        raise KairosError(f"{file}: {fault} {told}")
    name = f"{sampler['name']}+{weighting['name']}"
    strategy = Strategy(name, process, sampler=but_name(sampler), weighting=but_name(weighting))
    try:
        strategy.load_state_dict(content["strategy"])
        columns = strategy.table()
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        asked = f"{name} with T = {process.schedule.timesteps}"
        raise KairosError(f"{file}: does not hold the state of {asked} ({error})") from None
    notes = (f"as it was after {content['step']} steps: {file}",)
    return build_strategy_view(sampler, weighting, diffusion, columns, notes)


def _recorded_settings(record: dict[str, Any], arguments: argparse.Namespace) -> StrategySettings:
    """Return sampler, weighting and diffusion settings of a record, as `parse_strategy` does.

    The arguments may repeat the recorded strategy; every other setting must be left out.

    Raises:
        ConfigError: the arguments contain another strategy, or a setting that the record contains.
    """
    method = record["config"]["methods"][record["method"]]
    held = method["sampler"]["name"], method["weighting"]["name"]
    if arguments.strategy is not None:
        named = parse_name(arguments.strategy)
        only_sampler = arguments.strategy.strip() in SAMPLERS
        if named[0] != held[0] or (not only_sampler and named[1] != held[1]):
            fault = f"got {arguments.strategy!r}, but the checkpoint is of {'+'.join(held)}"
            raise ConfigError(f"strategy: {fault}; leave the name out")
    said = ("process", "schedule", "timesteps", "prediction", "set")
    superfluous = [f"--{key}" for key in said if getattr(arguments, key) not in (None, [])]
    if superfluous:
        raise ConfigError(f"{', '.join(superfluous)}: the checkpoint says it; leave it out with --checkpoint")
    diffusion = record["config"]["diffusion"]
    process = measured(diffusion["process"], record["sigma_data"])
    return method["sampler"], method["weighting"], {**diffusion, "process": process}


def _is_per_image(sampler: str) -> bool:
    return sampler in SAMPLERS and SAMPLERS[sampler].load().per_image
