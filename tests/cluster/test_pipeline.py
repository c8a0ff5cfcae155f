"""Tests of the small pipeline on SLURM without disturbances."""

import pytest
import yaml
from pipeline import CONFIG, RESULTS, Pipeline, all_jobs

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3600)]


def test_the_pipeline_runs_on_slurm_up_to_its_report(pipeline: Pipeline) -> None:
    pipeline.run()  # the report no longer contains the methods of other tests
    results = pipeline.folder / RESULTS
    assert (results / "report.html").stat().st_size > 10_000
    rows = (results / "summary.csv").read_text().splitlines()[1:]
    assert len(rows) == 2 * 2 + 4  # two methods at steps 0 and 400, four reference rows
    assert pipeline.to_do() == {}
    training_jobs = [job for job in all_jobs(pipeline.folder) if job.rule.startswith("rule_train")]
    assert len(training_jobs) >= 2


def test_sampling_in_shards_gives_the_same_images(pipeline: Pipeline) -> None:
    """Two jobs sample the shards of each run, another joins and evaluates them; all checksums stay equal."""
    sums = pipeline.folder / RESULTS / "sums"
    before = {path: path.read_text() for path in sums.rglob("*.txt")}
    file = pipeline.folder / CONFIG
    values = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump({**values, "sampling": {**values["sampling"], "batch_size": 50, "shards": 2}}))
    pipeline.run("--forcerun", "sample_parts", "--until", "evaluate")
    shard_jobs = [job for job in all_jobs(pipeline.folder) if job.rule.startswith("rule_sample_parts")]
    assert len(shard_jobs) == 4 and all(job.state == "COMPLETED" for job in shard_jobs), shard_jobs
    assert {path: path.read_text() for path in sums.rglob("*.txt")} == before
