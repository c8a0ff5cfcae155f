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


def parsed_shard(arguments: argparse.Namespace) -> Shard | None:
    """The part that ``--shard`` asks for; None: all.

    Raises:
        ConfigError: it means none, or parts are to be joined besides.
    """
    if arguments.shard is None:
        return None
    if arguments.part:
        raise ConfigError(f"--shard: got {arguments.shard} with --part, allowed: one of the two")
    return Shard.parse(arguments.shard)


def write_timing(arguments: argparse.Namespace, **facts: Any) -> None:
    """Write the timing record where it was asked for."""
    if arguments.timing is not None:
        clock.write(arguments.timing, arguments.command, machine=portable.machine(), **facts)
