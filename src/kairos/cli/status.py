"""``kairos status``: how far every training of an experiment is."""

import argparse
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from kairos.cli.common import demand, listen


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    where = parser.add_argument
    where("experiment", type=Path, nargs="?", default=Path("params.yaml"), metavar="FILE", help="experiment file, or "
          "its folder of results; default: params.yaml")  # fmt: skip
    where("--watch", type=float, nargs="?", const=10.0, metavar="S", help="again every S seconds (10), until Ctrl-C")
    where("--serve", action="store_true", help="a page for a browser, up to date (--watch: 5), until Ctrl-C")
    where("--port", type=int, default=8008, metavar="N", help="of the page; default: 8008")
    where("--host", default="127.0.0.1", metavar="H", help="of the page, e.g. 0.0.0.0, for all who reach this machine")
    where("--remove-unclaimed", action="store_true", help="delete states of earlier settings: nothing goes on there")


def run(arguments: argparse.Namespace) -> None:
    """Print the stages, then a line per training."""
    from kairos import resource_usage
    from kairos.status.render import render_lines

    every = arguments.watch
    demand(every is None or 0 < every <= 86400, "watch", every, "seconds, above 0 and at most 86400")
    resource_usage.end_startup()
    if arguments.serve:
        return _serve(arguments)
    while True:
        text = render_lines(arguments.experiment, arguments.remove_unclaimed)
        print(("\x1b[H\x1b[J" if every and sys.stdout.isatty() else "") + text, flush=True)
        if not every:
            return
        time.sleep(every)


def _serve(arguments: argparse.Namespace) -> None:
    """Answer browsers until Ctrl-C or SIGTERM."""
    from kairos.progress import say
    from kairos.status.server import Server

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt), listen(arguments.host, arguments.port) as listener:
        server, host = Server(listener, arguments.experiment, arguments.watch or 5.0), arguments.host
        if not server.loopback:
            say(f"--host {host}: whoever reaches this machine can read {server.results}; there is no password")
        print(f"http://{f'[{host}]' if ':' in host else host}:{arguments.port}/\nCtrl-C ends it", flush=True)
        server.serve_forever()
