"""Fixtures, order and signals of all tests."""

import gc
import os
import signal
from collections.abc import Iterator

import pytest

from commands import Commands

# A shell has what it starts in the background ignore Ctrl-C, and so would every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def commands() -> Iterator[Commands]:
    """Start kairos commands in processes of their own without the time that imports take."""
    with Commands() as commands:
        yield commands


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Restore the environment variables; `deterministic: portable` sets those that choose the kernels of torch."""
    before = dict(os.environ)
    yield
    if dict(os.environ) != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.hookimpl(trylast=True)  # after -m and -k have selected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put long tests first in the share of each process of pytest-xdist, so that no process ends with one alone."""
    processes = getattr(config, "workerinput", {}).get("workercount", 1)
    long = [item for item in items if item.get_closest_marker("long")]
    quick = [item for item in items if not item.get_closest_marker("long")]
    if not long or processes == 1:
        return
    items.clear()
    for process in range(processes):
        for group in (long, quick):
            items += group[process * len(group) // processes : (process + 1) * len(group) // processes]


def pytest_collection_finish() -> None:
    """Exempt what is imported by now from garbage collection, which would look at all of it again and again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let libraries free their objects at the end of the process; some print a warning for those that are left."""
    gc.unfreeze()
