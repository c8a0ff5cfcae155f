"""Text and HTML of `kairos status`, from the templates in this folder."""

import os
import re
import shutil
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
import numpy as np

from kairos import slurm
from kairos.files import glance
from kairos.progress import duration
from kairos.report import formatting
from kairos.status.job_logs import JobLogs, read_last_line
from kairos.status.run_outputs import RunOutputs, summarise_stages
from kairos.status.run_progress import STATES, RunProgress, list_run_progress, load_outline
from kairos.validity import state_folder

_CURVE_POINTS = 80  # largest number of points of a loss curve, apart from the last point
_CURVE_TOP, _CURVE_BOTTOM = 2, 28  # y in the SVG, which is 30 units high
_BLOCK = 2048  # bytes read at one position of metrics.jsonl, about ten lines
# matches {"step": 400, ... "loss": 0.0123, ...} and no line that is cut off before the end of the loss
_STEP_AND_LOSS = re.compile(rb'"step": (\d+).*?"loss": (-?\d[-+.\de]*)[,}]')
_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    autoescape=jinja2.select_autoescape(["html.jinja"]),
    trim_blocks=True,
    lstrip_blocks=True,
)


def render_lines(experiment: Path) -> str:
    """Return the status of an experiment as text, without a newline at the end.

    Lines have at most 120 columns, except lines with long paths.

    Args:
        experiment: the experiment's file, or its folder of results.

    Raises:
        KairosError: the folder contains no training run.
        ConfigError: the file is missing or not a valid experiment.
    """
    status = _collect_status(experiment)
    text = _TEMPLATES.get_template("lines.txt.jinja").render(status, experiment=experiment)
    return text.rstrip()


@lru_cache(maxsize=1)
def render_page(experiment: Path, interval: float, moment: float) -> str:
    """Return the status of an experiment as an HTML document that refreshes itself.

    The last document is cached. No error of reading is raised: the document shows the error instead of the status.

    Args:
        experiment: the experiment's file, or its folder of results.
        interval: seconds after which the document requests itself again.
        moment: cache key; calls with equal arguments return the cached document.
    """
    context: dict[str, Any] = {
        "title": experiment.stem,
        "interval": interval,
        "formatting": formatting,
        "glance": glance,
        "url": quote,
    }
    try:
        context |= _collect_status(experiment)
        logs = JobLogs(context["outline"].results)
        rows = [_build_row(run, outputs, logs) for run, outputs in zip(context["runs"], context["outputs"])]
        context["rows"] = rows
        context["rows_by_method"] = _group_by_method(rows)
    except Exception as error:  # a file may be half written: the next request may succeed
        # None: the template shows the error without a table, although the outline may have been read
        context |= {"outline": None, "fault": f"{type(error).__name__}: {error}"}
    return _TEMPLATES.get_template("page.html.jinja").render(context)


def _collect_status(experiment: Path) -> dict[str, Any]:
    """Return the values that both templates show, by name.

    ``runs`` and ``outputs`` are in the order of ``outline.trainings``. The texts are ``stages``, ``summary`` (number of
    runs by state) and ``queue`` (SLURM's jobs; without jobs SLURM's error, or empty). ``duration`` is the function that
    formats seconds, which the templates call.

    Raises:
        KairosError: the folder contains no training run.
        ConfigError: the file is missing or not a valid experiment.
    """
    outline = load_outline(experiment)
    jobs, queue_error = slurm.list_jobs(outline.results)
    queue_is_known = not queue_error and shutil.which("squeue") is not None
    runs = list_run_progress(outline, jobs, queue_is_known)
    outputs = [RunOutputs(outline, method, seed) for method, seed in outline.trainings]
    counts = Counter(run.state for run in runs)
    return {
        "outline": outline,
        "runs": runs,
        "outputs": outputs,
        "queue": slurm.summarize_jobs(jobs) if jobs else queue_error,
        "stages": summarise_stages(outline, outputs, jobs, queue_is_known),
        "summary": ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state]),
        "duration": duration,
    }


def _group_by_method(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of training runs by method; methods and rows keep their order."""
    rows_by_method: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        rows_by_method.setdefault(row["run"].method, []).append(row)
    return rows_by_method


def _build_row(run: RunProgress, outputs: RunOutputs, job_logs: JobLogs) -> dict[str, Any]:
    """Return the values of a training run's row in the page: run, note, logs, evaluation, grid and losses.

    ``evaluation`` and ``grid`` are paths of the last valid files, or None. The note of a running run is the last line
    of its log, unless it has another note. ``losses`` is the result of `_read_loss_curve`; None for a run without
    metrics of its identity.
    """
    log = job_logs.find_log(f"train_{run.method}_seed{run.seed}")
    note = run.note
    if not note and run.state == "running":
        note = read_last_line(log)
    metrics_file = _find_metrics(outputs.folder, run.identity)
    return {
        "run": run,
        "note": note,
        "logs": run.logs or ([str(log)] if log else []),
        "evaluation": outputs.last_evaluation,
        "grid": outputs.last_grid,
        "losses": None if metrics_file is None else _read_loss_curve(metrics_file),
    }


def _find_metrics(run_folder: Path, identity: str | None) -> Path | None:
    """Return the path of the metrics.jsonl of a run with an identity; None: there is none.

    The state of the run has such a file. The run's folder has a copy, which remains if the state is deleted.
    """
    if identity is None:
        return None
    files = [state_folder(run_folder, identity) / "metrics.jsonl"]
    if glance(run_folder / "training.json").get("identity") == identity:
        files.append(run_folder / "metrics.jsonl")
    return next((file for file in files if file.is_file()), None)


def _read_loss_curve(metrics_file: Path) -> tuple[str, float, float] | None:
    """Return (points, step, loss): an SVG polyline, 30 units high, and its last point; None if there is no loss.

    Each point, also the last one, is the mean of some lines. x is the step; y falls with nearly the logarithm of the
    loss. The result is cached until the file changes.

    Raises:
        FileNotFoundError: there is no file.
    """
    stat = metrics_file.stat()
    return _compute_loss_curve(metrics_file, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=4096)
def _compute_loss_curve(metrics_file: Path, size: int, modified_ns: int) -> tuple[str, float, float] | None:
    """Return the result of `_read_loss_curve` for the first `size` bytes of a file.

    The size and the time of the last change are keys of the cache, so that a file that grows is read again.
    """
    lines = _sample_losses(metrics_file, size)  # step and loss of each line
    if len(lines) == 0:
        return None

    # each point of the curve is the mean of a group of consecutive lines
    lines_per_point = _doubled_stride(1, len(lines))
    group_count = len(lines) // lines_per_point
    grouped_lines = lines[: group_count * lines_per_point]
    # If lines remain, the last `lines_per_point` lines are a further group. It overlaps the group before.
    if len(grouped_lines) < len(lines):
        grouped_lines = np.concatenate([grouped_lines, lines[-lines_per_point:]])
    means = grouped_lines.reshape(-1, lines_per_point, 2).mean(axis=1)  # (points, 2): mean step and loss of each group
    steps, losses = means.T

    # nearly log(2000 * loss) for losses above 0.01, but also defined for losses up to 0
    log_losses = np.arcsinh(1000 * losses)
    value_range = log_losses.min(), log_losses.max() + 1e-9  # not empty for a constant loss
    heights = np.interp(log_losses, value_range, (_CURVE_BOTTOM, _CURVE_TOP))  # y in an SVG increases downwards
    polyline = " ".join(f"{x:.6g},{y:.1f}" for x, y in zip(steps, heights))
    return polyline, float(steps[-1]), float(losses[-1])


def _sample_losses(metrics_file: Path, size: int) -> np.ndarray:
    """Return steps and losses of some lines of metrics.jsonl, float64 (lines, 2), from blocks spread over `size` bytes.

    Lines are in the order of the file, and no step is repeated. The blocks of a small file cover it completely. A line
    that is cut by an end of a block is left out, unless its step and loss are in one block. The array is
    empty, of shape (0,), if no line has a loss.
    """
    stride = _doubled_stride(_BLOCK, size)  # bytes between the beginnings of blocks; blocks of a small file touch
    last_position = max(size - _BLOCK, 0)
    positions = [*range(0, size - _BLOCK, stride), last_position]
    with open(metrics_file, "rb") as file:
        blocks = [os.pread(file.fileno(), _BLOCK, position) for position in positions]
    # "\n" between the blocks: a line that is cut off at the end of a block must not continue in the next block
    steps_and_losses = _STEP_AND_LOSS.findall(b"\n".join(blocks))  # digits, as bytes
    loss_by_step = dict(steps_and_losses)  # without repetitions: the last two blocks may overlap
    return np.array(list(loss_by_step.items()), float)  # converts the digits


def _doubled_stride(unit: int, length: int) -> int:
    """Return `unit`, doubled until `_CURVE_POINTS` units cover `length`.

    When `length` grows, every border between units, or every second one, therefore stays a border.
    """
    while unit * _CURVE_POINTS < length:
        unit *= 2
    return unit
