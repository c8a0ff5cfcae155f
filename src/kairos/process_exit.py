"""End of the processes of kairos without the teardown of the interpreter, which frees every Python object one by one.

With torch imported the teardown takes half a second of CPU time. In a fork of the fork server it takes longer, since
every object that it frees is copied from the server's memory first (benchmarks/process_costs.py). The operating system
frees the memory of a process at once.
"""

import atexit
import ctypes
import os
import signal
import sys
from contextlib import suppress
from typing import NoReturn

_PR_SET_PDEATHSIG = 1  # option of Linux's prctl: signal that the kernel sends when the parent process ends
_status = 1  # exit status of this process; 1 until `end_process` sets it, for errors that nothing handles


def skip_teardown() -> None:
    """Register an atexit function that flushes the standard streams and ends the process without the teardown.

    The exit status is the one of `end_process`, or 1 without that call, even after ``sys.exit(0)``. Atexit functions
    that are registered later run first. Those that were registered before this call never run, so call it before
    imports of packages that register some. Python waits for threads first.
    """
    atexit.register(_end_at_once)


def end_process(status: int) -> NoReturn:
    """Raise SystemExit with a status, as `sys.exit` does, and record the status for `skip_teardown`."""
    global _status
    _status = status
    sys.exit(status)


def die_with_parent(signal_number: int = signal.SIGKILL) -> None:
    """Make the kernel send a signal to this process when its parent ends; on systems other than Linux do nothing."""
    with suppress(OSError, AttributeError):  # the kernel rejects the request; not Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal_number)


def _end_at_once() -> None:
    """Flush the standard streams and end the process with the recorded status.

    Output that cannot be written changes status 0 to 1. References to an unhandled error are dropped first.
    """
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
