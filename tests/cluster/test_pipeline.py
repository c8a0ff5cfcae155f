"""Tests of stages on SLURM without disturbances."""

import pytest
import yaml
from pipeline import CONFIG, RESULTS, Pipeline, all_jobs

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3600)]


def test_sampling_in_shards_gives_the_same_images(pipeline: Pipeline) -> None:
    """Two jobs sample the shards of a run, a third job merges and evaluates them; all checksums stay equal."""
    sums = pipeline.folder / RESULTS / "sums"
    before = {path: path.read_text() for path in sums.rglob("*.txt")}
    target = "sums/evaluate/uniform_seed0/1.txt"
    assert sums.parent / target in before
    file = pipeline.folder / CONFIG
    values = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump({**values, "sampling": {**values["sampling"], "batch_size": 50, "shards": 2}}))
    pipeline.run("--forcerun", "sample_shards", "--", f"{RESULTS}/{target}")
    shard_jobs = [job for job in all_jobs(pipeline.folder) if job.rule.startswith("rule_sample_shards")]
    assert len(shard_jobs) == 2 and all(job.state == "COMPLETED" for job in shard_jobs), shard_jobs
    assert {path: path.read_text() for path in sums.rglob("*.txt")} == before
