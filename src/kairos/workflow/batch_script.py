"""Batch script of a SLURM job: runs a command and forwards SIGTERM to all of its processes.

    python -m kairos.workflow.batch_script python -m snakemake ...

Before SLURM kills a job (scancel, preemption, time limit), it sends SIGTERM to the batch script alone. The SLURM plugin
itself starts commands with srun, which kills them at once, before a training run can write a checkpoint.
"""

import os
import signal
import subprocess
import sys


def main(command: list[str]) -> int:
    """Run a command; return its exit status, or 128 plus the signal that ended it.

    The first SIGTERM is forwarded to all processes of the group, and the end of the command is awaited.
    """
    process = subprocess.Popen(command)

    def forward(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # the group contains this process, which must not end
        os.killpg(0, number)

    signal.signal(signal.SIGTERM, forward)
    status = process.wait()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
