"""Tests of a training run on several machines, and of several training runs in one job."""

import pytest
import yaml
from pipeline import Pipeline, all_jobs, details

from kairos.training import checkpoint
from training_case import difference

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]


def test_a_training_run_on_two_machines_equals_one_on_one_machine(
    pipeline: Pipeline, table: list[tuple[str, ...]]
) -> None:
    partitions = {"main": {"max_nodes": 1}, "wide": {"max_nodes": 2}}
    (pipeline.folder / "partitions.yaml").write_text(yaml.safe_dump({"partitions": partitions}))
    states = []
    for machines, name in ((1, "one_machine"), (2, "two_machines")):
        settings = {"precision": "fp64", "milestones": [50]}
        methods = {name: pipeline.tiny["methods"]["undisturbed"]}
        pipeline.configure(methods, **settings, processes=machines, nodes=machines)
        training = pipeline.training(name)
        pipeline.run("--kairos-partition-config", "partitions.yaml", "--", training.target)
        (job,) = training.jobs()
        assert job.state == "COMPLETED"
        assert details(job)["NumNodes"] == str(machines)
        assert details(job)["Partition"] == ("main", "wide")[machines - 1]
        assert ("2 processes" in training.log) == (machines == 2)
        states.append(checkpoint.read(training.folder / "checkpoint.pt"))
    differences = {name: difference(*(state[name] for state in states)) for name in checkpoint.COMPONENTS}
    assert max(differences.values()) < 1e-5, differences
    largest = f"largest relative difference {max(differences.values()):.1e}"
    table.append(
        ("nothing: two processes on two nodes instead of one", largest, "", "in double precision, within 1e-5")
    )


def test_training_runs_share_a_job_and_its_gpu(pipeline: Pipeline) -> None:
    methods = {f"shares{number}": {"sampler": "uniform"} for number in range(5)}
    pipeline.configure(methods, milestones=[20], trainings_per_gpu=3)
    trainings = [pipeline.training(name) for name in methods]
    before = len(all_jobs(pipeline.folder))
    resources = ("train:gres='gpu:1'", "train:constraint='steady'")
    pipeline.run("--set-resources", *resources, "--", *(training.target for training in trainings))
    jobs = all_jobs(pipeline.folder)[before:]
    assert [job.state for job in jobs] == ["COMPLETED", "COMPLETED"]  # one job of three runs, one of two
    assert all(training.complete() for training in trainings)
    gpus = [training.log.split("CUDA_VISIBLE_DEVICES ")[1].split()[0] for training in trainings]
    assert len(set(gpus[:3])) == len(set(gpus[3:])) == 1
    assert all(gpu.isdigit() for gpu in gpus)
