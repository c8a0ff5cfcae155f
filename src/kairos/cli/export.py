"""``kairos export``: results in the forms of other tools."""

import argparse
from pathlib import Path

from kairos.cli.common import load_experiment_at
from kairos_timesteps.errors import demand, rejection

# below a folder of milestones, a run, a method, an experiment, and all results
_MILESTONES = ("*", "milestones/*", "seed*/milestones/*", "*/seed*/milestones/*", "*/*/seed*/milestones/*")


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("form", choices=("tensorboard", "wandb", "hub"), metavar="tensorboard|wandb|hub")
    milestone = "results/<experiment>/<method>/seed0/milestones/N"
    what = f"results/<experiment> or an experiment file; hub: a milestone, {milestone}"
    parser.add_argument("path", type=Path, metavar="PATH", help=what)
    parser.add_argument("--out", type=Path, metavar="DIR", help="a new folder; hub without it: list milestones of PATH")


def run(arguments: argparse.Namespace) -> None:
    """Write the folder, or list the milestones that ``hub`` can export."""
    from kairos.report.collect import collect
    from kairos.tracking import export

    path, out = arguments.path, arguments.out
    is_milestone = (path / "milestone.json").is_file()
    if arguments.form == "hub" and not is_milestone:
        _list_milestones(path, out)
        return
    demand(out, "--out", "nothing", "a new folder")
    what = path if arguments.form == "hub" else collect(*load_experiment_at(path), unfinished=True)
    export.export(getattr(export, arguments.form), what, out)
    print(out)


def _list_milestones(path: Path, out: Path | None) -> None:
    """Print the folders of the milestones below results or of an experiment file.

    Raises:
        ConfigError: there is none, or `out` was given: only one milestone can be exported.
    """
    allowed = "a milestone's folder, which holds milestone.json"
    folder = load_experiment_at(path)[1] if path.is_file() else path
    records = [record for pattern in _MILESTONES for record in folder.glob(f"{pattern}/milestone.json")]
    demand(records, "PATH", path, allowed)
    for record in sorted(records):
        print(record.parent)
    if out is not None:
        raise rejection("PATH", path, f"{allowed}: one of those listed")
