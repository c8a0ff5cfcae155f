"""Tests of jobs that fail permanently, of an interrupted controller, and of a SLURM that does not answer."""

import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image
from pipeline import CONFIG, Pipeline, all_jobs
from slurm import kill_controller, save_state, start_controller, wait_for

from kairos.training.job import read_progress

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

_STEPS = 2000  # some seconds, so that a run can be stopped between its first checkpoint and its end


def count_failed_queries(log: Path) -> int:
    """Return how often the controller could not query the states of its jobs."""
    return log.read_text().count("the states of jobs are unknown")


def test_a_run_that_diverges_and_a_job_that_slurm_rejects_are_not_retried(pipeline: Pipeline) -> None:
    wild = {"name": "adamw", "lr": 1e30, "warmup_steps": 0, "grad_clip": None}
    pipeline.configure({"diverges": {"sampler": "uniform"}, "rejected": {"sampler": "uniform"}}, optimizer=wild)
    training, rejected = pipeline.training("diverges"), pipeline.training("rejected")
    partition = "train:slurm_partition='nowhere' if wildcards.method == 'rejected' else 'main'"
    with pipeline.controller("--set-resources", partition, "--", training.target, rejected.target) as controller:
        assert controller.process.wait(600) == 1
    assert [job.state for job in training.jobs()] == ["FAILED"]
    assert rejected.jobs() == []
    output = controller.log.read_text()
    assert "not finite" in output
    assert "logs/train_diverges_seed0.log" in output
    assert "logs/train_rejected_seed0.log: kairos: SLURM rejected job train: SLURM sbatch failed" in output
    assert "Traceback" not in output


def test_a_job_whose_error_another_attempt_would_repeat_is_submitted_once(pipeline: Pipeline) -> None:
    for index in range(40):
        image = pipeline.folder / "broken" / "ab"[index % 2] / f"{index}.png"  # two classes
        image.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.random.default_rng(index).integers(0, 256, (8, 8), dtype=np.uint8)).save(image)
    image.write_bytes(image.read_bytes()[:60])
    file = pipeline.folder / CONFIG
    values = yaml.safe_load(file.read_text())
    dataset = {"source": "folder", "path": "broken", "resolution": 8, "color": "grey", "heldout": 0.25}
    file.write_text(yaml.safe_dump({**values, "experiment": "broken", "dataset": dataset}))
    before = len(all_jobs(pipeline.folder))
    for run in (1, 2):  # the next run of the workflow tries again
        with pipeline.controller("--", "results/broken/dataset/record.json") as controller:
            assert controller.process.wait(300) == 1
        output = controller.log.read_text()
        assert "39.png is broken" in output
        assert len(all_jobs(pipeline.folder)) - before == run


def test_a_failed_job_loses_no_complete_training_run(pipeline: Pipeline) -> None:
    """Snakemake deletes all outputs of a failed job; a run that was complete publishes its outputs again.

    This also holds if the controller is killed while it waits for other jobs.
    """
    methods = {name: {"sampler": "uniform"} for name in ("killed", "complete", "queued")}
    pipeline.configure(methods, trainings_per_gpu=2, milestones=[_STEPS])  # a job for the first two, one for the last
    killed, complete, queued = (pipeline.training(name) for name in methods)
    targets = (complete.target, killed.target)
    held = ("--set-resources", "train:slurm_extra='--hold' if wildcards.method == 'queued' else ''")
    before = len(all_jobs(pipeline.folder))
    with pipeline.controller("--retries", "0", *held, "--", *targets, queued.target) as controller:
        wait_for(killed.has_checkpoint, 300, "the first checkpoint")
        os.kill(killed.pid(), signal.SIGSTOP)
        wait_for(complete.complete, 300, "a complete training run")
        timing = (complete.folder / "timing.jsonl").read_bytes()
        os.kill(killed.pid(), signal.SIGKILL)
        wait_for(lambda: not complete.complete(), 300, "the deletion of the failed job's outputs")
        time.sleep(1)  # Snakemake writes its metadata
        assert sorted(job.state for job in all_jobs(pipeline.folder)[before:]) == ["FAILED", "PENDING"]
        controller.process.send_signal(signal.SIGKILL)
    pipeline.run("--", *targets)
    assert (complete.folder / "timing.jsonl").read_bytes() == timing
    assert sum(killed.steps_of_jobs()) == _STEPS


def test_an_interrupted_controller_lets_its_training_runs_save_checkpoints(pipeline: Pipeline) -> None:
    pipeline.configure({"interrupted": {"sampler": "uniform"}}, milestones=[20_000], checkpoint_every=5_000)
    training = pipeline.training("interrupted")
    with pipeline.controller("--", training.target) as controller:
        wait_for(lambda: read_progress(training.folder).get("state") == "running", 300, "the first steps")
        controller.process.send_signal(signal.SIGINT)
        assert controller.process.wait(120) == 1
    wait_for(lambda: [job.state for job in training.jobs()] == ["CANCELLED"], 60, "the end of the job")
    assert re.search(r"SIGTERM: stopped after step \d+ of 20000, which is saved", training.log)
    assert "Traceback" not in controller.log.read_text()


def test_no_job_is_lost_while_slurm_does_not_answer(pipeline: Pipeline, cluster: Path) -> None:
    """SLURM is away when the controller submits the job, and again when the job ends."""
    pipeline.configure({"waiting": {"sampler": "uniform"}}, milestones=[_STEPS])
    training = pipeline.training("waiting")
    kill_controller(cluster)
    with pipeline.controller("--", training.target) as controller:
        try:
            wait_for(
                lambda: "kairos queries SLURM again" in controller.log.read_text(), 200, "a query without an answer"
            )
        finally:
            start_controller(cluster)
        wait_for(training.has_checkpoint, 300, "the first checkpoint")
        os.kill(training.pid(), signal.SIGSTOP)
        assert [job.state for job in training.jobs()] == ["RUNNING"]
        save_state(cluster)
        kill_controller(cluster)
        os.kill(training.pid(), signal.SIGCONT)
        try:
            wait_for(training.complete, 300, "the end of the training run")
            failed_queries = count_failed_queries(controller.log)
            wait_for(lambda: count_failed_queries(controller.log) >= failed_queries + 4, 300, "queries without answer")
        finally:
            start_controller(cluster)
        controller.wait_for_success(300)
    assert training.steps_of_jobs() == [_STEPS]
    assert [job.state for job in training.jobs()] in (["COMPLETED"], [])  # SLURM may have forgotten the job
    assert "Trying to restart" not in controller.log.read_text()
