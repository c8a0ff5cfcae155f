"""Registries of component classes by name, and the decorators that register classes.

Import the registries from `kairos_timesteps.components`: that import makes sure that they have all components of the
library.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kairos_timesteps import options as _options
from kairos_timesteps.errors import ConfigError, demand

C = TypeVar("C", bound=type[_options.Component])


@dataclass(frozen=True)
class Entry:
    """A named component.

    Attributes:
        component: the class.
        help: one line on what it is.
        facts: properties that its kind of component declares.
    """

    component: Any
    help: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def module(self) -> str:
        """The module that contains the class."""
        return str(self.component.__module__)

    @property
    def code(self) -> str:
        """The class as ``module:Name``."""
        return f"{self.module}:{self.component.__qualname__}"


def split(component: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return name and options of a component given as ``{"name": ..., option: ...}``."""
    return component["name"], _options.options_without_name(component)


class Registry(dict[str, Entry]):
    """All components of one kind by name, in the order of their registration.

    Args:
        kind: such as ``sampler``.
    """

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        self.unavailable: dict[str, str] = {}  # names that are known and not available, with the reason

    def __hash__(self) -> int:  # type: ignore[override]  # dictionaries have no hash
        return id(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Registry":
        """Return this registry: a copy would miss the components that are registered later."""
        return self

    def register(self, name: str, help: str = "", **facts: Any) -> Callable[[C], C]:
        """Register a `Component` class: a decorator.

        Raises:
            ConfigError: the name has a character that is not a letter, digit or underscore, another component has it,
                or the decorated object is not a `Component` class.
        """
        valid = isinstance(name, str) and re.fullmatch(r"\w+", name)
        demand(valid, f"{self.kind}: name", repr(name), "a text of letters, digits and underscores")

        def decorate(component: C) -> C:
            is_component = isinstance(component, type) and issubclass(component, _options.Component)
            allowed = "a class that derives from kairos_timesteps.options.Component"
            demand(is_component, f"{self.kind} {name}", getattr(component, "__name__", component), allowed)
            entry, existing = Entry(component, help, facts), self.get(name)
            # a notebook cell or a module that is executed again registers its components again
            if existing is not None and existing.code != entry.code:
                raise ConfigError(f"{self.kind} {name}: {existing.code} has this name; choose another for {entry.code}")
            self[name] = entry
            return component

        return decorate

    def entry(self, name: str, where: str = "") -> Entry:
        """Return the entry of a name.

        Raises:
            ConfigError: no such component; the message lists those that exist.
        """
        if name in self.unavailable:
            raise ConfigError(f"{where or self.kind}: {self.kind} {name!r} is not available: {self.unavailable[name]}")
        if name not in self:
            prefix = f"{where}: " if where else ""
            raise ConfigError(f"{prefix}unknown {self.kind} {name!r}{_options.allowed_names_hint(str(name), self)}")
        return self[name]

    def parse(self, name: str, values: Mapping[str, Any] | None = None, where: str = "") -> Any:
        """Return the checked options of component `name`."""
        return _options.parse(self.entry(name, where).component, values or {}, where or f"{self.kind} {name}")

    def build(self, name: str, values: Mapping[str, Any] | None = None, *arguments: Any, **keywords: Any) -> Any:
        """Check the options, and construct the component from them and the further arguments.

        Raises:
            ConfigError: an option is not allowed, or the constructor of a user's component raises a ValueError.
        """
        options = self.parse(name, values)
        try:
            return self.entry(name).component(options, *arguments, **keywords)
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(str(error)) from None


SAMPLERS = Registry("sampler")
WEIGHTINGS = Registry("weighting")
COUPLINGS = Registry("coupling")
PROCESSES = Registry("process")

sampler = SAMPLERS.register
weighting = WEIGHTINGS.register
coupling = COUPLINGS.register
process = PROCESSES.register
