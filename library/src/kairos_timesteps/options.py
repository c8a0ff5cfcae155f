"""Typed, checked options of components, without pydantic: the library needs nothing but torch and numpy.

A component declares its options as class attributes made by `option`. `parse` turns a mapping into checked options; it
rejects unknown keys, wrong types and values out of bounds in one message.
"""

import copy
import difflib
import math
import operator
import re
import sys
import types
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from kairos_timesteps.errors import ConfigError, rejection

_BOUNDS = {"gt": (">", operator.gt), "ge": (">=", operator.ge), "lt": ("<", operator.lt), "le": ("<=", operator.le)}


@dataclass
class Option:
    """Declaration of an option, made by `option`; attributes have the meaning of its arguments.

    Attributes:
        name: name of the class attribute.
        type: type of the values.
    """

    default: Any
    help: str
    choices: Collection[Any]
    alias: str
    component: Any
    bounds: dict[str, float]
    name: str = ""
    type: Any = None

    @property
    def public_name(self) -> str:
        """Key of the option in experiment files and in mappings such as ``sampler={...}``."""
        return self.alias or self.name

    def __get__(self, instance: Any, owner: Any) -> Any:
        """Return the default: the value of the attribute on the class, and on instances without options."""
        return copy.deepcopy(self.default)


def option(
    default: Any, help: str, *, choices: Collection[Any] = (), alias: str = "", component: Any = False, **bounds: float
) -> Any:
    """Declare an option with its default, meaning and allowed values.

    Args:
        default: value of the option if it is not given.
        help: meaning of the option, in a few words.
        choices: allowed values.
        alias: key of the option, where it differs from the name of the attribute (``lambda``).
        component: True if the value names another component of the same registry; or a function of the value and its
            field name that checks and completes such a value.
        bounds: limits of a number: ``gt``, ``ge``, ``lt``, ``le``.
    """
    return Option(default, help, choices, alias, component, bounds)


# attributes of components
_RESERVED = ("decorator", "function", "group", "options", "prediction", "requires_context", "schedule", "seed")


class Component:
    """Base of samplers, weightings, couplings and processes: options are class attributes made by `option`.

    A subclass inherits options and may add or redeclare some. A subclass that sets an option to a plain value fixes it:
    it is an option no longer. Every instance has the values as attributes.

    Attributes:
        options: declared options by attribute name.
    """

    options: typing.ClassVar[dict[str, Option]] = {}
    _built_with: Mapping[str, Any] = types.MappingProxyType({})  # values of options by attribute name

    def __init_subclass__(cls) -> None:
        declared = {name: value for name, value in vars(cls).items() if isinstance(value, Option)}
        annotations = {name: hint for name, hint in cls.__annotations__.items() if name in declared}
        namespace = getattr(sys.modules.get(cls.__module__), "__dict__", {})
        # evaluates types that are texts
        hints = typing.get_type_hints(SimpleNamespace(__annotations__=annotations), namespace)
        for name, declaration in declared.items():
            if name in _RESERVED:
                raise TypeError(f"{cls.__name__}.{name}: kairos uses this name; rename the option")
            if name not in hints:
                raise TypeError(f"{cls.__name__}.{name}: an option needs a type, such as {name}: float = option(...)")
            declaration.name, declaration.type = name, hints[name]
        cls.options = {}
        for base in reversed(cls.__mro__):
            for name, value in vars(base).items():
                if isinstance(value, Option):
                    if value.type is None:
                        raise TypeError(f"{base.__name__}.{name}: a class with options must derive from Component")
                    cls.options[name] = value
                else:
                    cls.options.pop(name, None)  # fixed by a plain value

    def __init__(self, options: Any):
        vars(self).update(vars(options))
        self._built_with = copy.deepcopy(vars(options))

    def option_values(self) -> dict[str, Any]:
        """Return copies of the options by public name, as they were when the component was built."""
        values = {name: self._built_with.get(name, getattr(self, name)) for name in self.options}
        return {self.options[name].public_name: copy.deepcopy(value) for name, value in values.items()}

    @staticmethod
    def check(options: Any) -> None:
        """Check that the values of options go together; a ValueError is reported with the name of the component."""

    @staticmethod
    def check_process(options: Any, timesteps: int, schedule: str) -> None:
        """Check options against the number of timesteps and the name of a process; see `check` for errors."""


def options_without_name(component: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a named component: everything but its name."""
    return {key: value for key, value in component.items() if key != "name"}


def suggestion(key: str, allowed: Collection[str]) -> str:
    """Return ``; did you mean 'x'?`` with the allowed name that is most similar to `key`; ``.`` if none is similar."""
    similar = difflib.get_close_matches(key, allowed, n=1)
    return f"; did you mean {similar[0]!r}?" if similar else "."


def allowed_names_hint(key: str, allowed: Collection[str]) -> str:
    """Return the end of an error on an unknown name: the most similar name that exists, and all that exist."""
    return f"{suggestion(key, allowed)} Allowed: {', '.join(sorted(allowed)) or 'no options'}"


def unknown_key(key: Any, allowed: Collection[str], where: str) -> ConfigError:
    """Return the error for a key that does not exist; in YAML, keys may be numbers."""
    return ConfigError(f"{where}: unknown option {key!r}{allowed_names_hint(str(key), allowed)}")


def parse(component: type[Component], values: Mapping[str, Any], where: str = "") -> SimpleNamespace:
    """Return checked options of a component as attributes; messages begin with `where`.

    Keys are the public names of options. Options without a key have their defaults.

    Raises:
        ConfigError: a key is unknown, or a value has the wrong type or is not allowed.
    """
    where = where or component.__name__
    declared = {declaration.public_name: declaration for declaration in component.options.values()}
    options = {}
    for name, declaration in component.options.items():
        default = copy.deepcopy(declaration.default)
        # a default that names a component gets the options of that component
        options[name] = declaration.component(default, where) if callable(declaration.component) else default
    for key, value in values.items():
        if key not in declared:
            raise unknown_key(key, declared, where)
        options[declared[key].name] = _checked(value, declared[key], f"{where}.{key}")
    checked = SimpleNamespace(**options)
    try:
        component.check(checked)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None
    return checked


def yaml_number_hint(value: Any) -> str:
    """Return a hint on a text that means a number, such as ``1e-3``, which YAML reads as text; else an empty text."""
    # YAML 1.1 reads a number with an exponent as text unless it has a decimal point and a sign of the exponent
    match = re.fullmatch(r"([-+]?\d+)(\.\d*)?(?:[eE]([-+]?)(\d+))?", value) if isinstance(value, str) else None
    if match is None:
        return ""
    whole, decimals, sign, exponent = match.groups()
    if abs(float(value)) < 1e15 and float(value).is_integer():
        number = str(int(float(value)))
    else:
        number = value if exponent is None else f"{whole}{decimals or '.0'}e{sign or '+'}{exponent}"
    return f"; in YAML this is text, write {number}"


def default_values(component: type[Component]) -> dict[str, Any]:
    """Return the default of each option by public name."""
    return dump(component, component)


def dump(component: type[Component], options: Any) -> dict[str, Any]:
    """Return the options that `parse` has checked by their public names."""
    return {declaration.public_name: getattr(options, name) for name, declaration in component.options.items()}


def _checked(value: Any, option: Option, where: str) -> Any:
    """Return the value of an option converted to its type; if `component` is a function, return its result.

    Raises:
        ConfigError: the value has another type, is out of bounds, or is none of the choices.
    """
    if callable(option.component):
        return option.component(value, where)
    if str(value) in option.choices:
        value = str(value)  # for YAML the name 64 is a number
    converted = _converted(value, option.type)
    valid = converted is not _INVALID
    if valid and converted is not None:
        within = (_BOUNDS[name][1](converted, bound) for name, bound in option.bounds.items())
        valid = all(within) and (not option.choices or converted in option.choices)
    if not valid:
        numeric = {int, float} & {option.type, *typing.get_args(option.type)}
        raise rejection(where, repr(value), _describe(option) + (yaml_number_hint(value) if numeric else ""))
    return converted


_INVALID = object()


def _converted(value: Any, hint: Any) -> Any:
    """Return a value as type `hint`, or `_INVALID` if it has another type.

    An integer is a valid float, a list a valid tuple, and a tuple a valid list. A bool is no number. Numbers that are
    not finite are invalid.
    """
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        tried = (_converted(value, member) for member in typing.get_args(hint))
        return next((converted for converted in tried if converted is not _INVALID), _INVALID)
    if origin in (tuple, list):
        member = typing.get_args(hint)[0]
        if not isinstance(value, (tuple, list)):
            return _INVALID
        items = [_converted(item, member) for item in value]
        return _INVALID if _INVALID in items else origin(items)
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value) if math.isfinite(value) else _INVALID
    plain = hint in (str, int, bool, type(None)) and isinstance(value, hint)
    return value if plain and (hint is bool or not isinstance(value, bool)) else _INVALID


def _describe(option: Option) -> str:
    """Return what an option allows, for messages: ``one of a, b``, or type, bounds and help: ``number > 0 (rate)``."""
    if option.choices:
        return "one of " + ", ".join(str(choice) for choice in option.choices)
    names = {float: "number", int: "integer", str: "text", bool: "true or false", type(None): "null"}
    members = [m for m in typing.get_args(option.type) if m is not Ellipsis] or [option.type]
    text = " or ".join(names.get(member, str(member)) for member in members)
    if typing.get_origin(option.type) in (tuple, list):
        text = f"list of {text}"
    bounds = [f"{_BOUNDS[name][0]} {bound:g}" for name, bound in option.bounds.items()]
    return text + (" " + " and ".join(bounds) if bounds else "") + f" ({option.help})"
