"""``kairos compare``: experiments and methods side by side, and an index of all reports."""

import argparse
import sys
from pathlib import Path
from typing import Any

from kairos.cli.common import demand, load_experiment_at
from kairos_timesteps import errors


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    where = parser.add_argument
    where("paths", type=Path, nargs="+", metavar="PATH", help="results/<experiment>, an experiment file, or "
          "results/<experiment>/<method>; with --index the folder of all results")  # fmt: skip
    where("--format", choices=("table", "csv", "md", "json"), default="table", help="default: table")
    where("--baseline", metavar="METHOD", help="or EXPERIMENT/METHOD; default: the first experiment's uniform method")
    where("--out", type=Path, metavar="FILE", help="write it there")
    where("--index", action="store_true", help="write a page over all experiments of a folder: PATH/index.html")


def run(arguments: argparse.Namespace) -> None:
    """Print the comparison, or write it, or the index."""
    from kairos.files import write_text
    from kairos.report.collect import collect
    from kairos.report.compare import (
        build_comparison_table,
        comparison_notes,
        find_ranking_warnings,
        format_table,
        join_experiments,
        render_index,
    )
    from kairos.report.ranking import compare_methods

    if arguments.index:
        (root, *others), entries = arguments.paths, dict[Path, Any]()
        folders = [] if others or not root.is_dir() else sorted(filter(_is_results, root.iterdir()))
        demand(folders, "index", " ".join(map(str, arguments.paths)), "one folder of folders of results, e.g. results")
        for folder in folders:
            try:
                results = collect(load_experiment_at(folder)[0], folder, unfinished=True)
                entries[folder] = results, compare_methods(results)
            except errors.KairosError as error:
                entries[folder] = str(error)
        out = arguments.out or root / "index.html"
        write_text(out, render_index(entries, out))
        print(out)
        return
    sides = _sides(arguments.paths)
    measured = join_experiments(sides, arguments.baseline)
    found = format_table(build_comparison_table(measured), arguments.format)
    for warning in find_ranking_warnings(sides):
        print(f"warning: {warning}\n", file=sys.stderr, flush=True)
    if arguments.out:
        write_text(arguments.out, found)
    print("" if arguments.out else found, end="", flush=True)
    for remark in comparison_notes(sides, measured):
        print(f"note: {remark}", file=sys.stderr)


def _sides(paths: list[Path]) -> list[tuple[Any, list[str]]]:
    """Experiments in the order given, with the methods of each that are compared."""
    from kairos.report.collect import collect

    sides: dict[Path, tuple[Any, list[str]]] = {}
    for path in paths:
        of_method = _is_results(path.parent) and (not path.exists() or any(path.glob("seed*")))
        experiment, folder = load_experiment_at(path.parent if of_method else path)
        allowed = ", ".join(experiment.methods)
        errors.demand(not of_method or path.name in experiment.methods, f"method of {folder}", path.name, allowed)
        if folder.resolve() not in sides:
            sides[folder.resolve()] = collect(experiment, folder, unfinished=True), []
        found, methods = sides[folder.resolve()]
        methods += [one for one in ([path.name] if of_method else found.methods) if one not in methods]
    return list(sides.values())


def _is_results(folder: Path) -> bool:
    return any(folder.glob("*/seed*"))
