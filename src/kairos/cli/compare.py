"""``kairos compare``: a table of experiments and methods, or an index of all reports."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kairos.cli.common import demand_option, load_experiment_at
from kairos.stages import RUN_FOLDERS
from kairos_timesteps import errors

if TYPE_CHECKING:
    from kairos.report.collect import Results


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `kairos compare`."""
    add = parser.add_argument
    paths = (
        "results/<experiment>, an experiment file, or results/<experiment>/<method>; with --index: folder of results"
    )
    add("paths", type=Path, nargs="+", metavar="PATH", help=paths)
    add("--format", choices=("table", "csv", "md", "json"), help="default: table")
    baseline = "METHOD or EXPERIMENT/METHOD; default: the uniform method of the first experiment, else its first method"
    add("--baseline", metavar="METHOD", help=baseline)
    metric = (
        "any measured value, such as val_loss_epsilon or kid; default: the metric that the experiment ranks methods by"
    )
    add("--metric", metavar="COLUMN", help=metric)
    at_equal = "compare at the last common step, or after an equal training time; default: steps"
    add("--at-equal", choices=("steps", "seconds"), help=at_equal)
    add("--out", type=Path, metavar="FILE", help="file to write; default: standard output")
    add("--index", action="store_true", help="write a page of all experiments in a folder: PATH/index.html")


def run(arguments: argparse.Namespace) -> None:
    """Read the results of experiments, and print their comparison or write it to ``--out``.

    With ``--index``, a page of all experiments in a folder is written instead, and its path is printed.

    Raises:
        ConfigError: a path, the baseline or the metric is not allowed.
        KairosError: a path is not an experiment, or has no result; with ``--index``, the page contains such errors.
    """
    if arguments.index:
        _write_index(arguments)
    else:
        _compare(arguments)


def _write_index(arguments: argparse.Namespace) -> None:
    """Write a page that lists all experiments in a folder, with their rankings or errors, and print its path.

    Experiments may lack results, and results that cannot be read raise no error. Folders that contain no
    training run are skipped. The page is ``--out``, or index.html in the folder.

    Raises:
        ConfigError: the paths are not a single folder that contains folders of results, or an option of tables is set.
    """
    from kairos.files import write_text
    from kairos.report.collect import collect
    from kairos.report.compare import render_index
    from kairos.report.ranking import compare_methods

    # the page has neither another format nor another comparison
    for option in ("format", "baseline", "metric", "at_equal"):
        value = getattr(arguments, option)
        demand_option(value is None, option, value, "none with --index")
    root, *further_paths = arguments.paths
    folders = []
    if not further_paths and root.is_dir():
        folders = sorted(filter(_is_experiment_folder, root.iterdir()))
    allowed = "one folder that contains folders of results, e.g. results"
    demand_option(folders, "index", " ".join(map(str, arguments.paths)), allowed)
    entries: dict[Path, Any] = {}  # results with their ranking, or the error as text, by folder
    for folder in folders:
        try:
            experiment, _ = load_experiment_at(folder)
            results = collect(experiment, folder, unfinished=True)
            entries[folder] = (results, compare_methods(results.measurements))
        except errors.KairosError as error:
            entries[folder] = str(error)
    out = arguments.out or root / "index.html"
    write_text(out, render_index(entries, out))
    print(out)


def _compare(arguments: argparse.Namespace) -> None:
    """Print the table of a comparison with its warnings, or write both to ``--out``; print notes on standard error.

    Warnings come before the table. They are also printed on standard error, unless standard output shows them as lines.

    Raises:
        ConfigError: the baseline is not among the methods, or not all methods have the metric.
        KairosError: a path is not an experiment, has no valid result, or was evaluated with another protocol. With
            ``--at-equal seconds``, training times are missing or of different machines.
    """
    from kairos.files import write_text
    from kairos.report.compare import (
        build_comparison_table,
        build_equal_time_table,
        comparison_notes,
        format_comparison,
        join_experiments,
        label_warnings,
        list_comparison_warnings,
    )
    from kairos.report.ranking import compare_methods

    experiments = _collect_experiments(arguments.paths)
    measurements = join_experiments(experiments, arguments.baseline, arguments.metric)
    comparisons = compare_methods(measurements)
    if arguments.at_equal == "seconds":
        table = build_equal_time_table(measurements)
    else:
        table = build_comparison_table(measurements, comparisons)
    warnings = list_comparison_warnings(experiments, arguments.metric)
    form = arguments.format or "table"
    text = format_comparison(table, warnings, form)
    if arguments.out:
        write_text(arguments.out, text)
    if arguments.out or form in ("csv", "json"):
        for line in label_warnings(warnings):
            print(f"warning: {line}\n", file=sys.stderr, flush=True)
    if not arguments.out:
        print(text, end="", flush=True)
    for note in comparison_notes(experiments, measurements, comparisons):
        print(f"note: {note}", file=sys.stderr)


def _collect_experiments(paths: list[Path]) -> list[tuple["Results", list[str]]]:
    """Return the results of each experiment with the names of its methods to compare, in the order of the paths.

    Experiments may lack results. An experiment that several paths refer to is collected once, and its methods are
    joined. A method's folder selects that method, even if it has no results. Any other path selects all methods with
    results.

    Args:
        paths: folders of results, experiment files, or folders of methods. A path below an experiment's folder that
            does not exist is treated as the folder of a method.

    Raises:
        ConfigError: the name of a method's folder is not a method of its experiment.
        KairosError: a path is not an experiment, or none of its runs has a valid result.
    """
    from kairos.report.collect import collect

    # results and selected methods; paths of two methods may share an experiment's folder
    by_folder: dict[Path, tuple[Results, list[str]]] = {}
    for path in paths:
        # a path that does not exist, below an experiment's folder, is a mistyped method: the message lists the methods
        may_be_method = not path.exists() or any(path.glob("seed*"))
        above = path.parent.parent if path.parent.name == "methods" else path.parent  # also results/demo/uniform
        is_method = may_be_method and _is_experiment_folder(above)
        experiment_path = above if is_method else path
        experiment, folder = load_experiment_at(experiment_path)
        if is_method:
            allowed = ", ".join(experiment.methods)
            errors.demand(path.name in experiment.methods, f"method of {folder}", path.name, allowed)
        resolved_folder = folder.resolve()
        if resolved_folder not in by_folder:
            by_folder[resolved_folder] = (collect(experiment, folder, unfinished=True), [])
        results, selected_methods = by_folder[resolved_folder]
        methods_of_path = [path.name] if is_method else results.methods
        for method in methods_of_path:
            if method not in selected_methods:
                selected_methods.append(method)
    return list(by_folder.values())


def _is_experiment_folder(folder: Path) -> bool:
    """Return True for the folder of results of one experiment, which contains ``methods/<method>/seed<N>``."""
    return any(folder.glob(RUN_FOLDERS))
