"""The executor plugin without SLURM: jobs that it waits for, cancels, rejects, or does not attempt again."""

import asyncio
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import snakemake_executor_plugin_slurm as plugin
from snakemake_interface_common.exceptions import WorkflowError
from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo

from kairos.config import validate
from kairos.files import write_json, write_record
from kairos.slurm import job_name
from kairos.validity import Result, Validity
from kairos.workflow.final_errors import read_final_error
from kairos.workflow.layout import create_layout, write_plan
from snakemake_executor_plugin_kairos import executor as executor_module
from snakemake_executor_plugin_kairos.executor import Executor

RESULTS = "results/demo"
NAME = "kairos-demo"


def plan(**changes):
    """Return the layout of a small experiment with its plan; `changes` replace its sections."""
    values = {"experiment": "demo", "seeds": [0, 1], "dataset": {"source": "digits"}, "methods": {"a": {}, "b": {}}}
    return write_plan(create_layout(validate({**values, **changes}, "demo.yaml")))


@pytest.fixture
def executor(tmp_path, monkeypatch):
    """An executor in an empty folder with a queue: the file `queue`, and `cancelled`, the numbers given to scancel."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    scripts = {"squeue": "[ -e queue ] && cat queue || exit 1", "scancel": 'echo "$@" >> cancelled; : > queue'}
    for name, script in scripts.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    monkeypatch.setattr(executor_module, "_QUERY_INTERVAL", 0.01)
    monkeypatch.setattr(executor_module, "_PAUSE", 0.05)
    executor = Executor.__new__(Executor)  # what __post_init__ sets up needs a whole workflow
    executor._layout = plan()
    executor._cancelled, executor._earlier_lock = threading.Event(), threading.Lock()
    executor._submitted, executor._taken_over, executor._final_errors, executor._delayed = set(), set(), {}, []
    executor._lost_answers = executor_module.Counter()
    executor._last_event = time.monotonic()
    executor._next_seconds_between_status_checks = None
    settings = SimpleNamespace(array_jobs=None, init_seconds_before_status_checks=5)
    executor.workflow = SimpleNamespace(executor_settings=settings)
    write_queue()
    return executor


@pytest.fixture
def reports(monkeypatch):
    """Reports of the executor to Snakemake: kind and job."""
    reports = []
    for kind in ("submission", "success", "error"):
        name = f"report_job_{kind}"
        monkeypatch.setattr(plugin.Executor, name, lambda self, info, kind=kind, **_: reports.append((kind, info.job)))
    return reports


def write_queue(*jobs: tuple[int, str, str, str]) -> None:
    """Write the queue: number, state, plan and comment of each job."""
    lines = [
        f"{number}|{state}|None|N/A|{job_name(RESULTS)}-{plan}|{comment}\n" for number, state, plan, comment in jobs
    ]
    Path("queue").write_text("".join(lines) + f"99|RUNNING|None|N/A|{NAME}x-123456-{'0' * 8}|rule_train\n")


class FakeJob(SimpleNamespace):
    """A job of Snakemake."""

    __hash__ = object.__hash__


def job(
    rule: str = "prepare", *wildcards: str, log: str = "job.log", output: str = "out", inputs: tuple[str, ...] = (),
    **resources: str,
) -> FakeJob:  # fmt: skip
    """Return a job of Snakemake."""
    snakemake_rule = SimpleNamespace(name=rule)
    return FakeJob(
        name=rule, rule=snakemake_rule, wildcards=wildcards, resources=resources, log=[log], input=inputs,
        output=[output],
        is_group=lambda: False,
    )  # fmt: skip


def group(name: str, *jobs: FakeJob) -> FakeJob:
    """Return a group of jobs."""
    rules = "_".join(sorted({single.rule.name for single in jobs}))
    return FakeJob(name=f"{name}_{rules}", groupid=name, jobs=jobs, resources={}, is_group=lambda: True)


def test_a_job_of_the_plan_is_waited_for_once_and_jobs_of_other_experiments_are_left_alone(executor, reports):
    write_queue((7, "RUNNING", executor._layout.plan, "rule_train_wildcards_a_0"))
    waits = job("train", "a", "0")
    executor.run_job(waits)
    assert reports == [("submission", waits)]
    assert executor._find_earlier_job(waits) is None  # another attempt is submitted
    assert not Path("cancelled").exists()


@pytest.mark.parametrize(
    ("comment", "changes", "is_kept"),
    [
        ("rule_train_wildcards_a_0", {"sampling": {"steps": 7}}, True),
        ("rule_images_a_seed0_evaluate_sample", {"sampling": {"steps": 7}}, False),
        ("rule_train_wildcards_a_0", {"methods": {"a": {"sampler": "speed"}, "b": {}}}, False),
        ("rule_train_wildcards_b_0", {"methods": {"a": {"sampler": "speed"}, "b": {}}}, True),
        ("rule_train_wildcards_a_0", {"training": {"milestones": [100, 5000]}}, False),
        ("rule_trainings_0_train", {"seeds": [0, 1, 2]}, False),  # other training runs share the job
        ("rule_prepare", {"methods": {"a": {}}}, True),
        ("rule_train_wildcards_a_0", {"dataset": {"source": "digits", "heldout": 0.5}}, False),  # other inputs
        ("rule_images_a_seed0_evaluate_sample", {"methods": {"a": {"sampler": "speed"}, "b": {}}}, False),
        ("rule_images_b_seed0_evaluate_sample", {"methods": {"a": {"sampler": "speed"}, "b": {}}}, True),
        ("rule_train_wildcards_a_2", {"seeds": [0, 1, 2]}, False),  # the experiment has no such seed any more
        ("rule_train_wildcards_c_0", {"methods": {"c": {}}}, False),  # the experiment has no such method any more
        ("rule_unknown", {"methods": {"a": {}}}, False),
    ],
)
def test_a_job_of_another_plan_is_kept_if_its_work_is_equal(executor, comment, changes, is_kept):
    write_queue((7, "RUNNING", plan(**changes).plan, comment), (8, "PENDING", "0" * 8, comment))
    assert (comment in executor._earlier_jobs) is is_kept
    assert Path("cancelled").read_text().split() == (["8"] if is_kept else ["7", "8"])


def test_a_job_whose_comment_the_cluster_has_changed_is_cancelled(executor):
    write_queue((7, "RUNNING", executor._layout.plan, "changed"))
    assert executor._earlier_jobs == {}
    assert Path("cancelled").read_text().split() == ["7"]


def test_outputs_that_are_results_are_valid_only_with_the_present_key(executor):
    record = Path("results/demo/dataset/record.json")
    write_record(record, {"computed_from": {"key": "0" * 64, "inputs": {}}})
    assert not executor._layout.has_valid_outputs([str(record)])
    validity = Validity(executor._layout.experiment, RESULTS, reads_outside=True)
    write_record(record, {"computed_from": validity.describe(Result("prepare"))})
    assert executor._layout.has_valid_outputs([str(record)])
    assert not executor._layout.has_valid_outputs([str(record), "missing"])


def test_a_group_is_waited_for_if_its_job_contains_all_of_its_rules(executor):
    number = executor._layout.plan
    write_queue(
        (7, "RUNNING", number, "rule_images_a_seed0_evaluate_sample"),
        (8, "RUNNING", number, "rule_images_a_seed1_sample"),
    )
    sample, evaluate = job("sample", "a", "0"), job("evaluate", "a", "0")
    assert executor._find_earlier_job(group("images_a_seed0", evaluate)) == "7"
    assert not Path("cancelled").exists()
    assert executor._find_earlier_job(group("images_a_seed1", sample, evaluate)) is None
    assert Path("cancelled").read_text().split() == ["8"]


def test_a_silent_queue_is_asked_until_it_answers_or_the_run_is_cancelled(executor):
    Path("queue").unlink()
    timer = threading.Timer(0.3, write_queue, ((7, "RUNNING", executor._layout.plan, "rule_prepare"),))
    timer.start()
    assert executor._find_earlier_job(job()) == "7"
    Path("queue").unlink()
    del executor.__dict__["_earlier_jobs"]
    executor._cancelled.set()
    with pytest.raises(WorkflowError, match="cancelled"):
        executor._find_earlier_job(job())


def check(executor, *numbers: int) -> list[str]:
    """Return the numbers of the jobs that a status check leaves active."""

    async def list_active() -> list[str]:
        infos = [SubmittedJobInfo(job(), external_jobid=str(number)) for number in numbers]
        return [info.external_jobid async for info in executor.check_active_jobs(infos)]

    return asyncio.run(list_active())


def test_the_end_of_a_job_is_its_state_or_its_absence_in_three_consecutive_answers(executor, reports):
    states = ("COMPLETED", "OUT_OF_MEMORY", "RUNNING", "PREEMPTED")
    write_queue(*((number, state, "plan", "rule_prepare") for number, state in enumerate(states, 1)))
    assert check(executor, 1, 2, 3, 4, 5) == ["3", "4", "5"]
    assert [kind for kind, _ in reports] == ["success", "error"]
    Path("queue").rename("away")  # no answer
    assert [check(executor, 4, 5) for _ in range(4)] == [["4", "5"]] * 4
    Path("away").rename("queue")
    write_queue((4, "RUNNING", "plan", "rule_prepare"))  # SLURM has started it again
    assert check(executor, 4, 5) == ["4", "5"]
    write_queue((4, "PREEMPTED", "plan", "rule_prepare"))
    assert check(executor, 4, 5) == ["4"]
    assert [kind for kind, _ in reports[2:]] == ["error"]
    assert [check(executor, 4) for _ in range(2)] == [["4"], []]
    Path("out").touch()  # the output of the jobs
    assert [check(executor, 6) for _ in range(3)] == [["6"], ["6"], []]
    assert [kind for kind, _ in reports[3:]] == ["error", "success"]
    assert Path("cancelled").read_text().split() == ["2", "5", "4"]  # SLURM must not start them again


def test_a_job_that_is_taken_over_succeeds_only_with_valid_results(executor, reports):
    write_queue((7, "RUNNING", executor._layout.plan, "rule_prepare"))
    executor.run_job(job())
    write_queue((7, "COMPLETED", executor._layout.plan, "rule_prepare"))
    assert check(executor, 7) == []
    assert [kind for kind, _ in reports] == ["submission", "error"]
    write_queue((7, "COMPLETED", executor._layout.plan, "rule_prepare"))  # again, since it was cancelled
    Path("out").touch()
    assert check(executor, 7) == []
    assert [kind for kind, _ in reports[2:]] == ["success"]


@pytest.fixture
def submitted_jobs(monkeypatch):
    """Jobs that the executor has passed to the SLURM plugin."""
    jobs = []
    monkeypatch.setattr(plugin.Executor, "run_jobs", lambda self, submitted: jobs.extend(submitted))
    monkeypatch.setattr(plugin.Executor, "run_job", lambda self, submitted: jobs.append(submitted))
    return jobs


@pytest.mark.parametrize("resource", ["cluster", "clusters", "slurm_cluster"])
def test_jobs_for_other_clusters_are_rejected(executor, submitted_jobs, resource):
    with pytest.raises(WorkflowError, match=f"^{resource}: only with executor: slurm"):
        executor.run_jobs([job(), job(**{resource: "elsewhere"})])
    assert submitted_jobs == []


def test_job_arrays_are_rejected(executor, submitted_jobs):
    executor.workflow.executor_settings.array_jobs = "train_1"
    with pytest.raises(WorkflowError, match=r"^kairos-array-jobs: only with executor: slurm"):
        executor.run_jobs([job()])
    assert submitted_jobs == []


def test_other_jobs_are_passed_to_the_slurm_plugin(executor, submitted_jobs):
    jobs = [job(), job(slurm_partition="gpu")]
    executor.run_jobs(jobs)
    assert submitted_jobs == jobs


def test_a_job_that_slurm_rejects_is_not_submitted_again_and_its_log_says_why(executor, reports, submitted_jobs):
    rejected = job(log="logs/rejected.log")
    message = "SLURM sbatch failed. The error message was 'invalid partition'.\n sbatch call:\n sbatch"
    executor.report_job_error(SubmittedJobInfo(rejected), msg=message)
    assert reports == [("error", rejected)]
    assert "invalid partition" in Path("logs/rejected.log").read_text()
    executor.run_job(rejected)
    assert reports == [("error", rejected)] * 2 and submitted_jobs == []


def test_a_job_that_slurm_cannot_accept_now_is_submitted_again(executor, reports, submitted_jobs):
    delayed = job()
    executor.run_job(delayed)
    executor.report_job_error(SubmittedJobInfo(delayed), msg="Unable to contact slurm controller")
    time.sleep(0.5)
    assert submitted_jobs == [delayed, delayed] and reports == []
    # SLURM had accepted the job although sbatch failed
    write_queue((7, "PENDING", executor._layout.plan, "rule_prepare"))
    executor.report_job_error(SubmittedJobInfo(delayed), msg="Unable to contact slurm controller")
    time.sleep(0.5)
    assert reports == [("submission", delayed)]


@pytest.mark.parametrize(
    ("errors", "outputs", "is_final"),
    [
        (["one"], [], True),
        ([], [], False),
        (["one"], ["two"], True),  # the other job of the group is complete
        (["one"], [], False),  # the other one may still succeed
        (["one", "two"], [], True),
    ],
)
def test_a_job_is_not_attempted_again_after_a_final_error(
    executor, reports, submitted_jobs, request, errors, outputs, is_final
):
    jobs = [job("train", name, "0", log=f"{name}.log", output=name) for name in ("one", "two")]
    for name in errors:
        write_json(f"{name}.error.json", {"plan": executor._layout.plan, "message": f"{name} diverged"})
    for name in outputs:
        Path(name).touch()
    failed = jobs[0] if request.node.callspec.id.startswith(("errors0", "errors1")) else group("trainings_0", *jobs)
    executor.report_job_error(SubmittedJobInfo(failed, external_jobid="7"))
    executor.run_job(failed)
    assert [kind for kind, _ in reports] == (["error"] * 2 if is_final else ["error"])
    assert submitted_jobs == ([] if is_final else [failed])


def test_a_group_is_not_attempted_again_if_its_remaining_jobs_need_the_failed_one(executor, reports, submitted_jobs):
    sample = job("sample", "a", "0", log="sample.log", output="samples")
    evaluate = job("evaluate", "a", "0", log="evaluate.log", output="evaluation", inputs=["samples"])
    write_json("sample.error.json", {"plan": executor._layout.plan, "message": "not finite"})
    failed = group("images_a_seed0", evaluate, sample)
    executor.report_job_error(SubmittedJobInfo(failed, external_jobid="7"))
    executor.run_job(failed)
    assert reports == [("error", failed)] * 2 and submitted_jobs == []


def test_an_error_of_another_plan_is_not_final(executor):
    write_json("job.error.json", {"plan": "0" * 8, "message": "before"})
    assert read_final_error("job.log", executor._layout.plan) == ""
    assert read_final_error("job.log", "0" * 8) == "before"


@pytest.mark.parametrize(("quiet_seconds", "expected"), [(8, 5), (60, 15), (3600, 180)])
def test_status_checks_follow_each_other_after_a_quarter_of_the_time_without_an_event(
    executor, quiet_seconds, expected
):
    executor._last_event = time.monotonic() - quiet_seconds
    write_queue((7, "RUNNING", executor._layout.plan, "rule_prepare"))
    check(executor, 7)
    assert executor.next_seconds_between_status_checks == pytest.approx(expected, abs=1)
