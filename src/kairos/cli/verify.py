"""``kairos verify``: check the files of a training run or a snapshot, or compare results with a recording."""

import argparse
from collections import Counter
from pathlib import Path


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `kairos verify`."""
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("folder", type=Path, nargs="?", metavar="D", help="folder of a training run or of a snapshot")
    group.add_argument("--against", type=Path, metavar="LOCK", help="compare all results with a dvc.lock")


def run(arguments: argparse.Namespace) -> None:
    """Check the files of a training run or a snapshot, or with ``--against`` all results; no file is written.

    A folder with milestone.json is a snapshot, any other folder a training run. A line ``component sha256`` is printed
    for each component of a training run, or a line ``file sha256`` for each file of a snapshot.

    Raises:
        KairosError: a file is missing or damaged, or results differ from the recording.
    """
    from kairos.milestones import check_milestone
    from kairos_timesteps.errors import KairosError

    folder = arguments.folder
    if arguments.against:
        _compare_with_recording(arguments.against)
    elif (folder / "milestone.json").exists():
        record = check_milestone(folder)
        for name, digest in sorted(record["files"].items()):
            print(f"{name} {digest}")
    elif folder.is_dir():
        _verify_training_run(folder)
    else:
        raise KairosError(f"{folder}: no such folder; pass the folder of a training run or of a snapshot")


def _verify_training_run(folder: Path) -> None:
    """Check the final checkpoint, the metrics and all snapshots of a training run against their records.

    The hashes of the checkpoint's components and of the metrics are printed before they are compared. A missing
    snapshot folder is not detected.

    Raises:
        KairosError: the training run is not complete.
        DamagedError: a file is missing or damaged.
    """
    from kairos.files import DamagedError, list_by_step, open_record, sha256_file
    from kairos.milestones import check_milestone
    from kairos.training.checkpoint import component_hashes, read

    record = open_record(folder, "train", "training.json")
    checkpoint = folder / "checkpoint.pt"
    for path in (checkpoint, folder / "metrics.jsonl"):
        if not path.is_file():
            raise DamagedError(f"{path}: missing")
    digests = {**component_hashes(read(checkpoint)), "metrics": sha256_file(folder / "metrics.jsonl")}
    for name, digest in digests.items():
        print(f"{name} {digest}")
    mismatched = [name for name, digest in digests.items() if record["components"].get(name) != digest]
    if mismatched:
        raise DamagedError(f"{folder}: damaged or from another training run: {', '.join(mismatched)}")
    for milestone in list_by_step(folder / "milestones"):
        check_milestone(milestone)


def _compare_with_recording(lock: Path) -> None:
    """Compare all results with the hashes in a dvc.lock; print the results that are not equal, and numbers by state.

    The states are ``same``, ``differs``, ``missing`` and ``not compared``. Results that were not
    compared are printed, too.

    Raises:
        KairosError: a result differs or is missing, and the message has the numbers; or the dvc.lock cannot be read.
    """
    from kairos.workflow.dvc_records import compare
    from kairos_timesteps.errors import KairosError

    counts: Counter[str] = Counter()  # keys are states: same, differs, missing, not compared
    for path, state, reason in compare(lock):
        counts[state] += 1
        if state != "same":
            explanation = f", {reason}" if reason else ""
            print(f"{path}: {state}{explanation}")
    summary = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
    if counts["differs"] or counts["missing"]:
        raise KairosError(f"results differ from {lock}: {summary}")
    print(f"results are equal to {lock}: {summary}")
