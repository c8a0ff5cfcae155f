"""CPU time of a command with its descendants."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


def run_command(
    command: Sequence[str | Path], folder: Path, environment: Mapping[str, str] | None = None
) -> tuple[float, str]:
    """Run a command in a folder; return the CPU seconds of its processes and its standard output.

    Standard error is hidden unless the command fails.

    Args:
        command: program and arguments.
        folder: working directory.
        environment: variables in addition to those of this process.

    Raises:
        SystemExit: the command fails; the message contains its standard error.
    """
    errors = folder / "stderr.txt"
    with open(errors, "wb") as error_file:
        process = subprocess.Popen(
            command, cwd=folder, env={**os.environ, **(environment or {})}, stdout=subprocess.PIPE, stderr=error_file
        )
        assert process.stdout is not None
        output = process.stdout.read().decode()
        _, status, usage = os.wait4(process.pid, 0)  # the usage includes descendants that have been waited for
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}: status {process.returncode}\n{errors.read_text()}")
    return usage.ru_utime + usage.ru_stime, output
