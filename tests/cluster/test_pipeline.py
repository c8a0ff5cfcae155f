"""The tiny pipeline through SLURM."""

import pytest
from pipeline import RESULTS, Pipeline, all_jobs

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
