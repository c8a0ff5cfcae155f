"""Hooks of pytest that library/tests/conftest.py and tests/conftest.py share: environment, order, garbage, signals."""

import gc
import os
import signal
from collections.abc import Iterator

import pytest

# A shell makes background processes ignore SIGINT, and each process that a test starts would inherit this.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Restore the environment variables after each test."""
    before = dict(os.environ)
    yield
    if dict(os.environ) != before:
        os.environ.clear()
        os.environ.update(before)


_LONG_TEST_SECONDS = 1800  # after which a long test has failed, also on a slow machine that runs other tests


@pytest.hookimpl(trylast=True)  # after -m and -k have selected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Set the timeout of long tests, and put them first in the share of each process of pytest-xdist.

    With long tests first, no process ends with a long test alone.
    """
    for item in items:
        is_long = item.get_closest_marker("long") or item.get_closest_marker("nightly")
        if is_long and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(_LONG_TEST_SECONDS))
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
    """Exempt imported objects from garbage collection, which would otherwise visit them again and again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let libraries free their objects at the end of the process; some print a warning for remaining objects."""
    gc.unfreeze()
