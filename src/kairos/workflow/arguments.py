"""Command line arguments that follow from a job's files, for the rules' ``params:``.

Snakemake does not compare parameters that are made of a job's input and output: those are compared themselves.
"""

import os
from collections.abc import Callable
from typing import Any

Paths = Callable[[Any, Any, Any], Any]


def files(name: str) -> Paths:
    """The files of an input or output by its name in the rule."""

    def value(wildcards: Any, input: Any, output: Any) -> list[str]:
        found = output.get(name) or input.get(name) or []
        return [found] if isinstance(found, str) else list(found)

    return value


def folders(name: str) -> Paths:
    """The folders that the files of an input or output lie in."""
    return lambda wildcards, input, output: [*map(os.path.dirname, files(name)(wildcards, input, output))]


def folder(name: str) -> Paths:
    """The folder that an input or output lies in."""
    return lambda wildcards, input, output: folders(name)(wildcards, input, output)[0]


def stages(*names: str) -> Paths:
    """An option for the folder of each stage that is an input, named as the stage."""
    return lambda wildcards, input, output: " ".join(
        f"--{name} {folder(name)(wildcards, input, output)}" for name in names
    )


def repeated(option: str, paths: Paths) -> Paths:
    """An option that is repeated for each path."""
    return lambda wildcards, input, output: " ".join(f"{option} {path}" for path in paths(wildcards, input, output))


def shards(wildcards: Any, input: Any, output: Any) -> str:
    """Which part a job makes, or the parts that it joins, if there are any."""
    if "shard" in wildcards.keys():  # noqa: SIM118  (no dictionary)
        return f"--shard {wildcards.shard}"
    return str(repeated("--part", files("parts"))(wildcards, input, output))
