"""Tests of stages on SLURM without disturbances."""

import shutil

import pytest
import yaml
from pipeline import CONFIG, RESULTS, Pipeline, all_jobs

from kairos.files import hash_folder

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3600)]


def test_sampling_in_shards_gives_the_same_images(pipeline: Pipeline) -> None:
    """Two jobs sample the shards of a run, and a third job merges them; all samples and evaluations stay equal."""
    run = pipeline.folder / RESULTS / "methods/uniform/seed0"
    before = hash_folder(run / "samples"), hash_folder(run / "evaluation")
    shutil.rmtree(run / "samples")
    file = pipeline.folder / CONFIG
    values = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump({**values, "sampling": {**values["sampling"], "batch_size": 50, "shards": 2}}))
    pipeline.run("--until", "evaluate")
    shard_jobs = [job for job in all_jobs(pipeline.folder) if job.rule.startswith("rule_sample_shards")]
    assert len(shard_jobs) == 2 and all(job.state == "COMPLETED" for job in shard_jobs), shard_jobs
    assert (hash_folder(run / "samples"), hash_folder(run / "evaluation")) == before
