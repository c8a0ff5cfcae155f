"""The process that SLURM takes for the batch script of a job: it hands on what asks to leave, and says how it ended.

    python -m kairos.workflow.batch_script .kairos/jobs/tiny python -m snakemake ...

SLURM's signals, before it kills, reach every process of the job (scancel, preemption, time limit), or this one alone
(``--signal=B:TERM@120``): then the others get it from here. There is no srun in between, as with the SLURM plugin's own
jobs: srun answers SIGTERM by killing its step at once, before a training can write its state.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path


def main(books: str, *command: str) -> int:
    """Run a command; returns its status, 128 and more where a signal ended it. A good end is noted in the folder."""
    process = subprocess.Popen(command)

    def hand_on(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)
        os.killpg(0, number)

    signal.signal(signal.SIGTERM, hand_on)
    status = process.wait()
    if status == 0:
        note = done(Path(books) / f"{os.environ['SLURM_JOB_ID']}.json")
        note.parent.mkdir(parents=True, exist_ok=True)
        note.touch()
    return status if status >= 0 else 128 - status


def done(book: Path) -> Path:
    """The file that says that a job has ended well, beside the one in which its controller has written it down."""
    return book.with_suffix(".done")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
