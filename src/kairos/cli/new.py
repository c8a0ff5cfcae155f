"""``kairos new``: an experiment file for images of one's own, each line with its reason, and the time that it takes."""

import argparse
import os
import re
from pathlib import Path

from kairos.cli.common import demand


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    if name == "init":
        parser.add_argument("folder", type=Path, metavar="DIR", help="folder to write, empty or not there yet")
        return
    parser.add_argument("file", type=Path, metavar="FILE", help="experiment file to write")
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER", help="images, flat or a folder per class")
    wanted = "how long the experiment may take on this machine (60); sets the number of steps"
    parser.add_argument("--minutes", type=float, default=60.0, metavar="N", help=wanted)


def run(arguments: argparse.Namespace) -> None:
    """Write a project, or look at images and machine, measure some steps and write an experiment file."""
    if arguments.command == "init":
        from kairos.workflow.project import begin

        print(f"{arguments.folder}: {', '.join(begin(arguments.folder))}; `snakemake` there runs the demo")
        return
    file, minutes = arguments.file, arguments.minutes
    demand(not file.exists() and not file.is_symlink(), "file", repr(str(file)), "a file that is not there yet")
    demand(file.parent.is_dir(), "file", repr(str(file)), "a file in a folder that exists")
    demand(0 < minutes < 1e6, "minutes", minutes, "more than 0, less than a million")

    from kairos.costs import proposal
    from kairos.files import write_text

    name = re.sub(r"[^A-Za-z0-9_.+-]", "-", file.stem).lstrip("_.+-") or "mine"
    schema = os.path.relpath("experiments/schema.json", file.parent)
    text, said = proposal.propose(arguments.data, name, minutes, schema)
    write_text(file, text)
    print(f"{file}: {said}\nkairos check {file} says what it will do; make run EXPERIMENT={file} does it")
