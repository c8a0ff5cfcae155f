"""Fixtures of the tests on SLURM: for all tests one cluster, and one pipeline whose first controller was killed."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm
from pipeline import Pipeline
from sweep import Sweep, run_sweep

ROWS = pytest.StashKey[list[tuple[str, ...]]]()
HEADER = ("disturbance", "effect", "seconds", "hashes equal")


@pytest.fixture(scope="session")
def cluster() -> Iterator[Path]:
    """Folder of a SLURM cluster on this machine: one that was started by hand, or a new one for these tests."""
    if (running := slurm.find_manual_cluster()) is not None:
        yield running
        return
    reason = slurm.find_obstacle()
    if reason is not None:
        pytest.skip(reason)
    try:
        folder = slurm.start(owner=os.getpid())
    except OSError as error:  # for example no permission to create the character devices that stand for GPUs
        pytest.skip(f"SLURM cannot be started: {error}")
    yield folder
    slurm.stop()


@pytest.fixture
def pipeline(sweep: Sweep) -> Pipeline:
    """The small pipeline with a complete report; tests change its experiment."""
    slurm.clean()
    sweep.pipeline.configure()
    return sweep.pipeline


@pytest.fixture(scope="session")
def sweep(cluster: Path, tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    """The small pipeline after its run on SLURM up to its report, during which its controller was killed."""
    return run_sweep(Pipeline(tmp_path_factory.mktemp("pipeline") / "kairos"))


@pytest.fixture(scope="session")
def table(request: pytest.FixtureRequest) -> list[tuple[str, ...]]:
    """Rows of the table of disturbances, which is printed at the end: disturbance, effect, seconds, hashes equal."""
    return request.config.stash.setdefault(ROWS, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the table of disturbances."""
    rows = config.stash.get(ROWS, [])
    if rows:
        terminalreporter.section("disturbances")
        for row in (HEADER, ("---",) * len(HEADER), *rows):
            terminalreporter.write_line("| " + " | ".join(row) + " |")
