"""``kairos fetch``: what jobs need from a network is brought on the login node, before any of them starts."""

import argparse
import os

from kairos.cli.common import add_config


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_config(parser)


def run(arguments: argparse.Namespace) -> None:
    """Say of each thing where it is, or bring it; ends with status 1 where something cannot be had."""
    from kairos import downloads
    from kairos.config import load
    from kairos_timesteps.errors import KairosError

    needs = downloads.needs(load(arguments.config))
    os.environ.pop(downloads.OFFLINE, None)  # the hub's client reads it when it is imported
    if not needs:
        print("nothing to fetch: the images are embedded and everything else is computed")
    failed = []
    for need in needs:
        place, fault = need.look(bring=True)
        if place is None:
            failed.append(f"{need.what}: {(fault or 'it is not there').rstrip('.')}; {need.by_hand}")
        else:
            print(f"{need.what}: {place}", flush=True)
    if failed:
        raise KairosError("not here, so jobs would fail:\n  " + "\n  ".join(failed))
