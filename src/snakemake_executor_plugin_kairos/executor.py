"""Executor whose SLURM jobs outlive the controller that submitted them: the next controller takes them over.

The controller records every job at submission: its outputs, and the parameters and inputs that decide them. Before the
next controller submits a job with the same outputs, it compares the job with the record. If the earlier job does the
same work and waits or runs, the controller waits for it. If its work differs, such as after an edit of the experiment,
the controller cancels it and submits the new job. Jobs that ended in the meantime are in Snakemake's metadata, because
the Snakemake in a job writes them.

A job without a record is cancelled. Such a job exists if the controller was killed within milliseconds of the
submission, or if SLURM accepted a job although sbatch failed. SLURM may be unreachable for a minute, or limit the
number of the user's jobs. A submission that fails for such a reason is not an attempt of the job, unlike in the SLURM
plugin.
"""

import getpass
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import snakemake_executor_plugin_slurm as plugin
from snakemake_interface_common.exceptions import WorkflowError
from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo
from snakemake_interface_executor_plugins.settings import ExecMode

from kairos.files import read_json, sha256_file, write_json
from kairos.progress import duration, log
from kairos.slurm import PENDING_STATES, job_name, job_records_folder, plain_environment, query_queue, run_command
from kairos.training.job import read_progress
from kairos.workflow import batch_script
from kairos.workflow.layout import OUTDATED, Layout, load_frozen_layout
from kairos.workflow.snakemake_private import prevent_retry

_QUERY_INTERVAL = 5  # seconds between queries of the queue
_QUIET_SHARE = 0.25  # longest time between status checks, as share of the time since the last event
_COMPLETING_LIMIT = 300  # seconds that a job may take to end
_COMMAND_TIMEOUT = 60  # seconds that a SLURM command may take
_MISSES_UNTIL_GONE = 3  # a job has ended if it is missing in this number of consecutive answers of the queue
_RETRY_PAUSES = (10.0, 20.0, 40.0)  # seconds between submissions that SLURM cannot accept
_LAST_RETRY_PAUSE = 60.0
_LARGEST_HASHED = 1_000_000  # bytes; larger inputs are compared by size and modification time
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
    """Executor of the SLURM plugin that records its jobs and takes over the jobs of earlier controllers."""

    # when a job was last submitted, or last ended; Snakemake's thread of status checks starts before `__post_init__`
    _last_event = 0.0

    def __post_init__(self, test_mode: bool = False) -> None:
        """Set up the executor; Snakemake calls this method.

        The controller's environment changes for the rest of its life, and jobs inherit it. Access to the Hugging Face
        hub is switched off, and the variables by which users change the output of SLURM's commands are deleted. SIGINT
        raises KeyboardInterrupt, also in a controller that a script has started in the background.
        """
        layout = load_frozen_layout()
        for name in os.environ.keys() - plain_environment().keys():
            del os.environ[name]
        os.environ |= _OFFLINE
        signal.signal(signal.SIGINT, signal.default_int_handler)  # background processes of a script ignore SIGINT
        super().__post_init__(test_mode)
        self._layout, self._results = layout, layout.results
        self.run_uuid = job_name(self._results)  # the plugin looks for jobs of this name, also of earlier runs
        training = layout.experiment.training
        # True if a repeated training run computes equal values, so that it diverges again
        self._exact = training.deterministic and not training.compile
        self._sbatch_errors: dict[Any, str] = {}  # error of the last submission, by job
        self._misses: Counter[str] = Counter()  # number of consecutive answers of the queue without a job, by job id
        self._cancelled = threading.Event()
        self._earlier_lock = threading.Lock()
        self._loaded_records: dict[Path, dict[str, Any]] | None = None  # see `_earlier_records`

    def get_exec_mode(self) -> ExecMode:
        """Return the mode of the Snakemake process in a job: the default mode, which alone records metadata."""
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

        The command runs `batch_script`, which starts Snakemake, forwards SIGTERM and records success.
        """
        # the SLURM plugin would run a Snakemake that starts another one with srun
        python = super().get_python_executable()
        return f"exec {python} -m {batch_script.__name__} {job_records_folder(self._results)} {python}"

    # Submission

    def run_jobs(self, jobs: list[Any]) -> None:
        """Submit each job by itself, in threads of the SLURM plugin; `run_job` handles one job.

        Raises:
            WorkflowError: job arrays or a cluster are requested, whose jobs could not be taken over. No job is
                submitted then.
        """
        unsupported = [name for name in _CLUSTER_RESOURCES for job in jobs if job.resources.get(name)]
        if self.workflow.executor_settings.array_jobs:
            unsupported.append("kairos-array-jobs")
        if unsupported:
            raise WorkflowError(
                f"{unsupported[0]}: not possible here, since a controller must be able to take jobs over"
            )
        super().run_jobs(jobs)

    def run_job(self, job: Any) -> None:
        """Take over the earlier SLURM job that does a job's work, or submit the job.

        An exception is not raised, since Snakemake calls this method in threads, which would lose it. It is logged and
        reported to Snakemake as an error of the job, which is not retried.
        """
        try:
            if not self._take_over(job):
                self._submit(job)
        except Exception as error:
            log(f"{job.name}: {error}")  # Snakemake's own message is hidden by `quiet` in the profile
            prevent_retry(job)
            # not `self.report_job_error`, which reports no failed submission
            super().report_job_error(SubmittedJobInfo(job), msg=str(error))

    def _submit(self, job: Any) -> None:
        """Submit a job, and repeat the submission without a limit while SLURM cannot accept it.

        A pause of 10 to 60 s precedes each repetition, which is logged. An unsuccessful submission may have left a job
        in the queue without a record. Such jobs are cancelled after the pause, if the name of their rule begins with
        the name of this job's rule.

        Raises:
            WorkflowError: sbatch failed with an error outside of `TEMPORARY_SBATCH_ERRORS`, or the run is cancelled.
        """
        for pause in chain(_RETRY_PAUSES, repeat(_LAST_RETRY_PAUSE)):
            self._pause(0)  # raises if the run is cancelled
            super().run_job(job)
            error = self._sbatch_errors.pop(job, None)  # from `report_job_error`, which the call above may have called
            if error is None:
                return
            if not TEMPORARY_SBATCH_ERRORS.search(error):
                raise WorkflowError(error)
            log(f"{job.name}: {error} It is submitted again in {duration(pause)}.")
            self._pause(pause)
            self._cancel_unrecorded(f"rule_{job.name}")  # SLURM may have accepted the job although sbatch failed

    def _take_over(self, job: Any) -> bool:
        """Take over the SLURM job of an earlier run that does a job's work; return True if there is one.

        Earlier jobs with an output of this job are examined in the order of their record files. The search ends at the
        first record of equal work whose job is in the queue, which is reported as submitted, or has succeeded, which is
        reported as successful. Other examined records are deleted, and their queued jobs are cancelled.

        Raises:
            WorkflowError: the run is cancelled.
            FileNotFoundError: an input does not exist.
            DamagedError: a record is damaged.
        """
        for record_file, record in list(self._earlier_records.items()):  # a copy, since `_forget` removes entries
            job_id, outputs = record_file.stem, record["outputs"]
            if set(_outputs_of(job)).isdisjoint(outputs):  # the record is of another job
                continue
            job_info = SubmittedJobInfo(job, job_id, {"slurm_logfile": Path(record["slurm_logfile"])})
            does_same_work = _does_work_of(record, job)
            is_queued = self._in_queue(job_id)
            if is_queued and does_same_work:
                log(f"SLURM job {job_id} of an earlier run computes {outputs[0]}: waiting for it")
                super().report_job_submission(job_info)
                return True
            if does_same_work and self._is_complete(job_info):  # it ended after the Snakefile was read
                self.report_job_success(job_info)
                return True
            if is_queued:  # it computes the outputs from other parameters or inputs
                log(f"SLURM job {job_id} of an earlier run computes {outputs[0]} from other settings: cancelling it")
                self._cancel_job(job_id)
            self._forget(record_file)
        return False

    # Events of a job

    def report_job_submission(self, job_info: SubmittedJobInfo, register_job: bool = True) -> None:
        """Write the record of a submitted job, see `_record_file`, and report the job to Snakemake.

        The record contains ``outputs``, ``slurm_logfile`` and ``work``: the result of `_describe_work` for each single
        job, by its first output.

        Args:
            job_info: the job with its SLURM number; ``aux`` contains the path of SLURM's log.
            register_job: argument of the SLURM plugin's method.
        """
        outputs = _outputs_of(job_info.job)
        work = {single.output[0]: _describe_work(single, outputs) for single in _single_jobs(job_info.job)}
        slurm_log = str(job_info.aux["slurm_logfile"])
        # before the report, so that a controller that is killed in between leaves a job with a record
        write_json(self._record_file(job_info), {"outputs": outputs, "work": work, "slurm_logfile": slurm_log})
        super().report_job_submission(job_info, register_job=register_job)
        self._last_event = time.monotonic()

    def report_job_success(self, job_info: SubmittedJobInfo) -> None:
        """Delete the record of a successful job and its success file, and report the job to Snakemake."""
        self._forget(self._record_file(job_info))
        super().report_job_success(job_info)
        self._last_event = time.monotonic()

    def report_job_error(self, job_info: SubmittedJobInfo, msg: str | None = None, **keywords: Any) -> None:
        """Delete the record of a failed job, and report the job to Snakemake; or keep the error of a failed submission.

        A job without a SLURM number is a failed submission. Its error is only stored in `_sbatch_errors`: `_submit`
        submits the job again or raises the error. If training is exactly repeatable, a job whose training run would
        only diverge again is not retried.
        """
        was_submitted = job_info.external_jobid is not None
        if not was_submitted:
            sbatch_error, _, _ = str(msg).partition("sbatch call:")  # msg: "<error of sbatch> sbatch call: <command>"
            self._sbatch_errors[job_info.job] = " ".join(sbatch_error.split())  # on one line
            return
        self._forget(self._record_file(job_info))
        if self._exact and _would_diverge_again(job_info, self._layout):
            prevent_retry(job_info.job)
        super().report_job_error(job_info, msg=msg, **keywords)
        self._last_event = time.monotonic()

    async def check_active_jobs(self, active_jobs: list[SubmittedJobInfo]) -> AsyncIterator[SubmittedJobInfo]:
        """Report the jobs that have ended, and yield all other jobs, which Snakemake checks again later.

        This method completes the SLURM plugin's check, which has three gaps:

        1. If the queue does not answer, the plugin forgets all jobs.
        2. It waits without end for a job that left the queue unseen (SLURM forgets jobs ``MinJobAge`` after their end),
           or that was preempted and not requeued.
        3. It waits for a job that SLURM queues again although its work is done, such as after a crash of slurmctld.

        A job that left the queue, or is queued again, is successful if it has recorded its success and its outputs
        exist. Otherwise a job that left the queue has failed. A job has left the queue if it is missing in
        `_MISSES_UNTIL_GONE` consecutive answers. The interval until the next check is limited, see `_limit_interval`.
        """
        # The plugin reports the jobs whose end it sees. The jobs that it yields are ignored, because of gap 1.
        async for _ in super().check_active_jobs(active_jobs):
            pass
        # a report of success or error deletes the record of a job: jobs with a record have not been reported
        unreported = [job_info for job_info in active_jobs if self._record_file(job_info).exists()]
        states = self._query_queue("%i %T") if unreported else {}  # state by job id; None: no answer
        for job_info in unreported:
            job_id = job_info.external_jobid
            if states is not None:  # without an answer, the number of misses stays
                self._misses[job_id] = 0 if job_id in states else self._misses[job_id] + 1
            is_gone = self._misses[job_id] >= _MISSES_UNTIL_GONE  # gap 2
            # pending: not started yet or, if the job is complete, queued again (gap 3)
            is_pending = states is not None and states.get(job_id) in PENDING_STATES
            if (is_gone or is_pending) and self._is_complete(job_info):
                # a job that is queued again must not run again
                run_command("scancel", job_id, timeout=_COMMAND_TIMEOUT)
                self.report_job_success(job_info)
            elif is_gone:
                self.report_job_error(job_info, msg=f"SLURM job {job_id} is no longer in the queue. ")
            else:
                yield job_info
        self._limit_interval()

    def _limit_interval(self) -> None:
        """Reduce the time until the next status check to at most a quarter of the time since the last event.

        The limit is at least `init_seconds_before_status_checks`. An event is a submission or the end of a job.
        """
        # the plugin adds 10 s after each check without an event: it would notice the end of a job of one minute up to a
        # minute late
        shortest = self.workflow.executor_settings.init_seconds_before_status_checks
        longest = max(shortest, _QUIET_SHARE * (time.monotonic() - self._last_event))
        planned: float = self.next_seconds_between_status_checks  # type: ignore[has-type]  # no types in the plugin
        self.next_seconds_between_status_checks = min(planned, longest)

    def cancel(self) -> None:
        """Cancel all jobs of the experiment that this user has in SLURM's queue, also jobs in submission.

        Methods of this class that pause raise WorkflowError from now on, so that no job is submitted again.
        """
        self._cancelled.set()  # first, so that no other thread submits a job again
        super().cancel()  # misses a job that another thread is submitting
        run_command("scancel", "--user", getpass.getuser(), "--name", self.run_uuid, timeout=_COMMAND_TIMEOUT)

    # Records of jobs

    @property
    def _earlier_records(self) -> dict[Path, dict[str, Any]]:
        """Records, by file, of the jobs that earlier controllers have submitted and that are not forgotten.

        The first access, before the first submission, reads the files. It also cancels the experiment's jobs in the
        queue that have no record. It raises DamagedError for a damaged record, and WorkflowError if the run is
        cancelled.
        """
        # the plugin submits jobs in two threads: without the lock (`cached_property` has none from Python 3.12 on) both
        # would read the records, and the slower thread would miss a record that the faster one has removed
        with self._earlier_lock:
            if self._loaded_records is None:
                self._cancel_unrecorded()
                paths = sorted(job_records_folder(self._results).glob("*.json"))
                self._loaded_records = {path: read_json(path) for path in paths}
            return self._loaded_records

    def _record_file(self, job_info: SubmittedJobInfo) -> Path:
        """Return the file of a job's record, ``.kairos/jobs/<experiment>/<job id>.json``."""
        return job_records_folder(self._results) / f"{job_info.external_jobid}.json"

    def _forget(self, record_file: Path) -> None:
        """Delete a job's record and success file, which may be missing, and its entry in `_earlier_records`."""
        record_file.unlink(missing_ok=True)
        batch_script.success_file(record_file).unlink(missing_ok=True)
        self._earlier_records.pop(record_file, None)

    def _is_complete(self, job_info: SubmittedJobInfo) -> bool:
        """Return True if the SLURM job of `job_info` recorded its success and all outputs of its job exist."""
        success_file = batch_script.success_file(self._record_file(job_info))
        outputs = _outputs_of(job_info.job)
        return success_file.exists() and all(os.path.exists(output) for output in outputs)

    # SLURM's queue

    def _cancel_unrecorded(self, comment: str = "") -> None:
        """Cancel the experiment's jobs in the queue that have no record and whose comment starts with `comment`.

        The method logs each job, and returns when the jobs have left the queue. It returns at once if there are none or
        the queue does not answer. An empty `comment` selects all jobs.

        Raises:
            WorkflowError: the run is cancelled.
        """
        if not self._find_unrecorded(comment):
            return
        # another thread may be submitting a job: by the second query it has a record
        self._pause(_QUERY_INTERVAL)
        for job_id, job_comment in self._find_unrecorded(comment).items():
            log(f"SLURM job {job_id} ({job_comment}) is in the queue without a record of its submission: cancelling it")
            self._cancel_job(job_id)

    def _find_unrecorded(self, comment: str) -> dict[str, str]:
        """Return the comment, by job id, of each job in the queue without a record whose comment starts with `comment`.

        The dictionary is empty if the queue does not answer.
        """
        comment_by_id = self._query_queue("%i %k") or {}  # no job is cancelled without an answer
        recorded_ids = {path.stem for path in job_records_folder(self._results).glob("*.json")}
        unrecorded = {}
        for job_id, job_comment in comment_by_id.items():
            if job_id not in recorded_ids and job_comment.startswith(comment):
                unrecorded[job_id] = job_comment
        return unrecorded

    def _cancel_job(self, job_id: str) -> None:
        """Cancel a SLURM job and wait until it has left the queue, see `_in_queue`.

        Raises:
            WorkflowError: the run is cancelled.
        """
        run_command("scancel", job_id, timeout=_COMMAND_TIMEOUT)
        while self._in_queue(job_id):
            self._pause(_QUERY_INTERVAL)

    def _in_queue(self, job_id: str) -> bool:
        """Return True if a SLURM job waits or runs; wait while it is ending, or while the queue does not answer.

        A job is ending in state COMPLETING. A job that is still ending five minutes after the first such answer is
        treated as ended. The wait for an answer has no limit.

        Raises:
            WorkflowError: the run is cancelled.
        """
        deadline: float | None = None  # unknown until the job is ending
        while True:
            states = self._query_queue("%i %T")
            # without an answer the job may be running, and a second job with its outputs could run at the same time
            if states is not None:
                state = states.get(job_id)
                is_ending = state == "COMPLETING"
                if not is_ending:
                    return state is not None
                if deadline is None:
                    deadline = time.monotonic() + _COMPLETING_LIMIT
                if time.monotonic() >= deadline:  # a job on a broken machine may not end for hours
                    return False
            self._pause(_QUERY_INTERVAL)

    def _query_queue(self, fields: str) -> dict[str, str] | None:
        """Return a field of the experiment's jobs in SLURM's queue, by job id; None if the queue does not answer.

        Args:
            fields: format of squeue for the job id and the field: ``%i %T`` for the state, ``%i %k`` for the comment.
        """
        has_answered, answer = query_queue(self._results, fields, timeout=_COMMAND_TIMEOUT)
        if not has_answered:
            return None
        values = {}
        for line in answer.splitlines():
            job_id, _, value = line.partition(" ")
            values[job_id] = value.strip()
        return values

    def _pause(self, seconds: float) -> None:
        """Wait for a number of seconds; raise WorkflowError if the run is cancelled before or meanwhile."""
        if self._cancelled.wait(seconds):
            raise WorkflowError("the run is cancelled")


def _single_jobs(job: Any) -> list[Any]:
    """Return the jobs of a group of jobs, or a list with the job itself if it is no group."""
    return list(job.jobs) if job.is_group() else [job]


def _outputs_of(job: Any) -> list[str]:
    """Return the sorted paths of all outputs of a job or of a group of jobs."""
    return sorted(str(path) for single in _single_jobs(job) for path in single.output)


def _does_work_of(record: dict[str, Any], job: Any) -> bool:
    """Return True if a recorded SLURM job computes the outputs of a job or group from equal parameters and inputs.

    The recorded job may compute further outputs. The result is False if it lacks any single job of the group.

    Raises:
        FileNotFoundError: an input does not exist.
    """
    for single in _single_jobs(job):
        recorded_work = record["work"].get(single.output[0])  # None: the recorded job does not have this output
        if recorded_work != _describe_work(single, record["outputs"]):
            return False
    return True


def _describe_work(job: Any, group_outputs: list[str]) -> dict[str, Any]:
    """Return everything that decides a job's outputs: parameters as Snakemake compares them, and content of inputs.

    ``params`` is a list of texts, and ``inputs`` contains the result of `_describe_file` by path. Outputs of the job's
    group are left out of the inputs: they may or may not exist at the time of a comparison. So is the file that marks
    outdated results, which every controller writes anew.

    Raises:
        FileNotFoundError: an input does not exist.
    """
    left_out = {*group_outputs, OUTDATED.as_posix()}
    inputs = {str(path): _describe_file(Path(path)) for path in job.input if path not in left_out}
    return {"params": [repr(value) for value in job.non_derived_params], "inputs": inputs}


def _describe_file(path: Path) -> str:
    """Return a text that changes with a file's content: its SHA-256, or size and modification time above 1 MB.

    Raises:
        FileNotFoundError: the file does not exist.
    """
    stat = path.stat()
    if stat.st_size <= _LARGEST_HASHED:
        return sha256_file(path)
    return f"{stat.st_size} {stat.st_mtime_ns}"


def _would_diverge_again(job_info: SubmittedJobInfo, layout: Layout) -> bool:
    """Return True if at least one training run diverged in a failed job, and all its other training runs are complete.

    Another attempt of such a job can achieve nothing. A training run has diverged if this SLURM job wrote its progress
    file, with ``"again": false``. Jobs of other stages in the group do not matter.
    """
    has_diverged = False
    for single in _single_jobs(job_info.job):
        if not single.rule.name.startswith("train"):
            continue
        folder = Path(layout.training_folder(single.wildcards.method, single.wildcards.seed))
        progress = read_progress(folder)  # empty without a file, as for a run that may succeed
        may_succeed = progress.get("again", True)
        if not may_succeed and progress["job"] == job_info.external_jobid:
            has_diverged = True
        elif progress.get("state") != "complete":
            return False  # another attempt may complete this training run
    return has_diverged
