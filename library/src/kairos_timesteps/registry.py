"""Named components: a dictionary from a name to its options and to where its code is.

An entry names its code as ``"module:attribute"``, so looking a name up, checking its options or listing what exists
imports nothing heavy, and a job's code fingerprint covers the components it uses and no others.
"""

import importlib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from kairos_timesteps import options as _options
from kairos_timesteps.errors import ConfigError


class NoOptions(_options.Options):
    """The options of a component that has none."""


@dataclass(frozen=True)
class Entry:
    """A named component: its options dataclass, its code, in one line what it is, and facts that its kind states."""

    options: type
    code: str
    help: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def module(self) -> str:
        """The module that holds the code: what the fingerprint of a job that uses the component covers."""
        return self.code.split(":")[0]

    def load(self) -> Any:
        """Import the component's code."""
        module, attribute = self.code.split(":")
        return getattr(importlib.import_module(module), attribute)


def split(named: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Name and options of a component given as ``{"name": ..., option: ...}``."""
    return named["name"], _options.but_name(named)


class Registry(dict[str, Entry]):
    """All components of one kind by name."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        self.refused: dict[str, str] = {}

    def add(self, name: str, code: str, options: type = NoOptions, help: str = "", **facts: Any) -> None:
        """Register a component; its `code` is called with its options first."""
        self[name] = Entry(options, code, help, facts)

    def refuse(self, name: str, reason: str) -> None:
        """A name that people will ask for and that cannot be had, with the reason."""
        self.refused[name] = reason

    def entry(self, name: str, where: str = "") -> Entry:
        """The entry of a name.

        Raises:
            ConfigError: no such component; the message lists those that exist.
        """
        if name in self.refused:
            raise ConfigError(f"{where or self.kind}: {self.kind} {name!r} is not available: {self.refused[name]}")
        if name not in self:
            place = f"{where}: " if where else ""
            raise ConfigError(f"{place}unknown {self.kind} {name!r}{_options.instead(str(name), self)}")
        return self[name]

    def modules(self, named: Mapping[str, Any]) -> list[str]:
        """The modules of a component, given by ``name`` among its options, and of the components its options name."""
        entry = self.entry(named["name"])
        inner = [field for field in fields(entry.options) if field.metadata.get("component")]
        values = [named.get(_options.public_name(field), field.default) for field in inner]
        parts = [part for value in values for part in (value if isinstance(value, list) else [value])]
        found = [{"name": part} if isinstance(part, str) else part for part in parts if part is not MISSING]
        return [entry.module, *(module for part in found for module in self.modules(part))]

    def parse(self, name: str, values: Mapping[str, Any] | None = None, where: str = "") -> Any:
        """The checked options of component `name`."""
        return _options.parse(self.entry(name, where).options, values or {}, where or f"{self.kind} {name}")

    def build(self, name: str, values: Mapping[str, Any] | None = None, *arguments: Any, **keywords: Any) -> Any:
        """Check the options, import the code and call it with the options and the further arguments."""
        return self.entry(name).load()(self.parse(name, values), *arguments, **keywords)
