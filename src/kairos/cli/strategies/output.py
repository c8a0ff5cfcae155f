"""Output of `show` and `increments`: tables by ranges of timesteps, csv files, pictures."""

import argparse
import math
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from kairos.files import write_text
from kairos.progress import say, table

Text = Callable[[], str]
_BAR = 30  # characters


def write_output(
    arguments: argparse.Namespace, name: str, table: Text, csv: Text, picture: Callable[[Any], Any]
) -> None:
    """Make what is asked for, or what the file's name ends in, and put it where it is asked for.

    Args:
        arguments: with `format` and `out`.
        name: of a picture's file where none is given, without suffix.
        table: makes the readable text.
        csv: makes the csv text.
        picture: makes a matplotlib figure with the module that draws strategies.
    """
    out: Path | None = arguments.out
    wanted = arguments.format or {".csv": "csv", ".png": "png"}.get(out.suffix.lower() if out else "", "table")
    if wanted == "png":
        from kairos.report import strategy_figures

        path = out or Path(f"{name}.png")
        strategy_figures.write_png(lambda: picture(strategy_figures), path)
        if out is None:
            say(f"kairos: written to {path}; --out names another file")
        return
    text = table() if wanted == "table" else csv()
    if out is not None:
        write_text(out, text)
    else:
        sys.stdout.write(text)


def warn(text: str) -> None:
    """A warning, on stderr."""
    say(f"kairos: warning: {text}")


def timestep_ranges(count: int, most: int = 20) -> list[slice]:
    """Ranges of `count` timesteps, at most `most`, of sizes that differ by one at most."""
    parts = min(count, most)
    return [slice(*ends) for ends in pairwise(count * k // parts for k in range(parts + 1))]


def text_bar(share: float, largest: float) -> str:
    """A text bar: `share` of `largest`."""
    drawn = largest > 0 and share > 0 and share != math.inf
    return "#" * max(round(_BAR * share / largest), 1) if drawn else ""


def align_columns(rows: list[list[str]]) -> str:
    """Rows of cells in columns, the first and the last to the left, the others to the right."""
    last = len(rows[0]) - 1
    return table(rows, lambda head, column, cell: 0 < column < last) + "\n"
