"""``kairos status``: how far every training of an experiment is."""

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kairos.status.trainings import Training

_WIDTH = 120


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    where = parser.add_argument
    where("experiment", type=Path, nargs="?", default=Path("params.yaml"), metavar="FILE", help="experiment file, or "
          "its folder of results; default: params.yaml")  # fmt: skip
    where("--watch", type=float, nargs="?", const=10.0, metavar="S", help="again every S seconds (10), until Ctrl-C")
    earlier = "delete states of earlier settings, which nothing goes on from"
    where("--remove-unclaimed", action="store_true", help=earlier)


def run(arguments: argparse.Namespace) -> None:
    """Print the stages, then a line per training."""
    from kairos.errors import ConfigError

    if arguments.watch is not None and not 0 < arguments.watch <= 86400:
        raise ConfigError(f"--watch: got {arguments.watch:g}, allowed: seconds, above 0 and at most 86400")
    while True:
        text = status(arguments.experiment, arguments.remove_unclaimed)
        print(("\x1b[H\x1b[J" if arguments.watch and sys.stdout.isatty() else "") + text, flush=True)
        if not arguments.watch:
            return
        time.sleep(arguments.watch)


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
    from kairos.status.trainings import STATES, trainings
    from kairos.status.unclaimed import freed, remove, unclaimed

    wanted = outline(path)
    jobs, fault = slurm.jobs(wanted.results)
    found = trainings(wanted, jobs)
    counts = {state: sum(training.state == state for training in found) for state in STATES}
    summary = ", ".join(f"{number} {state}" for state, number in counts.items() if number)
    width = min(max(len(_name(training)) for training in found), 40)
    lines = [f"{wanted.results}: {len(found)} trainings: {summary}", stages(wanted)]
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
