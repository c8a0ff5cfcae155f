"""File format of a strategy's table: CSV with columns t, p, w, effective.

This module imports nothing of kairos, so that jobs that read snapshots do not depend on the code of strategies.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

COLUMNS = ("t", "p", "w", "effective")


def strategy_csv(columns: Mapping[str, NDArray[np.float64]]) -> str:
    """Return a table as CSV with 17 significant digits, which reproduce float64 exactly.

    The first line has the names of the columns, and each line ends with a newline.

    Args:
        columns: the columns by name, each (T,); they need not be `COLUMNS`.

    Raises:
        ValueError: the columns have different lengths.
    """
    lines = [",".join(columns)]
    for row in zip(*columns.values(), strict=True):
        lines.append(",".join(f"{value:.17g}" for value in row))
    return "".join(f"{line}\n" for line in lines)


def parse_strategy_csv(text: str) -> dict[str, NDArray[np.float64]]:
    """Return the columns of a table, by name, from its CSV text as written by `strategy_csv`; each is float64 (T,).

    The header must be `COLUMNS`, in their order.

    Raises:
        ValueError: the text has other columns or no rows, or a value is missing or not a number.
    """
    header, *lines = text.splitlines()
    if tuple(header.split(",")) != COLUMNS or not lines:
        raise ValueError(f"columns {header!r}, expected {','.join(COLUMNS)}")
    rows = np.array([[float(value) for value in line.split(",")] for line in lines])  # (T, 4)
    return dict(zip(COLUMNS, rows.T, strict=True))  # raises ValueError if lines lack values
