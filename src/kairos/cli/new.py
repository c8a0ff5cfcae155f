"""``kairos init`` and ``kairos new``: write a project or an experiment file."""

import argparse
import os
import re
from pathlib import Path

from kairos.cli.common import demand_option
from kairos_timesteps.errors import ConfigError


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `kairos new`, or of `kairos init`, which has the folder alone."""
    if name == "init":
        parser.add_argument("folder", type=Path, metavar="DIR", help="folder to write, new or empty")
        return
    parser.add_argument("file", type=Path, metavar="FILE", help="experiment file to write")
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER", help="images, flat or a folder per class")
    minutes = "time that the experiment may take on this machine (60); determines the number of steps"
    parser.add_argument("--minutes", type=float, default=60.0, metavar="N", help=minutes)


def run(arguments: argparse.Namespace) -> None:
    """Write a project's folder or an experiment file, and print what was written and the command that runs it.

    - `init` writes the files of a project, such as the Snakefile.
    - `new` reads a folder of images, times a short run in a temporary folder, and writes an experiment file.

    Raises:
        ConfigError: an argument is not allowed, the file exists, or the folder of the project is not empty.
        KairosError: images cannot be read, or the short run fails.
    """
    if arguments.command == "init":
        from kairos.workflow.project import create_project

        files = ", ".join(create_project(arguments.folder))
        print(f"{arguments.folder}: {files}; `snakemake` there runs the demo")
        return
    file = arguments.file
    if file.exists() or file.is_symlink():  # a link without a target does not exist
        raise ConfigError(f"{file} already exists; choose another name")
    if not file.parent.is_dir():
        raise ConfigError(f"{file}: folder {file.parent} does not exist; create it or choose another path")
    _write_experiment_file(arguments)


def _write_experiment_file(arguments: argparse.Namespace) -> None:
    """Write an experiment file for a folder of images, with a length that fits ``--minutes`` on this machine.

    The name of the experiment is the file's without suffix, with hyphens for characters that are not allowed and
    without punctuation at its start; ``mine`` if nothing is left. A summary and the commands that check and run the
    file are printed. The length is measured by a short run, which takes minutes. The caller ensures that the file does
    not exist, as it would be replaced.

    Raises:
        ConfigError: ``--minutes`` is not above 0 and below a million, the folder cannot be used, or the working
            directory has no Snakefile.
        KairosError: images cannot be read, or the short run fails.
    """
    file, minutes = arguments.file, arguments.minutes
    demand_option(0 < minutes < 1e6, "minutes", minutes, "more than 0, less than a million")

    # imported after the checks of the arguments, since it takes seconds
    from kairos.costs import new_experiment
    from kairos.files import write_text

    # "my images.yaml" results in experiment my-images: the name is also a folder's
    name = re.sub(r"[^A-Za-z0-9_.+-]", "-", file.stem).lstrip("_.+-") or "mine"
    schema = os.path.relpath("experiments/schema.json", file.parent)
    text, summary = new_experiment.propose_experiment(arguments.data, name, minutes=minutes, schema=schema)
    write_text(file, text)
    print(f"{file}: {summary}\nkairos check {file} lists its jobs; make run EXPERIMENT={file} runs it")
