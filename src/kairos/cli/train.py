"""``kairos train``: train one method with one seed, or resume its training run."""

import argparse
from pathlib import Path
from typing import Any

from kairos import resource_usage
from kairos.cli.common import add_timing, demand_option, write_timing
from kairos.cli.jobs import Job, add_job, open_job
from kairos.training.job import StoppedEarly, StopRequest


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `kairos train`."""
    add_job(parser)
    add = parser.add_argument
    add("--out", type=Path, metavar="D", help="folder of the training run; default: in results/<experiment>")
    add("--latents", type=Path, metavar="DIR", help="default: results/<experiment>/latents")
    milestones = "steps of snapshots; default: those of the experiment, or of the segment"
    add("--milestones", type=int, nargs="+", metavar="STEP", help=milestones)
    add("--restart", action="store_true", help="delete the state of this run and start from step 0")
    versions = "resume a checkpoint of other versions of torch or diffusers; pipeline jobs never do"
    add("--accept-versions", action="store_true", help=versions)
    add(
        "--snapshots-only",
        action="store_true",
        help="write only the snapshots, since a later job resumes the training run",
    )
    wait = "wait for another process that trains in this folder; a job with --segment always waits"
    add("--wait", action="store_true", help=wait)
    add_timing(parser)


def run(arguments: argparse.Namespace) -> None:
    """Train one method with one seed, or resume its training run, and write the snapshots to its folder.

    Files read: the experiment file and the latents. Files written to the folder: snapshots, the state to resume from,
    and without ``--snapshots-only`` also checkpoint, metrics and record of the run. A complete run computes no step.

    A request to stop ends training after the current step, with a checkpoint, and its reason is logged. Requests are
    SIGTERM, SIGUSR1, Ctrl-C and the approaching end of a SLURM job. A second Ctrl-C ends the process at once.

    Raises:
        StoppedEarly: training stopped on request; it is raised even if a checkpoint was written, so that the exit
            status is 75, not 0.
        KairosError: see `_train`.
    """
    from kairos.progress import log
    from kairos.training.launch import is_reporting_process

    with StopRequest() as stop_request:  # before the imports of `_train`, which take seconds
        try:
            _train(arguments, stop_request)
        except StoppedEarly as stop:
            if stop.reason and is_reporting_process():  # a launcher has no reason: rank 0 logs it
                log(f"kairos: {stop.reason}; run the same command again to resume")
            raise


def _train(arguments: argparse.Namespace, stop_request: StopRequest) -> None:
    """Check the arguments, and train in this process, or launch the processes of a distributed run and wait for them.

    A complete run returns at once, without a file of ``--timing``. A launched process runs this command again, as one
    rank of the run. The file of ``--timing`` is written by the process that trains, or by rank 0.

    Raises:
        ConfigError: an argument is not allowed.
        StoppedEarly: training stopped on request.
        SystemExit: a launched process failed on another machine, and its error is reported there.
        TemporaryError: a launched process failed, which has recorded its error, or was killed.
        KairosError: training is not possible.
    """
    from kairos.progress import log
    from kairos.training import launch
    from kairos.workflow.final_errors import record_final_error

    job = open_job(arguments)
    milestones = _select_milestones(arguments, job)
    has_default_files = not (arguments.out or arguments.latents or arguments.milestones or arguments.restart)
    if has_default_files and not arguments.snapshots_only and job.has_complete_training():
        log(f"{job.run_folder}: settings, code and inputs are unchanged, 0 steps to do")
        return
    is_distributed = job.experiment.training.processes > 1
    is_launched = launch.local_rank() is not None  # this process is a rank of a distributed run
    if is_distributed and not is_launched:
        launch.launch(job.experiment.training)
        return

    def work() -> None:
        with record_final_error(arguments):  # a rank ends before `main` could record its error
            facts = _train_in_this_process(arguments, job, milestones, stop_request)
        if launch.is_reporting_process():
            timing_file = None if arguments.out else job.timing_file
            write_timing(arguments, timing_file, method=job.method, seed=job.seed, **facts)

    launch.run_rank(work)


def _select_milestones(arguments: argparse.Namespace, job: Job) -> list[int]:
    """Return the steps of the snapshots, ascending and each once: ``--milestones``, or those of segment or experiment.

    Only the steps of the experiment always contain step 0.

    Raises:
        ConfigError: a step is negative.
    """
    steps = job.segment.steps if job.segment else job.experiment.milestones
    milestones = sorted(set(arguments.milestones or steps))
    demand_option(milestones[0] >= 0, "milestones", milestones[0], "0 or more")
    return milestones


def _train_in_this_process(
    arguments: argparse.Namespace, job: Job, milestones: list[int], stop_request: StopRequest
) -> dict[str, Any]:
    """Train as the only process or as one rank, and return the entries of the timing record, see `run.train`.

    Latents are read from a local disk if `staged` copies them. The run reports to the MLflow server of the experiment,
    if it sets one. The end of start-up is marked before. `milestones` are the steps of the snapshots.

    Raises:
        KairosError: a plugin was edited since the run began, or training is not possible.
        StoppedEarly: training stopped on request.
    """
    from kairos.config.plugins import check_unedited
    from kairos.staging import staged
    from kairos.tracking.live import reporting
    from kairos.training.run import import_components, train

    experiment, method, seed, segment = job.experiment, arguments.method, arguments.seed, job.segment
    out = arguments.out or job.run_folder
    latents = arguments.latents or job.results / "latents"
    run_settings = experiment.run_settings(method, seed)
    check_unedited(arguments.config, method, run_settings.method)
    job.check_plan(f"train.{method}", job.validity.describe_stage("train", method)["key"])
    import_components(run_settings)  # now, so that the timing counts the imports as start-up
    resource_usage.end_startup()
    with reporting(experiment, method, seed, out), staged(latents) as local_latents:
        return train(
            run_settings,
            out,
            local_latents,
            milestones,
            restart=arguments.restart,
            snapshots_only=arguments.snapshots_only or (segment is not None and not segment.is_last),
            wait=arguments.wait or segment is not None,
            stop_request=stop_request,
            accept_versions=arguments.accept_versions,
        )
