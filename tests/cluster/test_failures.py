"""Tests of jobs that fail permanently, of an interrupted controller, and of a SLURM that does not answer."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
from pipeline import RESULTS, Pipeline
from slurm import kill_controller, save_state, slurm, start_controller, wait_for

from kairos.slurm import job_name

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]


def test_a_training_run_that_diverges_is_not_retried(pipeline: Pipeline) -> None:
    wild = {"name": "adamw", "lr": 1e30, "warmup_steps": 0, "grad_clip": None}
    pipeline.configure({"diverges": {"sampler": "uniform"}}, optimizer=wild)
    training = pipeline.training("diverges")
    with pipeline.controller("--", training.target) as controller:
        assert controller.process.wait(600) == 1
    assert [job.state for job in training.jobs()] == ["FAILED"]
    output = controller.log.read_text()
    assert "not finite" in output
    assert "logs/train_diverges_seed0.log" in output
    assert "Traceback" not in output


def test_a_failed_job_loses_no_complete_training_run(pipeline: Pipeline) -> None:
    """Snakemake deletes all outputs of a failed job; a run that was complete publishes its outputs again.

    This also holds if the controller is killed while it waits for other jobs.
    """
    methods = {name: {"sampler": "uniform"} for name in ("killed", "complete", "working")}
    pipeline.configure(methods, trainings_per_gpu=2)  # a job for the first two, one for the last
    killed, complete, working = (pipeline.training(name) for name in methods)
    targets = (complete.target, killed.target)
    with pipeline.controller("--retries", "0", "--", *targets, working.target) as controller:
        wait_for(lambda: killed.has_checkpoint() and working.has_checkpoint(), 300, "the first checkpoints")
        for training in (killed, working):
            os.kill(training.pid(), signal.SIGSTOP)
        wait_for(complete.complete, 300, "a complete training run")
        timing = (complete.folder / "timing.jsonl").read_bytes()
        os.kill(killed.pid(), signal.SIGKILL)
        wait_for(lambda: not complete.complete(), 300, "the deletion of the failed job's outputs")
        time.sleep(1)  # Snakemake writes its metadata
        controller.process.send_signal(signal.SIGKILL)
    os.kill(working.pid(), signal.SIGCONT)
    pipeline.run("--", *targets)
    assert (complete.folder / "timing.jsonl").read_bytes() == timing
    assert sum(killed.steps_of_jobs()) == pipeline.tiny["training"]["milestones"][-1]


def test_an_interrupted_controller_lets_its_training_runs_save_checkpoints(pipeline: Pipeline) -> None:
    pipeline.configure({"interrupted": {"sampler": "uniform"}}, milestones=[20_000], checkpoint_every=5_000)
    training = pipeline.training("interrupted")
    with pipeline.controller("--", training.target) as controller:
        wait_for(lambda: "step" in training.log_so_far(), 300, "the first steps")
        controller.process.send_signal(signal.SIGINT)
        assert controller.process.wait(120) == 1
    wait_for(lambda: [job.state for job in training.jobs()] == ["CANCELLED"], 60, "the end of the job")
    assert re.search(r"SIGTERM: stopped after step \d+ of 20000, which is saved", training.log_so_far())
    assert "Traceback" not in controller.log.read_text()


def test_no_job_is_lost_while_slurm_does_not_answer(pipeline: Pipeline, cluster: Path) -> None:
    pipeline.configure({"waiting": {"sampler": "uniform"}}, milestones=[1000])
    training = pipeline.training("waiting")
    with pipeline.controller("--kairos-status-attempts", "1", "--", training.target) as controller:
        wait_for(training.has_checkpoint, 300, "the first checkpoint")
        save_state(cluster)
        kill_controller(cluster)
        try:
            time.sleep(40)  # queries fail, and the training run ends in the meantime
        finally:
            start_controller(cluster)
        controller.wait_for_success(300)
    assert training.steps_of_jobs() == [1000]
    assert [job.state for job in training.jobs()] in (["COMPLETED"], [])  # SLURM may have forgotten the job


def test_a_finished_job_that_slurm_queues_again_is_cancelled(pipeline: Pipeline) -> None:
    pipeline.configure({"requeued": {"sampler": "uniform"}})
    training = pipeline.training("requeued")
    with pipeline.controller("--", training.target) as controller:
        wait_for(training.has_checkpoint, 300, "the first checkpoint")
        controller.process.send_signal(signal.SIGSTOP)
        wait_for(lambda: [job.state for job in training.jobs()] == ["COMPLETED"], 300, "the end of the job")
        slurm("scontrol", "requeuehold", training.jobs()[0].number)
        controller.process.send_signal(signal.SIGCONT)
        controller.wait_for_success(120)
    assert training.complete()
    assert [job.state for job in training.jobs()] == ["CANCELLED"]


def test_a_job_that_slurm_cannot_accept_yet_is_submitted_again(pipeline: Pipeline, cluster: Path) -> None:
    pipeline.configure({"later": {"sampler": "uniform"}})
    training = pipeline.training("later")
    kill_controller(cluster)
    with pipeline.controller("--", training.target) as controller:
        try:
            wait_for(lambda: "It is submitted again" in controller.log.read_text(), 200, "a failed submission")
        finally:
            start_controller(cluster)
        controller.wait_for_success(300)
    assert [job.state for job in training.jobs()] == ["COMPLETED"]
    assert "Trying to restart" not in controller.log.read_text()


def test_a_job_without_a_record_of_its_submission_is_cancelled(pipeline: Pipeline) -> None:
    """This happens if sbatch fails after SLURM took the job, or the controller is killed at that moment."""
    pipeline.configure({"lost": {"sampler": "uniform"}})
    training = pipeline.training("lost")
    name = job_name(str(pipeline.folder / RESULTS))
    command = ("sbatch", "--parsable", f"--job-name={name}", "--comment=rule_train_wildcards_lost_0", "--mem=50")
    lost = slurm(*command, "--output=/dev/null", "--wrap", "sleep 600")
    output = pipeline.run("--", training.target)
    message = f"SLURM job {lost} (rule_train_wildcards_lost_0) is in the queue without a record of its submission"
    assert message in output
    assert slurm("squeue", "-h", "-t", "all", "-j", lost, "-o", "%T") == "CANCELLED"
    assert [job.state for job in training.jobs()][-1] == "COMPLETED"


def test_a_job_that_slurm_rejects_is_not_submitted_again(pipeline: Pipeline) -> None:
    pipeline.configure({"rejected": {"sampler": "uniform"}})
    training = pipeline.training("rejected")
    with pipeline.controller("--default-resources", "slurm_partition='nowhere'", "--", training.target) as controller:
        assert controller.process.wait(120) == 1
    output = controller.log.read_text()
    assert output.count("invalid partition specified: nowhere") == 1, output
    assert training.jobs() == []


def test_the_executor_slurm_is_rejected(pipeline: Pipeline) -> None:
    pipeline.configure({"plugin": {"sampler": "uniform"}})
    with pipeline.controller("--executor", "slurm") as controller:
        assert controller.process.wait(120) == 2
    output = controller.log.read_text()
    assert "kairos: executor: got 'slurm', allowed: 'kairos'" in output
    assert "Traceback" not in output
