"""Tests that a killed and restarted controller loses no job and computes nothing twice."""

import os
import signal
import time

import pytest
from pipeline import RESULTS, Job, Pipeline, Training, all_jobs
from slurm import wait_for

from kairos.files import read_json, sha256_file

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(6 * 3600)]

TRAININGS = int(os.environ.get("KAIROS_SWEEP", "4"))  # make test-cluster KAIROS_SWEEP=200: hours on two CPUs


def start_and_kill_controller(pipeline: Pipeline, trainings: list[Training]) -> None:
    """Start a controller, and kill it when another training run is complete and some are still running."""
    before = sum(training.complete() for training in trainings)
    with pipeline.controller() as controller:
        wait_for(
            lambda: sum(training.complete() for training in trainings) > before, 1800, "a training run of the sweep"
        )
        wait_for(lambda: any(is_training(job) for job in all_jobs(pipeline.folder)), 60, "a training job")
        controller.process.send_signal(signal.SIGKILL)


def is_training(job: Job) -> bool:
    """Return True if a training job is running."""
    return job.rule.startswith("rule_train") and job.state == "RUNNING"


def test_a_sweep_survives_its_controller(pipeline: Pipeline, table: list[tuple[str, ...]]) -> None:
    methods = {f"sweep_{name}": method for name, method in pipeline.tiny["methods"].items()}
    seeds, steps, kills = TRAININGS // len(methods), 50, 1 if TRAININGS < 16 else 2
    pipeline.configure(methods, seeds, milestones=[steps])
    trainings = [pipeline.training(method, seed) for method in methods for seed in range(seeds)]
    start = time.monotonic()
    for _ in range(kills):
        start_and_kill_controller(pipeline, trainings)
    complete = [training for training in trainings if training.complete()]
    hashes = {training: sha256_file(training.folder / "training.json") for training in complete}
    job_counts = {training: len(training.jobs()) for training in complete}
    pipeline.run(seconds=60 * TRAININGS + 600)

    assert all(training.steps_of_jobs() == [steps] for training in trainings)  # one job computed each step once
    for training in complete:
        assert sha256_file(training.folder / "training.json") == hashes[training]
        assert len(training.jobs()) == job_counts[training]
    record = read_json(pipeline.folder / RESULTS / "tracking.json")
    assert record["imported"]
    assert sorted(record["runs"]) == sorted(f"{training.method}/seed{training.seed}" for training in trainings)
    assert len(set(record["runs"].values())) == len(trainings)
    assert pipeline.to_do() == {}
    disturbance = f"The controller of {len(trainings)} training runs is killed (SIGKILL) {kills} times and restarted."
    effect = (
        f"{len(complete)} were complete and unchanged; all are in the report and in MLflow, each step computed once"
    )
    table.append((disturbance, effect, f"{time.monotonic() - start:.0f}", ""))


def test_an_edit_between_two_controllers_replaces_the_job_of_the_first(pipeline: Pipeline) -> None:
    pipeline.configure({"edited": {"sampler": "uniform"}}, milestones=[20_000])
    training = pipeline.training("edited")
    with pipeline.controller("--", training.target) as controller:
        wait_for(training.has_checkpoint, 300, "the first checkpoint")
        controller.process.send_signal(signal.SIGKILL)
    pipeline.configure({"edited": {"sampler": "speed"}}, milestones=[50])
    output = pipeline.run("--", training.target)
    first, second = training.jobs()
    assert f"SLURM job {first.number} of an earlier run computes" in output
    assert (first.state, second.state) == ("CANCELLED", "COMPLETED")
    assert training.steps_of_jobs() == [50]
