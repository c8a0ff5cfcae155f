"""``kairos analyse``: an analysis of one milestone, or its table and figure."""

import argparse
from pathlib import Path

from kairos.cli.common import add_config, add_timing, demand, set_up_device, write_timing


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """The experiment, which of its analyses, and what is looked at."""
    add, parser.epilog = parser.add_argument, "Without --milestone: analyses/NAME.csv and .png of what was measured."
    add_config(parser)
    add("--analysis", required=True, metavar="NAME", help="one that the experiment asks for")
    add("--results", type=Path, metavar="DIR", help="results folder (default: results/<experiment>)")
    add("--milestone", type=Path, metavar="D", help="measure this milestone alone")
    add("--out", type=Path, metavar="F", help="with --milestone: CSV file to write")
    add_timing(parser)


def run(arguments: argparse.Namespace) -> None:
    """Measure, or draw."""
    from kairos.config import load

    a, experiment = arguments, load(arguments.config)
    asked = {named["name"]: named for named in experiment.analyses}
    demand(a.analysis in asked, "analysis", a.analysis, f"{', '.join(asked) or 'none'}: what {a.config} asks for")
    demand((a.milestone is None) == (a.out is None), "out", a.out, "a CSV file with --milestone, none without")
    from kairos import resource_usage
    from kairos.analyses import tables
    from kairos.analyses.registries import ANALYSES
    from kairos.report.analysis_figures import write_analysis

    entry, results = ANALYSES.entry(a.analysis), a.results or Path("results", experiment.experiment)
    entry.load()  # its imports are start-up
    resource_usage.end_startup()
    if a.milestone is None:
        write_analysis(asked[a.analysis], experiment, results)
    else:
        allowed = f"none: {a.analysis} looks at no single milestone"
        demand(entry.facts["reads"] == "milestone", "milestone", a.milestone, allowed)
        tables.measure_snapshot(asked[a.analysis], a.milestone, results / "latents", a.out, set_up_device(experiment))
    write_timing(arguments)
