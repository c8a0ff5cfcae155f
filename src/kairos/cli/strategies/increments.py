"""``kairos strategies increments``."""

import argparse
from typing import Any

import numpy as np

from kairos.cli.strategies.output import aligned, bar, deliver, strata, warn
from kairos.cli.strategies.show import noise_schedule
from kairos.strategies.increments import AREAS, PROCESSES, Increments, increments


def run(arguments: argparse.Namespace) -> None:
    """Show the increments of a process."""
    schedule = noise_schedule(arguments)
    if arguments.process in PROCESSES[1:] and arguments.schedule is not None:
        warn(f"--schedule {arguments.schedule} is not used: process {arguments.process} has noise levels of its own")
    found = increments(arguments.process, schedule, schedule.timesteps, arguments.r)
    title = f"{found.process.upper()}, {schedule.name} schedule" if found.process == "vp" else found.process.upper()

    def png() -> Any:
        from kairos.report.strategy_figure import draw_increments

        return draw_increments(found, f"{title}, T = {len(found.t)}")

    name = f"increments_{found.process}" + (f"_{schedule.name}" if found.process == "vp" else "")
    deliver(arguments, name, lambda: _text(found, title), lambda: _csv(found), png)


def _csv(found: Increments) -> str:
    columns = found.columns()
    lines = [",".join([*columns, "area"])]
    for area, *values in zip(found.area(), *columns.values(), strict=True):
        lines.append(",".join([*(f"{value:.17g}" for value in values), area]))
    return "".join(f"{line}\n" for line in lines)


def _text(found: Increments, title: str) -> str:
    area = found.area()
    growth = "evenly" if (area == "steady").any() else "ever faster"
    counts = {name: count for name in AREAS if (count := int(np.sum(area == name)))}
    head = [
        ("process", f"{title}, T = {len(found.t)}, x_(t+1) - x_t for t = 0 ... {found.t[-1]:.6g}"),
        ("slows at", _place(found.deceleration, f"no time: the variance grows {growth}")),
        ("converges", _place(found.convergence, "not reached") + f", where the magnitude exceeds r = {found.r:g}"),
        *((name, f"{count} increments, {100 * count / len(area):.1f} %") for name, count in counts.items()),
    ]
    rows = [["t", "mean / x0", "variance", "of it, given x0", "variance >=", "change per t", "magnitude", "area", ""]]
    for start, end in strata(len(area)):
        inside = slice(start, end)
        means = [getattr(found, name)[inside].mean() for name in ("mean", "variance", "own_variance", "variance_bound")]
        further = [found.change[inside].mean(), found.magnitude[inside].mean()]
        areas = "/".join(name for name in AREAS if name in area[inside])
        place = f"{found.t[start]:.4g} - {found.t[end - 1]:.4g}" if end - start > 1 else f"{found.t[start]:.4g}"
        numbers = [f"{value:.4g}" for value in (*means, *further)]
        rows.append([place, *numbers, areas, bar(float(means[1]), float(found.variance.max()))])
    return "".join(f"{word:13} {what}\n" for word, what in head) + "\n" + aligned(rows)


def _place(t: float | None, otherwise: str) -> str:
    return otherwise if t is None else f"t = {t:.6g}"
