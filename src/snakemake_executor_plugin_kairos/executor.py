"""Executor of the SLURM plugin whose jobs outlive their controller: the next controller waits for them.

SLURM's queue is the only record of the jobs, see `kairos.slurm`. A new controller cancels jobs whose work is not in its
plan, and waits for a job of the plan instead of submitting it again.

SLURM's state decides whether a job of this controller has succeeded. A job of an earlier controller must also have
valid results. For a job that SLURM has forgotten, the results alone decide.
"""

import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from functools import cached_property
from pathlib import Path
from typing import Any

import snakemake_executor_plugin_slurm as plugin
from snakemake_interface_common.exceptions import WorkflowError
from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo
from snakemake_interface_executor_plugins.settings import ExecMode

from kairos import slurm
from kairos.progress import duration, log
from kairos.slurm import (
    ENDED_STATES,
    find_trainings,
    job_name,
    plain_environment,
    query_jobs,
    run_command,
    slurm_logs_folder,
)
from kairos.workflow import batch_script
from kairos.workflow.final_errors import read_final_error
from kairos.workflow.layout import load_planned_layout, read_plan

_QUERY_INTERVAL = 5.0  # seconds between queries of the queue while a job ends
_QUIET_SHARE = 0.25  # longest time between status checks, as share of the time since the last event
_LONGEST_INTERVAL = 180.0  # seconds between status checks
_COMPLETING_LIMIT = 300.0  # seconds that a cancelled job may take to end
_COMMAND_TIMEOUT = 60.0  # seconds that a SLURM command may take
_ANSWERS_UNTIL_LOST = 3  # consecutive answers in which a lost job is missing, or may be started again
_PAUSE = 30.0  # seconds until the next attempt, if SLURM does not answer or does not accept a job
_SLURM_MAY_RESTART = ("NODE_FAIL", "PREEMPTED", "BOOT_FAIL")  # states from which SLURM queues a job again
_STAGES_OF_GROUPS = {"images": ["sample", "evaluate"], "trainings": ["train"]}
_CLUSTER_RESOURCES = ("cluster", "clusters", "slurm_cluster")
# compute nodes have no internet access; `kairos fetch` has downloaded what jobs need
_OFFLINE = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
# errors of sbatch after which the same call may succeed: SLURM is away or busy, or limits the jobs of a user
TEMPORARY_SBATCH_ERRORS = re.compile(
    r"timed out|unable to contact|temporarily|try again|connect failure|connection refused|communication|zero bytes"
    r"|SubmitJob",
    re.IGNORECASE,
)


class Executor(plugin.Executor):
    """Executor of the SLURM plugin that waits for jobs of earlier controllers."""

    def __post_init__(self, test_mode: bool = False) -> None:
        """Set up the executor; Snakemake calls this method.

        The controller's environment changes for the rest of its life, and jobs inherit it. Access to the Hugging Face
        hub is switched off, and the variables by which users change the output of SLURM's commands are deleted. SIGINT
        raises KeyboardInterrupt, also in a controller that a script has started in the background.
        """
        for name in os.environ.keys() - plain_environment().keys():
            del os.environ[name]
        os.environ |= _OFFLINE
        signal.signal(signal.SIGINT, signal.default_int_handler)  # background processes of a script ignore SIGINT
        self._layout = load_planned_layout()
        settings = self.workflow.executor_settings
        settings.logdir = settings.logdir or slurm_logs_folder(self._layout.results)
        super().__post_init__(test_mode)
        self.run_uuid = f"{job_name(self._layout.results)}-{self._layout.plan}"  # name of this controller's jobs
        self._last_event = time.monotonic()  # when a job was last submitted, or last ended
        self._submitted: set[str] = set()  # numbers of this controller's jobs
        self._final_errors: dict[Any, str] = {}  # by job, whose further attempts are not submitted
        self._lost_answers: Counter[str] = Counter()  # answers of the queue in which a job is lost, by number
        self._taken_over: set[str] = set()  # numbers of the jobs of earlier controllers that this one waits for
        self._delayed: list[Any] = []  # jobs that are submitted again after a pause
        self._cancelled = threading.Event()
        self._earlier_lock = threading.Lock()  # the plugin submits jobs in two threads

    def get_exec_mode(self) -> ExecMode:
        """Return the mode of the Snakemake process in a job: the default mode, which alone records that a job ended."""
        return ExecMode.DEFAULT

    def additional_general_args(self) -> str:
        """Return options for the Snakemake process in a job that Snakemake itself does not pass on.

        They are: no profile, keep temporary files, and the controller's largest size of hashed files.
        """
        # --notemp: the controller deletes temporary files
        size = self.workflow.dag_settings.max_checksum_file_size
        return f"--profile none --workflow-profile none --notemp --max-checksum-file-size {size}"

    @property
    def cores(self) -> str:
        """Cores that the Snakemake process in a job may use, the text ``all``: all that SLURM has allocated."""
        return "all"

    def get_python_executable(self) -> str:
        """Return the start of a job's command, to which Snakemake adds ``-m snakemake ...``.

        The command runs `batch_script`, which starts Snakemake and forwards SIGTERM.
        """
        python = super().get_python_executable()
        return f"exec {python} -m {batch_script.__name__} {python}"

    # Submission

    def run_jobs(self, jobs: list[Any]) -> None:
        """Submit each job by itself, in threads of the SLURM plugin; `run_job` handles one job.

        Raises:
            WorkflowError: job arrays or other clusters are requested, in which jobs would not be found again. No job is
                submitted then.
        """
        unsupported = [name for name in _CLUSTER_RESOURCES for job in jobs if job.resources.get(name)]
        if self.workflow.executor_settings.array_jobs:
            unsupported.append("kairos-array-jobs")
        if unsupported:
            raise WorkflowError(
                f"{unsupported[0]}: only with executor: slurm, since executor: kairos could not find such jobs again"
            )
        super().run_jobs(jobs)

    def run_job(self, job: Any) -> None:
        """Wait for the SLURM job that does a job's work, or submit the job, unless an attempt had a final error.

        An exception is not raised, since Snakemake calls this method in threads, which would lose it. It is reported as
        an error of the job.
        """
        if self._cancelled.is_set():
            return
        try:
            if job in self._final_errors:
                self.report_job_error(SubmittedJobInfo(job), msg=self._final_errors[job])
            elif (number := self._find_earlier_job(job)) is not None:
                log(f"SLURM job {number} of an earlier run computes {_describe(job)}: waiting for it")
                self.report_job_submission(SubmittedJobInfo(job, number))
            else:
                super().run_job(job)
        except Exception as error:
            if not self._cancelled.is_set():
                self.report_job_error(SubmittedJobInfo(job), msg=str(error))

    def report_job_submission(self, job_info: SubmittedJobInfo, register_job: bool = True) -> None:
        """Report a submitted job to Snakemake; its number is known from now on."""
        self._submitted.add(str(job_info.external_jobid))
        super().report_job_submission(job_info, register_job=register_job)
        self._last_event = time.monotonic()

    def report_job_error(self, job_info: SubmittedJobInfo, msg: str | None = None, **keywords: Any) -> None:
        """Report a failed job to Snakemake; or submit it again if SLURM could not accept it, which is no attempt.

        If SLURM rejects a job, or if another attempt would only repeat the error of the job, no attempt is submitted
        any more. The message of a rejected job is written into its log.
        """
        job = job_info.job
        if job_info.external_jobid is None and job not in self._final_errors:
            sbatch_error = " ".join(str(msg).partition("sbatch call:")[0].split())  # on one line
            if TEMPORARY_SBATCH_ERRORS.search(sbatch_error):
                log(f"{job.name}: {sbatch_error} It is submitted again in {duration(_PAUSE)}.")
                self._submit_later(job)
                return
            sbatch_error = f"kairos: SLURM rejected job {job.name}: {sbatch_error}"
            log(sbatch_error)  # Snakemake's own message is hidden by `quiet` in the profile
            self._final_errors[job] = sbatch_error
            for single in _single_jobs(job):
                for path in map(Path, single.log):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text(f"{sbatch_error}\n", encoding="utf-8")
        elif job not in self._final_errors and (error := self._read_final_error(job)):
            self._final_errors[job] = error
        super().report_job_error(job_info, msg=msg, **keywords)
        self._last_event = time.monotonic()

    def _submit_later(self, job: Any) -> None:
        """Submit a job again after `_PAUSE`; jobs that are delayed meanwhile are submitted with it, in order."""
        with self._earlier_lock:
            self._delayed.append(job)
            if len(self._delayed) == 1:
                timer = threading.Timer(_PAUSE, self._submit_delayed)
                timer.daemon = True
                timer.start()

    def _submit_delayed(self) -> None:
        with self._earlier_lock:
            jobs, self._delayed = self._delayed, []
            self.__dict__.pop("_earlier_jobs", None)  # SLURM may have accepted a job although sbatch failed
        for job in jobs:
            self.run_job(job)

    def _read_final_error(self, job: Any) -> str:
        """Return the message of a job's final error; empty: none, or another job of the group may still succeed."""
        singles = _single_jobs(job)
        errors = {single: read_final_error(single.log[0], self._layout.plan) for single in singles if single.log}
        failed = {str(path) for single, error in errors.items() if error for path in single.output}
        for single in singles if failed else ():
            is_blocked = not failed.isdisjoint(map(str, single.input))
            if not (errors.get(single) or is_blocked or self._has_valid_outputs(single)):
                return ""
        return next(filter(None, errors.values()), "")

    # Jobs of earlier controllers

    @cached_property
    def _earlier_jobs(self) -> dict[str, str]:
        """Numbers of the queued jobs of earlier controllers, by comment, whose work is that of this controller's plan.

        The first access cancels the other jobs of the experiment and waits for their end, see `_cancel`.

        Raises:
            WorkflowError: the run is cancelled.
        """
        kept: dict[str, str] = {}
        outdated = []
        for job in self._query_queue():
            if job.number in self._submitted:
                continue
            if self._does_planned_work(job) and job.comment not in kept:
                kept[job.comment] = job.number
            else:
                log(f"SLURM job {job.number} of an earlier run ({job.comment}) does no planned work: cancelling it")
                outdated.append(job.number)
        self._cancel(outdated)
        return kept

    def _does_planned_work(self, job: slurm.Job) -> bool:
        """Return True if a queued job computes what a job with the same comment would compute now.

        That is so for jobs of this plan. In jobs of another plan, the keys of the stage and of all stages before it
        must be equal, and the division into jobs, too.
        """
        if not job.comment.startswith("rule_"):  # the cluster has changed the comment, by which the job would be found
            return False
        if job.plan == self._layout.plan:
            return True
        plan, present = read_plan(self._layout, job.plan), read_plan(self._layout, self._layout.plan)
        divisions = ["segments", "trainings_per_gpu", *(["trainings"] if job.stage == "trainings" else [])]
        if any(plan.get(name) != present[name] for name in divisions):
            return False
        trainings = find_trainings(job.comment, self._layout.trainings, present["trainings_per_gpu"])
        if not set(trainings) <= set(self._layout.trainings):
            return False
        stages = self._find_stages(_STAGES_OF_GROUPS.get(job.stage, [job.stage]))
        methods = {method for method, _ in trainings} or self._layout.methods
        names = {f"train.{method}" for method in methods} if "train" in stages else set()
        names |= stages - {"train"}
        return bool(names) and all(plan["keys"].get(name, "") == present["keys"].get(name) for name in names)

    def _find_stages(self, names: list[str]) -> set[str]:
        """Return the names of stages and of all stages that they need."""
        stages: set[str] = set()
        for name in names:
            row = self._layout.stages.get(name)
            stages |= {name} | (self._find_stages(list(row.needs)) if row else set())
        return stages

    def _find_earlier_job(self, job: Any) -> str | None:
        """Return the number of the queued job of an earlier controller that does a job's work; None: there is none.

        A queued group that lacks a rule of this group is cancelled.

        Raises:
            WorkflowError: the run is cancelled.
        """
        with self._earlier_lock:
            if not job.is_group():
                wildcards = "_".join(job.wildcards).replace("/", "_")
                return self._take(f"rule_{job.name}" + (f"_wildcards_{wildcards}" if wildcards else ""))
            group = re.compile(rf"rule_{re.escape(job.groupid)}((?:_(?:train|sample|evaluate)(?:_\d+)?)+)")
            matches = [match for match in map(group.fullmatch, self._earlier_jobs) if match]
            for match in matches:
                if all(f"_{single.rule.name}_" in f"{match[1]}_" for single in job.jobs):
                    return self._take(match[0])
            self._cancel([self._earlier_jobs.pop(match[0]) for match in matches])
            return None

    def _take(self, comment: str) -> str | None:
        """Return the number of the earlier job with a comment, which is taken over now; None: there is none."""
        number = self._earlier_jobs.pop(comment, None)
        if number is None or number in self._submitted:  # submitted while the queue was queried
            return None
        self._taken_over.add(number)
        return number

    def _has_valid_outputs(self, job: Any) -> bool:
        return all(self._layout.has_valid_outputs([*map(str, single.output)]) for single in _single_jobs(job))

    # SLURM's queue

    async def check_active_jobs(self, active_jobs: list[SubmittedJobInfo]) -> AsyncIterator[SubmittedJobInfo]:
        """Report the jobs that have ended, and yield all other jobs, which Snakemake checks again later.

        Unlike the SLURM plugin, this method keeps all jobs if squeue fails. A job that is missing in
        `_ANSWERS_UNTIL_LOST` consecutive answers has ended; it has succeeded if its results are valid.
        """
        shortest = self.workflow.executor_settings.init_seconds_before_status_checks
        self.next_seconds_between_status_checks = shortest
        if not active_jobs:  # also before `__post_init__`, since Snakemake starts the checks first
            return
        jobs, problem = query_jobs(self._layout.results, with_ended=True, timeout=_COMMAND_TIMEOUT)
        if problem:
            log(f"{problem}; the states of jobs are unknown until SLURM answers")
            for job_info in active_jobs:
                yield job_info
            return
        states = {job.number: job.state for job in jobs}
        for job_info in active_jobs:
            number = str(job_info.external_jobid)
            state = states.get(number, "")
            is_lost = state in ("", *_SLURM_MAY_RESTART)
            self._lost_answers[number] = self._lost_answers[number] + 1 if is_lost else 0
            has_ended = self._lost_answers[number] >= _ANSWERS_UNTIL_LOST if is_lost else state in ENDED_STATES
            if not has_ended:
                yield job_info
                continue
            has_succeeded = state == "COMPLETED"
            if state == "" or number in self._taken_over:  # the end is unknown, or the inputs may have been others
                has_succeeded = state in ("", "COMPLETED") and self._has_valid_outputs(job_info.job)
            if has_succeeded:
                self.report_job_success(job_info)
            else:
                run_command("scancel", number, timeout=_COMMAND_TIMEOUT)  # SLURM must not start it again
                self.report_job_error(job_info, msg=f"SLURM job {number}: {state or 'no longer in the queue'}. ")
        if not any(self._lost_answers[str(job_info.external_jobid)] for job_info in active_jobs):
            quiet_seconds = time.monotonic() - self._last_event
            interval = min(max(shortest, _QUIET_SHARE * quiet_seconds), _LONGEST_INTERVAL)
            self.next_seconds_between_status_checks = interval

    def cancel(self) -> None:
        """Cancel all jobs of the experiment in the queue, also those in submission; no job is submitted any more."""
        self._cancelled.set()  # first, so that no other thread submits a job
        try:
            super().cancel()  # misses jobs in submission, and those of earlier controllers that are not taken over yet
        finally:
            jobs, _ = query_jobs(self._layout.results, timeout=_COMMAND_TIMEOUT)
            if jobs:
                run_command("scancel", *(job.number for job in jobs), timeout=_COMMAND_TIMEOUT)

    def _cancel(self, numbers: list[str]) -> None:
        """Cancel SLURM jobs and wait up to `_COMPLETING_LIMIT` for their end: a broken machine may take hours.

        Raises:
            WorkflowError: the run is cancelled.
        """
        if not numbers:
            return
        run_command("scancel", *numbers, timeout=_COMMAND_TIMEOUT)
        deadline = time.monotonic() + _COMPLETING_LIMIT
        while not {job.number for job in self._query_queue()}.isdisjoint(numbers) and time.monotonic() < deadline:
            self._wait(_QUERY_INTERVAL)

    def _query_queue(self) -> list[slurm.Job]:
        """Return the experiment's jobs that wait or run, and wait until the queue answers.

        Without an answer a job may be running, and a second one with its outputs could run at the same time.

        Raises:
            WorkflowError: the run is cancelled.
        """
        while True:
            jobs, problem = query_jobs(self._layout.results, timeout=_COMMAND_TIMEOUT)
            if not problem:
                return jobs
            log(f"{problem}; kairos queries SLURM again in {duration(_PAUSE)}")
            self._wait(_PAUSE)

    def _wait(self, seconds: float) -> None:
        """Wait for a number of seconds; raise WorkflowError if the run is cancelled before or meanwhile."""
        if self._cancelled.wait(seconds):
            raise WorkflowError("the run is cancelled")


def _single_jobs(job: Any) -> list[Any]:
    """Return the jobs of a group of jobs, or a list with the job itself if it is no group."""
    return list(job.jobs) if job.is_group() else [job]


def _describe(job: Any) -> str:
    """Return the first output of a job or group."""
    return min(str(path) for single in _single_jobs(job) for path in single.output)
