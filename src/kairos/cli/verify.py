"""``kairos verify``: is a training's folder whole, and what is in it; are results those of a recording."""

import argparse
from collections import Counter
from pathlib import Path


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("folder", type=Path, nargs="?", metavar="D", help="folder of a training, or of one milestone")
    group.add_argument("--against", type=Path, metavar="LOCK", help="compare all results with a dvc.lock")


def run(arguments: argparse.Namespace) -> None:
    """Print a line ``component sha256`` for each part; anything damaged ends with status 1."""
    from kairos.files import open_record, sha256_file
    from kairos.milestones import check_milestone
    from kairos_timesteps.errors import DamagedError, KairosError

    if arguments.against:
        _against(arguments.against)
        return
    folder = arguments.folder
    if (folder / "milestone.json").exists():
        record = check_milestone(folder)
        print(*(f"{name} {digest}" for name, digest in sorted(record["files"].items())), sep="\n")
        return
    if not folder.is_dir():
        raise KairosError(f"{folder}: no such folder; pass the folder of a training or of a milestone")

    from kairos.training.checkpoint import component_hashes, read

    record = open_record(folder, "train", "training.json")
    checkpoint = folder / "checkpoint.pt"
    for path in (checkpoint, folder / "metrics.jsonl"):
        if not path.is_file():
            raise DamagedError(f"{path}: missing")
    hashes = {**component_hashes(read(checkpoint)), "metrics": sha256_file(folder / "metrics.jsonl")}
    print(*(f"{name} {digest}" for name, digest in hashes.items()), sep="\n")
    wrong = [name for name, digest in hashes.items() if record["components"][name] != digest]
    if wrong:
        raise DamagedError(f"{folder}: damaged or not of this training: {', '.join(wrong)}")
    for milestone in sorted((folder / "milestones").glob("[0-9]*")):
        check_milestone(milestone)


def _against(lock: Path) -> None:
    from kairos.workflow.dvc_records import compare
    from kairos_timesteps.errors import KairosError

    found: Counter[str] = Counter()
    for path, state, why in compare(lock):
        found[state] += 1
        if state != "same":
            print(f"{path}: {state}{f', {why}' if why else ''}")
    said = ", ".join(f"{count} {state}" for state, count in sorted(found.items()))
    if found["differs"] or found["missing"]:
        raise KairosError(f"results are not those of {lock}: {said}")
    print(f"results are those of {lock}: {said}")
