"""Arguments that several subcommands share."""

import argparse
from pathlib import Path
from typing import Any

from kairos import clock, portable


def add_config(parser: argparse.ArgumentParser) -> None:
    """``--config F``: the experiment file."""
    parser.add_argument("--config", type=Path, required=True, metavar="F", help="experiment file, e.g. params.yaml")


def add_timing(parser: argparse.ArgumentParser) -> None:
    """``--timing F``: where the job's wall and CPU time goes."""
    parser.add_argument("--timing", type=Path, metavar="F", help="write the job's wall, CPU and start-up time to F")


def write_timing(arguments: argparse.Namespace, **facts: Any) -> None:
    """Write the timing record where it was asked for."""
    if arguments.timing is not None:
        clock.write(arguments.timing, arguments.command, machine=portable.machine(), **facts)
