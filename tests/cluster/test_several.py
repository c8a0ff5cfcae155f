"""A training on several machines, and several trainings in one job."""

import pytest
import yaml
from pipeline import Pipeline, all_jobs, details

from kairos.training import checkpoint
from training_case import difference

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]


def test_a_training_on_two_machines_equals_one_on_one(pipeline: Pipeline, table: list[tuple[str, ...]]) -> None:
    partitions = {"main": {"max_nodes": 1}, "wide": {"max_nodes": 2}}
    (pipeline.folder / "partitions.yaml").write_text(yaml.safe_dump({"partitions": partitions}))
    states = []
    for machines, name in ((1, "one_machine"), (2, "two_machines")):
        double = {"precision": "fp64", "milestones": [50]}
        methods = {name: pipeline.tiny["methods"]["undisturbed"]}
        pipeline.configure(methods, **double, processes=machines, nodes=machines)
        training = pipeline.training(name)
        pipeline.run("--kairos-partition-config", "partitions.yaml", "--", training.end)
        (job,) = training.jobs()
        assert job.state == "COMPLETED"
        assert details(job)["NumNodes"] == str(machines)
        assert details(job)["Partition"] == ("main", "wide")[machines - 1]
        assert ("2 processes" in training.log) == (machines == 2)
        states.append(checkpoint.read(training.folder / "checkpoint.pt"))
    found = {name: difference(*(state[name] for state in states)) for name in checkpoint.COMPONENTS}
    assert max(found.values()) < 1e-5, found
    largest = f"largest relative difference {max(found.values()):.1e}"
    table.append(("nothing: two processes on two nodes instead of one", largest, "", "in double, within 1e-5"))


def test_trainings_share_a_job_and_its_gpu(pipeline: Pipeline) -> None:
    methods = {f"shares{number}": {"sampler": "uniform"} for number in range(5)}
    pipeline.configure(methods, milestones=[20], trainings_per_gpu=3)
    trainings = [pipeline.training(name) for name in methods]
    before = len(all_jobs(pipeline.folder))
    ask = [f"train:{asked}" for asked in ("gres='gpu:1'", "constraint='steady'")]
    pipeline.run("--set-resources", *ask, "--", *(training.end for training in trainings))
    jobs = all_jobs(pipeline.folder)[before:]
    assert [job.state for job in jobs] == ["COMPLETED", "COMPLETED"]  # of three trainings, and of two
    assert all(training.complete() for training in trainings)
    seen = [training.log.split("CUDA_VISIBLE_DEVICES ")[1].split()[0] for training in trainings]
    assert len(set(seen[:3])) == len(set(seen[3:])) == 1
    assert all(word.isdigit() for word in seen)
