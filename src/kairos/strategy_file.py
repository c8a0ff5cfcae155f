"""A strategy's table as a file: columns t, p, w, effective. It imports nothing of kairos, so that jobs which read
milestones do not depend on the code of strategies.
"""

from typing import Any

import numpy as np

COLUMNS = ("t", "p", "w", "effective")


def strategy_csv(columns: dict[str, Any]) -> str:
    """`strategies.names.table` as text, 17 significant digits: they give back the same numbers."""
    lines = [",".join(columns)]
    for row in zip(*columns.values(), strict=True):
        lines.append(",".join(f"{value:.17g}" for value in row))
    return "".join(f"{line}\n" for line in lines)


def parse_strategy_csv(text: str) -> dict[str, Any]:
    """Parse the text of a file that `strategy_csv` wrote; each column is float64 (T,).

    Raises:
        ValueError: the columns are others, or there are no rows.
    """
    head, *lines = text.splitlines()
    if tuple(head.split(",")) != COLUMNS or not lines:
        raise ValueError(f"columns {head!r}, expected {','.join(COLUMNS)}")
    rows = np.array([[float(value) for value in line.split(",")] for line in lines])  # (T, 4)
    return dict(zip(COLUMNS, rows.T, strict=True))
