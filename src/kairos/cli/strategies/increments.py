"""``kairos strategies increments``: print or draw SpeeD's process increments."""

import argparse

from kairos.cli.strategies.output import align_columns, text_bar, timestep_ranges, warn, write_output
from kairos.cli.strategies.show import build_process_with_warnings
from kairos.increments import AREAS, PROCESSES, Increments, increments
from kairos.strategy_file import strategy_csv


def run(arguments: argparse.Namespace) -> None:
    """Show the increments of a process as table, CSV or figure."""
    process = {"name": "discrete", "schedule": arguments.schedule or "linear", "timesteps": arguments.timesteps}
    schedule = build_process_with_warnings({"process": process, "prediction": "epsilon"}).schedule
    if arguments.process in PROCESSES[1:] and arguments.schedule is not None:
        warn(f"--schedule {arguments.schedule} is not used: process {arguments.process} defines its noise levels")
    result = increments(arguments.process, schedule, schedule.timesteps, arguments.r)
    title, name = result.process.upper(), f"increments_{result.process}"
    if result.process == "vp":
        title, name = f"{title}, {schedule.name} schedule", f"{name}_{schedule.name}"
    title = f"{title}, T = {len(result.t)}"
    write_output(
        arguments,
        name,
        table=lambda: _render_table(result, title),
        csv=lambda: _render_csv(result),
        picture=lambda figures: figures.draw_increments(result, title),
    )


def _render_csv(result: Increments) -> str:
    """Return a CSV with a row per increment; the last column is its area."""
    lines = strategy_csv(result.columns()).splitlines()
    return "".join(f"{line},{area}\n" for line, area in zip(lines, ["area", *result.area()], strict=True))


def _render_table(result: Increments, title: str) -> str:
    """Return a description of the areas, and a table of means over ranges of timesteps."""
    areas = result.area()
    growth = "evenly" if "steady" in areas else "ever faster"
    converges = f"{_format_time(result.convergence, 'not reached')}, where the magnitude exceeds r = {result.r:g}"
    description = {
        "process": f"{title}, x_(t+1) - x_t for t = 0 ... {result.t[-1]:.6g}",
        "slows at": _format_time(result.deceleration, f"no time: the variance grows {growth}"),
        "converges": converges,
    }
    for area in AREAS:
        count = int((areas == area).sum())
        if count:
            description[area] = f"{count} increments, {100 * count / len(areas):.1f} %"
    header = ["t", "mean / x0", "variance", "of it, given x0", "variance >=", "change per t", "magnitude", "area", ""]
    rows = [header]
    columns = ("mean", "variance", "own_variance", "variance_bound", "change", "magnitude")
    for timesteps in timestep_ranges(len(areas)):
        t = result.t[timesteps]
        times = f"{t[0]:.4g} - {t[-1]:.4g}" if len(t) > 1 else f"{t[0]:.4g}"
        means = [getattr(result, column)[timesteps].mean() for column in columns]
        area_names = "/".join(area for area in AREAS if area in areas[timesteps])
        bar = text_bar(means[1], result.variance.max())
        rows.append([times, *(f"{mean:.4g}" for mean in means), area_names, bar])
    lines = "".join(f"{label:13} {text}\n" for label, text in description.items())
    return f"{lines}\n{align_columns(rows)}"


def _format_time(t: float | None, otherwise: str) -> str:
    """Return a time as text, or another text if there is none."""
    return otherwise if t is None else f"t = {t:.6g}"
