"""Tests of the pipeline with several executors, also under random kills."""

import os
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from contextlib import suppress

import pytest
from pipeline import KAIROS, Job, Pipeline, Training, all_jobs
from slurm import slurm, wait_for

from kairos.files import hash_folder

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]
SUBMIT = (
    "sbatch --parsable --cpus-per-task={threads} --mem={resources.mem_mb} --time={resources.runtime} --output=/dev/null"
)
STATUS = """#!/bin/sh
state=$(squeue --noheader --states=all --jobs="$1" --format=%T)
case "$state" in
    COMPLETED) echo success ;;
    PENDING | CONFIGURING | RUNNING | COMPLETING) echo running ;;
    *) echo failed ;;
esac
"""


_CHECKS = ("--slurm-status-command", "squeue", "--slurm-init-seconds-before-status-checks", "1")
EXECUTORS = {
    "kairos": KAIROS,
    "slurm": ("--executor", "slurm", *_CHECKS),
    "slurm with job arrays": ("--executor", "slurm", *_CHECKS, "--slurm-array-jobs", "all"),
    "cluster-generic": (
        "--executor", "cluster-generic", "--cluster-generic-submit-cmd", SUBMIT,
        "--cluster-generic-status-cmd", "./status.sh", "--cluster-generic-cancel-cmd", "scancel",
    ),
}  # fmt: skip
KILLS = int(os.environ.get("KAIROS_KILLS", "3"))  # make test-cluster KAIROS_KILLS=20


@pytest.fixture(autouse=True)
def status_command(pipeline: Pipeline) -> None:
    """Write the command by which cluster-generic asks for the state of a job."""
    (pipeline.folder / "status.sh").write_text(STATUS)
    (pipeline.folder / "status.sh").chmod(0o755)


@pytest.mark.parametrize("executor", ["slurm with job arrays", "cluster-generic"])
def test_results_are_equal_with_an_executor_that_knows_nothing_of_kairos(pipeline: Pipeline, executor: str) -> None:
    before = hash_results(pipeline)
    for training in trainings(pipeline):
        shutil.rmtree(training.folder)
    job_count = len(all_jobs(pipeline.folder))
    with pipeline.controller("--until", "evaluate", executor=EXECUTORS[executor]) as controller:
        controller.wait_for_success()
    assert len(all_jobs(pipeline.folder)) > job_count
    assert hash_results(pipeline) == before


on_demand = pytest.mark.skipif("KAIROS_KILLS" not in os.environ, reason="minutes: make test-cluster KAIROS_KILLS=20")


@pytest.mark.parametrize(
    "executor", ["kairos", pytest.param("slurm", marks=on_demand), pytest.param("cluster-generic", marks=on_demand)]
)
def test_kills_at_random_moments_change_no_result(
    pipeline: Pipeline, executor: str, table: list[tuple[str, ...]]
) -> None:
    """Controllers and jobs are killed, cancelled, requeued and interrupted; the same command runs until it succeeds.

    If it succeeds before the last disturbance, the training runs are deleted and computed again.
    """
    before = hash_results(pipeline)
    steps = pipeline.tiny["training"]["milestones"][-1]
    choose, kills, start = random.Random(executor), Counter[str](), time.monotonic()
    while kills.total() < KILLS:
        for training in trainings(pipeline):
            shutil.rmtree(training.folder)
        while not run_with_kills(pipeline, executor, choose, kills):
            assert time.monotonic() - start < 60 * (KILLS + 10)
        assert [sum(training.steps_of_jobs()) for training in trainings(pipeline)] == [steps] * len(trainings(pipeline))
        assert hash_results(pipeline) == before
        wait_for(lambda: not list_active(pipeline), 300, "the end of jobs of killed controllers")
    counts = ", ".join(f"{kind} {count}" for kind, count in sorted(kills.items()))
    table.append((f"{executor}: {counts}", "", f"{time.monotonic() - start:.0f}", "yes"))


def run_with_kills(pipeline: Pipeline, executor: str, choose: random.Random, kills: Counter[str]) -> bool:
    """Run the pipeline with disturbances at random moments until there are `KILLS`; return True if it succeeds."""
    with pipeline.controller("--until", "evaluate", executor=EXECUTORS[executor]) as controller:
        while kills.total() < KILLS:
            with suppress(subprocess.TimeoutExpired):
                controller.process.wait(choose.uniform(3, 15))
                break
            kills[disturb(choose, pipeline, controller.process)] += 1
        return controller.process.wait(900) == 0


def list_active(pipeline: Pipeline) -> list[Job]:
    """Return the jobs that wait or run."""
    return [job for job in all_jobs(pipeline.folder) if job.state in ("PENDING", "RUNNING", "COMPLETING")]


def trainings(pipeline: Pipeline) -> list[Training]:
    """Return the training runs of the experiment."""
    return [pipeline.training(method) for method in pipeline.tiny["methods"]]


def hash_results(pipeline: Pipeline) -> list[object]:
    """Return the hashes of the components, samples and evaluations of all training runs."""
    hashes: list[object] = []
    for training in trainings(pipeline):
        hashes += [training.components(), *(hash_folder(training.folder / name) for name in ("samples", "evaluation"))]
    return hashes


def disturb(choose: random.Random, pipeline: Pipeline, controller: "subprocess.Popen[bytes]") -> str:
    """Disturb the controller or a running job at random; return what happened."""
    kind = choose.choice(["controller killed", "controller interrupted", "cancelled", "requeued", "job killed"])
    jobs = [job for job in list_active(pipeline) if job.state == "RUNNING"]
    if kind == "controller interrupted":
        controller.send_signal(signal.SIGINT)
    elif kind == "controller killed" or not jobs:
        controller.kill()
        kind = "controller killed"
    else:
        commands = {
            "cancelled": ("scancel",),
            "requeued": ("scontrol", "requeue"),
            "job killed": ("scancel", "--signal=KILL", "--full"),
        }
        number = choose.choice(jobs).number
        with suppress(RuntimeError):  # it has just ended
            slurm(*commands[kind], number)
    return kind
