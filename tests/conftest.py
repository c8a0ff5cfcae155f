"""Fixtures and hooks of the pipeline's tests; library/tests/hooks.py defines those that the library's tests share."""

import os
from collections.abc import Callable, Iterator

import pytest
from jaxtyping import install_import_hook

from checked_modules import CHECKED_MODULES
from commands import Commands
from hooks import environment, pytest_collection_finish, pytest_collection_modifyitems, pytest_unconfigure

__all__ = ["environment", "pytest_collection_finish", "pytest_collection_modifyitems", "pytest_unconfigure"]

os.environ["KAIROS_CACHE"] = ".kairos/cache"  # in the working directory of a test, not the user's cache

install_import_hook(CHECKED_MODULES, "beartype.beartype")


@pytest.fixture(scope="session")
def commands() -> Iterator[Commands]:
    """Kairos commands in separate processes, without the time that imports take."""
    with Commands() as commands:
        yield commands


@pytest.fixture
def kairos_strategies(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Function that runs ``kairos strategies ...`` in this process and returns exit status, stdout and stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        from kairos.cli import main

        status = main(["strategies", *map(str, arguments)])
        return status, *capsys.readouterr()

    return run
