"""Stage `report`: write summary.csv, published.csv, figures/ and report.html of an experiment, each atomically."""

from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd

from kairos.config import REFERENCE_ROWS, Experiment
from kairos.files import atomic_folder, write_text
from kairos.report.collect import Record, Results, collect
from kairos.report.columns import FIRST_COLUMNS, LAST_COLUMNS, OPTIONAL_PROTOCOL, PROTOCOL
from kairos.report.figures import draw_figures
from kairos.report.page import render_page
from kairos.report.published_numbers import published_csv


def build_report(experiment: Experiment, folder: Path, unfinished: bool = False) -> Path:
    """Read the results of an experiment, write its report into the results folder, and return the path of the page.

    A complete report consists of figures/, summary.csv, report.html and, with published numbers, published.csv. An
    earlier report_unfinished.html is then deleted. An earlier published.csv stays if there are no published numbers.

    Args:
        experiment: the experiment.
        folder: its results folder, which receives the report.
        unfinished: True accepts missing results. If any are missing, only report_unfinished.html is written, and the
            files of an earlier complete report stay. If none are missing, the report is complete.

    Raises:
        KairosError: results are missing or cannot be compared.
    """
    results = collect(experiment, folder, unfinished)
    unfinished_page = folder / "report_unfinished.html"
    if results.missing:
        with TemporaryDirectory() as temporary:
            draw_figures(results, Path(temporary))
            write_text(unfinished_page, render_page(results, Path(temporary)))  # the page contains its figures
        return unfinished_page
    with atomic_folder(folder / "figures") as figures:
        draw_figures(results, figures)
    write_text(folder / "summary.csv", summary_csv(results))
    if experiment.published:
        write_text(folder / "published.csv", published_csv(results))
    write_text(folder / "report.html", render_page(results, folder / "figures"))
    unfinished_page.unlink(missing_ok=True)
    return folder / "report.html"


def summary_csv(results: Results) -> str:
    """Return the content of summary.csv: a row per evaluated snapshot, then a row per reference row.

    The columns that scripts may rely on come first, whether measured or not. The other measured values follow, then
    `OPTIONAL_PROTOCOL` and `LAST_COLUMNS`. Values of single sample sets are left out. A missing value is an empty cell.
    Floats have enough digits to be read back exactly.
    """
    metric = results.distance_metric
    fixed_columns = [*FIRST_COLUMNS, metric, f"{metric}_spread", results.validation_metric, "val_vlb", *PROTOCOL]
    records = [snapshot.measured_values for _, snapshot in results.run_snapshots]
    records += results.reference["rows"].values()
    # names ending in _sets contain lists: the values of single sample sets
    measured_columns = [name for name in chain.from_iterable(records) if not name.endswith("_sets")]
    fixed_and_measured_columns = dict.fromkeys([*fixed_columns, *measured_columns])  # each name once, in this order
    columns = [*fixed_and_measured_columns, *OPTIONAL_PROTOCOL, *LAST_COLUMNS]
    # dtype object: an integer in a column with missing values would become a float
    reference_table = pd.DataFrame(_reference_rows(results), dtype=object)
    table = pd.concat([results.table, reference_table])
    return table.reindex(columns=columns).to_csv(index=False, lineterminator="\n")


def _reference_rows(results: Results) -> list[Record]:
    """Return the available reference rows, in the order of `REFERENCE_ROWS`, as rows of summary.csv.

    A row contains its name as ``method``, its values, five protocol fields of the reference's record, and the name of
    the experiment. A field that the record lacks is None. Seed, step and training times are not included.
    """
    reference = results.reference
    rows = []
    for name in REFERENCE_ROWS:
        if name in reference["rows"]:
            row = {"method": name, **reference["rows"][name]}
            for key in ("extractor", "extractor_hash", "reference_hash", "sets", "eval_seed"):
                row[key] = reference.get(key)
            row["experiment"] = results.experiment.experiment
            rows.append(row)
    return rows
