"""The process that SLURM takes for the batch script of a job: it hands on what asks to leave, and waits.

    python -m kairos.workflow.batch_script python -m snakemake ...

SLURM's signals, before it kills, reach every process of the job (scancel, preemption, time limit), or this one alone
(``--signal=B:TERM@120``): then the others get it from here. There is no srun in between, as with the SLURM plugin's own
jobs: srun answers SIGTERM by killing its step at once, before a training can write its state.
"""

import os
import signal
import subprocess
import sys


def main(command: list[str]) -> int:
    """Run a command; returns its status, 128 and more where a signal ended it."""
    process = subprocess.Popen(command)

    def hand_on(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)
        os.killpg(0, number)

    signal.signal(signal.SIGTERM, hand_on)
    status = process.wait()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
