"""``kairos report`` and ``kairos track``: what is made of an experiment's results."""

import argparse
from pathlib import Path

from kairos.cli.common import add_config, add_timing, write_timing


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `report` or `track`."""
    add_config(parser)
    parser.add_argument("--results", type=Path, metavar="DIR", help="results folder (default: results/<experiment>)")
    if name == "track":
        what = "what was imported, e.g. tracking.json"
        parser.add_argument("--out", type=Path, required=True, metavar="F", help=what)
    add_timing(parser)


def run(arguments: argparse.Namespace) -> None:
    """Make the report, or import the results into MLflow."""
    from kairos import clock
    from kairos.config import load

    experiment = load(arguments.config)
    results = arguments.results or Path("results") / experiment.experiment
    if arguments.command == "report":
        from kairos.report.build import build

        clock.work_begins()
        build(experiment, results)
    else:
        from kairos.tracking.track import track

        track(experiment, results, arguments.out)
    write_timing(arguments)
