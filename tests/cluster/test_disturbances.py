"""Tests that disturbances of a training run's SLURM job, such as preemption, do not change its result.

One training run runs under two names at once, each with a series of disturbances. The checkpoint and metrics of both
runs must equal those of the undisturbed run.
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
    """The job's time limit is over."""
    pid = training.pid()
    slurm("scontrol", "update", f"JobId={job.number}", "EndTime=now+1seconds")
    wait_for(lambda: term_is_pending(pid), 300, "SLURM's signal")


def time_nearly_over(training: Training, job: Job) -> None:
    """The job's time is nearly over, which the training run detects."""
    end = datetime.fromisoformat(details(job)["EndTime"])  # two minutes after the start; the run stops 30 s before
    wait_for(lambda: datetime.now() > end - timedelta(seconds=28), 150, "the end of the job's time")


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
    wait_for(lambda: len(training.jobs()) > 1, 600, "the second attempt")


Disturbance = Callable[[Training, Job], None]
DISTURBANCES: dict[str, list[Disturbance]] = {
    "limits": [out_of_memory, time_nearly_over, time_limit],
    "losses": [kill_process, kill_job, scancel, requeue, node_down],
}
# Only the run `losses` may use the node that will be set down, which SLURM prefers.
RESOURCES = (
    "--set-resources",
    "train:constraint='failing|steady' if wildcards.method == 'losses' else 'steady'",
    "train:mem_mb=100 if wildcards.method == 'limits' and attempt == 1 else 3000",
    "train:runtime=2 if wildcards.method == 'limits' and attempt == 2 else 60",
    "train:gpu=1",
)


def apply_disturbances(training: Training, disturbances: list[Disturbance]) -> str:
    """Disturb each job of a run, and wait until the run is complete; return the seconds since the first disturbance.

    Every job is disturbed after it has written a checkpoint, except if it has too little memory for that. Its training
    process is stopped meanwhile, so that the run is not complete before the disturbance, on any machine.
    """
    pid, start = 0, 0.0
    for disturb in disturbances:
        if disturb is out_of_memory:
            wait_for(training.jobs, 1800, f"the job of {training.method}")
            disturb(training, training.jobs()[0])
            if training.has_checkpoint():  # its memory was measured late
                pid = training.pid()
            continue
        wait_for(lambda: training.is_resumed(after=pid), 1800, f"a checkpoint of {training.method}")  # noqa: B023
        pid = training.pid()
        os.kill(pid, signal.SIGSTOP)
        try:
            start = start or time.monotonic()
            assert environment(pid)["HF_HUB_OFFLINE"] == "1"  # compute nodes have no internet
            assert not training.complete()
            disturb(training, training.jobs()[-1])
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    wait_for(training.complete, 1800, f"{training.method} to be complete")
    return f"{time.monotonic() - start:.0f}"


def describe_jobs(training: Training) -> str:
    """Return the states of a run's jobs, and the steps that each computed, as text."""
    states = []
    for job in training.jobs():
        restarts = int(details(job)["Restarts"])
        states.append(f"job {job.number} {job.state}" + (f" after {restarts} requeues" if restarts else ""))
    return ", ".join(states) + "; steps " + " + ".join(str(steps) for steps in training.steps_of_jobs())


def test_disturbed_runs_equal_the_undisturbed_one(pipeline: Pipeline, table: list[tuple[str, ...]]) -> None:
    methods = pipeline.tiny["methods"]
    pipeline.configure({**methods, **dict.fromkeys(DISTURBANCES, methods["undisturbed"])})
    trainings = {name: pipeline.training(name) for name in DISTURBANCES}
    targets = [training.target for training in trainings.values()]
    with pipeline.controller(*RESOURCES, "--", *targets) as controller, ThreadPoolExecutor(len(trainings)) as pool:
        seconds = list(pool.map(apply_disturbances, trainings.values(), DISTURBANCES.values()))
        controller.wait_for_success()

    undisturbed = pipeline.training("undisturbed").components()
    steps = pipeline.tiny["training"]["milestones"][-1]
    is_equal = {name: training.components() == undisturbed for name, training in trainings.items()}
    for (name, training), duration in zip(trainings.items(), seconds):
        description = " ".join(str(disturb.__doc__) for disturb in DISTURBANCES[name])
        equal = "yes" if is_equal[name] else "NO"
        table.append((description, describe_jobs(training), duration, equal))
    assert all(is_equal.values()), table
    for name, training in trainings.items():
        # every disturbance ended a job, whose steps up to its checkpoint were not computed again
        disturbed = len(DISTURBANCES[name])
        may_lack_checkpoint = out_of_memory in DISTURBANCES[name]
        assert disturbed + 1 - may_lack_checkpoint <= len(training.steps_of_jobs()) <= disturbed + 1, name
        assert sum(training.steps_of_jobs()) == steps, name
    limited, lost = trainings["limits"].jobs(), trainings["losses"].jobs()
    assert limited[0].state in ("FAILED", "OUT_OF_MEMORY") and limited[1].state == "FAILED"
    assert [len(limited), len(lost)] == [4, 4]  # three attempts of each failed
    assert [int(details(job)["Restarts"]) for job in lost] == [0, 0, 0, 2]  # requeue and node_down
    reasons = [(limited[1], r"\d+ s before the job's time is over"), (limited[2], "SIGTERM"), (lost[2], "SIGTERM")]
    for job, reason in reasons:
        log = trainings["limits" if job in limited else "losses"].log_of(job)
        assert re.search(rf"{reason}: stopped after step \d+ of {steps}, which is saved", log), log
