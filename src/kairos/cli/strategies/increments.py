"""``kairos strategies increments``."""

import argparse

from kairos.cli.strategies.output import align_columns, text_bar, timestep_ranges, warn, write_output
from kairos.cli.strategies.show import build_process_with_warnings
from kairos.increments import AREAS, PROCESSES, Increments, increments
from kairos.strategy_file import strategy_csv


def run(arguments: argparse.Namespace) -> None:
    """Show the increments of a process."""
    named = {"name": "discrete", "schedule": arguments.schedule or "linear", "timesteps": arguments.timesteps}
    schedule = build_process_with_warnings({"process": named, "prediction": "epsilon"}).schedule
    if arguments.process in PROCESSES[1:] and arguments.schedule is not None:
        warn(f"--schedule {arguments.schedule} is not used: process {arguments.process} has noise levels of its own")
    found = increments(arguments.process, schedule, schedule.timesteps, arguments.r)
    title, name = found.process.upper(), f"increments_{found.process}"
    if found.process == "vp":
        title, name = f"{title}, {schedule.name} schedule", f"{name}_{schedule.name}"
    title = f"{title}, T = {len(found.t)}"
    write_output(
        arguments,
        name,
        table=lambda: _text(found, title),
        csv=lambda: _csv(found),
        picture=lambda figures: figures.draw_increments(found, title),
    )


def _csv(found: Increments) -> str:
    lines = strategy_csv(found.columns()).splitlines()
    return "".join(f"{line},{area}\n" for line, area in zip(lines, ["area", *found.area()], strict=True))


def _text(found: Increments, title: str) -> str:
    area = found.area()
    growth = "evenly" if "steady" in area else "ever faster"
    counts = {name: int((area == name).sum()) for name in AREAS}
    head = {
        "process": f"{title}, x_(t+1) - x_t for t = 0 ... {found.t[-1]:.6g}",
        "slows at": _place(found.deceleration, f"no time: the variance grows {growth}"),
        "converges": f"{_place(found.convergence, 'not reached')}, where the magnitude exceeds r = {found.r:g}",
        **{name: f"{count} increments, {100 * count / len(area):.1f} %" for name, count in counts.items() if count},
    }
    rows = [["t", "mean / x0", "variance", "of it, given x0", "variance >=", "change per t", "magnitude", "area", ""]]
    shown = ("mean", "variance", "own_variance", "variance_bound", "change", "magnitude")
    for inside in timestep_ranges(len(area)):
        t = found.t[inside]
        means = [getattr(found, name)[inside].mean() for name in shown]
        times = f"{t[0]:.4g} - {t[-1]:.4g}" if len(t) > 1 else f"{t[0]:.4g}"
        areas = "/".join(name for name in AREAS if name in area[inside])
        rows.append([times, *(f"{mean:.4g}" for mean in means), areas, text_bar(means[1], found.variance.max())])
    return "".join(f"{word:13} {what}\n" for word, what in head.items()) + "\n" + align_columns(rows)


def _place(t: float | None, otherwise: str) -> str:
    return otherwise if t is None else f"t = {t:.6g}"
