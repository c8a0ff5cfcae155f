"""Tests of the pipeline with executors that know nothing of kairos."""

import shutil

import pytest
from pipeline import RESULTS, Pipeline, all_jobs

from kairos.files import hash_folder

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]
SUBMIT = (
    "sbatch --parsable --cpus-per-task={threads} --mem={resources.mem_mb} --time={resources.runtime} --output=/dev/null"
)
STATUS = """#!/bin/sh
state=$(squeue --noheader --states=all --jobs="$1" --format=%T)
case "$state" in
    COMPLETED) echo success ;;
    PENDING | CONFIGURING | RUNNING | COMPLETING) echo running ;;
    *) echo failed ;;
esac
"""


@pytest.mark.parametrize(
    "options",
    [
        ("--executor", "slurm", "--slurm-status-command", "squeue", "--slurm-init-seconds-before-status-checks", "1"),
        (
            "--executor", "slurm", "--slurm-status-command", "squeue", "--slurm-init-seconds-before-status-checks", "1",
            "--slurm-array-jobs", "all",
        ),
        (
            "--executor", "cluster-generic", "--cluster-generic-submit-cmd", SUBMIT,
            "--cluster-generic-status-cmd", "./status.sh", "--cluster-generic-cancel-cmd", "scancel",
        ),
    ],
    ids=["slurm", "slurm with job arrays", "cluster-generic"],
)  # fmt: skip
def test_results_are_equal_with_an_executor_that_knows_nothing_of_kairos(
    pipeline: Pipeline, options: tuple[str, ...]
) -> None:
    (pipeline.folder / "status.sh").write_text(STATUS)
    (pipeline.folder / "status.sh").chmod(0o755)
    methods = {name: {"sampler": "uniform"} for name in ("first", "second")}
    pipeline.configure(methods, milestones=[200])
    runs = [pipeline.training(name) for name in methods]
    pipeline.run("--until", "evaluate")
    names = ("samples", "evaluation")
    before = [hash_folder(run.folder / name) for run in runs for name in names]
    components = [run.components() for run in runs]
    for run in runs:
        shutil.rmtree(run.folder)
    count = len(all_jobs(pipeline.folder))
    with pipeline.controller("--until", "evaluate", executor=options) as controller:
        controller.wait_for_success()
    assert len(all_jobs(pipeline.folder)) > count
    assert [hash_folder(run.folder / name) for run in runs for name in names] == before
    assert [run.components() for run in runs] == components
    assert (pipeline.folder / RESULTS / "latents").exists()
