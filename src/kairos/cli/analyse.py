"""``kairos analyse``: measure one snapshot for an analysis, or write table and figure of an analysis."""

import argparse
from pathlib import Path

from kairos.cli.common import add_config, add_timing, demand, set_up_device, write_timing


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.epilog = "Without --milestone: write analyses/NAME.csv and .png from the measurements."
    add = parser.add_argument
    add_config(parser)
    add("--analysis", required=True, metavar="NAME", help="name of an analysis of the experiment")
    add("--results", type=Path, metavar="DIR", help="results folder (default: results/<experiment>)")
    add("--milestone", type=Path, metavar="D", help="measure only this snapshot")
    add("--out", type=Path, metavar="F", help="with --milestone: CSV file to write")
    add_timing(parser)


def run(arguments: argparse.Namespace) -> None:
    """Measure a snapshot, or write table and figure."""
    from kairos.config import load

    a, experiment = arguments, load(arguments.config)
    analyses = {settings["name"]: settings for settings in experiment.analyses}
    allowed = f"{', '.join(analyses) or 'none'}: the analyses of {a.config}"
    demand(a.analysis in analyses, "analysis", a.analysis, allowed)
    has_both = (a.milestone is None) == (a.out is None)
    demand(has_both, "out", a.out, "a CSV file with --milestone, none without")
    from kairos import resource_usage
    from kairos.analyses import tables
    from kairos.analyses.registries import ANALYSES
    from kairos.report.analysis_figures import write_analysis

    entry, results = ANALYSES.entry(a.analysis), a.results or Path("results", experiment.experiment)
    entry.load()  # its imports count as start-up
    resource_usage.end_startup()
    if a.milestone is None:
        write_analysis(analyses[a.analysis], experiment, results)
    else:
        allowed = f"none: {a.analysis} does not measure single snapshots"
        demand(entry.facts["reads"] == "milestone", "milestone", a.milestone, allowed)
        tables.measure_snapshot(
            analyses[a.analysis], a.milestone, results / "latents", a.out, set_up_device(experiment)
        )
    write_timing(arguments)
