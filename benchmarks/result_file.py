"""CSV files of results, whose first line is a comment with the command and the setting."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]], setting: str = "") -> None:
    """Write rows as a CSV file; folders above it are created.

    Args:
        path: the file.
        rows: values by column. A column that a row does not have is empty there.
        setting: text of the comment in the first line; empty: no comment.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = list(dict.fromkeys(column for row in rows for column in row))
    with open(path, "w", newline="", encoding="utf-8") as file:
        if setting:
            file.write(f"# {setting}\n")
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
