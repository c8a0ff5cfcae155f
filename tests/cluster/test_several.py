"""Tests of a training run on several machines, and of several training runs in one job."""

import os
import re
import signal
from contextlib import suppress

import pytest
import yaml
from pipeline import CONFIG, RESULTS, Pipeline, Training, all_jobs, details
from slurm import wait_for

from kairos.cli import main
from kairos.training import checkpoint
from training_case import difference

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]


def test_a_training_run_on_two_machines_equals_one_on_one_machine(
    pipeline: Pipeline, table: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    methods = {"machines": pipeline.tiny["methods"]["undisturbed"]}
    settings = {"precision": "fp64", "milestones": [20]}
    monkeypatch.chdir(pipeline.folder)
    pipeline.configure(methods, **settings)
    run = ["--config", CONFIG, "--method", "machines", "--seed", "0", "--latents", f"{RESULTS}/latents"]
    assert main(["train", *run, "--out", "one_machine"]) == 0

    partitions = {"main": {"max_nodes": 1}, "wide": {"max_nodes": 2}}
    (pipeline.folder / "partitions.yaml").write_text(yaml.safe_dump({"partitions": partitions}))
    pipeline.configure(methods, **settings, processes=2, nodes=2)
    training = pipeline.training("machines")
    pipeline.run("--kairos-partition-config", "partitions.yaml", "--", training.target)
    (job,) = training.jobs()
    assert job.state == "COMPLETED"
    assert (details(job)["Partition"], details(job)["NumNodes"]) == ("wide", "2")
    assert "2 processes" in training.log
    one, two = (
        checkpoint.read(folder / "checkpoint.pt") for folder in (pipeline.folder / "one_machine", training.folder)
    )
    differences = {name: difference(one[name], two[name]) for name in checkpoint.COMPONENTS}
    assert max(differences.values()) < 1e-5, differences
    largest = f"largest relative difference {max(differences.values()):.1e}"
    table.append(
        ("nothing: two processes on two nodes instead of one", largest, "", "in double precision, within 1e-5")
    )


def test_training_runs_share_a_job_and_its_gpu(pipeline: Pipeline) -> None:
    """Two training runs use the GPU that SLURM has allocated to their job, another one that of its own job."""
    methods = {f"shares{number}": {"sampler": "uniform"} for number in range(3)}
    pipeline.configure(methods, trainings_per_gpu=2)
    trainings = [pipeline.training(name) for name in methods]
    before = len(all_jobs(pipeline.folder))
    job_of_run: dict[Training, str] = {}
    processes: list[int] = []

    def are_all_stopped() -> bool:
        """Stop each run that has started, and record its job; return True if all have started."""
        for training in trainings:
            lock = training.folder / ".state/lock"
            match = re.search(r"SLURM job (\d+)", lock.read_text()) if lock.exists() else None
            if match and training not in job_of_run:
                job_of_run[training] = match[1]
                processes.append(training.pid())
                os.kill(processes[-1], signal.SIGSTOP)
        return len(job_of_run) == len(trainings)

    resources = ("train:gres='gpu:1'", "train:constraint='steady'")
    targets = [training.target for training in trainings]
    with pipeline.controller("--set-resources", *resources, "--", *targets) as controller:
        try:
            wait_for(are_all_stopped, 300, "the start of all runs, which so run at once")
            running = all_jobs(pipeline.folder)[before:]
            allocated = {job.number: re.search(r"IDX:(\d+)", details(job)["GRES"])[1] for job in running}
        finally:
            for process in processes:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGCONT)
        controller.wait_for_success()
    jobs = all_jobs(pipeline.folder)[before:]
    assert [job.state for job in jobs] == ["COMPLETED", "COMPLETED"]  # one job of two runs, one of one
    assert all(training.complete() for training in trainings)
    gpus = [training.log.split("CUDA_VISIBLE_DEVICES ")[1].split()[0] for training in trainings]
    assert gpus[0] == gpus[1] != gpus[2]  # both jobs run on one node
    numbers = [job_of_run[training] for training in trainings]
    assert numbers[0] == numbers[1] != numbers[2]
    assert gpus == [allocated[number] for number in numbers]
