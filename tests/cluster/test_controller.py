"""Tests that a killed and restarted controller loses no job, computes nothing twice, and cancels outdated jobs."""

import os
import signal
from contextlib import suppress

import pytest
import yaml
from pipeline import CONFIG, RESULTS, Pipeline, all_jobs, details
from slurm import slurm, wait_for
from sweep import KILLS, Sweep, record_hash

from kairos.files import read_json
from kairos.slurm import job_name

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(6 * 3600)]


def test_a_sweep_survives_its_controller(sweep: Sweep, table: list[tuple[str, ...]]) -> None:
    pipeline, trainings = sweep.pipeline, sweep.trainings
    pipeline.configure(seeds=sweep.seeds)
    steps = pipeline.tiny["training"]["milestones"][-1]
    assert all(training.steps_of_jobs() == [steps] for training in trainings)  # one job computed each step once
    assert 0 < len(sweep.complete) < len(trainings)
    for training, seen in sweep.complete.items():
        assert (record_hash(training), len(training.jobs())) == seen
    # a run that ended while the second controller read its results may have another job, which computes nothing
    assert all(len(training.jobs()) <= 1 + KILLS for training in trainings)
    disturbance = f"The controller of {len(trainings)} training runs is killed (SIGKILL) {KILLS} times and restarted."
    effect = f"{len(sweep.complete)} complete and unchanged; all are in report and MLflow, each step computed once"
    table.append((disturbance, effect, f"{sweep.seconds:.0f}", ""))


def test_the_pipeline_runs_on_slurm_up_to_its_report(sweep: Sweep) -> None:
    pipeline = sweep.pipeline
    pipeline.configure(seeds=sweep.seeds)
    results = pipeline.folder / RESULTS
    assert (results / "report.html").stat().st_size > 10_000
    rows = (results / "summary.csv").read_text().splitlines()[1:]
    assert len(rows) == 2 * 2 + 4  # two methods at the first and last step, four reference rows
    record = read_json(results / "tracking.json")
    assert record["imported"]
    assert sorted(record["runs"]) == sorted(f"{training.method}/seed{training.seed}" for training in sweep.trainings)
    assert len(set(record["runs"].values())) == len(sweep.trainings)
    assert pipeline.to_do() == {}
    shared_jobs = [job.rule for job in all_jobs(pipeline.folder) if job.rule in ("rule_prepare", "rule_reference")]
    assert sorted(shared_jobs) == ["rule_prepare", "rule_reference"]  # one job computed each of these stages


def test_jobs_of_another_plan_continue_if_their_work_is_equal_and_are_cancelled_otherwise(pipeline: Pipeline) -> None:
    partitions = {"main": {"max_nodes": 1}, "wide": {"max_nodes": 2}}
    (pipeline.folder / "partitions.yaml").write_text(yaml.safe_dump({"partitions": partitions}))
    pipeline.configure({"edited": {"sampler": "uniform"}}, milestones=[20_000])
    training = pipeline.training("edited")
    with pipeline.controller("--", training.target) as controller:
        wait_for(training.has_checkpoint, 300, "the first checkpoint")
        os.kill(pid := training.pid(), signal.SIGSTOP)  # it computes nothing until it is cancelled
        controller.process.send_signal(signal.SIGKILL)
    name = f"{job_name(pipeline.folder / RESULTS)}-00000000"
    command = ("sbatch", "--parsable", f"--job-name={name}", "--comment=rule_train_wildcards_edited_0", "--mem=50")
    unknown = slurm(*command, "--output=/dev/null", "--wrap", "sleep 600")
    (first,) = training.jobs()[:1]

    # another plan: training is the same, sampling is not
    file = pipeline.folder / CONFIG
    values = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump({**values, "sampling": {**values["sampling"], "steps": 6}}))
    with pipeline.controller("--", training.target) as controller:
        waits = f"SLURM job {first.number} of an earlier run computes"
        wait_for(lambda: waits in controller.log.read_text(), 300, "the job of the earlier controller")
        controller.process.send_signal(signal.SIGKILL)
        output = controller.log.read_text()
    assert f"SLURM job {unknown} of an earlier run (rule_train_wildcards_edited_0) does no planned work" in output
    assert slurm("squeue", "-h", "-t", "all", "-j", unknown, "-o", "%T") == "CANCELLED"
    assert training.jobs()[0].state == "RUNNING"

    pipeline.configure({"edited": {"sampler": "speed"}}, milestones=[50])
    with pipeline.controller("--kairos-partition-config", "partitions.yaml", "--", training.target) as controller:
        wait_for(lambda: "does no planned work: cancelling it" in controller.log.read_text(), 300, "a cancelled job")
        with suppress(ProcessLookupError):  # SLURM sends SIGCONT too when it cancels the job: it may have ended
            os.kill(pid, signal.SIGCONT)
        controller.wait_for_success(300)
    jobs = [job for job in training.jobs() if job.number != unknown]
    assert [job.state for job in jobs] == ["CANCELLED", "COMPLETED"]
    assert (details(jobs[1])["Partition"], details(jobs[1])["NumNodes"]) == ("main", "1")
    assert training.complete()
    assert training.steps_of_jobs() == [50]
