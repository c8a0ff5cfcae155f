"""The page of ``kairos status --serve``: the template beside this file, filled with an experiment as it stands."""

import math
import os
import re
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import quote

import jinja2

from kairos import slurm
from kairos.files import glance
from kairos.progress import duration
from kairos.report import text
from kairos.status.outline import outline
from kairos.status.stages import stages
from kairos.status.trainings import Logs, Training, last_line, summary, trainings

_POINTS = 80  # of a curve, at most
_BLOCK = 2048  # bytes that are read at a place of a file of losses: ten lines or so
_POINT = re.compile(rb'"step": (\d+).*?"loss": (-?\d[-+.\de]*)[,}]')  # nothing of a line that was cut off matches
_SOURCE = Path(__file__).with_suffix(".html.jinja").read_text(encoding="utf-8")
_TEMPLATE = jinja2.Template(_SOURCE, autoescape=True, trim_blocks=True, lstrip_blocks=True)


@lru_cache(maxsize=1)
def page(experiment: Path, every: float, moment: float) -> str:
    """An experiment as one HTML document, which keeps itself up to date; what cannot be read now, it says.

    Args:
        experiment: its file, or its folder of results.
        every: seconds after which the document is asked for again.
        moment: tells one look from the next; all who ask at the same moment get the same page.
    """
    facts: dict[str, Any] = {"text": text, "duration": duration, "glance": glance, "summary": summary}
    facts["url"] = lambda path: quote(str(path), errors="surrogateescape")
    try:
        wanted = outline(experiment)
        (jobs, fault), logs = slurm.jobs(wanted.results), Logs(wanted.results)
        rows = [_row(wanted.results, each, logs) for each in trainings(wanted, jobs)]
        facts |= {
            "wanted": wanted,
            "rows": rows,
            "stages": stages(wanted),
            "queue": slurm.summary(jobs) if jobs else fault,
        }
    except Exception as error:  # whatever is being written or damaged now, a later look may be better
        facts["fault"] = f"{type(error).__name__}: {error}"
    return _TEMPLATE.render(title=experiment.stem, every=every, **facts)


def _row(results: Path, each: Training, logs: Logs) -> dict[str, Any]:
    """What the template shows of a training beside what it says itself."""
    folder = results / each.method / f"seed{each.seed}"
    metrics = (*folder.glob(".state/*/metrics.jsonl"), *folder.glob("metrics.jsonl"))
    newest = max(((file.stat().st_mtime_ns, file.stat().st_size, file) for file in metrics), default=None)
    written = each.logs or logs.of(each.method, each.seed, None)
    note = each.note or (last_line(written) if each.state == "running" else "")
    evaluation, grid = _last(folder, "evaluation/[0-9]*.json"), _last(folder, "samples/[0-9]*.png")
    own = {"training": each, "note": note, "logs": written, "evaluation": evaluation, "grid": grid}
    return own | {"losses": _losses(*newest) if newest else None}


def _last(folder: Path, what: str) -> Path | None:
    """The file of the last step."""
    return max(folder.glob(what), key=lambda path: (len(path.name), path.name), default=None)


@lru_cache(maxsize=4096)
def _losses(changed: int, size: int, metrics: Path) -> tuple[str, float, float] | None:
    """A training's losses as points of a polyline, 30 high, and the last step and loss; each a mean over some lines.

    Of a long file 81 blocks are read and no more. Distances between them are doubled as it grows, so that points stay
    where they are. When it `changed` and its `size` (bytes) tell the cache one content from another.
    """
    with open(metrics, "rb") as file:
        places = (*range(0, size - _BLOCK, _doubled(_BLOCK, size)), max(size - _BLOCK, 0))
        blocks = [os.pread(file.fileno(), _BLOCK, place) for place in places]
    lines = list(dict(_POINT.findall(b"\n".join(blocks))).items())  # the last two blocks overlap
    count = _doubled(1, len(lines))
    starts = (*range(0, len(lines) - count, count), max(len(lines) - count, 0))
    means = [[fmean(map(float, column)) for column in zip(*lines[at : at + count])] for at in starts if lines]
    heights = [math.asinh(1000 * loss) for _, loss in means] or [0]  # its logarithm, where it is not almost 0 or below
    scale = 26 / (max(heights) - min(heights) or 1)
    points = [f"{step:.6g},{2 + (max(heights) - y) * scale:.1f}" for (step, _), y in zip(means, heights)]
    return (" ".join(points), means[-1][0], means[-1][1]) if means else None


def _doubled(unit: int, length: int) -> int:
    """A unit, doubled until `_POINTS` of it are enough for a length."""
    return unit << max(math.ceil(length / (unit * _POINTS)) - 1, 0).bit_length()
