"""HTTP server of ``kairos status --serve``: serves the status page and the files in the experiment's results.

The server reads nothing else, writes nothing and has no password. By default only this machine can connect.
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

from kairos.status.render import render_page
from kairos.status.run_progress import load_outline

# matches a name or address of this machine, with or without a port, as in a Host header
_THIS_MACHINE = re.compile(r"(localhost|127(\.\d+){3}|\[?::1\]?)(:\d+)?", re.IGNORECASE)
# types, by extension, with which browsers show a file instead of saving it
_TYPES = dict.fromkeys((".log", ".json", ".jsonl", ".csv", ".yaml", ".txt"), "text/plain; charset=utf-8")


class Server(ThreadingTCPServer):
    """HTTP server of a status page, on a socket that listens already; the caller runs it with `serve_forever`.

    Args:
        listener: the socket.
        experiment: file of an experiment, or its folder of results.
        interval: seconds after which a page requests itself again.

    Attributes:
        results: folder of the results, whose files are served.
        loopback: True if only this machine can connect.

    Raises:
        KairosError: the folder contains no training run.
        ConfigError: the file is missing or not a valid experiment.
    """

    daemon_threads = True

    def __init__(self, listener: socket.socket, experiment: Path, interval: float):
        super().__init__(listener.getsockname(), _Handler, bind_and_activate=False)
        self.socket.close()  # the base class has created one, which is not bound; the listener replaces it
        self.socket = listener
        self.experiment = experiment
        self.interval = interval
        self.results = load_outline(experiment).results
        self.loopback = bool(_THIS_MACHINE.fullmatch(listener.getsockname()[0]))

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore an error of a request: most errors are browsers that close their connection."""


class _Handler(SimpleHTTPRequestHandler):
    """Answers the requests of one connection."""

    server: Server
    timeout = 60  # seconds after which the connection of a silent browser is closed
    extensions_map = _TYPES

    def send_head(self) -> Any:
        """Send status and headers of a response, and return its content as a file to read.

        The path ``/`` is the status page, every other path a file in the results. The result is None after an error,
        whose response is sent: status 404 for a path without a file. If only this machine can connect, requests with
        another host name in header ``Host`` get status 403.
        """
        server = self.server
        if server.loopback and not _THIS_MACHINE.fullmatch(self.headers.get("Host", "")):
            # a foreign name that resolves to this machine (DNS rebinding) must not read results
            return self.send_error(403, "request localhost or 127.0.0.1")
        if self.path.partition("?")[0] != "/":
            return super().send_head()
        moment = time.monotonic() // (server.interval / 2)  # requests within half an interval get one page
        page = render_page(server.experiment, server.interval, moment)
        body = page.encode(errors="replace")  # a file's name may contain bytes that are not UTF-8
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        return BytesIO(body)

    def translate_path(self, path: str) -> str:
        """Return the path of the file in the results that the path of a URL selects; empty if there is no such file.

        The result is also empty for a folder, a file outside of the results, and a hidden file or a file in a hidden
        folder. The URL may have a query, which is ignored.
        """
        parts = [unquote(part, errors="surrogateescape") for part in path.partition("?")[0].split("/")]
        try:
            file = self.server.results.joinpath(*parts).resolve(strict=True)
            target_parts = file.relative_to(self.server.results.resolve()).parts
        except (OSError, ValueError, RuntimeError):  # no such file, outside of the results, invalid name, or link cycle
            return ""
        names = (*parts, *target_parts)  # in the URL, and in the path of the file that a link leads to
        is_hidden = any(name.startswith(".") for name in names)
        has_quoted_slash = any("/" in name for name in names)  # %2F, which is part of no name
        return str(file) if file.is_file() and not is_hidden and not has_quoted_slash else ""

    def end_headers(self) -> None:
        """Send the headers of all responses, which forbid caching and guessing of types, and end the header section."""
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        super().end_headers()

    def log_message(self, *_: Any) -> None:
        """Log no requests."""
