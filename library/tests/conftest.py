"""Fixtures and hooks of the library's tests; nothing here imports the pipeline."""

from collections.abc import Iterator

import pytest

from hooks import environment, pytest_collection_finish, pytest_collection_modifyitems, pytest_unconfigure

__all__ = ["environment", "pytest_collection_finish", "pytest_collection_modifyitems", "pytest_unconfigure"]


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers where the repository's pyproject.toml is absent, as in the source distribution."""
    if not any(line.startswith("long:") for line in config.getini("markers")):
        config.addinivalue_line("markers", "long: slower tests, and combinations beyond those of the quick tests")
        config.addinivalue_line("markers", "nightly: more inputs")
        config.addinivalue_line("markers", "trainers: trains with packages of other projects")


@pytest.fixture
def unregistered_names() -> Iterator[None]:
    """Remove the samplers and weightings that a test registers."""
    from kairos_timesteps.components import SAMPLERS, WEIGHTINGS

    before = [(registry, set(registry)) for registry in (SAMPLERS, WEIGHTINGS)]
    yield
    for registry, names in before:
        for name in set(registry) - names:
            del registry[name]
