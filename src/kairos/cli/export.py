"""``kairos export``: results in the forms of other tools."""

import argparse
from pathlib import Path

from kairos.cli.common import experiment_at
from kairos.errors import demand


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("form", choices=("tensorboard", "wandb", "hub"), metavar="tensorboard|wandb|hub")
    milestone = "results/<experiment>/<method>/seed0/milestones/N"
    what = f"results/<experiment> or an experiment file; hub: a milestone, {milestone}"
    parser.add_argument("path", type=Path, metavar="PATH", help=what)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new folder")


def run(arguments: argparse.Namespace) -> None:
    """Write the folder."""
    from kairos.report.collect import collect
    from kairos.tracking import export

    path = arguments.path
    if arguments.form == "hub":
        demand((path / "milestone.json").is_file(), "PATH", path, "a milestone's folder, which holds milestone.json")
        what = path
    else:
        what = collect(*experiment_at(path), unfinished=True)
    export.export(getattr(export, arguments.form), what, arguments.out)
    print(arguments.out)
