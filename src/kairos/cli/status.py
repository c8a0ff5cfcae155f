"""``kairos status``: print or serve the state of every training run of an experiment."""

import argparse
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from kairos.cli.common import demand, listen


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add = parser.add_argument
    experiment = "experiment file or its folder of results; default: params.yaml"
    add("experiment", type=Path, nargs="?", default=Path("params.yaml"), metavar="FILE", help=experiment)
    add("--watch", type=float, nargs="?", const=10.0, metavar="S", help="refresh every S seconds (10), until Ctrl-C")
    add(
        "--serve",
        action="store_true",
        help="serve a page for a browser, refreshed every S seconds of --watch (5), until Ctrl-C",
    )
    add("--port", type=int, default=8008, metavar="N", help="port of the page; default: 8008")
    add("--host", default="127.0.0.1", metavar="H", help="address of the page; 0.0.0.0: reachable from other machines")
    add(
        "--remove-unclaimed",
        action="store_true",
        help="delete training states of earlier settings, which no training run resumes",
    )


def run(arguments: argparse.Namespace) -> None:
    """Print the stages, then a line per training run; repeat with ``--watch``, or serve a page."""
    from kairos import resource_usage
    from kairos.status.render import render_lines

    interval = arguments.watch
    demand(interval is None or 0 < interval <= 86400, "watch", interval, "seconds, above 0 and at most 86400")
    resource_usage.end_startup()
    if arguments.serve:
        _serve(arguments)
        return
    clear_screen = "\x1b[H\x1b[J" if interval and sys.stdout.isatty() else ""
    while True:
        text = render_lines(arguments.experiment, arguments.remove_unclaimed)
        print(clear_screen + text, flush=True)
        if not interval:
            return
        time.sleep(interval)


def _serve(arguments: argparse.Namespace) -> None:
    """Serve the page until Ctrl-C or SIGTERM."""
    from kairos.progress import log
    from kairos.status.server import Server

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt), listen(arguments.host, arguments.port) as listener:
        server, host = Server(listener, arguments.experiment, arguments.watch or 5.0), arguments.host
        if not server.loopback:
            log(f"--host {host}: other machines can read {server.results} without a password")
        address = f"[{host}]" if ":" in host else host
        print(f"http://{address}:{arguments.port}/\nCtrl-C ends it", flush=True)
        server.serve_forever()
