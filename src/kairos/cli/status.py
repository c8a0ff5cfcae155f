"""``kairos status``: print or serve the state of every training run of an experiment."""

import argparse
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from kairos.cli.common import demand_option, open_listening_socket


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `kairos status`; ``--watch`` is None if it is not set, and 10 if it has no number."""
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


def run(arguments: argparse.Namespace) -> None:
    """Print the stages of an experiment and a line per training run; ``--watch`` repeats it, ``--serve`` serves a page.

    Results, logs and SLURM's queue are read. With ``--watch`` on a terminal, the screen is cleared before each
    repetition. The repetition ends with the KeyboardInterrupt of Ctrl-C.

    Raises:
        ConfigError: ``--watch`` is not a number of seconds up to a day, or the experiment file is not valid.
        KairosError: the experiment does not exist, or the page cannot be served at this address or port.
    """
    from kairos import resource_usage
    from kairos.status.render import render_lines

    interval = arguments.watch
    demand_option(interval is None or 0 < interval <= 86400, "watch", interval, "seconds, above 0 and at most 86400")
    resource_usage.end_startup()
    if arguments.serve:
        _serve(arguments)
        return
    repeats_on_terminal = interval is not None and sys.stdout.isatty()
    clear_screen = "\x1b[H\x1b[J" if repeats_on_terminal else ""  # escape codes: cursor to the top, erase below
    while True:
        text = render_lines(arguments.experiment)
        print(clear_screen + text, flush=True)
        if interval is None:
            return
        time.sleep(interval)


def _serve(arguments: argparse.Namespace) -> None:
    """Print the address of a page with the state of the experiment, and serve it; return after Ctrl-C or SIGTERM.

    The files in the folder of results are served, too. A warning is logged if other machines can open them. The page is
    refreshed every 5 s, or as ``--watch`` sets.

    Raises:
        KairosError: the address or the port cannot be used, or there is no such experiment.
    """
    from kairos.progress import log
    from kairos.status.server import Server

    host = arguments.host
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # raises KeyboardInterrupt, as Ctrl-C does
    with suppress(KeyboardInterrupt), open_listening_socket(host, arguments.port) as listener:
        seconds_to_refresh = 5.0 if arguments.watch is None else arguments.watch
        server = Server(listener, arguments.experiment, seconds_to_refresh)
        if not server.loopback:
            log(f"--host {host}: other machines can read {server.results} without a password")
        address = f"[{host}]" if ":" in host else host  # URLs have brackets around IPv6 addresses
        print(f"http://{address}:{arguments.port}/\nCtrl-C ends it", flush=True)
        server.serve_forever()
