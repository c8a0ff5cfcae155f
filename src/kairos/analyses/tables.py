"""Tables of the analyses: measured at one snapshot, or built for a whole experiment."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from kairos.analyses.settings import AnalysisOptions, analysed_snapshots, snapshot_table_path
from kairos.data.latents import open_latents
from kairos.files import DamagedError, read_record, write_text
from kairos_timesteps.errors import KairosError

if TYPE_CHECKING:
    import torch


def measure_snapshot(
    analysis: AnalysisOptions, snapshot: Path, latents: Path, out: Path, device: "torch.device"
) -> None:
    """Measure one snapshot, and write the rows of the analysis with method, seed and step as the first columns.

    The table is the CSV file `out`. `latents` is the folder of the data that the snapshot was trained on.

    Raises:
        FileNotFoundError: the snapshot is missing.
        KairosError: the snapshot is damaged, or the latents are missing or incomplete.
    """
    record = read_record(snapshot / "snapshot.json")
    rows = analysis.build(snapshot, open_latents(latents), device)
    snapshot_columns = {key: record[key] for key in ("method", "seed", "step")}
    write_table(pd.DataFrame([snapshot_columns | row for row in rows]), out)


def build_table(analysis: AnalysisOptions, experiment: Any, results: Path) -> pd.DataFrame:
    """Build the table of an analysis for an experiment: join the tables of its snapshots, or compute it from results.

    The rows of snapshots are in the order of `analysed_snapshots`.

    Raises:
        KairosError: the table of a snapshot, or the training time of a run, is missing; or a table is damaged.
        FileNotFoundError: another result that the analysis reads, such as an evaluation, is missing.
    """
    snapshots = analysed_snapshots(analysis, experiment)
    if not snapshots:  # an analysis of other results, or of none
        return pd.DataFrame(analysis.build(experiment, results))
    paths = [Path(snapshot_table_path(results, analysis.name, *snapshot)) for snapshot in snapshots]
    for path in paths:
        if not path.is_file():
            remedy = "`kairos analyse --step` creates it, `make run` all such files"
            raise KairosError(f"{path} is missing; {remedy}")
    return pd.concat(map(_read_table, paths), ignore_index=True)


def _read_table(path: Path) -> pd.DataFrame:
    """Return the table of a snapshot. Method names stay text: 10 is no number, and NA no missing value.

    Raises:
        DamagedError: the file is empty or no CSV.
    """
    try:
        return pd.read_csv(path, dtype={"method": str}, keep_default_na=False, na_values=[""])
    except ValueError as error:  # pandas' errors of an empty file and of lines with too many cells are such errors
        remedy = "delete it and let `kairos analyse --step` create it again"
        raise DamagedError(f"{path} cannot be read ({error}); {remedy}") from None


def write_table(table: pd.DataFrame, path: Path) -> None:
    """Write a table as CSV with ten significant digits, atomically."""
    write_text(path, table.to_csv(index=False, float_format="%.10g", lineterminator="\n"))
