"""Arguments that several subcommands share."""

import argparse
import errno
import json
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from kairos import portable, resource_usage
from kairos.shards import Shard
from kairos_timesteps import errors
from kairos_timesteps.errors import ConfigError, KairosError, rejection


def add_config(parser: argparse.ArgumentParser) -> None:
    """``--config F``: the experiment file."""
    parser.add_argument("--config", type=Path, required=True, metavar="F", help="experiment file, e.g. params.yaml")


def add_plugins(parser: argparse.ArgumentParser) -> None:
    """``--plugin F``: Python files that register components."""
    help = "Python file that registers samplers, weightings or couplings (repeatable)"
    parser.add_argument("--plugin", action="append", default=[], metavar="F", help=help)


def add_timing(parser: argparse.ArgumentParser) -> None:
    """``--timing F``: where the job's wall and CPU time goes."""
    parser.add_argument("--timing", type=Path, metavar="F", help="write the job's wall, CPU and start-up time to F")


def demand(good: object, option: str, got: object, allowed: str) -> None:
    """Refuse the value of an option that is not good; see `errors.demand`."""
    errors.demand(good, f"--{option}", got, allowed)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there.

    Raises:
        KairosError: the port is taken or not for this user, or the host is none of this machine's.
    """
    demand(0 < port < 65536, "port", port, "1 to 65535")
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, UnicodeError) as error:
        taken = getattr(error, "errno", None) in (errno.EADDRINUSE, errno.EACCES)
        what, another = (f"--port: {port}", port + 1) if taken else (f"--host: {host}", "127.0.0.1")
        fault = str(getattr(error, "strerror", error)).partition(" (")[0]
        raise KairosError(f"{what} cannot be used ({fault}); name another, e.g. {another}") from None


def plain(option: str, allowed: str) -> Callable[[str], Any]:
    """The type of an option whose value is JSON, which the workflow writes, or YAML, for which 1e-05 is a text."""

    def read(text: str) -> Any:
        import yaml

        with suppress(ValueError):
            return json.loads(text)
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError:
            raise ConfigError(str(rejection(f"--{option}", repr(text), allowed))) from None

    return read


def paired(arguments: argparse.Namespace, *options: str) -> list[tuple[Any, ...]]:
    """The values of options that are repeated together; None for those of the last where there is none of it.

    Raises:
        ConfigError: they are not as many.
    """
    given = [getattr(arguments, option) or [] for option in options]
    counts = [len(values) for values in given]
    names, of_last = ", ".join(f"--{option}" for option in options), counts.pop()
    if len(set(counts)) > 1 or of_last not in (0, counts[0]):
        got = ", ".join(map(str, (*counts, of_last)))
        raise ConfigError(f"{names}: got {got}; allowed: as many of each, or none of --{options[-1]}")
    return list(zip(*given[:-1], given[-1] or [None] * counts[0]))


def add_shards(parser: argparse.ArgumentParser, metavar: str) -> None:
    """``--shard KofN`` or ``--part``: a part of a job's images alone, or all parts joined."""
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--shard", type=Shard.parse, metavar="KofN", help="part K of N alone, whole batches of its own")
    joined = "join the parts of each --out, made with --shard (repeatable)"
    either.add_argument("--part", type=Path, action="append", default=[], metavar=metavar, help=joined)


def experiment_at(path: Path) -> tuple[Any, Path]:
    """The experiment that an experiment file, or a folder of results, stands for, and its folder of results.

    Raises:
        KairosError: there is none.
    """
    from kairos.report.collect import recorded
    from kairos.status.outline import outline

    found = outline(path)
    return found.experiment or recorded(found.results), found.results


def setup(experiment: Any, device: str | None = None) -> Any:
    """The device that an experiment names, or another one, ready to compute as the experiment says."""
    from kairos import compute

    training = experiment.training
    return compute.setup(training.threads, device or training.device, training.deterministic)


def write_timing(arguments: argparse.Namespace, **facts: Any) -> None:
    """Write the timing record where it was asked for."""
    if arguments.timing is not None:
        resource_usage.write_record(arguments.timing, arguments.command, machine=portable.machine(), **facts)
