"""End of the processes of kairos without the teardown of the interpreter, which frees every Python object one by one.

With torch imported the teardown takes half a second of CPU time. In a fork of the fork server it takes longer, since
every object that it frees is copied from the server's memory first (benchmarks/process_costs.py). The operating system
frees the memory of a process at once.
"""

import atexit
import os
import sys
from contextlib import suppress
from typing import NoReturn

_status = 1  # exit status of this process; 1 until `end_process` sets it, for errors that nothing handles


def skip_teardown() -> None:
    """Let this process end right after its atexit functions.

    Its exit status is the one of `end_process`, or 1 without that call, even after ``sys.exit(0)``. Python waits for
    threads first. Atexit functions that were registered before this call are lost, so call it before imports of
    packages that register some.
    """
    atexit.register(_end_at_once)


def end_process(status: int) -> NoReturn:
    """Raise SystemExit with a status, as `sys.exit`; a process that skips the teardown ends with this status too."""
    global _status
    _status = status
    sys.exit(status)


def _end_at_once() -> None:
    """Flush the standard streams and end the process; output that cannot be written changes a status of 0 to 1."""
    # frames of an unhandled error may hold temporary files, which are deleted with their objects
    for name in ("last_exc", "last_value", "last_traceback"):
        vars(sys).pop(name, None)
    status = _status
    for stream in (sys.stdout, sys.stderr):
        try:
            with suppress(ValueError, AttributeError):  # closed streams, or None
                stream.flush()
        except OSError:  # such as a full disk
            status = status or 1
    os._exit(status)
