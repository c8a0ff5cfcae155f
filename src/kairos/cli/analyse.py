"""``kairos analyse``: measure one snapshot for an analysis, or write table and figure of an analysis."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from kairos.cli.common import add_config, add_timing, demand_option, set_up_device, write_timing

if TYPE_CHECKING:
    from kairos.analyses.settings import AnalysisOptions
    from kairos.config import Experiment


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `kairos analyse`."""
    parser.epilog = "Without --milestone: write analyses/NAME.csv and .png from the measurements."
    add = parser.add_argument
    add_config(parser)
    add("--analysis", required=True, metavar="NAME", help="name of an analysis of the experiment")
    add("--results", type=Path, metavar="DIR", help="results folder (default: results/<experiment>)")
    add("--milestone", type=Path, metavar="D", help="measure only this snapshot")
    add("--out", type=Path, metavar="F", help="with --milestone: CSV file to write")
    add_timing(parser)


def run(arguments: argparse.Namespace) -> None:
    """Measure one snapshot for an analysis, or write table and figure of the analysis.

    With ``--milestone``, that snapshot is measured on the latents in the folder of results, and the measurements are
    written to the CSV file in ``--out``. Without, the results are read, and ``analyses/NAME.csv`` and ``.png`` are
    written into their folder. The folder of results is ``--results``, or by default results/<experiment>. With
    ``--timing``, the time of the job is recorded.

    Raises:
        ConfigError: the experiment has no such analysis, only one of ``--milestone`` and ``--out`` is set, or the
            analysis does not measure single snapshots.
        KairosError: the latents, the measurements or the training time of a run are missing, or a file is damaged.
        FileNotFoundError: the snapshot is missing, or another result that the analysis reads.
    """
    from kairos.config import load

    experiment, snapshot = load(arguments.config), arguments.milestone
    analysis = _select_analysis(arguments, experiment)
    both_or_neither = (snapshot is None) == (arguments.out is None)
    demand_option(both_or_neither, "out", arguments.out, "a CSV file with --milestone, none without")

    # imported after the checks of the arguments, since it takes seconds
    from kairos import resource_usage
    from kairos.analyses import tables

    analysis.load()  # its imports belong to start-up
    results = arguments.results or Path("results", experiment.experiment)
    if snapshot is None:
        from kairos.report.analysis_figures import write_analysis  # imports matplotlib, which measurements do not need

        resource_usage.end_startup()
        write_analysis(analysis, experiment, results)
    else:
        resource_usage.end_startup()
        measures_snapshots = analysis.reads == "milestone"
        demand_option(
            measures_snapshots, "milestone", snapshot, f"none: {analysis.name} does not measure single snapshots"
        )
        tables.measure_snapshot(
            analysis,
            snapshot=snapshot,
            latents=results / "latents",
            out=arguments.out,
            device=set_up_device(experiment),
        )
    write_timing(arguments)


def _select_analysis(arguments: argparse.Namespace, experiment: "Experiment") -> "AnalysisOptions":
    """Return the analysis of the experiment that ``--analysis`` names.

    Raises:
        ConfigError: the experiment has no such analysis; the message lists its analyses.
    """
    analyses = {analysis.name: analysis for analysis in experiment.analyses}
    if analyses:
        allowed = f"{', '.join(analyses)}: the analyses of {arguments.config}"
    else:
        allowed = f"none, as {arguments.config} has no analyses"
    demand_option(arguments.analysis in analyses, "analysis", arguments.analysis, allowed)
    return analyses[arguments.analysis]
