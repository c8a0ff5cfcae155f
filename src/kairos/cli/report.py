"""``kairos report`` and ``kairos track``: write the report of an experiment, or import its results into MLflow."""

import argparse
from pathlib import Path

from kairos.cli.common import add_timing, load_experiment_at, write_timing


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `report` or `track`; only `track` has ``--out``.

    Exactly one of ``--config`` and PATH is required.
    """
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--config", type=Path, metavar="F", help="experiment file; its results must be complete")
    path = "experiment file or folder of results; "
    path += "missing results are listed in the report" if name == "report" else "its results must be complete"
    group.add_argument("path", type=Path, nargs="?", metavar="PATH", help=path)
    parser.add_argument("--results", type=Path, metavar="DIR", help="results folder (default: results/<experiment>)")
    if name == "track":
        out = "record of the import to write (default: tracking.json in the results folder)"
        parser.add_argument("--out", type=Path, metavar="F", help=out)
    add_timing(parser)


def run(arguments: argparse.Namespace) -> None:
    """Read the results of an experiment, and write its report or import the results into MLflow.

    `report` writes tables, figures and the page into the folder of results, and prints the path of the page. `track`
    writes runs into MLflow's store and a record of the import; an error of the store is logged and
    recorded, but not raised. The folder is ``--results``, or by default the folder of the experiment file or the folder
    PATH. The time of the job is recorded with ``--timing`` or ``--config``.

    Raises:
        KairosError: results are missing. `report` with PATH accepts that, unless no training run has results.
    """
    from kairos import resource_usage
    from kairos.files import read_record, sha256_file, write_record
    from kairos.validity import Result, Validity

    experiment, default_results = load_experiment_at(arguments.path or arguments.config)  # the parser requires one
    results = arguments.results or default_results
    if arguments.command == "report":
        from kairos.report.build import build_report

        resource_usage.end_startup()
        validity = Validity(experiment, results)
        computed_from = validity.describe(Result("report"))
        page = build_report(experiment, results, unfinished=arguments.path is not None)
        print(f"report: {page}")
        if page.name == "report.html":
            files = {name: sha256_file(results / name) for name in (page.name, "summary.csv")}
            write_record(results / "report.json", {"files": files, "computed_from": computed_from})
    else:
        from kairos.tracking.track import track

        validity = Validity(experiment, results)
        computed_from = validity.describe(Result("track"))
        out = arguments.out or results / "tracking.json"
        track(experiment, results, out)  # marks the end of start-up itself
        if read_record(out)["imported"]:  # otherwise the next run of the pipeline imports again
            write_record(out, {**read_record(out), "computed_from": computed_from})
    write_timing(arguments, results / "logs" / f"{arguments.command}.timing.json" if arguments.config else None)
