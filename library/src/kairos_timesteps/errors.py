"""Errors that a user sees as one message, without a traceback."""

from importlib import import_module
from typing import Any


class KairosError(Exception):
    """An error that its message explains in full; the command line prints it and exits with status 1."""


class ConfigError(KairosError):
    """An experiment file or option that cannot be used; reports the field, the value and what is allowed."""


class ValueRejected(ConfigError, ValueError):
    """A value that is not allowed. It is a ValueError as well, because pydantic expects that of checks."""


def rejection(where: str, got: object, allowed: str) -> ValueRejected:
    """Return the error for a field or argument, its value as a user would write it, and what is allowed."""
    return ValueRejected(f"{where}: got {got}, allowed: {allowed}")


def demand(condition: object, where: str, got: object, allowed: str) -> None:
    """Raise the error of `rejection` unless the condition holds."""
    if not condition:
        raise rejection(where, got, allowed)


def optional_module(module: str, extra: str, user: str) -> Any:
    """Import a module of a package that an extra of kairos-timesteps installs.

    Raises:
        ConfigError: it is not installed; the message contains `user`, the package and the extra.
    """
    try:
        return import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise ConfigError(f"{user}: needs {package}; install it, or the extra {extra} of kairos-timesteps") from None


class NotFiniteError(KairosError):
    """Values that contain NaN or infinity; a repetition computes them again, so that it cannot help."""


class DivergedError(NotFiniteError):
    """A training run whose next step is not finite; a repetition diverges at the same step."""
