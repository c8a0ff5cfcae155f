"""The page of ``kairos status --serve``: the template beside this file, filled with an experiment as it stands."""

import math
import os
import re
import time
from functools import cache, lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import quote

import jinja2

from kairos import slurm
from kairos.files import glance
from kairos.progress import duration
from kairos.report import text
from kairos.status.outline import Outline
from kairos.status.stages import stages
from kairos.status.trainings import Logs, Training, last_line, summary, trainings
from kairos.training.job import last_word

_POINTS = 80  # of a curve, at most
_BLOCK = 2048  # bytes that are read for a point of a long file: ten lines or so
_POINT = re.compile(rb'"step": (\d+).*?"loss": (-?\d[-+.\de]*)[,}]')  # nothing of a line that was cut off matches
_LINKS = ("report.html", "report_unfinished.html", "summary.csv")


def page(title: str, every: float, wanted: Outline | None, fault: str = "") -> str:
    """An experiment as one HTML document, which keeps itself up to date.

    Args:
        title: its name.
        every: seconds after which it is asked for again.
        wanted: the experiment; None where it cannot be read now.
        fault: why it cannot.
    """
    facts = _facts(wanted) if wanted else {}
    words = {"text": text, "duration": duration, "url": lambda path: quote(os.fsencode(path))}
    return _template().render(title=title, every=every, fault=fault, now=time.strftime("%H:%M:%S"), **words, **facts)


@cache
def _template() -> jinja2.Template:
    beside = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=beside, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.get_template("page.html.jinja")


def _facts(wanted: Outline) -> dict[str, Any]:
    (jobs, trouble), results = slurm.jobs(wanted.results), wanted.results
    found, logs = trainings(wanted, jobs), Logs(results)
    metric = glance(results / "reference" / "reference.json").get("metric")
    methods: dict[str, list[dict[str, Any]]] = {}
    for each in found:
        methods.setdefault(each.method, []).append(_row(results, each, logs, metric))
    known = [(each, each.of, min(each.step, each.of)) for each in found if each.of]
    todo = sum(of - step for each, of, step in known if each.state != "failed")
    rate = sum(each.rate or 0 for each in found)
    longest = max((each.left for each in found if each.left is not None), default=0.0)  # when only slow ones are left
    return {
        "experiment": wanted.experiment, "results": results, "methods": methods, "metric": metric,
        "summary": summary(found), "stages": stages(wanted).split("\n"),
        "queue": trouble or (slurm.summary(jobs) if jobs else ""),
        "step": sum(step for _, _, step in known), "of": sum(of for _, of, _ in known),
        "left": max(todo / rate, longest) if rate else None,
        "links": [name for name in _LINKS if (results / name).is_file()],
    }  # fmt: skip


def _row(results: Path, each: Training, logs: Logs, metric: str | None) -> dict[str, Any]:
    """What the template shows of a training beside what `Training` says."""
    folder = results / each.method / f"seed{each.seed}"
    written = each.logs or logs.of(each.method, each.seed, None)
    evaluation, grid = _newest(folder / "evaluation", "json"), _newest(folder / "samples", "png")
    evaluated = glance(evaluation) if evaluation else {}
    distances = evaluated.get("metrics", {})
    private = folder / ".state" / str(last_word(folder).get("identity"))[:16] / "metrics.jsonl"
    metrics = private if private.is_file() else folder / "metrics.jsonl"  # the former grows
    losses = _losses(metrics, metrics.stat().st_size, metrics.stat().st_mtime_ns) if metrics.is_file() else []
    return {
        "training": each, "curve": _curve(losses, each.of), "loss": losses[-1][1] if losses else None,
        "note": each.note or (last_line(written) if each.state == "running" else ""),
        "logs": {path: os.path.relpath(path, results) for path in written},
        "distance": (distances.get(metric), distances.get(f"{metric}_spread")),
        "validation": (evaluated.get("validation") or {}).get("loss"), "evaluation": evaluation, "grid": grid,
    }  # fmt: skip


def _newest(folder: Path, suffix: str) -> Path | None:
    """The file of the latest step."""
    return max(folder.glob(f"[0-9]*.{suffix}"), key=lambda path: (len(path.name), path.name), default=None)


@lru_cache(maxsize=4096)
def _losses(metrics: Path, size: int, changed: int) -> list[tuple[float, float]]:
    """At most 81 points of a training's loss, each the mean step and loss of some lines that follow each other.

    Of a long file so many blocks are read and no more. Distances between them are doubled as it grows, so that points
    stay where they are. `size` (bytes) and `changed` (modification time) tell the cache one content from another.
    """
    with open(metrics, "rb") as file:
        if size <= _POINTS * _BLOCK:
            lines = _POINT.findall(file.read())
            count = _doubled(1, len(lines))
            groups = [lines[place : place + count] for place in range(0, len(lines), count)]
        else:
            places = [*range(0, size - _BLOCK, _doubled(_BLOCK, size)), size - _BLOCK]
            groups = [_POINT.findall(os.pread(file.fileno(), _BLOCK, place)) for place in places]
    means = (tuple(fmean(map(float, column)) for column in zip(*group)) for group in groups if group)
    return [(step, loss) for step, loss in means]


def _doubled(unit: int, length: int) -> int:
    """A unit, doubled until `_POINTS` of it are enough for a length."""
    return unit << max(math.ceil(length / (unit * _POINTS)) - 1, 0).bit_length()


def _curve(losses: list[tuple[float, float]], of: int | None) -> str:
    """Points of a polyline in a box of 100 × 30, on a logarithmic axis where losses have logarithms."""
    heights = [math.log(loss) for _, loss in losses] if all(loss > 0 for _, loss in losses) else [y for _, y in losses]
    low, high = min(heights, default=0), max(heights, default=0)
    width, scale = max(of or 0, losses[-1][0] if losses else 1), 26 / ((high - low) or 1)
    return " ".join(f"{100 * x / width:.1f},{28 - (y - low) * scale:.1f}" for (x, _), y in zip(losses, heights))
