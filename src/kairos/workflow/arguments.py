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
        found = output.get(name) or input.get(name)
        return [found] if isinstance(found, str) else list(found)

    return value


def folders(name: str) -> Paths:
    """The folders that the files of an input or output lie in."""
    of = files(name)

    def value(wildcards: Any, input: Any, output: Any) -> list[str]:
        return [os.path.dirname(path) for path in of(wildcards, input, output)]

    return value


def folder(name: str) -> Paths:
    """The folder that an input or output lies in."""
    of = folders(name)

    def value(wildcards: Any, input: Any, output: Any) -> str:
        return of(wildcards, input, output)[0]

    return value


def repeated(option: str, paths: Paths) -> Paths:
    """An option that is repeated for each path."""

    def value(wildcards: Any, input: Any, output: Any) -> str:
        return " ".join(f"{option} {path}" for path in paths(wildcards, input, output))

    return value
