"""``kairos verify``: check results for damage, or compare them with a recording."""

import argparse
from collections import Counter
from pathlib import Path

_RECORDS = ("record.json", "snapshot.json", "training.json", "report.json", "tracking.json")
_FOLDERS = ("samples", "evaluation", "analyses")  # folders with records that have the names of snapshots or analyses


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `kairos verify`."""
    group = parser.add_mutually_exclusive_group(required=True)
    folder = "folder of results, of a stage, a training run or a snapshot"
    group.add_argument("folder", type=Path, nargs="?", metavar="D", help=folder)
    recording = "compare all results of params.yaml, or of --config, with a file of kairos record"
    group.add_argument("--against", type=Path, metavar="F", help=recording)
    add = parser.add_argument
    add("--config", type=Path, default=Path("params.yaml"), metavar="F", help="experiment file of --against")


def run(arguments: argparse.Namespace) -> None:
    """Check the files in a folder, or with ``--against`` compare all results with a recording; no file is written.

    A folder with snapshot.json is a snapshot, and one with training.json a training run. For these, a line ``file
    sha256`` is printed for each file of the snapshot, or ``component sha256`` for each component of the run. For any
    other folder, the records below it are checked with the files that they list.

    Raises:
        KairosError: a file is missing or damaged, the folder has no record, or results differ from the recording.
    """
    from kairos.snapshots import check_snapshot

    folder = arguments.folder
    if arguments.against:
        _compare_with_recording(arguments.against, arguments.config)
    elif (folder / "snapshot.json").exists():
        record = check_snapshot(folder)
        for name, digest in sorted(record["files"].items()):
            print(f"{name} {digest}")
    elif (folder / "training.json").exists():
        _verify_training_run(folder)
    else:
        _verify_records(folder)


def _verify_records(folder: Path, prints: bool = True) -> None:
    """Check all records below a folder, the files that they list, and files of samples; print one line for each kind.

    Raises:
        KairosError: there is no record, or a file is missing or damaged; the message lists all damaged files.
    """
    from kairos.files import check_files, read_record
    from kairos.sampling.samples_file import open_samples
    from kairos_timesteps.errors import KairosError

    counts: Counter[str] = Counter()  # intact records and files of samples by the name of their kind
    problems = []
    for path in sorted(folder.rglob("*")):
        is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        is_record = path.name in _RECORDS or (path.suffix == ".json" and path.parent.name in _FOLDERS)
        is_samples = path.suffix == ".npz" and path.parent.name == "samples"
        is_timing = path.parent.name == "timing"  # a job's time, named after its stage, without a checksum
        if is_hidden or is_timing or not (is_record or is_samples):
            continue
        remedy = f"delete {path} and run the workflow again"
        if is_samples:
            remedy += f" with this path as its target: snakemake … -- {path}"
        try:
            if is_samples:
                open_samples(path)
            else:
                record = read_record(path)
                check_files(path.parent, record.get("files", {}), remedy)
                if path.name == "training.json":
                    _check_components(path.parent)
        except KairosError as error:
            problems.append(f"{error}; {remedy}" if is_samples else str(error))
        else:
            has_kind_of_folder = path.name == "record.json" or path.parent.name in _FOLDERS
            counts[path.parent.name if has_kind_of_folder else path.name] += 1
    if not counts and not problems:
        raise KairosError(f"{folder}: no record there; pass a folder of results, a stage, a training run or a snapshot")
    for name, count in sorted(counts.items()):
        if prints:
            print(f"{name}: {count} intact")
    if problems:
        raise KairosError("\n".join(problems))


def _verify_training_run(folder: Path) -> None:
    """Check checkpoint, metrics, snapshots, samples and evaluations of a training run against their records.

    The hashes of the checkpoint's components and of the metrics are printed. A missing snapshot folder is not detected.

    Raises:
        DamagedError: a file is missing or damaged.
    """
    from kairos.files import list_by_step
    from kairos.snapshots import check_snapshot

    for name, digest in _check_components(folder).items():
        print(f"{name} {digest}")
    for snapshot in list_by_step(folder / "snapshots"):
        check_snapshot(snapshot)
    for name in ("samples", "evaluation"):
        if (folder / name).is_dir():
            _verify_records(folder / name, prints=False)


def _check_components(folder: Path) -> dict[str, str]:
    """Compare the final checkpoint and the metrics of a training run with its record; return all hashes by component.

    Raises:
        DamagedError: a file is missing or damaged.
    """
    from kairos.files import DamagedError, open_record, sha256_file
    from kairos.training.checkpoint import component_hashes, read

    record = open_record(folder, "train", "training.json")
    checkpoint = folder / "checkpoint.pt"
    for path in (checkpoint, folder / "metrics.jsonl"):
        if not path.is_file():
            raise DamagedError(f"{path}: missing")
    digests = {**component_hashes(read(checkpoint)), "metrics": sha256_file(folder / "metrics.jsonl")}
    mismatched = [f"{name} {digest}" for name, digest in digests.items() if record["components"].get(name) != digest]
    if mismatched:
        raise DamagedError(f"{folder}: damaged or from another training run: {', '.join(mismatched)}")
    return digests


def _compare_with_recording(recording: Path, config: Path) -> None:
    """Compare all results with a recording; print the results that are not equal, and numbers by state.

    The states are ``same``, ``differs`` and ``missing``.

    Raises:
        KairosError: a result differs or is missing, and the message has the numbers; or the recording cannot be read.
    """
    from kairos.cli.common import load_experiment_at
    from kairos.workflow.recording import compare
    from kairos_timesteps.errors import KairosError

    counts: Counter[str] = Counter()
    for path, state, reason in compare(recording, *load_experiment_at(config)):
        counts[state] += 1
        if state != "same":
            explanation = f", {reason}" if reason else ""
            print(f"{path}: {state}{explanation}")
    summary = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
    if counts["differs"] or counts["missing"]:
        raise KairosError(f"results differ from {recording}: {summary}")
    print(f"results are equal to {recording}: {summary}")
