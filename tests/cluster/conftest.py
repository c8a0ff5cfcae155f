"""One SLURM and one undisturbed run of the tiny pipeline for all tests on a cluster."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm
from pipeline import Pipeline

ROWS = pytest.StashKey[list[tuple[str, ...]]]()
HEADER = ("what was done", "what happened", "seconds", "hashes equal")


@pytest.fixture(scope="session")
def cluster() -> Iterator[Path]:
    """Folder of a SLURM that runs on this machine: one that was started by hand, or one for these tests."""
    if (running := slurm.by_hand()) is not None:
        yield running
        return
    reason = slurm.why_not()
    if reason is not None:
        pytest.skip(reason)
    try:
        folder = slurm.start(owner=os.getpid())
    except OSError as error:  # such as no right to make the character devices that stand for GPUs
        pytest.skip(f"SLURM cannot be started: {error}")
    yield folder
    slurm.stop()


@pytest.fixture
def pipeline(finished: Pipeline) -> Pipeline:
    """The tiny pipeline, with its report; tests add to its experiment."""
    slurm.clean()
    finished.configure()
    return finished


@pytest.fixture(scope="session")
def finished(cluster: Path, tmp_path_factory: pytest.TempPathFactory, table: list[tuple[str, ...]]) -> Pipeline:
    """The tiny pipeline, run through SLURM to its report without disturbance."""
    made = Pipeline(tmp_path_factory.mktemp("pipeline") / "kairos")
    made.configure()
    begun = time.monotonic()
    made.run()
    table.append(("nothing: the pipeline to its report", "ended by itself", f"{time.monotonic() - begun:.0f}", ""))
    return made


@pytest.fixture(scope="session")
def table(request: pytest.FixtureRequest) -> list[tuple[str, ...]]:
    """Rows of the table of disturbances, printed at the end: what was done, what happened, seconds, hashes equal."""
    return request.config.stash.setdefault(ROWS, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the table of disturbances."""
    rows = config.stash.get(ROWS, [])
    if rows:
        terminalreporter.section("disturbances")
        for row in (HEADER, ("---",) * len(HEADER), *rows):
            terminalreporter.write_line("| " + " | ".join(row) + " |")
