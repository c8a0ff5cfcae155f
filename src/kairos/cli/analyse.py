"""``kairos analyse``: measure one snapshot for an analysis, or write table and figure of an analysis."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from kairos.cli.common import add_config, add_timing, demand_option, set_up_device, write_timing
from kairos.snapshots import step_name

if TYPE_CHECKING:
    from kairos.analyses.settings import AnalysisOptions
    from kairos.config import Experiment


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `kairos analyse`."""
    parser.epilog = "Without --step: write analyses/NAME.csv and .png from the measurements."
    add = parser.add_argument
    add_config(parser)
    add("--analysis", required=True, metavar="NAME", help="name of an analysis of the experiment")
    add("--results", type=Path, metavar="DIR", help="results folder (default: results/<experiment>)")
    add("--step", type=int, metavar="STEP", help="measure only the snapshot of this step of a training run")
    add("--method", metavar="M", help="with --step: method of the training run")
    add("--seed", type=int, metavar="N", help="with --step: seed of the training run")
    add_timing(parser)


def run(arguments: argparse.Namespace) -> None:
    """Measure one snapshot for an analysis, or write table and figure of the analysis.

    With ``--step``, the snapshot of a training run is measured on the latents in the folder of results, and the
    measurements are written to the folder of the training run. Without, the results are read, and
    ``analyses/NAME.csv`` and ``.png`` are written into their folder. The time of the job is recorded, unless
    ``--results`` is set without ``--timing``.

    Raises:
        ConfigError: the experiment has no such analysis or method, only some of ``--step``, ``--method`` and ``--seed``
            are set, or the analysis does not measure single snapshots.
        KairosError: the latents, the measurements or the training time of a run are missing, or a file is damaged.
        FileNotFoundError: the snapshot is missing, or another result that the analysis reads.
    """
    from kairos.cli.jobs import open_job

    job = open_job(arguments)
    analysis, step = _select_analysis(arguments, job.experiment), arguments.step
    for option in ("method", "seed"):
        value = getattr(arguments, option)
        demand_option((value is None) == (step is None), option, value, "a value with --step, none without")
    measures_snapshots = analysis.reads == "snapshot"
    demand_option(step is None or measures_snapshots, "step", step, f"none: {analysis.name} measures no snapshots")

    # imported after the checks of the arguments, since it takes seconds
    from kairos import resource_usage
    from kairos.analyses import tables
    from kairos.analyses.settings import snapshot_table_path
    from kairos.validity import Result

    analysis.load()  # its imports belong to start-up
    results = arguments.results or job.results
    if step is None:
        from kairos.report.analysis_figures import write_analysis  # imports matplotlib, which measurements do not need

        result = Result(f"analyse_{analysis.name}")
        files = tuple(results / "analyses" / f"{analysis.name}.{suffix}" for suffix in ("csv", "png"))
        timing_file = job.layout.timing_file(f"analyse_{analysis.name}")
    else:
        name = step_name(step)
        result = Result(f"measure_{analysis.name}", job.method, job.seed, name)
        files = (Path(snapshot_table_path(results, analysis.name, arguments.method, arguments.seed, step)),)
        timing_file = job.layout.timing_file(f"measure_{analysis.name}.{job.method}.seed{job.seed}.{name}")
    resource_usage.end_startup()

    def write() -> None:
        if step is None:
            write_analysis(analysis, job.experiment, results)
        else:
            tables.measure_snapshot(
                analysis,
                snapshot=results / job.run_folder.relative_to(job.results) / "snapshots" / step_name(step),
                latents=results / "latents",
                out=files[0],
                device=set_up_device(job.experiment),
            )
        write_timing(arguments, None if arguments.results else Path(timing_file))

    if arguments.results:  # not the folder of the pipeline
        write()
    else:
        job.compute(result, write, files)


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
