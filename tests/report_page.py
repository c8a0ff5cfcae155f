"""The page of a report without the files of its figures, since writing them takes most of a report's time."""

from pathlib import Path
from tempfile import TemporaryDirectory

import matplotlib
from PIL import Image

from kairos.config import load
from kairos.report import plot_style
from kairos.report.collect import Results, collect
from kairos.report.figures import available_figures
from kairos.report.page import render_page


def page_of(config: Path, folder: Path, unfinished: bool = False) -> str:
    """Draw every figure of the results in `folder`; returns the page with blank images instead of the figures."""
    results = collect(load(config), folder, unfinished)
    draw_figures(results)
    with TemporaryDirectory() as pictures:
        for name in available_figures(results):
            Image.new("L", (1, 1)).save(Path(pictures, f"{name}.png"))
            Path(pictures, f"{name}.svg").write_text("<svg/>")
        return render_page(results, Path(pictures))


def draw_figures(results: Results) -> None:
    """Draw every figure that the results have numbers for, without writing files."""
    styles = plot_style.assign_styles(results.methods, results.baseline)
    for draw in available_figures(results).values():
        with matplotlib.rc_context(plot_style.STYLE):
            draw(results, styles)
