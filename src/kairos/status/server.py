"""The server behind ``kairos status --serve``: the page, and the files in the experiment's folder of results.

Nothing else is read, nothing is written, and there is no password: by default only this machine can ask.
"""

import re
import socket
import time
from http.server import SimpleHTTPRequestHandler
from io import BytesIO
from pathlib import Path
from socketserver import ThreadingTCPServer
from typing import Any
from urllib.parse import unquote

from kairos.status.outline import outline
from kairos.status.views import page

_THIS_MACHINE = re.compile(r"(localhost|127(\.\d+){3}|\[?::1\]?)(:\d+)?", re.IGNORECASE)
_TYPES = dict.fromkeys((".log", ".json", ".jsonl", ".csv", ".yaml", ".txt"), "text/plain; charset=utf-8")


class Server(ThreadingTCPServer):
    """Answers on a socket that listens already.

    Args:
        listener: the socket.
        experiment: file of an experiment, or its folder of results.
        every: seconds after which a page asks for itself again.

    Raises:
        KairosError: there is no such experiment.
    """

    daemon_threads = True

    def __init__(self, listener: socket.socket, experiment: Path, every: float):
        super().__init__(listener.getsockname(), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket, self.experiment, self.every = listener, experiment, every
        self.results = outline(experiment).results
        self.loopback = bool(_THIS_MACHINE.fullmatch(listener.getsockname()[0]))

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing if a browser closes its connection."""


class _Handler(SimpleHTTPRequestHandler):
    server: Server
    timeout = 60  # seconds that a silent browser keeps a thread
    extensions_map = _TYPES  # others as usual

    def send_head(self) -> Any:
        """Answer but for the content, which is given back."""
        asked = self.server
        if asked.loopback and not _THIS_MACHINE.fullmatch(self.headers.get("Host", "")):
            return self.send_error(403, "ask for localhost or 127.0.0.1")  # not for a name that was made to lead here
        if self.path.partition("?")[0] != "/":
            return super().send_head()
        body = page(asked.experiment, asked.every, time.monotonic() // (asked.every / 2)).encode(errors="replace")
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        return BytesIO(body)

    def translate_path(self, path: str) -> str:
        """The file within the results that a URL names; nothing where there is none, or it is hidden as states are."""
        parts = [unquote(part, errors="surrogateescape") for part in path.partition("?")[0].split("/")]
        try:
            file = self.server.results.joinpath(*parts).resolve(strict=True)
            parts += file.relative_to(self.server.results.resolve()).parts  # where links led to
        except (OSError, ValueError, RuntimeError):  # nothing there, outside or no name at all, a circle of links
            return ""
        return str(file) if file.is_file() and not any(part.startswith(".") or "/" in part for part in parts) else ""

    def end_headers(self) -> None:
        """Send the headers that all responses have in common, and end the header section."""
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        super().end_headers()

    def log_message(self, *_: Any) -> None:
        """Log no requests."""
