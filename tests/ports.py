"""Ports of this machine for servers that tests start."""

import secrets
import socket
from contextlib import suppress

_FIRST, _COUNT = 20_000, 12_000  # below the ports that the kernel assigns to connections, which begin at 32768 on Linux


def free_port() -> int:
    """Return a random port of this machine on which no process listens.

    The kernel does not assign the port to a connection of another test before the server uses it.
    """
    while True:
        port = _FIRST + secrets.randbelow(_COUNT)  # not `random`, which hypothesis seeds equally in all processes
        with suppress(OSError), socket.socket() as listener:
            listener.bind(("127.0.0.1", port))
            return port
