"""Rows of an analysis as a table: of one milestone, and of a whole experiment."""

from pathlib import Path
from typing import Any

import pandas as pd

from kairos.analyses.registries import ANALYSES, part_of, places
from kairos.data.latents import open_latents
from kairos.files import read_json, write_text
from kairos_timesteps.errors import KairosError
from kairos_timesteps.registry import split


def measure(named: dict[str, Any], milestone: Path, latents: Path, out: Path, device: Any) -> None:
    """Measure one milestone, and write the rows with its method, seed and step before them.

    Args:
        named: the analysis, one of those that read milestones, with its options.
        milestone: folder.
        latents: folder of what it was trained on.
        out: the CSV file.
        device: where it is computed.
    """
    record = read_json(milestone / "milestone.json")
    rows = ANALYSES.build(*split(named), milestone, open_latents(latents), device)
    write(pd.DataFrame([{key: record[key] for key in ("method", "seed", "step")} | row for row in rows]), out)


def table(named: dict[str, Any], experiment: Any, results: Path) -> pd.DataFrame:
    """The whole table of an analysis: its parts together, or made of what the experiment's folder `results` holds.

    Raises:
        KairosError: a part is missing.
    """
    if not (parts := [Path(part_of(results, named["name"], *place)) for place in places(named, experiment)]):
        return pd.DataFrame(ANALYSES.build(*split(named), experiment, results))
    if missing := [path for path in parts if not path.is_file()]:
        raise KairosError(f"{missing[0]} is missing; `kairos analyse --milestone` makes it, `make run` all of them")
    return pd.concat(map(pd.read_csv, parts), ignore_index=True)


def write(rows: pd.DataFrame, path: Path) -> None:
    """Write a table, whole or not at all; ten significant digits."""
    write_text(path, rows.to_csv(index=False, float_format="%.10g", lineterminator="\n"))
