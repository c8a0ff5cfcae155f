"""End of the processes of kairos without the teardown of the interpreter, which frees every Python object one by one.

With torch imported the teardown takes 0.6 s of CPU time. In a fork of the fork server it takes 2 s, since every object
that it frees is copied from the server's memory first. The operating system frees the memory of a process at once.
"""

import atexit
import os
import sys
from contextlib import suppress
from typing import NoReturn

_status = 1  # exit status of this process; 1 until `end_process` sets it, for errors that nothing handles


def skip_teardown() -> None:
    """Let this process end right after its atexit functions.

    Python waits for threads before it calls these functions, and calls those registered last first. Call this function
    before the imports of packages that register such functions, so that their functions run.
    """
    atexit.register(_end_at_once)


def end_process(status: int) -> NoReturn:
    """Exit with a status, as `sys.exit`."""
    global _status
    _status = status
    sys.exit(status)


def _end_at_once() -> None:
    """Write what the standard streams have buffered, and end the process."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed streams, or None
            stream.flush()
    os._exit(_status)
