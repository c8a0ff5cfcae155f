"""Named components: a dictionary from a name to a component and its options.

Decorators register component classes. Looking a name up, checking options and listing what exists import nothing heavy.
The code fingerprint of a run covers the components that the run uses and no others.
"""

import importlib
import re
import threading
from collections import UserDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kairos_timesteps import options as _options
from kairos_timesteps.errors import ConfigError, demand

C = TypeVar("C", bound=type[_options.Component])
_IMPORTING = threading.RLock()  # the modules of a registry may read registries while they are imported


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
        return self.component.__module__

    @property
    def code(self) -> str:
        """The class as ``module:Name``."""
        return f"{self.module}:{self.component.__qualname__}"


def split(component: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return name and options of a component given as ``{"name": ..., option: ...}``."""
    return component["name"], _options.but_name(component)


class Registry(UserDict[str, Entry]):
    """All components of one kind by name.

    Args:
        kind: such as ``sampler``.
        modules: modules whose import registers components; they are imported when the registry is first read.
    """

    def __init__(self, kind: str, *modules: str):
        self.kind = kind
        self.unavailable: dict[str, str] = {}  # names that are known and not available, with the reason
        self._entries: dict[str, Entry] = {}
        self._modules = modules  # not imported yet
        self._is_complete = not modules

    @property
    def data(self) -> dict[str, Entry]:  # type: ignore[override]  # UserDict has an attribute
        """All entries, in the order of their modules, after importing these; other threads wait for the imports."""
        if not self._is_complete:
            with _IMPORTING:
                self._import_modules()
        return self._entries

    def _import_modules(self) -> None:
        """Import the modules that register components, and sort the entries by module."""
        # none remain for a module that reads this registry while it is imported here
        modules, self._modules = self._modules, ()
        for module in modules:
            importlib.import_module(module)
        if modules:
            order = {module: number for number, module in enumerate(modules)}
            ordered = sorted(self._entries.items(), key=lambda item: order.get(item[1].module, len(order)))
            self._entries = dict(ordered)
            self._is_complete = True

    def __hash__(self) -> int:
        return id(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Registry":
        """Return this registry: a copy would miss the components that are registered later."""
        return self

    def register(self, name: str, help: str = "", **facts: Any) -> Callable[[C], C]:
        """Register a `Component` class: a decorator.

        Raises:
            ConfigError: the name is no word of letters, digits and underscores, or another component has it.
        """
        valid = isinstance(name, str) and re.fullmatch(r"\w+", name)
        demand(valid, f"{self.kind}: name", repr(name), "a text of letters, digits and underscores")

        def decorate(component: C) -> C:
            entry, taken = Entry(component, help, facts), self._entries.get(name)
            # a notebook cell or a module that is executed again registers its components again
            if taken is not None and taken.code != entry.code:
                raise ConfigError(f"{self.kind} {name}: {taken.code} has this name; choose another for {entry.code}")
            self._entries[name] = entry
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
            raise ConfigError(f"{prefix}unknown {self.kind} {name!r}{_options.instead(str(name), self)}")
        return self[name]

    def parse(self, name: str, values: Mapping[str, Any] | None = None, where: str = "") -> Any:
        """Return the checked options of component `name`."""
        return _options.parse(self.entry(name, where).component, values or {}, where or f"{self.kind} {name}")

    def build(self, name: str, values: Mapping[str, Any] | None = None, *arguments: Any, **keywords: Any) -> Any:
        """Check the options, and construct the component from them and the further arguments."""
        return self.entry(name).component(self.parse(name, values), *arguments, **keywords)
