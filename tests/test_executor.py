"""The executor plugin without SLURM: its record of earlier jobs, and the jobs that it rejects or does not retry."""

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import snakemake_executor_plugin_slurm as plugin
from snakemake_interface_common.exceptions import WorkflowError
from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo

from kairos.files import write_json
from kairos.slurm import job_records_folder
from kairos.workflow import controller
from snakemake_executor_plugin_kairos import executor as executor_module
from snakemake_executor_plugin_kairos.executor import Executor


@pytest.fixture
def executor(tmp_path, monkeypatch):
    """An executor in an empty folder, with a `squeue` that takes a moment, counts its calls and lists no job."""
    monkeypatch.chdir(tmp_path)
    squeue = tmp_path / "bin" / "squeue"
    squeue.parent.mkdir()
    squeue.write_text("#!/bin/sh\necho called >> calls\nsleep 0.3\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", str(squeue.parent), prepend=os.pathsep)
    executor = Executor.__new__(Executor)  # what __post_init__ sets up needs a whole workflow
    executor._results = "results/demo"
    executor._layout = SimpleNamespace(training_folder=lambda method, seed: f"results/demo/methods/{method}/seed{seed}")
    executor._cancelled = threading.Event()
    executor._earlier_lock = threading.Lock()
    executor._loaded_records = None
    return executor


def test_threads_that_submit_jobs_share_one_record_of_earlier_jobs(executor, tmp_path):
    for number in (11, 12):
        write_json(
            job_records_folder("results/demo") / f"{number}.json", {"outputs": [], "work": {}, "slurm_logfile": "log"}
        )
    records, start = [], threading.Barrier(2)

    def read():
        start.wait()
        records.append(executor._earlier_records)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert records[0] is records[1] and {path.stem for path in records[0]} == {"11", "12"}
    assert (tmp_path / "calls").read_text().splitlines() == ["called"]
    executor._forget(job_records_folder("results/demo") / "11.json")
    assert {path.stem for path in executor._earlier_records} == {"12"}


@pytest.mark.parametrize(
    ("answers", "is_queued"),
    [
        (["", "", "", "17 RUNNING"], True),
        (["", "", "", "16 RUNNING"], False),
        (["", "", "", *["17 COMPLETING"] * 4, "16 RUNNING"], False),  # silent for longer than a job may take to end
        (["17 COMPLETING", "", "", "", "", "", "17 COMPLETING"], False),  # no later answer is needed
        (["17 COMPLETING", "", "17 RUNNING"], True),  # SLURM has queued the job again
    ],
)
def test_a_silent_queue_is_queried_until_it_answers_and_an_ending_job_gets_its_time(
    executor, tmp_path, monkeypatch, answers, is_queued
):
    (tmp_path / "answers").write_text("".join(f"{answer}\n" for answer in answers))
    (tmp_path / "bin" / "squeue").write_text(  # the first line of the file is the answer; without one it fails
        '#!/bin/sh\nread -r answer < answers\nsed -i 1d answers\n[ -n "$answer" ] && echo "$answer"\n'
    )
    seconds = [0.0]
    monkeypatch.setattr(executor_module, "time", SimpleNamespace(monotonic=lambda: seconds[0]))
    monkeypatch.setattr(executor_module, "_QUERY_INTERVAL", 90)
    monkeypatch.setattr(executor, "_pause", lambda pause: seconds.__setitem__(0, seconds[0] + pause))
    assert executor._in_queue("17") is is_queued
    assert (tmp_path / "answers").read_text() == ""  # all answers were needed


def test_waiting_for_a_silent_queue_ends_when_the_run_is_cancelled(executor, tmp_path):
    (tmp_path / "bin" / "squeue").write_text("#!/bin/sh\nexit 1\n")
    executor._cancelled.set()
    with pytest.raises(WorkflowError, match="cancelled"):
        executor._in_queue("17")


def job(method: str = "", seed: int = 0, rule: str = "train_1", **resources: str) -> SimpleNamespace:
    """Return a job of Snakemake that may be retried twice."""
    return SimpleNamespace(
        name=rule,
        rule=SimpleNamespace(name=rule),
        resources=resources,
        wildcards=SimpleNamespace(method=method, seed=seed),
        restart_times=2,
        _attempt=1,
        is_group=lambda: False,
    )


def group(*jobs: SimpleNamespace) -> SimpleNamespace:
    """Return a group of jobs that may be retried twice."""
    return SimpleNamespace(name="trainings_0", jobs=jobs, restart_times=2, _attempt=1, is_group=lambda: True)


def test_the_executor_slurm_is_rejected(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    workflow = SimpleNamespace(executor_plugin=SimpleNamespace(name="slurm"))
    layout = SimpleNamespace(results="results/demo")
    with pytest.raises(SystemExit) as ended:
        controller.starts(workflow, layout)
    assert ended.value.code == 2
    assert "executor: got 'slurm', allowed: 'kairos'" in capsys.readouterr().err


@pytest.fixture
def submitted_jobs(executor, monkeypatch):
    """Jobs that the executor has passed to the SLURM plugin."""
    jobs = []
    executor.workflow = SimpleNamespace(executor_settings=SimpleNamespace(array_jobs=None))
    monkeypatch.setattr(plugin.Executor, "run_jobs", lambda self, submitted: jobs.extend(submitted))
    return jobs


@pytest.mark.parametrize("resource", ["cluster", "clusters", "slurm_cluster"])
def test_jobs_for_other_clusters_are_rejected(executor, submitted_jobs, resource):
    with pytest.raises(WorkflowError, match=f"^{resource}: not possible here"):
        executor.run_jobs([job(), job(**{resource: "elsewhere"})])
    assert submitted_jobs == []


def test_job_arrays_are_rejected(executor, submitted_jobs):
    executor.workflow.executor_settings.array_jobs = "train_1"
    with pytest.raises(WorkflowError, match=r"^kairos-array-jobs: not possible here"):
        executor.run_jobs([job()])
    assert submitted_jobs == []


def test_other_jobs_are_passed_to_the_slurm_plugin(executor, submitted_jobs):
    jobs = [job(), job(slurm_partition="gpu")]
    executor.run_jobs(jobs)
    assert submitted_jobs == jobs


FAILED_IN_THIS_JOB = {"state": "failed", "again": True, "job": "7"}
DIVERGED_IN_THIS_JOB = {"state": "failed", "again": False, "job": "7"}
DIVERGED_EARLIER = {"state": "failed", "again": False, "job": "6"}
COMPLETE = {"state": "complete", "again": True, "job": "7"}


@pytest.mark.parametrize(
    ("progress_records", "exact", "retried"),
    [
        ([DIVERGED_IN_THIS_JOB], True, False),
        ([DIVERGED_IN_THIS_JOB, COMPLETE], True, False),
        ([DIVERGED_IN_THIS_JOB], False, True),
        ([DIVERGED_IN_THIS_JOB, FAILED_IN_THIS_JOB], True, True),
        ([DIVERGED_EARLIER], True, True),
        ([FAILED_IN_THIS_JOB], True, True),
    ],
)
def test_a_run_that_diverged_is_not_retried(executor, monkeypatch, progress_records, exact, retried):
    reported = []
    monkeypatch.setattr(plugin.Executor, "report_job_error", lambda self, info, **_: reported.append(info.job))
    executor._exact, executor._loaded_records = exact, {}
    jobs = []
    for number, record in enumerate(progress_records):
        training = Path("results/demo/methods/method") / f"seed{number}"
        write_json(training / ".state/progress.json", record)
        jobs.append(job("method", number))
    failed = jobs[0] if len(jobs) == 1 else group(*jobs)
    executor.report_job_error(SubmittedJobInfo(failed, external_jobid="7"))
    assert reported == [failed]
    assert (failed._attempt <= failed.restart_times) is retried


@pytest.mark.parametrize(
    ("planned", "quiet_seconds", "expected"),
    [(30, 8, 5), (30, 60, 15), (30, 3600, 30)],  # at least the initial interval, at most the plugin's own one
)
def test_status_checks_follow_each_other_after_a_quarter_of_the_time_without_an_event(
    executor, monkeypatch, planned, quiet_seconds, expected
):
    settings = SimpleNamespace(init_seconds_before_status_checks=5)
    executor.workflow = SimpleNamespace(executor_settings=settings)
    executor._last_event = 1000.0
    executor.next_seconds_between_status_checks = planned
    monkeypatch.setattr(executor_module, "time", SimpleNamespace(monotonic=lambda: 1000.0 + quiet_seconds))
    executor._limit_interval()
    assert executor.next_seconds_between_status_checks == expected
