"""Stage `report`: summary.csv, figures/ and report.html of an experiment, each written whole or not at all."""

from pathlib import Path

from kairos.config import Experiment
from kairos.files import atomic_folder, write_text
from kairos.report import summary_csv
from kairos.report.collect import collect
from kairos.report.figures import draw_all
from kairos.report.page import page


def build(experiment: Experiment, folder: Path) -> None:
    """Read the results in `folder` and write the report there.

    Raises:
        KairosError: a part of the results is missing or they cannot be compared.
    """
    results = collect(experiment, folder)
    with atomic_folder(folder / "figures") as figures:
        draw_all(results, figures)
    write_text(folder / "summary.csv", summary_csv.text(results))
    write_text(folder / "report.html", page(results, folder / "figures"))
