"""Jobs on a SLURM cluster outlive the controller that sent them: its successor takes them over.

Every job is written down when it is sent: what it makes, and from what. Before the next
controller sends a job with the same outputs, it looks at the earlier one: the same work that waits or runs is waited
for like a job of its own; other work, such as after an edit of the experiment, is cancelled, and replaced when it is
gone. What has ended meanwhile is on Snakemake's books, since a job's own Snakemake writes them.

A job that was sent and not yet written down when its controller died (milliseconds), or that SLURM took although sbatch
failed, is cancelled. And a SLURM that is away for a minute, or has as many jobs of this user as it takes, uses up no
attempts: the plugin would take such a job for one that has failed, and send it again at once.
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
from operator import or_
from pathlib import Path
from typing import Any

import snakemake_executor_plugin_slurm as plugin
from snakemake_interface_common.exceptions import WorkflowError
from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo
from snakemake_interface_executor_plugins.settings import ExecMode

from kairos.files import read_json, sha256_file, write_json
from kairos.progress import duration, say
from kairos.slurm import WAITING, ask, job_name, job_records_folder, plain_environment, queue
from kairos.training.job import read_progress
from kairos.workflow import batch_script
from kairos.workflow.layout import load_frozen_layout
from kairos.workflow.snakemake_private import prevent_retry

_PATIENCE = 5  # seconds between looks at the queue
_ENDING = 300  # seconds that a job may take to end
_ANSWER = 60  # seconds that SLURM may take to answer
_MISSED = 3  # looks in which the queue does not have a job: it has ended, and how is seen in what it left
_PAUSES = (10.0, 20.0, 40.0)  # seconds until sbatch is called again; then a minute
_HASHED_WHOLE = 1_000_000  # bytes; of a larger input size and time are compared
_CLUSTERS = ("cluster", "clusters", "slurm_cluster")
# compute nodes have no internet: jobs find what `kairos fetch` has brought
_OFFLINE = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
# what sbatch says when the same call may succeed later: SLURM is away or busy, or limits how many jobs a user submits
LATER = re.compile(
    r"timed out|unable to contact|temporarily|try again|connect failure|connection refused|communication|zero bytes"
    r"|SubmitJob",
    re.IGNORECASE,
)


class Executor(plugin.Executor):  # type: ignore[misc]
    """The SLURM plugin's executor, with patience, and a memory that survives it."""

    def __post_init__(self, test_mode: bool = False) -> None:
        layout = load_frozen_layout()
        for name in os.environ.keys() - plain_environment().keys():
            del os.environ[name]
        os.environ |= _OFFLINE
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a script's background ignores it
        super().__post_init__(test_mode)
        self._results = layout.results
        self.run_uuid = job_name(self._results)  # by this name the plugin finds its jobs' states, now earlier ones too
        training = layout.experiment.training
        self._exact = training.deterministic and not training.compile  # the same course when it is done again
        self._refused: dict[Any, str] = {}  # what sbatch has just said to a job
        self._missed: Counter[str] = Counter()  # in how many looks on end the queue did not have a job
        self._leaving = threading.Event()
        self._reading_earlier = threading.Lock()
        self._earlier_jobs: dict[Path, dict[str, Any]] | None = None

    def get_exec_mode(self) -> ExecMode:
        """Return the mode of the Snakemake in a job: the mode that records metadata."""
        return ExecMode.DEFAULT

    def additional_general_args(self) -> str:
        """Return arguments that Snakemake does not pass to the one in a job; the controller deletes temporary files."""
        checked = self.workflow.dag_settings.max_checksum_file_size
        return f"--profile none --workflow-profile none --notemp --max-checksum-file-size {checked}"

    @property
    def cores(self) -> str:
        """Cores of the job that its Snakemake may use: those that SLURM has given it."""
        return "all"

    def get_python_executable(self) -> str:
        """Return the command of a job: one Snakemake, not the plugin's two, that SLURM can ask to end.

        `batch_script` runs Snakemake, forwards SIGTERM and records success.
        """
        python = super().get_python_executable()
        return f"exec {python} -m {batch_script.__name__} {job_records_folder(self._results)} {python}"

    def run_jobs(self, jobs: list[Any]) -> None:
        """Send each by itself: the next controller could not take a part of an array over."""
        wished = [name for name in _CLUSTERS for job in jobs if job.resources.get(name)]
        if wished or self.workflow.executor_settings.array_jobs:
            refused = wished[0] if wished else "kairos-array-jobs"
            raise WorkflowError(f"{refused}: not possible here, since a controller must be able to take each job over")
        super().run_jobs(jobs)

    def run_job(self, job: Any) -> None:
        """Send a job, or take an earlier one over; called in threads, where an exception would be lost."""
        try:
            if not self._take_over(job):
                self._send(job)
        except Exception as error:
            say(f"{job.name}: {error}")  # of Snakemake, `quiet` in the profile hides it
            prevent_retry(job)
            super().report_job_error(SubmittedJobInfo(job), msg=str(error))

    def _send(self, job: Any) -> None:
        """Submit a job, again and again where SLURM cannot take it now."""
        for pause in chain(_PAUSES, repeat(60.0)):
            self._pause(0)
            super().run_job(job)
            if (said := self._refused.pop(job, None)) is None:
                return
            if not LATER.search(said):
                raise WorkflowError(said)
            say(f"{job.name}: {said} It is sent again in {duration(pause)}.")
            self._pause(pause)
            self._cancel_unknown(f"rule_{job.name}")

    def _take_over(self, job: Any) -> bool:
        """Return True if a SLURM job of an earlier run does this job's work, and take that SLURM job over.

        An earlier SLURM job that makes the outputs of this job differently is cancelled.
        """
        for book, record in list(self._earlier.items()):
            number, made = book.stem, record["outputs"]
            if set(_outputs(job)).isdisjoint(made):
                continue
            same = all(record["work"].get(one.output[0]) == _work(one, made) for one in _jobs(job))
            info = SubmittedJobInfo(job, number, {"slurm_logfile": Path(record["slurm_logfile"])})
            if self._in_queue(number):
                if same:
                    say(f"SLURM job {number} of an earlier run makes {made[0]}: it is waited for")
                    super().report_job_submission(info)
                    return True
                say(f"SLURM job {number} of an earlier run made {made[0]} differently: it is cancelled")
                self._cancel(number)
            elif same and self._complete(info):  # since the Snakefile was read
                self.report_job_success(info)
                return True
            self._forget(book)
        return False

    def report_job_submission(self, job_info: SubmittedJobInfo, register_job: bool = True) -> None:
        """Write a job down."""
        outputs = _outputs(job_info.job)
        work = {one.output[0]: _work(one, outputs) for one in _jobs(job_info.job)}
        log = str(job_info.aux["slurm_logfile"])
        write_json(self._book(job_info), {"outputs": outputs, "work": work, "slurm_logfile": log})
        super().report_job_submission(job_info, register_job=register_job)

    def report_job_success(self, job_info: SubmittedJobInfo) -> None:
        """Forget it."""
        self._forget(self._book(job_info))
        super().report_job_success(job_info)

    def report_job_error(self, job_info: SubmittedJobInfo, msg: str | None = None, **keywords: Any) -> None:
        """Forget it, and do not try again a training that would only diverge again; one that was not sent may be."""
        if job_info.external_jobid is None:
            self._refused[job_info.job] = " ".join(str(msg).partition("sbatch call:")[0].split())
            return
        self._forget(self._book(job_info))
        if self._exact and _in_vain(job_info):
            prevent_retry(job_info.job)
        super().report_job_error(job_info, msg=msg, **keywords)

    def handle_job_error(self, job: Any) -> None:
        """Take its outputs, which are deleted now, from the books: they would seem to be deleted by the user."""
        super().handle_job_error(job)
        for one in _jobs(job):
            self.workflow.persistence.cleanup(one)

    async def check_active_jobs(self, active_jobs: list[SubmittedJobInfo]) -> AsyncIterator[SubmittedJobInfo]:
        """The plugin's look at the queue, after which every job has ended or is still watched.

        By itself the plugin forgets all jobs when the queue does not answer, and waits without end for one that the
        queue has forgotten (it does so ``MinJobAge`` after a job's end), that was preempted and not requeued, or that
        waits anew, perhaps held, when its work is done: so after a crash of slurmctld that had not saved its start.
        """
        async for _ in super().check_active_jobs(active_jobs):
            pass
        left = [info for info in active_jobs if self._book(info).exists()]
        states = self._queue("%i %T") if left else {}
        for info in left:
            number = info.external_jobid
            if states is not None:
                self._missed[number] = 0 if number in states else self._missed[number] + 1
            gone = self._missed[number] >= _MISSED
            anew = states is not None and states.get(number) in WAITING
            if (gone or anew) and self._complete(info):
                ask("scancel", number, patience=_ANSWER)
                self.report_job_success(info)
            elif gone:
                self.report_job_error(info, msg=f"SLURM job {number} is no longer in the queue. ")
            else:
                yield info

    def cancel(self) -> None:
        """Cancel all jobs of the experiment, also those that are on their way into the queue."""
        self._leaving.set()
        super().cancel()
        ask("scancel", "--user", getpass.getuser(), "--name", self.run_uuid, patience=_ANSWER)

    @property
    def _earlier(self) -> dict[Path, dict[str, Any]]:
        """Records of the jobs that earlier controllers have sent, read before the first job is sent.

        The plugin submits jobs in two threads. Without the lock both would read the records (`cached_property` has no
        lock from Python 3.12 on), and the slower thread would miss a record that the faster one has removed.
        """
        with self._reading_earlier:
            if self._earlier_jobs is None:
                self._cancel_unknown()
                paths = sorted(job_records_folder(self._results).glob("*.json"))
                self._earlier_jobs = {path: read_json(path) for path in paths}
            return self._earlier_jobs

    def _book(self, job_info: SubmittedJobInfo) -> Path:
        return job_records_folder(self._results) / f"{job_info.external_jobid}.json"

    def _forget(self, book: Path) -> None:
        book.unlink(missing_ok=True)
        batch_script.success_file(book).unlink(missing_ok=True)
        self._earlier.pop(book, None)

    def _complete(self, job_info: SubmittedJobInfo) -> bool:
        """Return True if a job recorded its success and all its outputs exist."""
        outputs = _outputs(job_info.job)
        return batch_script.success_file(self._book(job_info)).exists() and all(map(os.path.exists, outputs))

    def _cancel_unknown(self, comment: str = "") -> None:
        """Cancel this user's jobs that are in the queue and not written down, of those whose comment begins so."""
        unknown: dict[str, str] = {}
        for pause in (_PATIENCE, 0):  # one that another thread has just sent is written down by the second look
            found = self._queue("%i %k") or {}
            known = {path.stem for path in job_records_folder(self._results).glob("*.json")}
            unknown = {job: said for job, said in found.items() if job not in known and said.startswith(comment)}
            if not unknown:
                return
            self._pause(pause)
        for number, said in unknown.items():
            say(f"SLURM job {number} ({said}) is in the queue and was never written down: it is cancelled")
            self._cancel(number)

    def _cancel(self, number: str) -> None:
        """Cancel a job and wait until it is gone."""
        ask("scancel", number, patience=_ANSWER)
        while self._in_queue(number):
            self._pause(_PATIENCE)

    def _in_queue(self, number: str) -> bool:
        """Return True if a SLURM job waits or runs; wait for a job that is just ending.

        The wait has a limit, because a job on a broken machine may not end for hours.
        """
        latest = time.monotonic() + _ENDING
        while (states := self._queue("%i %T")) is None or (
            states.get(number) == "COMPLETING" and time.monotonic() < latest
        ):
            self._pause(_PATIENCE)
        return states.get(number, "COMPLETING") != "COMPLETING"

    def _queue(self, what: str) -> dict[str, str] | None:
        """Query the queue for each of this experiment's jobs, in format `what`; None: the queue does not answer."""
        good, answer = queue(self._results, what, patience=_ANSWER)
        lines = (line.partition(" ") for line in answer.splitlines())
        return {number: said.strip() for number, _, said in lines} if good else None

    def _pause(self, seconds: float) -> None:
        """Wait.

        Raises:
            WorkflowError: the run has been asked to leave.
        """
        if self._leaving.wait(seconds):
            raise WorkflowError("asked to leave")


def _jobs(job: Any) -> list[Any]:
    return list(job.jobs) if job.is_group() else [job]


def _outputs(job: Any) -> list[str]:
    """All files that a job or a group of jobs makes."""
    return sorted(str(path) for one in _jobs(job) for path in one.output)


def _work(job: Any, made: list[str]) -> dict[str, Any]:
    """Return everything that decides a job's outputs: parameters as Snakemake compares them, content of inputs.

    Inputs that its group makes are left out: when another job is compared with it, they may or may not be there.
    """
    inputs = {str(path): _content(Path(path)) for path in job.input if path not in made}
    return {"params": [repr(value) for value in job.non_derived_params], "inputs": inputs}


def _content(path: Path) -> str:
    stat = path.stat()
    return sha256_file(path) if stat.st_size <= _HASHED_WHOLE else f"{stat.st_size} {stat.st_mtime_ns}"


def _in_vain(job_info: SubmittedJobInfo) -> bool:
    """Return True if training runs diverged in a failed job and all its other training runs are complete."""
    words = [read_progress(Path(one.params.out)) for one in _jobs(job_info.job) if one.rule.name.startswith("train")]
    diverged = [not word.get("again", True) and word["job"] == job_info.external_jobid for word in words]
    complete = [word.get("state") == "complete" for word in words]
    return any(diverged) and all(map(or_, diverged, complete))
