"""``kairos export``: convert results to the formats of TensorBoard, Weights & Biases and the Hugging Face hub."""

import argparse
from pathlib import Path
from typing import Any

from kairos.cli.common import load_experiment_at
from kairos.stages import RUN_FOLDERS
from kairos_timesteps.errors import demand, rejection

# where snapshots are below a folder of snapshots, a training run, a method, all methods, an experiment, and all results
_SNAPSHOTS_OF_EXPERIMENT = f"{RUN_FOLDERS}/snapshots/*"
_SNAPSHOT_PATTERNS = (
    "*",
    "snapshots/*",
    "seed*/snapshots/*",
    "*/seed*/snapshots/*",
    _SNAPSHOTS_OF_EXPERIMENT,
    f"*/{_SNAPSHOTS_OF_EXPERIMENT}",
)


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `kairos export`."""
    parser.add_argument("form", choices=("tensorboard", "wandb", "hub"), metavar="tensorboard|wandb|hub")
    snapshot = "results/<experiment>/methods/<method>/seed0/snapshots/N"
    path = f"results/<experiment> or an experiment file; hub: a snapshot, {snapshot}"
    parser.add_argument("path", type=Path, metavar="PATH", help=path)
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="a new folder; hub without --out: list snapshots of PATH"
    )


def run(arguments: argparse.Namespace) -> None:
    """Write the results of an experiment, or for ``hub`` one snapshot, as a new folder ``--out``, and print its path.

    Results of an experiment may be incomplete. ``hub`` with another path than a snapshot lists the snapshots below it.

    Raises:
        ConfigError: ``--out`` is missing or exists; or ``hub`` finds no snapshot, or got ``--out`` without a snapshot.
        KairosError: no run is evaluated past step 0, a file is damaged, or the package of the format is not installed.
    """
    from kairos.report.collect import collect
    from kairos.tracking import export

    path, out = arguments.path, arguments.out
    is_snapshot = (path / "snapshot.json").is_file()
    if arguments.form == "hub" and not is_snapshot:
        _list_snapshots(path, out)
        return
    demand(out, "--out", "nothing", "a new folder")
    content: Any  # folder of a snapshot, or results of an experiment
    if arguments.form == "hub":
        content = path
    else:
        experiment, results = load_experiment_at(path)
        content = collect(experiment, results, unfinished=True)
    export.export(export.FORMS[arguments.form], content, out)
    print(out)


def _list_snapshots(path: Path, out: Path | None) -> None:
    """Print the folders of the snapshots below a folder, or below the results of an experiment file, sorted by path.

    Args:
        path: the file, or the folder of snapshots, a training run, a method, an experiment or all results. Snapshots in
            other folders are left out.
        out: value of ``--out``.

    Raises:
        ConfigError: there is no snapshot; or `out` is set, although only a single snapshot can be exported. In the
            second case the folders are printed before.
    """
    allowed = "a snapshot's folder, which contains snapshot.json"
    if path.is_file():
        _, folder = load_experiment_at(path)
    else:
        folder = path
    records: list[Path] = []
    for pattern in _SNAPSHOT_PATTERNS:
        records += folder.glob(f"{pattern}/snapshot.json")
    demand(records, "PATH", path, allowed)
    for record in sorted(records):
        print(record.parent)
    if out is not None:
        raise rejection("PATH", path, f"{allowed}: one of the folders above")
