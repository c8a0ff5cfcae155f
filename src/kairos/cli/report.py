"""``kairos report`` and ``kairos track``: what is made of an experiment's results."""

import argparse
from pathlib import Path

from kairos.cli.common import add_timing, load_experiment_at, write_timing


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `report` or `track`."""
    either = parser.add_mutually_exclusive_group(required=True)
    either.add_argument("--config", type=Path, metavar="F", help="experiment file; all of its results must be there")
    what = "experiment file or folder of results; the report shows what is there, and says so where that is not all"
    either.add_argument("path", type=Path, nargs="?", metavar="PATH", help=what)
    parser.add_argument("--results", type=Path, metavar="DIR", help="results folder (default: results/<experiment>)")
    if name == "track":
        what = "what was imported, e.g. tracking.json"
        parser.add_argument("--out", type=Path, required=True, metavar="F", help=what)
    add_timing(parser)


def run(arguments: argparse.Namespace) -> None:
    """Make the report, or import the results into MLflow."""
    from kairos import resource_usage

    experiment, found = load_experiment_at(arguments.path or arguments.config)
    results = arguments.results or found
    if arguments.command == "report":
        from kairos.report.build import build_report

        resource_usage.end_startup()
        made = build_report(experiment, results, unfinished=arguments.path is not None)
        print(f"report: {made}")
    else:
        from kairos.tracking.track import track

        track(experiment, results, arguments.out)
    write_timing(arguments)
