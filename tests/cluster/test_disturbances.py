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
    os.kill(pid, signal.SIGSTOP)  # work that outlasts the limit, however fast this machine is: limits are whole minutes
    try:
        hours, minutes, _ = details(job)["RunTime"].split(":")
        slurm("scontrol", "update", f"JobId={job.number}", f"TimeLimit={int(hours) * 60 + int(minutes) + 1}")
        wait_for(lambda: term_is_pending(pid), 300, "SLURM's signal")
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def end_in_sight(training: Training, job: Job) -> None:
    """The job's time is nearly over: the training sees it."""
    pid = training.pid()
    os.kill(pid, signal.SIGSTOP)  # it has two minutes; steps that last until half a minute before their end
    try:
        end = datetime.fromisoformat(details(job)["EndTime"])
        wait_for(lambda: datetime.now() > end - timedelta(seconds=28), 150, "the end of the job's time")
    finally:
        os.kill(pid, signal.SIGCONT)


def kill_process(training: Training, job: Job) -> None:
    """The process that trains is killed (SIGKILL)."""
    os.kill(training.pid(), signal.SIGKILL)


def kill_job(training: Training, job: Job) -> None:
    """All processes of the job are killed (SIGKILL)."""
    slurm("scancel", "--signal=KILL", "--full", job.number)


def node_down(training: Training, job: Job) -> None:
    """The job's node is set down."""
    slurm("scontrol", "update", f"NodeName={job.node}", "State=DOWN", "Reason=test")


def out_of_memory(training: Training, job: Job) -> None:
    """The job's memory is too small at its first attempt."""


DISTURBANCES: list[Callable[[Training, Job], None]] = [
    end_in_sight, time_limit, node_down, scancel, requeue, kill_process, kill_job, out_of_memory,
]  # fmt: skip
# Of two nodes the one that will be set down is the first choice, of the training that may go there alone.
RESOURCES = (
    "--set-resources",
    "train:constraint='failing|steady' if wildcards.method == 'node_down' else 'steady'",
    "train:mem_mb=300 if wildcards.method == 'out_of_memory' and attempt == 1 else 3000",
    "train:runtime=2 if wildcards.method == 'end_in_sight' and attempt == 1 else 60",
    "train:gpu=1",
)


def disturb(training: Training, act: Callable[[Training, Job], None]) -> str:
    """Disturb a training once it has a checkpoint, and wait until it is complete; returns the seconds from then."""
    if act is out_of_memory:
        wait_for(lambda: training.jobs(), 1800, f"the job of {training.method}")
    else:
        wait_for(training.has_checkpoint, 1800, f"the first checkpoint of {training.method}")
        assert environment(training.pid())["HF_HUB_OFFLINE"] == "1"  # compute nodes have no internet
    begun = time.monotonic()
    assert not training.complete()
    act(training, training.jobs()[-1])
    wait_for(training.complete, 1800, f"{training.method} to be complete")
    return f"{time.monotonic() - begun:.0f}"


def what_happened(training: Training) -> str:
    """States of the training's jobs, and the steps that each computed."""
    states = []
    for job in training.jobs():
        restarts = int(details(job)["Restarts"])
        states.append(f"job {job.number} {job.state}" + (f" after {restarts} requeue" if restarts else ""))
    return ", ".join(states) + "; steps " + " + ".join(str(steps) for steps in training.lengths())


def test_disturbed_trainings_equal_the_undisturbed_one(pipeline: Pipeline, table: list[tuple[str, ...]]) -> None:
    own = pipeline.tiny["methods"]
    pipeline.configure({**own, **{act.__name__: own["undisturbed"] for act in DISTURBANCES}})
    trainings = {act: pipeline.training(act.__name__) for act in DISTURBANCES}
    targets = [training.end for training in trainings.values()]
    with pipeline.controller(*RESOURCES, "--", *targets) as controller, ThreadPoolExecutor(len(trainings)) as pool:
        seconds = list(pool.map(lambda act: disturb(trainings[act], act), DISTURBANCES))
        controller.ended()

    undisturbed = pipeline.training("undisturbed").components()
    steps = pipeline.tiny["training"]["milestones"][-1]
    equal = {act: training.components() == undisturbed for act, training in trainings.items()}
    for (act, training), took in zip(trainings.items(), seconds):
        table.append((str(act.__doc__), what_happened(training), took, "yes" if equal[act] else "NO"))
    assert all(equal.values()), table
    for act, training in trainings.items():
        assert len(training.jobs()) > 1 or int(details(training.jobs()[0])["Restarts"]) == 1, act.__name__
        assert sum(training.lengths()) == steps, act.__name__  # of what was kept, nothing was computed twice
        if act is not out_of_memory:
            assert training.lengths()[-1] < steps, act.__name__  # and the last job did not begin at step 0
    assert trainings[end_in_sight].jobs()[0].state == "FAILED"
    asked = {end_in_sight: r"\d+ s before the job's time is over", time_limit: "SIGTERM", scancel: "SIGTERM"}
    for act, why in asked.items():
        said = trainings[act].log_of(trainings[act].jobs()[0])
        assert re.search(why + r": stopped after step \d+ of 400, which is saved", said), said
