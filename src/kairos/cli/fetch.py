"""``kairos fetch``: download the files that jobs need, on a login node, since compute nodes may have no internet."""

import argparse
import os

from kairos.cli.common import add_config


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `kairos fetch`."""
    add_config(parser)


def run(arguments: argparse.Namespace) -> None:
    """Download the files that an experiment's jobs need and print the path of each; files that exist are kept.

    If the jobs need no file, a line reports it. Existing files are verified: damaged weights in a cache are downloaded
    again, other damaged files are an error. The environment variable ``HF_HUB_OFFLINE``, which would forbid downloads,
    is removed from this process.

    Raises:
        KairosError: some files are missing and cannot be downloaded, or are damaged. All other files are downloaded
            before, and the message contains a line for each of these files.
    """
    from kairos import downloads
    from kairos.config import load
    from kairos_timesteps.errors import KairosError

    requirements = downloads.list_requirements(load(arguments.config))
    os.environ.pop(downloads.OFFLINE, None)  # now, as the hub's client reads it when `locate` imports the client
    if not requirements:
        print("nothing to download: the images are embedded and everything else is computed")
    problems = []
    for requirement in requirements:
        path, problem = requirement.locate(download=True)
        if path is None:
            reason = problem.rstrip(".") if problem else "it does not exist"  # a semicolon follows
            problems.append(f"{requirement.name}: {reason}; {requirement.advice}")
        else:
            print(f"{requirement.name}: {path}", flush=True)
    if problems:
        raise KairosError("files that jobs need are missing:\n  " + "\n  ".join(problems))
