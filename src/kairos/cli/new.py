"""``kairos new`` and ``kairos small``: experiment files for images of one's own, and for trying a recipe out."""

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
    if name == "small":
        recipe = "experiment file, e.g. recipes/speed/table5.yaml"
        parser.add_argument("recipe", type=Path, metavar="RECIPE", help=recipe)
        parser.add_argument("file", type=Path, metavar="FILE", help="experiment file to write")
        what = "folder of small data sets: cifar10, fashion_mnist, coco_mini, taesd (data); else the embedded digits"
        parser.add_argument("--data", type=Path, default=Path("data"), metavar="DIR", help=what)
        parser.add_argument("--text-encoder", metavar="DIR", help="of captions; default: the recipe's")
        parser.add_argument("--methods", nargs="+", metavar="M", help="default: two, those that the recipe is about")
        parser.add_argument("--steps", type=int, default=100, metavar="N", help="optimiser steps, at most 100 (100)")
        return
    parser.add_argument("file", type=Path, metavar="FILE", help="experiment file to write")
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER", help="images, flat or a folder per class")
    wanted = "how long the experiment may take on this machine (60); sets the number of steps"
    parser.add_argument("--minutes", type=float, default=60.0, metavar="N", help=wanted)


def run(arguments: argparse.Namespace) -> None:
    """Write a project, or look at images and machine, measure some steps and write an experiment file."""
    if arguments.command == "init":
        from kairos.workflow.project import create_project

        print(f"{arguments.folder}: {', '.join(create_project(arguments.folder))}; `snakemake` there runs the demo")
        return
    file = arguments.file
    demand(not file.exists() and not file.is_symlink(), "file", repr(str(file)), "a file that is not there yet")
    demand(file.parent.is_dir(), "file", repr(str(file)), "a file in a folder that exists")
    if arguments.command == "small":
        _small(arguments)
        return
    minutes = arguments.minutes
    demand(0 < minutes < 1e6, "minutes", minutes, "more than 0, less than a million")

    from kairos.costs import new_experiment
    from kairos.files import write_text

    name = re.sub(r"[^A-Za-z0-9_.+-]", "-", file.stem).lstrip("_.+-") or "mine"
    schema = os.path.relpath("experiments/schema.json", file.parent)
    text, said = new_experiment.propose_experiment(arguments.data, name, minutes, schema)
    write_text(file, text)
    print(f"{file}: {said}\nkairos check {file} says what it will do; make run EXPERIMENT={file} does it")


def _small(arguments: argparse.Namespace) -> None:
    import yaml

    from kairos.config import load
    from kairos.costs.small_experiment import select_two_methods, shrink_experiment
    from kairos.files import write_text

    a, experiment = arguments, load(arguments.recipe)
    methods = a.methods or select_two_methods(experiment)
    values = shrink_experiment(experiment, a.data.resolve(), a.text_encoder, methods, a.steps)
    write_text(a.file, f"# the small form of {a.recipe}\n" + yaml.safe_dump(values, sort_keys=False))
    print(f"{a.file}: {' and '.join(methods)}, {a.steps} steps; make run EXPERIMENT={a.file} runs it")
