"""Ports of this machine for servers that tests start."""

import socket


def free_port() -> int:
    """Return a port of this machine on which no process listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
