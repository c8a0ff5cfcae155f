"""Stage `report`: the tables (*.csv), figures/ and report.html of an experiment, each written whole or not at all."""

from pathlib import Path
from tempfile import TemporaryDirectory

from kairos.config import Experiment
from kairos.files import atomic_folder, write_text
from kairos.report import published_numbers, summary_csv
from kairos.report.collect import collect
from kairos.report.figures import draw_all
from kairos.report.page import page


def build(experiment: Experiment, folder: Path, unfinished: bool = False) -> Path:
    """Read the results in `folder` and write the report there; returns where it is.

    Args:
        experiment, folder: what is to be there, and where.
        unfinished: where not all is there, write a page of what is under a name of its own, and nothing else.

    Raises:
        KairosError: a part of the results is missing or they cannot be compared.
    """
    results, partial = collect(experiment, folder, unfinished), folder / "report_unfinished.html"
    if results.missing:
        with TemporaryDirectory() as drawn:
            write_text(partial, page(results, Path(drawn), draw_all(results, Path(drawn))))
        return partial
    with atomic_folder(folder / "figures") as figures:
        live = draw_all(results, figures)
    write_text(folder / "summary.csv", summary_csv.text(results))
    if experiment.published:
        write_text(folder / "published.csv", published_numbers.csv(results))
    write_text(folder / "report.html", page(results, folder / "figures", live))
    partial.unlink(missing_ok=True)
    return folder / "report.html"
