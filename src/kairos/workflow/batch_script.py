"""Batch script of a SLURM job: runs a command, forwards SIGTERM to the job's processes, and records success.

    python -m kairos.workflow.batch_script .kairos/jobs/tiny python -m snakemake ...

Before it kills a job (scancel, preemption, time limit), SLURM sends signals to all processes of the job, or with
``--signal=B:TERM@120`` only to the batch script. The SLURM plugin's own jobs start the command with srun. This
script does not use srun, because srun kills its step on SIGTERM at once, before a training run can write a checkpoint.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path


def main(records_folder: str, *command: str) -> int:
    """Run a command and, if it succeeds, create the job's success file.

    The success file is ``<records_folder>/<SLURM_JOB_ID>.done``; missing folders are created. The first SIGTERM does
    not end this process: it is forwarded to all processes of the group, and the command's end is awaited. Later ones
    are ignored.

    Args:
        records_folder: folder of the records of an experiment's jobs.
        command: program and arguments.

    Returns:
        The exit status of the command, or 128 plus the signal that ended it.

    Raises:
        OSError: the program cannot be started, or the success file cannot be created.
        KeyError: SLURM_JOB_ID is not set, after a command that has succeeded; SLURM sets it in every job.
    """
    process = subprocess.Popen(command)

    def forward(number: int, frame: object) -> None:
        """Send a signal to this process's group, and ignore the signal from now on."""
        signal.signal(number, signal.SIG_IGN)  # the group contains this process, which must not end
        os.killpg(0, number)  # 0: the group of this process

    signal.signal(signal.SIGTERM, forward)
    status = process.wait()
    if status == 0:
        record = Path(records_folder) / f"{os.environ['SLURM_JOB_ID']}.json"
        success = success_file(record)
        success.parent.mkdir(parents=True, exist_ok=True)
        success.touch()
    return status if status >= 0 else 128 - status  # a negative status is the number of a signal


def success_file(record: Path) -> Path:
    """Return the path of the file that a job creates when it succeeds: its record's path with the suffix ``.done``."""
    return record.with_suffix(".done")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
