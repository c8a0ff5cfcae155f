"""``kairos train``."""

import argparse
from pathlib import Path

from kairos import resource_usage
from kairos.cli.common import add_config, add_timing, demand, write_timing
from kairos.training.job import StoppedEarly, StopRequest


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_config(parser)
    add = parser.add_argument
    add("--method", required=True, metavar="M", help="one of the experiment's methods")
    add("--seed", required=True, type=int, metavar="N", help="seed of the training")
    add("--out", required=True, type=Path, metavar="D", help="folder of the training")
    add("--latents", type=Path, metavar="DIR", help="default: results/<experiment>/latents")
    add("--milestones", type=int, nargs="+", metavar="STEP", help="default: all of the experiment's")
    add("--until", type=int, metavar="STEP", help="stop at this milestone")
    add("--restart", action="store_true", help="forget the state and start from step 0")
    other = "go on from a state that other versions of torch or diffusers have computed; jobs of a pipeline never do"
    add("--accept-versions", action="store_true", help=other)
    add("--part", action="store_true", help="a later job goes on: publish the milestones only")
    add("--wait", action="store_true", help="wait for a process that trains here already")
    add_timing(parser)


def run(arguments: argparse.Namespace) -> None:
    """Train, or go on training."""
    from kairos.progress import say
    from kairos.training.launch import is_reporting_process

    with StopRequest() as leave:  # from here on: imports take a while
        try:
            _run(arguments, leave)
        except StoppedEarly as left:
            if left.reason and is_reporting_process():
                say(f"kairos: {left.reason}; the same command goes on from there")
            raise


def _run(arguments: argparse.Namespace, leave: StopRequest) -> None:
    from kairos.config import load
    from kairos.config.plugins import check_unedited
    from kairos.training import launch

    experiment, method, seed, out = load(arguments.config), arguments.method, arguments.seed, arguments.out
    demand(method in experiment.methods, "method", repr(method), ", ".join(experiment.methods))
    demand(seed >= 0, "seed", seed, "0 or more")
    milestones = sorted(set(arguments.milestones or experiment.milestones))
    demand(milestones[0] >= 0, "milestones", milestones[0], "0 or more")
    if arguments.until is not None:
        milestones = [step for step in milestones if step <= arguments.until]
        demand(arguments.until in milestones, "until", arguments.until, f"one of {list(experiment.milestones)}")
    latents = arguments.latents or Path("results") / experiment.experiment / "latents"
    several = experiment.training.processes > 1
    if several and launch.local_rank() is None:
        launch.launch(experiment.training)
        return

    with launch.report_first_failure():
        if several:
            launch.die_with_launcher()
        from kairos.staging import staged
        from kairos.tracking.live import reporting
        from kairos.training.run import import_components, train

        plain = experiment.plain()
        check_unedited(arguments.config, method, plain["methods"][method])
        import_components(plain, method)
        resource_usage.end_startup()
        switches = {name: getattr(arguments, name) for name in ("restart", "wait", "accept_versions")}
        switches["milestones_only"] = arguments.part
        with reporting(experiment, method, seed, out), staged(latents) as read:
            done = train(plain, method, seed, out, read, milestones, stop_request=leave, **switches)
        if launch.is_reporting_process():
            write_timing(arguments, method=method, seed=seed, **done)
