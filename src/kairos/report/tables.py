"""The report's tables: the comparison, every milestone, learned samplers, reference rows, cost."""

from collections import defaultdict

import numpy as np

from kairos.config import REFERENCE_ROWS
from kairos.report import html
from kairos.report.canvas import Look
from kairos.report.collect import Record, Results
from kairos.report.html import Table, escape, small
from kairos.report.table import NOT_MOVED, Row, curve, moved
from kairos.report.text import component, number, plus_minus, seconds, times

_REFERENCE_MEANING = {
    "floor": "held-out real images: what a perfect generator would score",
    "reconstruction": "held-out images through the autoencoder: the best that its latents allow",
    "gaussian": "a Gaussian fitted to the training data in the model's space: no structure learned",
    "noise": "uniform noise",
}
STAGES = (
    "prepare",
    "autoencoder",
    "encode",
    "extractor",
    "reference",
    "train",
    "sample",
    "evaluate",
)


def comparison(results: Results, rows: list[Row], looks: dict[str, Look]) -> str:
    """One line per method, lowest distance first."""
    seeds = len(results.experiment.seeds) > 1
    header = ["rank", "method", f"{escape(results.metric)} ↓<small>± over sets of samples</small>"]
    header += ["± over seeds"] if seeds else []
    header += ["val. loss ↓", "VLB ↓", "VLB without<br>last stratum ↓", "fewer steps", "less time", "time per step"]
    lines = []
    for row in rows:
        loss, vlb, rest = (plus_minus(*row.values[name], digits=4) for name in row.values)
        lines.append(
            [
                _rank(row),
                _method(results, row.method, looks),
                f"<b>{plus_minus(row.mean, row.over_sets)}</b>",
                *([number(row.over_seeds, 2)] if seeds else []),
                loss,
                vlb,
                rest,
                *(value + small(limits) for value, limits in (times(row.steps), times(row.time))),
                _milliseconds(row.step_seconds),
            ]
        )
    return html.table(Table(header, lines, frozenset(range(2, len(header)))))


def methods(results: Results, looks: dict[str, Look]) -> str:
    """Sampler and weighting of every method with all options."""
    lines = [
        [_name(name, looks), escape(component(method.sampler)), escape(component(method.weighting))]
        for name, method in results.experiment.methods.items()
    ]
    return html.table(Table(["method", "sampler", "weighting"], lines))


def milestones(results: Results, looks: dict[str, Look]) -> str:
    """The distance of every method at every milestone."""
    header = ["method", *(f"step {step:,}" if step else "untrained" for step in results.experiment.milestones)]
    lines = []
    for method in results.methods:
        own = curve(results, method)
        cells = [plus_minus(mean, spread) for mean, spread in zip(own.mean, own.spread)]
        lines.append([_name(method, looks), *cells])
    return html.table(Table(header, lines, frozenset(range(1, len(header)))))


def references(results: Results) -> str:
    """The reference rows."""
    rows = results.reference["rows"]
    others = [name for name in _optional(rows.values()) if name != results.metric]
    header = ["reference", escape(results.metric), *map(escape, others), "what it is"]
    lines = [
        [
            name,
            *(plus_minus(rows[name].get(key), rows[name].get(f"{key}_spread")) for key in (results.metric, *others)),
            _REFERENCE_MEANING[name],
        ]
        for name in REFERENCE_ROWS
        if name in rows
    ]
    return html.table(Table(header, lines, frozenset(range(1, len(header) - 1))))


def other_metrics(results: Results, looks: dict[str, Look]) -> str:
    """Further metrics at the last milestone, mean over seeds; empty where there are none."""
    finals = [training.final.evaluation["metrics"] for training in results.trainings]
    names = [name for name in _optional(finals) if name != results.metric]
    if not names:
        return ""
    lines = []
    for method in results.methods:
        metrics = [training.final.evaluation["metrics"] for training in results.of(method)]
        cells = [plus_minus(_mean(metrics, name), _mean(metrics, f"{name}_spread")) for name in names]
        lines.append([_name(method, looks), *cells])
    title = "<h3>Other metrics at the last milestone</h3>"
    return title + html.table(Table(["method", *map(escape, names)], lines, frozenset(range(1, len(names) + 1))))


def learned(results: Results) -> str:
    """Learned samplers per milestone: updates, a, b and how far p(t) has moved; empty where none learns."""
    lines = []
    for training in results.trainings:
        distance = moved(training)
        if distance is None:
            continue
        still = not distance >= NOT_MOVED
        for milestone in training.milestones:
            state = milestone.record["strategy"]
            mark = '<span class="mark warn">has not moved</span>' if still and milestone is training.final else ""
            lines.append(
                [
                    escape(training.method),
                    str(training.seed),
                    f"{milestone.step:,}",
                    number(state.get("updates"), 5),
                    number(state.get("a")),
                    number(state.get("b")),
                    f"{state['tv_from_start']:.3f}",
                    mark,
                ]
            )
    if not lines:
        return ""
    header = [
        "method",
        "seed",
        "step",
        "policy updates",
        "a",
        "b",
        "total variation distance<br>of p(t) from its start",
        "",
    ]
    return html.table(Table(header, lines, frozenset(range(1, 7))))


def cost(jobs: tuple[Record, ...]) -> tuple[str, float]:
    """CPU and wall time per stage, and the share of all CPU time that is start-up."""
    stages: dict[str, list[Record]] = defaultdict(list)
    for job in jobs:
        stages[job["stage"]].append(job)
    order = sorted(stages, key=lambda stage: STAGES.index(stage) if stage in STAGES else len(STAGES))
    lines = [_cost_line(stage, stages[stage]) for stage in order]
    lines.append(_cost_line("all", list(jobs)))
    header = [
        "stage",
        "jobs",
        "wall time<small>summed over jobs</small>",
        "of it start-up",
        "CPU time",
        "of it start-up",
        "peak memory<small>of a job</small>",
    ]
    total = sum(job["cpu_seconds"] for job in jobs)
    share = sum(job["startup_cpu_seconds"] for job in jobs) / total
    return html.table(Table(header, lines, frozenset(range(1, 7)), total=True)), share


def _cost_line(name: str, jobs: list[Record]) -> list[str]:
    cpu, wall = sum(job["cpu_seconds"] for job in jobs), sum(job["wall_seconds"] for job in jobs)
    startup = sum(job["startup_cpu_seconds"] for job in jobs)
    waiting = sum(job["startup_wall_seconds"] for job in jobs)  # on a slow shared file system too
    peak = max(job["peak_rss_bytes"] for job in jobs)
    return [
        escape(name),
        str(len(jobs)),
        seconds(wall),
        f"{waiting / wall:.0%}" if wall else "–",
        seconds(cpu),
        f"{startup / cpu:.0%}" if cpu else "–",
        f"{peak / 2**30:.2f} GiB",
    ]


def _rank(row: Row) -> str:
    if not row.judged:
        return '<span class="muted">–</span> <span class="mark warn">spread unknown</span>'
    if row.ranked:
        return f"<b>{row.first_rank}</b>"
    mark = '<span class="mark">≈ best</span>' if row.like_best else ""
    return f'<span class="muted">{row.first_rank}–{row.last_rank}</span> {mark}'


def _name(method: str, looks: dict[str, Look]) -> str:
    return f'<b class="name"><i style="background:{looks[method].color}"></i>{escape(method)}</b>'


def _method(results: Results, method: str, looks: dict[str, Look]) -> str:
    config = results.experiment.methods[method]
    lines = f"{config.sampler['name']} × {config.weighting['name']}"
    mark = ""
    distances = [distance for distance in map(moved, results.of(method)) if distance is not None]
    if distances and not max(distances) >= NOT_MOVED:
        mark = ' <span class="mark warn">has not moved</span>'
    return _name(method, looks) + mark + small(lines)


def _milliseconds(value: float) -> str:
    return f"{value * 1000:.0f} ms" if np.isfinite(value) else "–"


def _optional(records: object) -> list[str]:
    names = dict.fromkeys(name for record in records for name in record)  # type: ignore[attr-defined]
    return [name for name in names if not name.endswith(("_spread", "_sets"))]


def _mean(records: list[Record], name: str) -> float | None:
    values = [record.get(name) for record in records]
    return None if any(value is None for value in values) else float(np.mean(values))  # type: ignore[arg-type]
