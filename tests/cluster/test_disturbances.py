"""Tests that disturbances of a training run's SLURM job, such as preemption, do not change its result.

One training run runs under several names at once, each with another disturbance. The checkpoint and metrics of every
run must equal those of the undisturbed run.
"""

import os
import re
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime, timedelta

import pytest
from pipeline import Job, Pipeline, Training, details, environment, term_is_pending
from slurm import slurm, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3600)]


def scancel(training: Training, job: Job) -> None:
    """The job is cancelled (scancel)."""
    slurm("scancel", job.number)


def requeue(training: Training, job: Job) -> None:
    """The job is preempted (scontrol requeue)."""
    slurm("scontrol", "requeue", job.number)


def time_limit(training: Training, job: Job) -> None:
    """The job's time limit is shorter than its work."""
    pid = training.pid()
    os.kill(pid, signal.SIGSTOP)  # a stopped process outlasts the limit on any machine; limits are whole minutes
    try:
        hours, minutes, _ = details(job)["RunTime"].split(":")
        slurm("scontrol", "update", f"JobId={job.number}", f"TimeLimit={int(hours) * 60 + int(minutes) + 1}")
        wait_for(lambda: term_is_pending(pid), 300, "SLURM's signal")
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def time_nearly_over(training: Training, job: Job) -> None:
    """The job's time is nearly over, which the training run detects."""
    pid = training.pid()
    os.kill(pid, signal.SIGSTOP)  # the job has two minutes; this step lasts until 28 seconds before their end
    try:
        end = datetime.fromisoformat(details(job)["EndTime"])
        wait_for(lambda: datetime.now() > end - timedelta(seconds=28), 150, "the end of the job's time")
    finally:
        os.kill(pid, signal.SIGCONT)


def kill_process(training: Training, job: Job) -> None:
    """The training process is killed (SIGKILL)."""
    os.kill(training.pid(), signal.SIGKILL)


def kill_job(training: Training, job: Job) -> None:
    """All processes of the job are killed (SIGKILL)."""
    slurm("scancel", "--signal=KILL", "--full", job.number)


def node_down(training: Training, job: Job) -> None:
    """The job's node is set down."""
    slurm("scontrol", "update", f"NodeName={job.node}", "State=DOWN", "Reason=test")


def out_of_memory(training: Training, job: Job) -> None:
    """The job's first attempt has too little memory."""


DISTURBANCES: list[Callable[[Training, Job], None]] = [
    time_nearly_over, time_limit, node_down, scancel, requeue, kill_process, kill_job, out_of_memory,
]  # fmt: skip
# Only the run `node_down` may use the node that will be set down, which SLURM prefers.
RESOURCES = (
    "--set-resources",
    "train:constraint='failing|steady' if wildcards.method == 'node_down' else 'steady'",
    "train:mem_mb=300 if wildcards.method == 'out_of_memory' and attempt == 1 else 3000",
    "train:runtime=2 if wildcards.method == 'time_nearly_over' and attempt == 1 else 60",
    "train:gpu=1",
)


def apply_disturbance(training: Training, disturb: Callable[[Training, Job], None]) -> str:
    """Disturb a run that has a checkpoint, and wait until it is complete; return the seconds since the disturbance."""
    if disturb is out_of_memory:
        wait_for(lambda: training.jobs(), 1800, f"the job of {training.method}")
    else:
        wait_for(training.has_checkpoint, 1800, f"the first checkpoint of {training.method}")
        assert environment(training.pid())["HF_HUB_OFFLINE"] == "1"  # compute nodes have no internet
    start = time.monotonic()
    assert not training.complete()
    disturb(training, training.jobs()[-1])
    wait_for(training.complete, 1800, f"{training.method} to be complete")
    return f"{time.monotonic() - start:.0f}"


def describe_jobs(training: Training) -> str:
    """Return the states of a run's jobs, and the steps that each computed, as text."""
    states = []
    for job in training.jobs():
        restarts = int(details(job)["Restarts"])
        states.append(f"job {job.number} {job.state}" + (f" after {restarts} requeue" if restarts else ""))
    return ", ".join(states) + "; steps " + " + ".join(str(steps) for steps in training.steps_of_jobs())


def test_disturbed_runs_equal_the_undisturbed_one(pipeline: Pipeline, table: list[tuple[str, ...]]) -> None:
    methods = pipeline.tiny["methods"]
    pipeline.configure({**methods, **{disturb.__name__: methods["undisturbed"] for disturb in DISTURBANCES}})
    trainings = {disturb: pipeline.training(disturb.__name__) for disturb in DISTURBANCES}
    targets = [training.target for training in trainings.values()]
    with pipeline.controller(*RESOURCES, "--", *targets) as controller, ThreadPoolExecutor(len(trainings)) as pool:
        seconds = list(pool.map(lambda disturb: apply_disturbance(trainings[disturb], disturb), DISTURBANCES))
        controller.wait_for_success()

    undisturbed = pipeline.training("undisturbed").components()
    steps = pipeline.tiny["training"]["milestones"][-1]
    is_equal = {disturb: training.components() == undisturbed for disturb, training in trainings.items()}
    for (disturb, training), duration in zip(trainings.items(), seconds):
        equal = "yes" if is_equal[disturb] else "NO"
        table.append((str(disturb.__doc__), describe_jobs(training), duration, equal))
    assert all(is_equal.values()), table
    for disturb, training in trainings.items():
        assert len(training.jobs()) > 1 or int(details(training.jobs()[0])["Restarts"]) == 1, disturb.__name__
        assert sum(training.steps_of_jobs()) == steps, disturb.__name__  # no step of the result was computed twice
        if disturb is not out_of_memory:
            assert training.steps_of_jobs()[-1] < steps, disturb.__name__  # the last job resumed after step 0
    assert trainings[time_nearly_over].jobs()[0].state == "FAILED"
    reasons = {time_nearly_over: r"\d+ s before the job's time is over", time_limit: "SIGTERM", scancel: "SIGTERM"}
    for disturb, reason in reasons.items():
        log = trainings[disturb].log_of(trainings[disturb].jobs()[0])
        assert re.search(reason + r": stopped after step \d+ of 400, which is saved", log), log
