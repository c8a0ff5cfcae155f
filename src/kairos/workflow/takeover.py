"""Jobs on a SLURM cluster outlive the controller that sent them: its successor takes them over.

A controller that is killed leaves jobs in the queue, and some end before the next one starts. So every job is written
down when it is sent: what it makes, and a hash of what it makes it from. Before the next controller sends a job with
the same outputs, it looks at the earlier one:

- the same work, queued or running: waited for like a job of its own;
- the same work, ended and complete: done, and only Snakemake's books are written;
- other work, such as after an edit of the experiment: cancelled, and replaced when it is gone.

A job that was sent and not yet written down when its controller died (milliseconds) is cancelled. What is written down
is taken back when Snakemake's own books have the job's end.
"""

import getpass
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from operator import or_
from pathlib import Path
from typing import Any

from snakemake_interface_common.exceptions import WorkflowError
from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo

from kairos.files import canonical_json, read_json, sha256_bytes, sha256_file, write_json
from kairos.progress import say
from kairos.slurm import WAITING, ask, books, plain_environment
from kairos.training.job import last_word
from kairos.workflow import batch_script
from kairos.workflow.layout import Layout
from kairos.workflow.submitter import ANSWER, STATES, Submitter

_HASHED_WHOLE = 1_000_000  # bytes; of a larger input size and time are compared
_CLUSTERS = ("cluster", "clusters", "slurm_cluster")
_MISSED = 3  # looks in which the queue does not have a job: it has ended, and how is seen in its outputs


def attach(workflow: Any, plugin: Any, layout: Layout) -> Any:
    """The executor's plugin for an experiment, in a Snakemake that knows of earlier jobs when it plans."""
    build = workflow._build_dag

    def build_with_earlier() -> None:
        _mark_unbooked(workflow.persistence, layout.results)
        build()

    workflow._build_dag = build_with_earlier
    for name in os.environ.keys() - plain_environment().keys():
        del os.environ[name]
    training = layout.experiment.training
    exact = training.deterministic and not training.compile
    return replace(plugin, executor=type("Executor", (Takeover,), {"results": layout.results, "exact": exact}))


class Takeover(Submitter):
    """The plugin's executor, with a memory that survives it."""

    exact: bool  # whether a training that is done again takes the same course

    def __post_init__(self, test_mode: bool = False) -> None:
        super().__post_init__(test_mode)
        self._ended: set[str] = set()  # jobs whose end was reported
        self._books: dict[Any, Path] = {}  # where those are written down whose end Snakemake does not know yet
        self._missed: dict[str, int] = {}  # in how many looks on end the queue did not have a job
        self._earlier = {path: read_json(path) for path in _records(self.results)}

    def run_job(self, job: Any) -> None:
        """Send a job, or take an earlier one over; called in threads, where an exception would be lost."""
        try:
            if self._take_over(job):
                return
        except Exception as error:
            self._give_up(job, f"earlier jobs cannot be looked at: {error!r}")
            return
        super().run_job(job)

    def _take_over(self, job: Any) -> bool:
        """Whether an earlier job does this one's work; those that make its outputs differently are ended."""
        outputs, work = set(_outputs(job)), _work(job)
        for path, record in list(self._earlier.items()):
            if outputs.isdisjoint(record["outputs"]):
                continue
            queued = not record.get("complete") and self._in_queue(path.stem)
            if record["work"] == work:
                log = {"slurm_logfile": Path(record["slurm_logfile"])}
                info = SubmittedJobInfo(job, external_jobid=path.stem, aux=log)
                if queued:
                    say(f"SLURM job {path.stem} of an earlier run makes {record['outputs'][0]}: it is waited for")
                    self._report_job_submission_threadsafe(info)
                    return True
                booked = record.get("complete") and all(os.path.exists(path) for path in record["outputs"])
                if booked or _complete(self.workflow.persistence, record["outputs"]):
                    self.report_job_success(info)
                    return True
            if queued:
                say(f"SLURM job {path.stem} of an earlier run made {record['outputs'][0]} differently: it is cancelled")
                self._cancel(path.stem)
            self._forget(path)
        return False

    def run_jobs(self, jobs: list[Any]) -> None:
        """Send each by itself: the next controller could not take a part of an array over."""
        if self.array_jobs:
            raise WorkflowError("slurm-array-jobs: not possible here, since jobs are taken over one by one")
        for job in jobs:
            if others := [name for name in _CLUSTERS if job.resources.get(name)]:
                raise WorkflowError(f"{others[0]}: not possible here, since another cluster's queue is not looked at")
        super().run_jobs(jobs)

    @property
    def cores(self) -> str:
        """Cores of the job that its Snakemake may use: those that SLURM has given it."""
        return "all"

    def additional_general_args(self) -> str:
        """No executor for the job's Snakemake: it runs the commands itself."""
        return ""

    def format_job_exec(self, job: Any) -> str:
        """What runs in the job: one Snakemake, not the plugin's two; SLURM can ask it to leave (`batch_script`)."""
        python = self.get_python_executable()
        snakemake = f"{python} -m snakemake"
        return str(super().format_job_exec(job)).replace(
            snakemake, f"exec {python} -m {batch_script.__name__} {snakemake}", 1
        )

    def report_job_submission(self, job_info: SubmittedJobInfo, register_job: bool = True) -> None:
        """Write a job down when Snakemake has marked its outputs as begun."""
        super().report_job_submission(job_info, register_job=register_job)
        job, log = job_info.job, str(job_info.aux["slurm_logfile"])
        write_json(self._record(job_info), {"outputs": _outputs(job), "work": _work(job), "slurm_logfile": log})

    def report_job_success(self, job_info: SubmittedJobInfo) -> None:
        """Note that it has ended."""
        self._note_end(job_info)
        super().report_job_success(job_info)

    def report_job_error(self, job_info: SubmittedJobInfo, msg: str | None = None, **keywords: Any) -> None:
        """Note it, and try neither what SLURM refuses again nor a training that would only diverge again."""
        self._note_end(job_info)
        if job_info.external_jobid is None or (self.exact and _in_vain(job_info)):
            job_info.job._attempt = job_info.job.restart_times + 1  # what it asked for is given back as it was
        super().report_job_error(job_info, msg=msg, **keywords)

    def handle_job_success(self, job: Any) -> None:
        """Forget it: Snakemake's own books have it."""
        super().handle_job_success(job)
        self._forget_ended(job)

    def handle_job_error(self, job: Any) -> None:
        """Forget it: the next attempt is another job. Its outputs, which are deleted now, are on the books as made."""
        super().handle_job_error(job)
        for one in _jobs(job):
            self.workflow.persistence.cleanup(one)
        self._forget_ended(job)

    def _record(self, job_info: SubmittedJobInfo) -> Path:
        return books(self.results) / f"{job_info.external_jobid}.json"

    def _note_end(self, job_info: SubmittedJobInfo) -> None:
        self._ended.add(job_info.external_jobid)
        self._books[job_info.job] = self._record(job_info)

    def _forget_ended(self, job: Any) -> None:
        if (path := self._books.pop(job, None)) is not None:
            self._forget(path)

    def _forget(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self._earlier.pop(path, None)

    async def check_active_jobs(self, active_jobs: list[SubmittedJobInfo]) -> AsyncIterator[SubmittedJobInfo]:
        """The plugin's look at the queue, after which every job has ended or is still watched.

        By itself the plugin forgets all jobs when the queue does not answer, and waits without end for one that the
        queue has forgotten (it does so ``MinJobAge`` after a job's end), that was preempted and not requeued, or that
        waits anew, perhaps held, when its work is done: so after a crash of slurmctld that had not saved its start.
        """
        async for _ in super().check_active_jobs(active_jobs):
            pass
        left = [info for info in active_jobs if info.external_jobid not in self._ended]
        states = self._queue(STATES) if left else {}
        for info in left:
            job = info.external_jobid
            if states is not None:
                self._missed[job] = 0 if job in states else self._missed.get(job, 0) + 1
            waits_anew = states is not None and states.get(job) in WAITING
            if waits_anew and _complete(self.workflow.persistence, _outputs(info.job)):
                ask("scancel", job, patience=ANSWER)
                self.report_job_success(info)
            elif self._missed.get(job, 0) < _MISSED:
                yield info
            elif _complete(self.workflow.persistence, _outputs(info.job)):
                self.report_job_success(info)
            else:
                self.report_job_error(info, msg=f"SLURM job {job} is no longer in the queue. ")

    def cancel_jobs(self, active_jobs: list[SubmittedJobInfo]) -> None:
        """Cancel all jobs of the experiment, also those that are on their way into the queue."""
        self._leaving = True
        self._job_submission_executor.shutdown(wait=True, cancel_futures=True)
        super().cancel_jobs(active_jobs)
        ask("scancel", "--user", getpass.getuser(), "--name", self.run_uuid, patience=ANSWER)


def _mark_unbooked(books: Any, results: str) -> None:
    """Make Snakemake plan the jobs that have ended without a controller: else their parameters were never on its books.

    A job that succeeds takes the marks of begun outputs away itself. They are set again, and `Takeover` knows.
    """
    for path in _records(results):
        record = read_json(path)
        if not record.get("complete") and _complete(books, record["outputs"]):
            write_json(path, {**record, "complete": True})
        for output in record["outputs"]:  # also where a part of a group is done: the same group must be planned again
            books._mark_incomplete(output, path.stem)


def _records(results: str) -> list[Path]:
    return sorted(books(results).glob("*.json"))


def _complete(books: Any, outputs: list[str]) -> bool:
    """Whether all outputs are there, made by their job: it has removed those of an earlier run when it began.

    Until it begins, its number is in the marks of begun outputs. What it writes last is the time that it took.
    """
    return not books._get_external_jobids(outputs) and all(os.path.exists(path) for path in outputs)


def _jobs(job: Any) -> list[Any]:
    return sorted(job.jobs, key=lambda one: str(one.output[0])) if job.is_group() else [job]


def _in_vain(job_info: SubmittedJobInfo) -> bool:
    """Whether of the trainings of a failed job those that are not complete have diverged, in this job."""
    words = [last_word(Path(one.params.out)) for one in _jobs(job_info.job) if one.rule.name.startswith("train")]
    diverged = [not word.get("again", True) and word["job"] == job_info.external_jobid for word in words]
    complete = [word.get("state") == "complete" for word in words]
    return any(diverged) and all(map(or_, diverged, complete))


def _outputs(job: Any) -> list[str]:
    """All files that a job or a group of jobs makes."""
    return sorted(str(path) for one in _jobs(job) for path in one.output)


def _work(job: Any) -> str:
    """Hash of what decides the outputs: rule, wildcards, parameters as Snakemake compares them, content of inputs."""
    parts = [
        [one.rule.name, dict(one.wildcards_dict), [repr(value) for value in one.non_derived_params]]
        for one in _jobs(job)
    ]
    inputs = {str(path): _content(Path(path)) for path in job.input}
    return sha256_bytes(canonical_json([parts, inputs]).encode())


def _content(path: Path) -> str:
    stat = path.stat()
    return sha256_file(path) if stat.st_size <= _HASHED_WHOLE else f"{stat.st_size} {stat.st_mtime_ns}"
