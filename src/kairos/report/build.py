"""Stage `report`: summary.csv, figures/ and report.html of an experiment, each written whole or not at all."""

from pathlib import Path

from kairos.config import Experiment
from kairos.files import atomic_folder, write_text
from kairos.report import html, outcome, sections, summary
from kairos.report.canvas import looks
from kairos.report.collect import Results, collect
from kairos.report.figures import draw_all
from kairos.report.table import compare


def build(experiment: Experiment, folder: Path) -> None:
    """Read the results in `folder` and write the report there.

    Raises:
        KairosError: a part of the results is missing or they cannot be compared.
    """
    results = collect(experiment, folder)
    with atomic_folder(folder / "figures") as figures:
        draw_all(results, figures)
    write_text(folder / "summary.csv", summary.text(results))
    write_text(folder / "report.html", document(results, folder / "figures"))


def document(results: Results, figures: Path) -> str:
    """The report as one HTML document with its images inside."""
    rows = compare(results)
    colors = looks(results.methods, results.baseline)
    name = results.experiment.experiment
    return html.page(
        f"{name}: timestep strategies compared",
        sections.head(results, rows, outcome.warnings(results)),
        sections.all_sections(results, rows, colors, figures),
    )
