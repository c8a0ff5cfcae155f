"""Jobs on their way into SLURM's queue, and what the queue says of them.

The plugin takes a job that sbatch could not submit for one that has failed, and sends it again at once: a SLURM that is
away for a minute, or has as many jobs of this user as it takes, would use up all attempts. Here such a job waits. And
sbatch may fail although SLURM has the job: before it is sent again, what is in the queue and in no book is cancelled.
"""

import getpass
import re
import time
from typing import Any

from snakemake_executor_plugin_slurm import Executor
from snakemake_interface_common.exceptions import WorkflowError
from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo

from kairos.progress import duration, say
from kairos.slurm import ask, books, job_name

_PATIENCE = 5  # seconds between looks at the queue
_ENDING = 300  # seconds that a job may take to end
ANSWER = 60  # seconds that SLURM may take to answer
STATES = "%i %T"  # what the queue is asked for
_FIRST, _LONGEST = 10.0, 60.0  # seconds until sbatch is called again
# what sbatch says when the same call may succeed later: SLURM is away or busy, or limits how many jobs a user submits
_LATER = re.compile(
    r"timed out|unable to contact|temporarily|try again|connect failure|connection refused|communication|zero bytes"
    r"|SubmitJob",
    re.IGNORECASE,
)


class Submitter(Executor):  # type: ignore[misc]
    """The plugin's executor, with patience."""

    results: str

    def __post_init__(self, test_mode: bool = False) -> None:
        super().__post_init__(test_mode)
        self.run_uuid = job_name(self.results)  # by this name the plugin finds its jobs' states, now earlier ones too
        self._leaving = False
        self._sent: set[str] = set()  # numbers of jobs that this controller has sent
        self._refusals: dict[Any, str] = {}  # why sbatch has just failed for a job
        self._cancel_unknown()

    def run_job(self, job: Any) -> None:
        """Send a job; called in threads, where an exception would be lost."""
        pause = _FIRST
        while True:
            super().run_job(job)
            message = self._refusals.pop(job, None)
            if message is None:
                return
            said = " ".join(message.partition("sbatch call:")[0].split())
            if self._leaving or not _LATER.search(said):
                self._give_up(job, said)
                return
            say(f"{job.name}: {said} It is sent again in {duration(pause)}.")
            try:
                self._pause(pause)
                self._cancel_unknown(f"rule_{job.name}")
            except WorkflowError as error:
                self._give_up(job, str(error))
                return
            pause = min(2 * pause, _LONGEST)

    def _report_job_error_threadsafe(self, job_info: SubmittedJobInfo, msg: str) -> None:
        """What the plugin calls where a job could not be sent."""
        self._refusals[job_info.job] = msg

    def _report_job_submission_threadsafe(self, job_info: SubmittedJobInfo) -> None:
        self._sent.add(job_info.external_jobid)
        super()._report_job_submission_threadsafe(job_info)

    def _give_up(self, job: Any, message: str) -> None:
        """Report a job that cannot be sent, and say why: of Snakemake, `quiet` in the profile hides it."""
        say(f"{job.name}: {message}")
        super()._report_job_error_threadsafe(SubmittedJobInfo(job), message)

    def _cancel_unknown(self, comment: str = "") -> None:
        """Cancel this user's jobs that are in the queue and in no book, of those whose comment begins so."""
        for _ in range(2):  # one that another thread has just sent is in its book by the second look
            queue = self._queue("%i %k", "--user", getpass.getuser()) or {}
            unknown = {number: said for number, said in queue.items() if said.startswith(comment)}
            unknown = {number: said for number, said in unknown.items() if not self._known(number)}
            if not unknown:
                return
            self._pause(_PATIENCE)
        for number, said in unknown.items():
            say(f"SLURM job {number} ({said}) is in the queue and was never written down: it is cancelled")
            self._cancel(number)

    def _known(self, number: str) -> bool:
        return number in self._sent or (books(self.results) / f"{number}.json").exists()

    def _cancel(self, number: str) -> None:
        """Cancel a job and wait until it is gone."""
        ask("scancel", number, patience=ANSWER)
        while self._in_queue(number):
            self._pause(_PATIENCE)

    def _in_queue(self, number: str) -> bool:
        """Whether a job waits or runs; one that is just ending is waited for, but not for hours on a sick machine."""
        patience = time.monotonic() + _ENDING
        while True:
            states = self._queue(STATES)
            if states is not None and (states.get(number) != "COMPLETING" or time.monotonic() > patience):
                return states.get(number, "COMPLETING") != "COMPLETING"
            self._pause(_PATIENCE)

    def _queue(self, what: str, *whose: str) -> dict[str, str] | None:
        """What the queue says of each of this experiment's jobs; None: it does not answer."""
        line = ("squeue", "--noheader", "--name", self.run_uuid, *whose, "--format", what)
        good, answer = ask(*line, patience=ANSWER)
        lines = (line.partition(" ") for line in answer.splitlines())
        return {number: said.strip() for number, _, said in lines} if good else None

    def _pause(self, seconds: float) -> None:
        """Wait, but not when the run has been asked to leave.

        Raises:
            WorkflowError: it has.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self._leaving:
            time.sleep(min(1, max(end - time.monotonic(), 0)))
        if self._leaving:
            raise WorkflowError("asked to leave")
