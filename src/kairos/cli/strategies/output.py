"""What both `show` and `increments` print: tables by ranges of timesteps, csv, pictures."""

import argparse
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from kairos.files import write_text
from kairos.progress import say

_BAR = 30  # characters


def format_of(arguments: argparse.Namespace) -> str:
    """The format asked for, or what the file's name ends in, else ``table``."""
    if arguments.format is not None:
        return str(arguments.format)
    suffix = arguments.out.suffix.lower() if arguments.out is not None else ""
    return {".csv": "csv", ".png": "png"}.get(suffix, "table")


def deliver(
    arguments: argparse.Namespace, name: str, table: Callable[[], str], csv: Callable[[], str], png: Any
) -> None:
    """Make what is asked for and put it where it is asked for.

    Args:
        arguments: with `format` and `out`.
        name: of a picture's file where none is given, without suffix.
        table: makes the readable text.
        csv: makes the csv text.
        png: returns the picture, a matplotlib figure.
    """
    wanted = format_of(arguments)
    if wanted == "png":
        from kairos.report.strategy_figure import write_png

        path = arguments.out or Path(f"{name}.png")
        write_png(png(), path)
        if arguments.out is None:
            say(f"kairos: written to {path}; --out names another file")
        return
    text = table() if wanted == "table" else csv()
    if arguments.out is not None:
        write_text(arguments.out, text)
    else:
        sys.stdout.write(text)


def warn(text: str) -> None:
    """A warning, on stderr."""
    say(f"kairos: warning: {text}")


def strata(count: int, most: int = 20) -> list[tuple[int, int]]:
    """Ranges [start, end) of `count` timesteps, at most `most`, of sizes that differ by one at most."""
    parts = min(count, most)
    return list(pairwise(count * k // parts for k in range(parts + 1)))


def ranges_text(start: int, end: int, width: int) -> str:
    """The timesteps start ... end - 1."""
    return f"{start:>{width}}" + (f" - {end - 1:>{width}}" if end - start > 1 else " " * (width + 3))


def bar(share: float, largest: float) -> str:
    """A text bar: `share` of `largest`."""
    if not largest > 0 or not share > 0 or share == float("inf"):
        return ""
    return "#" * max(round(_BAR * share / largest), 1)


def aligned(rows: list[list[str]]) -> str:
    """Rows of cells in columns, the first and the last to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths)]
        cells[0], cells[-1] = row[0].ljust(widths[0]), row[-1]
        lines.append("  ".join(cells).rstrip())
    return "".join(f"{line}\n" for line in lines)
