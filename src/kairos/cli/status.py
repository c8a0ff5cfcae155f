"""``kairos status``: how far every training of an experiment is."""

import argparse
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from kairos.cli.common import listen

if TYPE_CHECKING:
    from kairos.status.trainings import Training

_WIDTH = 120


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    where = parser.add_argument
    where("experiment", type=Path, nargs="?", default=Path("params.yaml"), metavar="FILE", help="experiment file, or "
          "its folder of results; default: params.yaml")  # fmt: skip
    where("--watch", type=float, nargs="?", const=10.0, metavar="S", help="again every S seconds (10), until Ctrl-C")
    where("--serve", action="store_true", help="a page for a browser, up to date (--watch: 5), until Ctrl-C")
    where("--port", type=int, default=8008, metavar="N", help="of the page; default: 8008")
    where("--host", default="127.0.0.1", metavar="H", help="of the page, e.g. 0.0.0.0, for all who reach this machine")
    earlier = "delete states of earlier settings, which nothing goes on from"
    where("--remove-unclaimed", action="store_true", help=earlier)


def run(arguments: argparse.Namespace) -> None:
    """Print the stages, then a line per training."""
    from kairos.errors import ConfigError

    if arguments.watch is not None and not 0 < arguments.watch <= 86400:
        raise ConfigError(f"--watch: got {arguments.watch:g}, allowed: seconds, above 0 and at most 86400")
    if arguments.serve:
        return _serve(arguments)
    while True:
        text = status(arguments.experiment, arguments.remove_unclaimed)
        print(("\x1b[H\x1b[J" if arguments.watch and sys.stdout.isatty() else "") + text, flush=True)
        if not arguments.watch:
            return
        time.sleep(arguments.watch)


def _serve(arguments: argparse.Namespace) -> None:
    """Answer browsers until Ctrl-C or SIGTERM."""
    from kairos import clock
    from kairos.progress import say
    from kairos.status.server import Server

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt), listen(arguments.host, arguments.port) as listener:
        server, host = Server(listener, arguments.experiment, arguments.watch or 5.0), arguments.host
        if not server.loopback:
            say(f"--host {host}: whoever reaches this machine can read {server.results}; there is no password")
        print(f"http://{f'[{host}]' if ':' in host else host}:{arguments.port}/\nCtrl-C ends it", flush=True)
        clock.work_begins()
        server.serve_forever()


def status(path: Path, remove_unclaimed: bool = False) -> str:
    """What there is to say of an experiment, in lines of at most 120 columns.

    Args:
        path: experiment file, or its folder of results.
        remove_unclaimed: delete states of earlier settings first.

    Raises:
        KairosError: there is no such experiment, or its file cannot be used.
    """
    from kairos import slurm
    from kairos.status.outline import outline
    from kairos.status.stages import stages
    from kairos.status.trainings import summary, trainings
    from kairos.status.unclaimed import freed, remove, unclaimed

    wanted = outline(path)
    jobs, fault = slurm.jobs(wanted.results)
    found = trainings(wanted, jobs)
    width = min(max(len(_name(training)) for training in found), 40)
    lines = [f"{wanted.results}: {len(found)} trainings: {summary(found)}", stages(wanted)]
    lines += [fault[:_WIDTH]] if fault else [slurm.summary(jobs)] if jobs else []
    if states := unclaimed(wanted, found):
        told = f"{len(states)} state{'s' * (len(states) > 1)} of earlier settings, {freed(states) / 1e6:.3g} MB"
        if remove_unclaimed:
            remove(states)
        advice = ": deleted" if remove_unclaimed else f": kairos status {path} --remove-unclaimed deletes them"
        lines.append(told + advice)
    lines += ["", f"{'training':<{width}}  {'state':<8}  {'step':>17}  {'steps/s':>8}  {'left':>9}  where, why"]
    for training in found:
        lines.append(_line(training, width)[:_WIDTH].rstrip())
        lines += [f"  {training.note}"[:_WIDTH]] if training.logs and training.note else []
        lines += [f"  log: {log}" for log in training.logs]
    return "\n".join(lines)


def _line(training: "Training", width: int) -> str:
    from kairos.progress import duration

    step = f"{training.step}/{'?' if training.of is None else training.of}"
    rate = f"{training.rate:.3g}" if training.rate else ""
    left = duration(training.left) if training.left is not None else ""
    why = ": ".join(part for part in (training.where, "" if training.logs else training.note) if part)
    return f"{_name(training)[:width]:<{width}}  {training.state:<8}  {step:>17}  {rate:>8}  {left:>9}  {why}"


def _name(training: "Training") -> str:
    return f"{training.method} seed {training.seed}"
