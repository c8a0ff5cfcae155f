"""``kairos strategies increments``: print or draw SpeeD's process increments."""

import argparse

from kairos.cli.strategies.output import align_columns, text_bar, timestep_ranges, warn, write_output
from kairos.cli.strategies.show import build_process_with_warnings
from kairos.increments import AREAS, PROCESSES, Increments, increments
from kairos.library_components import LibraryComponent
from kairos.strategy_file import strategy_csv
from kairos_timesteps.components import PROCESSES as FORWARD_PROCESSES

_TABLE_COLUMNS = {  # header by attribute of `Increments`
    "mean": "mean / x0",
    "variance": "variance",
    "own_variance": "variance given x0",
    "variance_bound": "variance >=",
    "change": "change per t",
    "magnitude": "magnitude",
}


def run(arguments: argparse.Namespace) -> None:
    """Compute the increments of a process, and show them as table, CSV or figure, see `output.write_output`.

    No file is read. A warning is logged if ``--schedule`` has no effect, and for each warning of the discrete process.

    Raises:
        ConfigError: the process or the schedule is unknown, or ``--timesteps`` or ``--r`` is not allowed.
    """
    # vp is the process of a noise schedule with T timesteps; the other processes use only the number of timesteps
    process = {"name": "discrete", "schedule": arguments.schedule or "linear", "timesteps": arguments.timesteps}
    component = LibraryComponent.select(FORWARD_PROCESSES, process)
    schedule = build_process_with_warnings(component, "epsilon").schedule
    # an unknown process has no warning: `increments` rejects it
    defines_noise_levels = arguments.process in PROCESSES and arguments.process != "vp"
    if defines_noise_levels and arguments.schedule is not None:
        warn(f"--schedule {arguments.schedule} is not used: process {arguments.process} defines its noise levels")
    result = increments(arguments.process, schedule, timesteps=schedule.timesteps, r=arguments.r)
    title = result.process.upper()
    file_name = f"increments_{result.process}"
    if result.process == "vp":
        title += f", {schedule.name} schedule"
        file_name += f"_{schedule.name}"
    title += f", T = {len(result.t)}"
    write_output(
        arguments,
        file_name,
        table=lambda: _render_table(result, title),
        csv=lambda: _render_csv(result),
        picture=lambda figures: figures.draw_increments(result, title),
    )


def _render_csv(result: Increments) -> str:
    """Return a CSV with a header and a row per increment: the columns of `Increments`, and last the area's name."""
    csv_lines = strategy_csv(result.columns()).splitlines()
    area_column = ["area", *result.area()]  # header and cells
    return "".join(f"{line},{cell}\n" for line, cell in zip(csv_lines, area_column, strict=True))


def _render_table(result: Increments, title: str) -> str:
    """Return the lines of `_describe_areas`, and a table of means over ranges of timesteps, as one text.

    A range with increments of several areas has all their names. The last column has bars of the mean variance.
    """
    rows = [["t", *_TABLE_COLUMNS.values(), "area", ""]]
    areas = result.area()
    for timesteps in timestep_ranges(len(areas)):
        t = result.t[timesteps]
        times = f"{t[0]:.4g} - {t[-1]:.4g}" if len(t) > 1 else f"{t[0]:.4g}"
        means = {attribute: getattr(result, attribute)[timesteps].mean() for attribute in _TABLE_COLUMNS}
        mean_cells = [f"{mean:.4g}" for mean in means.values()]
        area_names = "/".join(area for area in AREAS if area in areas[timesteps])
        bar = text_bar(means["variance"], largest=result.variance.max())
        rows.append([times, *mean_cells, area_names, bar])
    description = "".join(f"{label:13} {text}\n" for label, text in _describe_areas(result, title).items())
    return f"{description}\n{align_columns(rows)}"


def _describe_areas(result: Increments, title: str) -> dict[str, str]:
    """Return lines about a process, by label: where its areas begin, and number and share of increments in each area.

    The labels are ``process``, ``slows at``, ``converges``, and the areas that have increments. If an area does not
    begin at any time, the line contains the reason, or ``not reached``.

    Args:
        title: process, schedule and number of timesteps, for the first line.
    """
    areas = result.area()
    growth = "evenly" if "steady" in areas else "ever faster"
    convergence = _format_time(result.convergence, "not reached")
    description = {
        "process": f"{title}, x_(t+1) - x_t for t = 0 ... {result.t[-1]:.6g}",
        "slows at": _format_time(result.deceleration, f"no time: the variance grows {growth}"),
        "converges": f"{convergence}, where the magnitude exceeds r = {result.r:g}",
    }
    for area in AREAS:
        count = int((areas == area).sum())
        if count:
            description[area] = f"{count} increments, {100 * count / len(areas):.1f} %"
    return description


def _format_time(t: float | None, otherwise: str) -> str:
    """Return a time as text, such as ``t = 250``, or the text `otherwise` for None."""
    return otherwise if t is None else f"t = {t:.6g}"
