"""The controller is killed and started again: nothing is lost, nothing is done twice."""

import os
import signal
import time

import pytest
from pipeline import RESULTS, Pipeline, Training, all_jobs
from slurm import wait_for

from kairos.files import read_json, sha256_file

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(6 * 3600)]

TRAININGS = int(os.environ.get("KAIROS_SWEEP", "4"))  # make test-cluster KAIROS_SWEEP=200: hours on two processors


def kill_on_the_way(pipeline: Pipeline, trainings: list[Training]) -> None:
    """Start a controller, and kill it when another training is complete and some still run."""
    before = sum(each.complete() for each in trainings)
    with pipeline.controller() as controller:
        wait_for(lambda: sum(each.complete() for each in trainings) > before, 1800, "a training of the sweep")
        wait_for(
            lambda: any(
                job.rule.startswith("rule_train") and job.state == "RUNNING" for job in all_jobs(pipeline.folder)
            ),
            60,
            "a job",
        )
        controller.process.send_signal(signal.SIGKILL)


def test_a_sweep_survives_its_controller(pipeline: Pipeline, table: list[tuple[str, ...]]) -> None:
    methods = {f"sweep_{name}": method for name, method in pipeline.tiny["methods"].items()}
    seeds, steps, kills = TRAININGS // len(methods), 50, 1 if TRAININGS < 16 else 2
    pipeline.configure(methods, seeds, milestones=[steps])
    trainings = [pipeline.training(method, seed) for method in methods for seed in range(seeds)]
    begun = time.monotonic()
    for _ in range(kills):
        kill_on_the_way(pipeline, trainings)
    complete = {each: sha256_file(each.folder / "training.json") for each in trainings if each.complete()}
    jobs = {each: len(each.jobs()) for each in complete}
    pipeline.run(seconds=60 * TRAININGS + 600)

    assert all(each.lengths() == [steps] for each in trainings)  # every step computed once, by one job
    for each, written in complete.items():
        assert sha256_file(each.folder / "training.json") == written
        assert len(each.jobs()) == jobs[each]
    record = read_json(pipeline.folder / RESULTS / "tracking.json")
    assert record["imported"]
    assert sorted(record["runs"]) == sorted(f"{each.method}/seed{each.seed}" for each in trainings)
    assert len(set(record["runs"].values())) == len(trainings)
    assert pipeline.to_do() == {}
    done = f"The controller of {len(trainings)} trainings is killed (SIGKILL) {kills} times and started again."
    happened = f"{len(complete)} were complete and stayed; all are in the report and in MLflow, each step computed once"
    table.append((done, happened, f"{time.monotonic() - begun:.0f}", ""))


def test_an_edit_between_two_controllers_replaces_the_job_of_the_first(pipeline: Pipeline) -> None:
    pipeline.configure({"edited": {"sampler": "uniform"}}, milestones=[20_000])
    training = pipeline.training("edited")
    with pipeline.controller("--", training.end) as controller:
        wait_for(training.has_checkpoint, 300, "the first checkpoint")
        controller.process.send_signal(signal.SIGKILL)
    pipeline.configure({"edited": {"sampler": "speed"}}, milestones=[50])
    said = pipeline.run("--", training.end)
    first, second = training.jobs()
    assert f"SLURM job {first.number} of an earlier run computes" in said
    assert (first.state, second.state) == ("CANCELLED", "COMPLETED")
    assert training.lengths() == [50]
