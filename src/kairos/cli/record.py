"""``kairos record``: write a hash of the content of every result to a small file for git."""

import argparse
from pathlib import Path

from kairos.cli.common import add_config


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `kairos record`."""
    add_config(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="F", help="JSON file to write, for git")


def run(arguments: argparse.Namespace) -> None:
    """Write the hash of each result's content, the settings and the machines; ``dvc repro`` calls it after Snakemake.

    DVC's metrics and curves are written into folder ``summary`` of the results.

    Raises:
        KairosError: results are missing, damaged or outdated.
    """
    from kairos.config import load
    from kairos.workflow.recording import record

    experiment, _ = load(arguments.config).resolve()
    record(experiment, Path("results") / experiment.experiment, arguments.out)
