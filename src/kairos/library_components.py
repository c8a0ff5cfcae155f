"""Samplers, weightings, couplings and forward processes of the library, as an experiment selects them.

This module imports no pydantic, so that `kairos strategies` starts quickly.
"""

import copy
import dataclasses
from collections.abc import Mapping
from functools import cached_property
from types import SimpleNamespace
from typing import Any

from kairos_timesteps import options
from kairos_timesteps.registry import Registry, split


@dataclasses.dataclass(frozen=True)
class LibraryComponent:
    """A sampler, weighting, coupling or forward process that an experiment selects.

    Attributes:
        registry: registry of the library with the component.
        name: name of the component.
        options: checked options of the component, as attributes.
        component_class: class of the component.
    """

    registry: Registry = dataclasses.field(repr=False, compare=False)
    name: str
    options: SimpleNamespace
    component_class: Any = dataclasses.field(repr=False, compare=False)

    @classmethod
    def select(cls, registry: Registry, values: Mapping[str, Any]) -> "LibraryComponent":
        """Return the component with checked options from ``{"name": ..., option: ...}``; it is not built.

        Raises:
            ConfigError: the component or an option is unknown, or an option has a value that is not allowed.
            KeyError: the values have no name.
        """
        name, unchecked_options = split(values)
        options = registry.parse(name, unchecked_options, f"{registry.kind} {name}")
        return cls(registry, name, options, registry.entry(name).component)

    def get(self, option: str, default: Any = None) -> Any:
        """Return the value of an option by its name in an experiment file.

        If the component does not have the option, `default` is returned. An option whose value is None returns None.
        """
        return self.plain_options().get(option, default)

    @cached_property
    def facts(self) -> Mapping[str, Any]:
        """Properties, by name, that the registration of the component declares, such as `predictions` of a process."""
        return self.registry.entry(self.name).facts

    def module(self) -> str:
        """Return the name of the module that contains the class of the component."""
        return self.registry.entry(self.name).module

    def load(self) -> Any:
        """Return the class of the component, like `components.ComponentOptions.load`; nothing is imported."""
        return self.component_class

    def build(self, *arguments: Any, **keywords: Any) -> Any:
        """Construct an instance of the component's class from a copy of the options and the arguments; return it."""
        options = copy.deepcopy(self.options)  # a constructor may change its argument
        return self.load()(options, *arguments, **keywords)

    def plain(self) -> dict[str, Any]:
        """Return ``{"name": ..., option: ...}`` with plain values, defaults included."""
        return {"name": self.name, **self.plain_options()}

    def plain_options(self) -> dict[str, Any]:
        """Return the options as plain values by their names in an experiment file, defaults included."""
        return options.dump(self.load(), self.options)
