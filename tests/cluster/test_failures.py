"""A training that fails for good."""

import pytest
from pipeline import Pipeline

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
