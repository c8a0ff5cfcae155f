"""Arguments and functions that several subcommands share."""

import argparse
import errno
import json
import re
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kairos import portable, resource_usage
from kairos.devices import DEVICE_PATTERN
from kairos.shards import Shard
from kairos_timesteps import errors
from kairos_timesteps.errors import ConfigError, KairosError, rejection

if TYPE_CHECKING:
    import torch

    from kairos.config import Experiment


def add_config(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """Declare ``--config F``, the experiment file."""
    parser.add_argument("--config", type=Path, required=required, metavar="F", help="experiment file, e.g. params.yaml")


def add_plugins(parser: argparse.ArgumentParser) -> None:
    """Declare ``--plugin F``, Python files that register components: a list of texts, empty without the option."""
    help = "Python file that registers samplers, weightings or couplings (repeatable)"
    parser.add_argument("--plugin", action="append", default=[], metavar="F", help=help)


def add_device(parser: argparse.ArgumentParser) -> None:
    """Declare ``--device DEVICE``, the device that computes: None without the option.

    A text that names no device raises ConfigError. The option does not check that the device exists.
    """

    def parse(text: str) -> str:
        """Return a valid name of a device unchanged; `argparse` calls this function."""
        if re.fullmatch(DEVICE_PATTERN, text) is None:
            # not `rejection` itself: it is a ValueError too, whose message argparse would replace
            raise ConfigError(str(rejection("--device", repr(text), "auto, cpu, cuda, cuda:N")))
        return text

    help = "auto, cpu, cuda or cuda:N; default: the device of the snapshot's training run; auto without a snapshot"
    parser.add_argument("--device", type=parse, metavar="DEVICE", help=help)


def add_timing(parser: argparse.ArgumentParser) -> None:
    """Declare ``--timing F``, the JSON file that `write_timing` writes."""
    parser.add_argument(
        "--timing",
        type=Path,
        metavar="F",
        help="write wall, CPU and start-up time of the job to F (default: in the results, unless folders are set)",
    )


def demand_option(condition: object, option: str, value: object, allowed: str) -> None:
    """Reject the value of a command-line option unless a condition is true.

    `option` is the name of the option without dashes, and `allowed` describes the allowed values.

    Raises:
        ConfigError: the condition is false, None or empty.
    """
    errors.demand(condition, f"--{option}", value, allowed)


def open_listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address and port of this machine, IPv6 if the address contains a colon.

    Raises:
        ConfigError: the number is not from 1 to 65535.
        KairosError: the port is in use or needs privileges, or this machine does not have the address.
    """
    demand_option(0 < port < 65536, "port", port, "1 to 65535")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, UnicodeError) as error:  # UnicodeError: a name that is too long
        # the socket module adds the address: "Address already in use (while attempting to bind ...)"
        reason, _, _ = str(getattr(error, "strerror", error)).partition(" (")
        port_is_unusable = getattr(error, "errno", None) in (errno.EADDRINUSE, errno.EACCES)
        if port_is_unusable:
            raise KairosError(f"--port: {port} cannot be used ({reason}); choose another, e.g. {port + 1}") from None
        raise KairosError(f"--host: {host} cannot be used ({reason}); choose another, e.g. 127.0.0.1") from None


def yaml_type(option: str, allowed: str) -> Callable[[str], Any]:
    """Return a function that parses a value as JSON or YAML, for argument `type` of `argparse`.

    JSON is tried first: the workflow writes it, and YAML reads 1e-05 as text. The function raises ConfigError for a
    text that is neither. It does not check that the value is among `allowed`, which is only for the message. `option`
    is the name of the option without dashes.
    """

    def parse(text: str) -> Any:
        """Return the value of a text; `argparse` calls this function."""
        import yaml

        with suppress(ValueError):
            return json.loads(text)
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError:
            # not `rejection` itself: it is a ValueError too, whose message argparse would replace
            raise ConfigError(str(rejection(f"--{option}", repr(text), allowed))) from None

    return parse


def pair_options(arguments: argparse.Namespace, *options: str) -> list[tuple[Any, ...]]:
    """Return a tuple of values for each repetition of options that are repeated together.

    ``--samples a --out x --samples b --out y`` results in ``[(a, x, None), (b, y, None)]`` for options samples, out and
    snapshot: the last option may be omitted, and is then None. If no option is set, the list is empty.

    Args:
        arguments: arguments of the command; None or an empty list for an option that is not set.

    Raises:
        ConfigError: the numbers of values differ.
    """
    values_by_option = [getattr(arguments, option) or [] for option in options]  # None: the option is not set
    *required, optional = values_by_option
    count = len(required[0])
    required_differ = any(len(values) != count for values in required)
    if required_differ or len(optional) not in (0, count):
        names = ", ".join(f"--{option}" for option in options)
        numbers = ", ".join(str(len(values)) for values in values_by_option)
        allowed = f"an equal number of each, or none of --{options[-1]}"
        raise ConfigError(f"{names}: got {numbers} values; allowed: {allowed}")
    if not optional:
        optional = [None] * count
    return list(zip(*required, optional))


def add_shards(parser: argparse.ArgumentParser, metavar: str, default: str) -> None:
    """Declare ``--shard KofN``, which computes a shard, and ``--merge``, which lists the computed shards to merge.

    The two options exclude each other. Without them, `shard` is None and `merge` an empty list.

    Args:
        parser: parser of the command.
        metavar: placeholder of a shard's path in the help.
        default: description of the shards that are merged without ``--merge``, for the help.
    """
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--shard", type=Shard.parse, metavar="KofN", help="compute shard K of N: whole batches")
    merge_help = f"merge this shard, written with --shard, into --out (repeatable); default: {default}"
    group.add_argument("--merge", type=Path, action="append", default=[], metavar=metavar, help=merge_help)


def load_experiment_at(path: Path) -> tuple["Experiment", Path]:
    """Return the experiment of an experiment file or of a folder of results, and its folder of results.

    The folder of an experiment file is ``results/<experiment>``, and need not exist. For a folder, the experiment is
    the newest file that the pipeline in the working directory has kept for the folder. Without such a file it is the
    experiment in the record of the newest snapshot.

    Raises:
        ConfigError: the path does not exist, or the file is not a valid experiment.
        KairosError: a folder without a kept file has no snapshot, or the record of the newest snapshot is damaged.
    """
    from kairos.status.run_progress import load_outline

    outline = load_outline(path)
    return outline.experiment, outline.results


def set_up_device(experiment: "Experiment", device: str | None = None) -> "torch.device":
    """Set threads and determinism of torch as an experiment configures them, and return the `torch.device`.

    Both are settings of the whole process.

    Args:
        device: name of the device; None: the device of the experiment.

    Raises:
        KairosError: the device is not usable, or portable kernels are not.
    """
    from kairos import compute

    training = experiment.training
    return compute.setup(training.threads, device or training.device, training.deterministic)


def write_timing(arguments: argparse.Namespace, default: Path | None = None, **facts: Any) -> None:
    """Write durations and peak memory of this process to the file of ``--timing``, or else to a default file.

    The JSON record also contains the name of the subcommand and the properties of the machine, see `portable.machine`.

    Args:
        arguments: arguments of the command.
        default: file of a job of the pipeline; None: no record is written without the option.
        facts: further entries of the record, such as the number of images.
    """
    path = arguments.timing or default
    if path is not None:
        resource_usage.write_record(path, arguments.command, machine=portable.machine(), **facts)
