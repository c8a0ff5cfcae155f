"""The server behind ``kairos status --serve``: the page, and the files in the experiment's folder of results.

Nothing else is read, nothing is written, and there is no password: by default only this machine can ask.
"""

import math
import os
import re
import socket
import sys
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote_to_bytes

from kairos.errors import KairosError
from kairos.status.outline import outline
from kairos.status.page import page

_PLAIN = "text/plain; charset=utf-8"
_TYPES = dict.fromkeys((".log", ".json", ".jsonl", ".csv", ".yaml", ".txt"), _PLAIN)
_TYPES |= {".html": "text/html; charset=utf-8", ".png": "image/png", ".svg": "image/svg+xml"}
_THIS_MACHINE = re.compile(r"(localhost|127\.\d+\.\d+\.\d+|\[::1\])(:\d+)?", re.IGNORECASE)


class Server(ThreadingHTTPServer):
    """Answers on a socket that listens already.

    Args:
        listener: the socket.
        experiment: file of an experiment, or its folder of results.
        every: seconds between two looks at the experiment, whoever asks.

    Raises:
        KairosError: there is no such experiment.
    """

    def __init__(self, listener: socket.socket, experiment: Path, every: float):
        self.results = outline(experiment).results
        super().__init__(listener.getsockname(), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.loopback = ip_address(listener.getsockname()[0]).is_loopback  # only this machine can ask
        self._experiment, self._every = experiment, every
        self._looking, self._looked, self._page = threading.Lock(), -math.inf, b""

    def page(self) -> bytes:
        """The page, made anew where the last one is old."""
        with self._looking:
            if time.monotonic() - self._looked > self._every / 2:
                try:
                    wanted = outline(self._experiment)
                    self.results = wanted.results
                    made = page(self.results.name, self._every, wanted)
                except Exception as error:  # whatever is being written or damaged now, a later look may be better
                    fault = str(error) if isinstance(error, KairosError) else f"{type(error).__name__}: {error}"
                    made = page(self.results.name, self._every, None, fault)
                self._page, self._looked = made.encode(errors="replace"), time.monotonic()
            return self._page

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing is said of a browser that has gone away."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = 60  # seconds that a silent browser keeps a thread

    def do_GET(self) -> None:
        host, asked = self.headers.get("Host", ""), self.path.partition("?")[0]
        if self.server.loopback and not _THIS_MACHINE.fullmatch(host):  # a page of a name that was made to lead here
            self.send_error(HTTPStatus.FORBIDDEN, "ask for localhost or 127.0.0.1")
        elif asked == "/":
            body = self.server.page()
            self._head(_TYPES[".html"], len(body))
            if self.command == "GET":
                self.wfile.write(body)
        elif file := _opened(self.server.results, asked):
            with file:
                size = os.fstat(file.fileno()).st_size
                self._head(_TYPES.get(Path(file.name).suffix, "application/octet-stream"), size)
                if self.command == "GET" and size:
                    self.connection.sendfile(file, count=size)  # no more than that of a log that grows
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    do_HEAD = do_GET

    def _head(self, kind: str, size: int) -> None:
        self.send_response(HTTPStatus.OK)
        facts = {"Content-Type": kind, "Content-Length": size, "Cache-Control": "no-store"}
        for name, value in (facts | {"X-Content-Type-Options": "nosniff"}).items():
            self.send_header(name, str(value))
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Nothing is said of what was asked for."""


def _opened(results: Path, asked: str) -> BinaryIO | None:
    """The file within the results that a URL's path names; None where there is none, or it is hidden as states are."""
    parts = [os.fsdecode(unquote_to_bytes(part)) for part in asked.split("/")[1:]]
    try:
        file = results.joinpath(*parts).resolve(strict=True)
        parts += file.relative_to(results.resolve()).parts  # where links led to
        if file.is_file() and not any(part.startswith(".") or "/" in part for part in parts):
            return file.open("rb")
    except (OSError, ValueError, RuntimeError):  # missing, outside or no name at all, a circle of links
        pass
    return None
