"""Output of `show` and `increments`: tables with a row per range of timesteps, CSV files, PNG figures."""

import argparse
import math
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from kairos.files import write_text
from kairos.progress import log, table

Text = Callable[[], str]
_BAR_LENGTH = 30  # characters


def write_output(
    arguments: argparse.Namespace, name: str, table: Text, csv: Text, picture: Callable[[Any], Any]
) -> None:
    """Write a table, a CSV or a PNG figure to the file of ``--out``, or else to standard output.

    The format is ``--format``, or else follows from the suffix of ``--out``, .csv or .png. Otherwise it is a table. A
    figure without ``--out`` is written into the working directory, and its path is logged. An existing file is
    replaced. Only the function of the format is called.

    Args:
        name: name of a PNG file without suffix, if ``--out`` is not set.
        table: function that returns the table.
        csv: function that returns the CSV text.
        picture: function that returns a matplotlib figure; its argument is module `report.strategy_figures`.
    """
    out: Path | None = arguments.out
    suffix = out.suffix.lower() if out else ""
    format_of_suffix = {".csv": "csv", ".png": "png"}.get(suffix, "table")
    output_format = arguments.format or format_of_suffix
    if output_format == "png":
        from kairos.report import strategy_figures

        path = out or Path(f"{name}.png")
        strategy_figures.write_png(lambda: picture(strategy_figures), path)  # draws in its own style
        if out is None:
            log(f"kairos: written to {path}; --out sets another file")
        return
    text = table() if output_format == "table" else csv()
    if out is not None:
        write_text(out, text)
    else:
        sys.stdout.write(text)


def warn(text: str) -> None:
    """Print a line ``kairos: warning: ...`` to standard error."""
    log(f"kairos: warning: {text}")


def timestep_ranges(count: int, most: int = 20) -> list[slice]:
    """Return slices that divide `count` timesteps into at most `most` consecutive ranges; sizes differ by at most one.

    The caller ensures that `count` is at least 1. No range is empty.
    """
    range_count = min(count, most)
    ends = [count * index // range_count for index in range(range_count + 1)]
    return [slice(start, stop) for start, stop in pairwise(ends)]


def text_bar(value: float, largest: float) -> str:
    """Return a bar of ``#`` whose length is proportional to a value, at least one for a positive value.

    The largest value has `_BAR_LENGTH` characters. The bar is empty if the value or `largest` is not positive, and for
    an infinite value.
    """
    if not (largest > 0 and value > 0) or value == math.inf:  # also for NaN
        return ""
    return "#" * max(round(_BAR_LENGTH * value / largest), 1)


def align_columns(rows: list[list[str]]) -> str:
    """Return rows of cells as a text with aligned columns: the first and the last aligned left, the others right.

    The text ends with a newline. The caller ensures that there is a row.
    """
    return table(rows, left=(0, len(rows[0]) - 1)) + "\n"
