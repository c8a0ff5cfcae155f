"""Arguments that several subcommands share."""

import argparse
from pathlib import Path
from typing import Any

from kairos import clock, portable
from kairos.errors import ConfigError
from kairos.shards import Shard


def add_config(parser: argparse.ArgumentParser) -> None:
    """``--config F``: the experiment file."""
    parser.add_argument("--config", type=Path, required=True, metavar="F", help="experiment file, e.g. params.yaml")


def add_timing(parser: argparse.ArgumentParser) -> None:
    """``--timing F``: where the job's wall and CPU time goes."""
    parser.add_argument("--timing", type=Path, metavar="F", help="write the job's wall, CPU and start-up time to F")


def demand(good: object, option: str, got: object, allowed: str) -> None:
    """Refuse the value of an option that is not good.

    Raises:
        ConfigError: with what was given and what is allowed.
    """
    if not good:
        raise ConfigError(f"--{option}: got {got}, allowed: {allowed}")


def paired(arguments: argparse.Namespace, *options: str) -> list[tuple[Any, ...]]:
    """The values of options that are repeated together; None for those of the last where there is none of it.

    Raises:
        ConfigError: they are not as many.
    """
    given = [getattr(arguments, option) or [] for option in options]
    most = len(given[0])
    if {len(values) for values in given[:-1]} != {most} or len(given[-1]) not in (0, most):
        names, counts = ", ".join(f"--{option}" for option in options), ", ".join(str(len(values)) for values in given)
        raise ConfigError(f"{names}: got {counts}; allowed: as many of each, or none of --{options[-1]}")
    return list(zip(*given[:-1], given[-1] or [None] * most))


def add_shards(parser: argparse.ArgumentParser, metavar: str) -> None:
    """``--shard KofN`` or ``--part``: a part of a job's images alone, or all parts joined."""
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--shard", type=Shard.parse, metavar="KofN", help="part K of N alone, whole batches of its own")
    joined = "join the parts of each --out, made with --shard (repeatable)"
    either.add_argument("--part", type=Path, action="append", default=[], metavar=metavar, help=joined)


def write_timing(arguments: argparse.Namespace, **facts: Any) -> None:
    """Write the timing record where it was asked for."""
    if arguments.timing is not None:
        clock.write(arguments.timing, arguments.command, machine=portable.machine(), **facts)
