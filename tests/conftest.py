"""Fixtures and hooks of the pipeline's tests; library/tests/hooks.py defines those that the library's tests share."""

from collections.abc import Callable, Iterator

import pytest
from jaxtyping import install_import_hook

from commands import Commands
from hooks import environment, pytest_collection_finish, pytest_collection_modifyitems, pytest_unconfigure

__all__ = ["environment", "pytest_collection_finish", "pytest_collection_modifyitems", "pytest_unconfigure"]

# modules whose calls all tests check against the shapes and types in their signatures, with beartype
CHECKED_MODULES = [
    "kairos.analyses.gradients",
    "kairos.autoencoders.codec",
    "kairos.conditions",
    "kairos.data.augment",
    "kairos.data.batches",
    "kairos.data.latents",
    "kairos.evaluation.classifier",
    "kairos.evaluation.measurements",
    "kairos.losses.terms",
    "kairos.sampling.generate",
    "kairos.sampling.solvers",
    "kairos.training.loop",
]
# modules whose calls are checked if long tests run too: a network calls its layers so often that checks take long
CHECKED_WITH_LONG_TESTS = [
    "kairos.autoencoders.train",
    "kairos.data.random_order",
    "kairos.evaluation.dinov2",
    "kairos.evaluation.inception",
    "kairos.models",
    "kairos.text_encoders",
]


def pytest_configure(config: pytest.Config) -> None:
    """Let calls be checked in modules that are imported later."""
    modules = list(CHECKED_MODULES)
    if "not long" not in config.option.markexpr:
        modules += CHECKED_WITH_LONG_TESTS
    install_import_hook(modules, "beartype.beartype")


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
