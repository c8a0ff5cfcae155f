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


def test_a_training_that_diverges_is_not_tried_again(pipeline: Pipeline) -> None:
    wild = {"name": "adamw", "lr": 1e30, "warmup_steps": 0, "grad_clip": None}
    pipeline.configure({"diverges": {"sampler": "uniform"}}, optimizer=wild)
    training = pipeline.training("diverges")
    with pipeline.controller("--", training.end) as controller:
        assert controller.process.wait(600) == 1
    assert [job.state for job in training.jobs()] == ["FAILED"]
    said = controller.log.read_text()
    assert "not finite" in said
    assert "logs/train_diverges_seed0.log" in said
    assert "Traceback" not in said


def test_a_job_that_fails_takes_no_complete_training_down(pipeline: Pipeline) -> None:
    """Snakemake deletes all outputs of a failed job; those of a training that is complete are given out again.

    Also where the controller, busy with other jobs, is killed before its end.
    """
    methods = {name: {"sampler": "uniform"} for name in ("killed", "whole", "working")}
    pipeline.configure(methods, trainings_per_gpu=2)  # a job for the first two, one for the last
    killed, whole, working = (pipeline.training(name) for name in methods)
    ends = (whole.end, killed.end)
    with pipeline.controller("--retries", "0", "--", *ends, working.end) as controller:
        wait_for(lambda: killed.has_checkpoint() and working.has_checkpoint(), 300, "the first checkpoints")
        for training in (killed, working):
            os.kill(training.pid(), signal.SIGSTOP)
        wait_for(whole.complete, 300, "a training")
        timing = (whole.folder / "timing.jsonl").read_bytes()
        os.kill(killed.pid(), signal.SIGKILL)
        wait_for(lambda: not whole.complete(), 300, "the deletion of the failed job's outputs")
        time.sleep(1)  # Snakemake writes its metadata
        controller.process.send_signal(signal.SIGKILL)
    os.kill(working.pid(), signal.SIGCONT)
    pipeline.run("--", *ends)
    assert (whole.folder / "timing.jsonl").read_bytes() == timing
    assert sum(killed.lengths()) == pipeline.tiny["training"]["milestones"][-1]


def test_an_interrupted_controller_lets_its_trainings_write_their_state(pipeline: Pipeline) -> None:
    pipeline.configure({"interrupted": {"sampler": "uniform"}}, milestones=[20_000], checkpoint_every=5_000)
    training = pipeline.training("interrupted")
    with pipeline.controller("--", training.end) as controller:
        wait_for(lambda: "step" in training.said(), 300, "the first steps")
        controller.process.send_signal(signal.SIGINT)
        assert controller.process.wait(120) == 1
    wait_for(lambda: [job.state for job in training.jobs()] == ["CANCELLED"], 60, "the end of the job")
    assert re.search(r"SIGTERM: stopped after step \d+ of 20000, which is saved", training.said())
    assert "Traceback" not in controller.log.read_text()


def test_a_scheduler_that_does_not_answer_for_a_while_loses_no_job(pipeline: Pipeline, cluster: Path) -> None:
    pipeline.configure({"patient": {"sampler": "uniform"}}, milestones=[1000])
    training = pipeline.training("patient")
    with pipeline.controller("--kairos-status-attempts", "1", "--", training.end) as controller:
        wait_for(training.has_checkpoint, 300, "the first checkpoint")
        save_state(cluster)
        kill_controller(cluster)
        try:
            time.sleep(40)  # looks that are not answered; meanwhile the training ends
        finally:
            start_controller(cluster)
        controller.ended(300)
    assert training.lengths() == [1000]
    assert [job.state for job in training.jobs()] in (["COMPLETED"], [])  # forgotten by SLURM, not by us


def test_a_job_whose_work_is_done_is_not_waited_for_when_slurm_queues_it_anew(pipeline: Pipeline) -> None:
    pipeline.configure({"anew": {"sampler": "uniform"}})
    training = pipeline.training("anew")
    with pipeline.controller("--", training.end) as controller:
        wait_for(training.has_checkpoint, 300, "the first checkpoint")
        controller.process.send_signal(signal.SIGSTOP)
        wait_for(lambda: [job.state for job in training.jobs()] == ["COMPLETED"], 300, "the end of the job")
        slurm("scontrol", "requeuehold", training.jobs()[0].number)
        controller.process.send_signal(signal.SIGCONT)
        controller.ended(120)
    assert training.complete()
    assert [job.state for job in training.jobs()] == ["CANCELLED"]


def test_a_job_that_slurm_cannot_take_now_is_sent_again(pipeline: Pipeline, cluster: Path) -> None:
    pipeline.configure({"later": {"sampler": "uniform"}})
    training = pipeline.training("later")
    kill_controller(cluster)
    with pipeline.controller("--", training.end) as controller:
        try:
            wait_for(lambda: "It is submitted again" in controller.log.read_text(), 200, "an attempt in vain")
        finally:
            start_controller(cluster)
        controller.ended(300)
    assert [job.state for job in training.jobs()] == ["COMPLETED"]
    assert "Trying to restart" not in controller.log.read_text()


def test_a_job_that_no_controller_has_heard_of_is_cancelled(pipeline: Pipeline) -> None:
    """This happens if sbatch fails after SLURM took the job, or the controller is killed at that moment."""
    pipeline.configure({"lost": {"sampler": "uniform"}})
    training = pipeline.training("lost")
    name = job_name(str(pipeline.folder / RESULTS))
    line = ("sbatch", "--parsable", f"--job-name={name}", "--comment=rule_train_wildcards_lost_0", "--mem=50")
    lost = slurm(*line, "--output=/dev/null", "--wrap", "sleep 600")
    said = pipeline.run("--", training.end)
    assert f"SLURM job {lost} (rule_train_wildcards_lost_0) is in the queue without a record of its submission" in said
    assert slurm("squeue", "-h", "-t", "all", "-j", lost, "-o", "%T") == "CANCELLED"
    assert [job.state for job in training.jobs()][-1] == "COMPLETED"


def test_what_slurm_refuses_is_not_sent_again(pipeline: Pipeline) -> None:
    pipeline.configure({"refused": {"sampler": "uniform"}})
    training = pipeline.training("refused")
    with pipeline.controller("--default-resources", "slurm_partition='nowhere'", "--", training.end) as controller:
        assert controller.process.wait(120) == 1
    said = controller.log.read_text()
    assert said.count("invalid partition specified: nowhere") == 1, said
    assert training.jobs() == []


def test_the_plugin_s_own_executor_is_refused(pipeline: Pipeline) -> None:
    pipeline.configure({"plugin": {"sampler": "uniform"}})
    with pipeline.controller("--executor", "slurm") as controller:
        assert controller.process.wait(120) == 2
    said = controller.log.read_text()
    assert "kairos: executor: got 'slurm', allowed: 'kairos'" in said
    assert "Traceback" not in said
