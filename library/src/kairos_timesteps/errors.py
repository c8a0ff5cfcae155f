"""What a user sees when something is wrong: one message, no traceback."""

from importlib import import_module
from typing import Any


class KairosError(Exception):
    """A mistake or misfortune that the message explains in full; the command line prints it and exits with 1."""


class ConfigError(KairosError):
    """An experiment file or an option that cannot be used; names the field, the value and what is allowed."""


class Refusal(ConfigError, ValueError):
    """A value that cannot be used; a ValueError too, which is what pydantic and the checks of a dataclass may raise."""


def refusal(where: str, got: object, allowed: str) -> Refusal:
    """The one form of it: the field or argument, the value as a user would write it, and what is allowed."""
    return Refusal(f"{where}: got {got}, allowed: {allowed}")


def demand(good: object, where: str, got: object, allowed: str) -> None:
    """Raise that `refusal` of what is not good."""
    if not good:
        raise refusal(where, got, allowed)


def needed(module: str, extra: str, who: str) -> Any:
    """A module of a package that `who` needs and that not everyone has installed: an extra of kairos-timesteps.

    Raises:
        ConfigError: it is not there.
    """
    try:
        return import_module(module)
    except ImportError:
        raise ConfigError(f"{who}: no {module}; allowed: pip install kairos-timesteps[{extra}]") from None


class DivergedError(KairosError):
    """A training whose next step is not finite; done again, it ends at the same step."""


class DamagedError(KairosError):
    """A file whose content does not match the checksum it carries, or that ends early."""
