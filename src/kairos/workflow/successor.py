"""Jobs on a SLURM cluster outlive the controller that sent them: its successor takes them over.

A controller that is killed leaves jobs in the queue, and some end before the next one starts. So every job is written
down when it is sent: what it makes, and a hash of what it makes it from. Before the next controller sends a job with
the same outputs, it looks at the earlier one:

- the same work, queued or running: waited for like a job of its own;
- the same work, ended and complete: done, and only Snakemake's books are written;
- other work, such as after an edit of the experiment: cancelled, and replaced when it is gone.

A job that was sent and not yet written down when its controller died (milliseconds) is not found; then the lock of its
training, and records that appear whole, keep it from doing harm.
"""

import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from snakemake_executor_plugin_slurm import Executor
from snakemake_executor_plugin_slurm_jobstep import get_cpu_setting, get_gpu_setting
from snakemake_interface_common.exceptions import WorkflowError
from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo

from kairos.files import canonical_json, read_json, sha256_bytes, sha256_file, write_json
from kairos.progress import say
from kairos.status.queue import job_name

_HASHED_WHOLE = 1_000_000  # bytes; of a larger input size and time are compared
_PATIENCE = 5  # seconds between looks at the queue
# SLURM_…: what srun would take from sbatch as options of a step, which are given to it
_INHERITED = (
    "CPUS_PER_TASK", "CPUS_PER_GPU", "TRES_PER_TASK", "NTASKS", "NTASKS_PER_NODE", "NPROCS", "GPUS", "GPUS_PER_NODE",
    "GPUS_PER_TASK", "MEM_PER_CPU", "MEM_PER_GPU", "MEM_PER_NODE",
)  # fmt: skip


def attach(workflow: Any, plugin: Any, results: str) -> Any:
    """The executor's plugin for an experiment's results, in a Snakemake that knows of earlier jobs when it plans."""
    build = workflow._build_dag

    def build_with_earlier() -> None:
        _mark_unbooked(workflow.persistence, results)
        build()

    workflow._build_dag = build_with_earlier
    return replace(plugin, executor=type("Executor", (Successor,), {"results": results}))


class Successor(Executor):  # type: ignore[misc]
    """The plugin's executor, with a memory that survives it."""

    results: str

    def __post_init__(self, test_mode: bool = False) -> None:
        super().__post_init__(test_mode)
        self.run_uuid = job_name(self.results)  # by this name the plugin finds its jobs' states, now earlier ones too
        self._earlier = {path: read_json(path) for path in _records(self.results)}

    def run_job(self, job: Any) -> None:
        """Send a job, or take an earlier one over; called in threads, where an exception would be lost."""
        try:
            if self._take_over(job):
                return
        except Exception as error:
            self._report_job_error_threadsafe(SubmittedJobInfo(job), f"earlier jobs cannot be looked at: {error!r}")
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
                if record.get("complete") or _complete(self.workflow.persistence, record["outputs"]):
                    self.report_job_success(info)
                    return True
            if queued:
                say(f"SLURM job {path.stem} of an earlier run made {record['outputs'][0]} differently: it is cancelled")
                subprocess.run(["scancel", path.stem], check=False)
                while self._in_queue(path.stem):
                    time.sleep(_PATIENCE)
            self._forget(path)
        return False

    def run_jobs(self, jobs: list[Any]) -> None:
        """Send each by itself: the next controller could not take a part of an array over."""
        if self.array_jobs:
            raise WorkflowError("slurm-array-jobs: not possible here, since jobs are taken over one by one")
        super().run_jobs(jobs)

    @property
    def cores(self) -> str:
        """Cores of the job that its Snakemake may use: those that SLURM has given it."""
        return "all"

    def additional_general_args(self) -> str:
        """No executor for the job's Snakemake: it runs the commands itself."""
        return ""

    def format_job_exec(self, job: Any) -> str:
        """What runs in the job: one Snakemake, as a step of it. The plugin's would start a second one for that."""
        drop = " ".join(f"-u SLURM_{name}" for name in _INHERITED)
        asked = f"{get_cpu_setting(job, bool(job.resources.get('gpu')))} {get_gpu_setting(job)}"
        step = f"env {drop} srun --ntasks=1 --nodes=1 --cpu-bind=q {asked}"
        snakemake = f"{self.get_python_executable()} -m snakemake"
        return str(super().format_job_exec(job)).replace(snakemake, f"{step} {snakemake}", 1)

    def report_job_submission(self, job_info: SubmittedJobInfo, register_job: bool = True) -> None:
        """Write a job down when Snakemake has marked its outputs as begun."""
        super().report_job_submission(job_info, register_job=register_job)
        record = {
            "outputs": _outputs(job_info.job),
            "work": _work(job_info.job),
            "slurm_logfile": str(job_info.aux["slurm_logfile"]),
        }
        write_json(self._record(job_info), record)

    def report_job_success(self, job_info: SubmittedJobInfo) -> None:
        """Forget it: Snakemake's own books have it."""
        self._forget(self._record(job_info))
        super().report_job_success(job_info)

    def report_job_error(self, job_info: SubmittedJobInfo, msg: str | None = None, **keywords: Any) -> None:
        """Forget it: the next attempt is another job. There is none for a training that would only diverge again."""
        self._forget(self._record(job_info))
        if _in_vain(job_info):
            job_info.job._attempt = job_info.job.restart_times + 1  # what it asked for is given back as it was
        super().report_job_error(job_info, msg=msg, **keywords)

    def _record(self, job_info: SubmittedJobInfo) -> Path:
        return _folder(self.results) / f"{job_info.external_jobid}.json"

    def _forget(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self._earlier.pop(path, None)

    def _in_queue(self, job: str) -> bool:
        """Whether a job waits or runs; one that is just ending is waited for."""
        while True:
            listed = subprocess.run(
                ["squeue", "--noheader", "--name", self.run_uuid, "--format", "%i %T"], capture_output=True, text=True
            )
            states = dict(line.split() for line in listed.stdout.splitlines())
            if not listed.returncode and states.get(job) != "COMPLETING":
                return job in states
            time.sleep(_PATIENCE)


def _mark_unbooked(books: Any, results: str) -> None:
    """Make Snakemake plan the jobs that have ended without a controller: else their parameters were never on its books.

    A job that succeeds takes the marks of begun outputs away itself. They are set again, and `Successor` knows.
    """
    for path in _records(results):
        record = read_json(path)
        if not record.get("complete") and _complete(books, record["outputs"]):
            write_json(path, {**record, "complete": True})
            for output in record["outputs"]:
                books._mark_incomplete(output, path.stem)


def _records(results: str) -> list[Path]:
    return sorted(_folder(results).glob("*.json"))


def _folder(results: str) -> Path:
    return Path(".kairos/jobs") / os.path.basename(results)


def _complete(books: Any, outputs: list[str]) -> bool:
    """Whether all outputs are there and none is marked as begun."""
    return not books._get_external_jobids(outputs) and all(os.path.exists(path) for path in outputs)


def _jobs(job: Any) -> list[Any]:
    return sorted(job.jobs, key=lambda one: str(one.output[0])) if job.is_group() else [job]


def _in_vain(job_info: SubmittedJobInfo) -> bool:
    """Whether of the trainings of a failed job those that are not complete have diverged, in this job."""
    trainings = [one for one in _jobs(job_info.job) if one.rule.name.startswith("train")]
    files = [Path(one.params.out) / ".state/progress.json" for one in trainings]
    words = [read_json(file) for file in files if file.exists()]
    diverged = [word for word in words if not word.get("again", True) and word["job"] == job_info.external_jobid]
    complete = [word for word in words if word["state"] == "complete"]
    return bool(diverged) and len(diverged) + len(complete) == len(trainings)


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
