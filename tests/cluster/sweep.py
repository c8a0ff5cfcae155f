"""The first run of the small pipeline on SLURM: the controller of its training runs is killed and started again."""

import os
import signal
import time
from dataclasses import dataclass

from pipeline import Pipeline, Training
from slurm import wait_for

from kairos.files import sha256_file

TRAININGS = max(2, int(os.environ.get("KAIROS_SWEEP", "2")))  # make test-cluster KAIROS_SWEEP=200: hours on two CPUs
KILLS = 1 if TRAININGS < 16 else 2


@dataclass(frozen=True)
class Sweep:
    """A pipeline whose report is complete although its controller was killed.

    Attributes:
        pipeline: the pipeline.
        seeds: number of seeds of each method.
        complete: hash of the record, and number of jobs, of each training run that was complete before the last
            controller started.
        seconds: seconds from the first controller to the report.
    """

    pipeline: Pipeline
    seeds: int
    complete: dict[Training, tuple[str, int]]
    seconds: float

    @property
    def trainings(self) -> list[Training]:
        """Training runs of the pipeline."""
        methods = self.pipeline.tiny["methods"]
        return [self.pipeline.training(method, seed) for method in methods for seed in range(self.seeds)]


def run_sweep(pipeline: Pipeline) -> Sweep:
    """Run a new pipeline up to its report, and kill its controller while a training run is complete and another not."""
    sweep = Sweep(pipeline, seeds=TRAININGS // len(pipeline.tiny["methods"]), complete={}, seconds=0)
    pipeline.configure(seeds=sweep.seeds)
    start = time.monotonic()
    for _ in range(KILLS):
        start_and_kill_controller(pipeline, sweep.trainings)
    complete = [training for training in sweep.trainings if training.complete()]
    seen = {training: (record_hash(training), len(training.jobs())) for training in complete}
    pipeline.run(seconds=60 * TRAININGS + 900)
    return Sweep(pipeline, sweep.seeds, seen, time.monotonic() - start)


def record_hash(training: Training) -> str:
    """Return the hash of the record of a complete training run."""
    return sha256_file(training.folder / "training.json")


def start_and_kill_controller(pipeline: Pipeline, trainings: list[Training]) -> None:
    """Start a controller, and kill it when another training run is complete.

    A training run of the method `uniform` is stopped until then, so that it is not complete.
    """
    before = sum(training.complete() for training in trainings)

    def computing() -> list[Training]:
        """Return the runs of `uniform` that compute."""
        return [
            training
            for training in trainings
            if training.method == "uniform" and training.has_checkpoint() and not training.complete()
        ]

    with pipeline.controller() as controller:
        wait_for(computing, 1800, "a training run of the method uniform")
        stopped = computing()[0].pid()
        os.kill(stopped, signal.SIGSTOP)
        try:
            wait_for(
                lambda: sum(training.complete() for training in trainings) > before, 1800, "a complete training run"
            )
            controller.process.send_signal(signal.SIGKILL)
            controller.process.wait()
        finally:
            os.kill(stopped, signal.SIGCONT)
