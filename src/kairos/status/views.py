"""Views of an experiment's status for ``kairos status``, as lines or as a page, from the templates in this folder."""

import os
import re
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
import numpy as np

from kairos import slurm
from kairos.files import glance
from kairos.progress import duration
from kairos.report import formatting
from kairos.status.outline import outline
from kairos.status.products import Products
from kairos.status.stages import stages
from kairos.status.trainings import STATES, Logs, Training, last_line, trainings
from kairos.status.unclaimed import freed, remove, unclaimed

_url = partial(quote, errors="surrogateescape")  # of a path's text
_POINTS = 80  # of a curve, at most
_BLOCK = 2048  # bytes that are read at a place of a file of losses: ten lines or so
_POINT = re.compile(rb'"step": (\d+).*?"loss": (-?\d[-+.\de]*)[,}]')  # nothing of a line that was cut off matches
_BESIDE, _ESCAPED = jinja2.FileSystemLoader(Path(__file__).parent), jinja2.select_autoescape(["html.jinja"])
_TEMPLATES = jinja2.Environment(loader=_BESIDE, autoescape=_ESCAPED, trim_blocks=True, lstrip_blocks=True)


def lines(experiment: Path, remove_unclaimed: bool = False) -> str:
    """Return the status of an experiment, in lines of at most 120 columns.

    Args:
        experiment: the experiment's file, or its folder of results.
        remove_unclaimed: delete states of earlier settings first.

    Raises:
        KairosError: there is no such experiment, or its file cannot be used.
    """
    facts = _look(experiment)
    states = unclaimed(facts["wanted"], facts["found"])
    facts |= {"experiment": experiment, "states": states, "freed": freed(states), "removed": remove_unclaimed}
    remove(states if remove_unclaimed else [])
    return _TEMPLATES.get_template("lines.txt.jinja").render(facts).rstrip()


@lru_cache(maxsize=1)
def page(experiment: Path, every: float, moment: float) -> str:
    """An experiment as one HTML document, which keeps itself up to date; what cannot be read now, it says.

    Args:
        experiment: its file, or its folder of results.
        every: seconds after which the document is asked for again.
        moment: tells one look from the next; all who ask at the same moment get the same page.
    """
    facts: dict[str, Any] = {"title": experiment.stem, "every": every, "formatting": formatting, "glance": glance, "url": _url}
    try:
        facts |= _look(experiment)
        logs = Logs(facts["wanted"].results)
        facts["rows"] = [_row(*both, logs) for both in zip(facts["found"], facts["products"])]
    except Exception as error:  # whatever is being written or damaged now, a later look may be better
        facts |= {"wanted": None, "fault": f"{type(error).__name__}: {error}"}
    return _TEMPLATES.get_template("page.html.jinja").render(facts)


def _look(experiment: Path) -> dict[str, Any]:
    """Collect the values that both views, lines and page, show."""
    wanted = outline(experiment)
    jobs, fault = slurm.jobs(wanted.results)
    found, queue = trainings(wanted, jobs), slurm.summary(jobs) if jobs else fault
    counts = {state: sum(training.state == state for training in found) for state in STATES}
    told = ", ".join(f"{number} {state}" for state, number in counts.items() if number)
    products = [Products(wanted, *training) for training in wanted.trainings]
    shown = {"wanted": wanted, "found": found, "products": products, "queue": queue}
    return shown | {"stages": stages(wanted, products), "summary": told, "duration": duration}


def _row(each: Training, products: Products, logs: Logs) -> dict[str, Any]:
    """The facts about a training that the template shows, beside those of the training itself."""
    folder, outdated = products.folder, each.state == "outdated"
    metrics = () if outdated else (*folder.glob(".state/*/metrics.jsonl"), *folder.glob("metrics.jsonl"))
    newest = max(((file.stat().st_mtime_ns, file.stat().st_size, file) for file in metrics), default=None)
    written = each.logs or logs.of(each.method, each.seed, None)
    note = each.note or (last_line(written) if each.state == "running" else "")
    return {
        "training": each,
        "note": note,
        "logs": written,
        "evaluation": products.last_evaluation,
        "grid": products.last_grid,
        "losses": _losses(*newest) if newest else None,
    }


@lru_cache(maxsize=4096)
def _losses(changed: int, size: int, metrics: Path) -> tuple[str, float, float] | None:
    """A training's losses as points of a polyline, 30 high, and the last step and loss; each a mean over some lines.

    Of a long file 81 blocks are read and no more. Distances between them are doubled as it grows, so that points stay
    where they are. When it `changed` and its `size` (bytes) tell the cache one content from another.
    """
    with open(metrics, "rb") as file:
        places = (*range(0, size - _BLOCK, _doubled(_BLOCK, size)), max(size - _BLOCK, 0))
        blocks = [os.pread(file.fileno(), _BLOCK, place) for place in places]
    points = np.array([*dict(_POINT.findall(b"\n".join(blocks))).items()], float)  # step, loss; the last blocks overlap
    if not len(points):
        return None
    count = _doubled(1, len(points))
    groups = [*np.split(points, range(count, len(points), count))[:-1], points[-count:]]
    steps, losses = np.array([group.mean(axis=0) for group in groups]).T
    heights = np.arcsinh(1000 * losses)  # their logarithms, where they are not almost 0 or below
    heights = np.interp(heights, (heights.min(), heights.max() + 1e-9), (28, 2))
    return " ".join(f"{x:.6g},{y:.1f}" for x, y in zip(steps, heights)), float(steps[-1]), float(losses[-1])


def _doubled(unit: int, length: int) -> int:
    """A unit, doubled until `_POINTS` of it are enough for a length."""
    return unit << max((length - 1) // (unit * _POINTS), 0).bit_length()
