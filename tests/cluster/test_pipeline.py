"""The tiny pipeline through SLURM."""

import pytest
import yaml
from pipeline import CONFIG, RESULTS, Pipeline, all_jobs

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3600)]


def test_the_pipeline_runs_through_slurm_to_its_report(pipeline: Pipeline) -> None:
    pipeline.run()  # what other tests have added to its report is left out again
    results = pipeline.folder / RESULTS
    assert (results / "report.html").stat().st_size > 10_000
    rows = (results / "summary.csv").read_text().splitlines()[1:]
    assert len(rows) == 2 * 2 + 4  # two methods at steps 0 and 400, four reference rows
    assert pipeline.to_do() == {}
    mine = [job for job in all_jobs(pipeline.folder) if job.rule.startswith("rule_train")]
    assert len(mine) >= 2


def test_sampling_in_shards_gives_the_same_images(pipeline: Pipeline) -> None:
    """Two jobs draw the parts of each training's milestones, another joins and evaluates them: no sum differs."""
    sums = pipeline.folder / RESULTS / "sums"
    before = {path: path.read_text() for path in sums.rglob("*.txt")}
    file = pipeline.folder / CONFIG
    values = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump({**values, "sampling": {**values["sampling"], "batch_size": 50, "shards": 2}}))
    pipeline.run("--forcerun", "sample_parts", "--until", "evaluate")
    parts = [job for job in all_jobs(pipeline.folder) if job.rule.startswith("rule_sample_parts")]
    assert len(parts) == 4 and all(job.state == "COMPLETED" for job in parts), parts
    assert {path: path.read_text() for path in sums.rglob("*.txt")} == before
