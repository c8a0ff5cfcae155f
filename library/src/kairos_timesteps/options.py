"""Checked options of named components, without pydantic: the strategies must work in a plain torch environment.

A component's options are a subclass of `Options` whose fields are made by `option`. `parse` turns a mapping into an
instance and refuses unknown keys, wrong types and impossible values in one message.
"""

import dataclasses
import difflib
import math
import operator
import re
import types
import typing
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from typing_extensions import dataclass_transform  # torch's own; Python has it from 3.11 on

from kairos_timesteps.errors import ConfigError, refusal

T = TypeVar("T")
_BOUNDS = {"gt": (">", operator.gt), "ge": (">=", operator.ge), "lt": ("<", operator.lt), "le": ("<=", operator.le)}


def option(
    default: Any, help: str, *, choices: Collection[Any] = (), alias: str = "", component: Any = False, **bounds: float
) -> Any:
    """A dataclass field with its meaning and the values it allows; `bounds` are of gt, ge, lt and le.

    `alias` is its name outside Python (`lambda`); the value of a `component` names another one of the same registry, or
    several: what takes and returns it, with its place, where that is more than a name.
    """
    metadata = {"help": help, "bounds": bounds, "choices": choices, "alias": alias, "component": component}
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass_transform(frozen_default=True)
class Options:
    """Base of what a component can be told: every subclass is a frozen dataclass, without a decorator.

    Its methods are these: a dataclass' own, made for each class, took most of the time that the strategies' import did.
    """

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(init=False, repr=False, eq=False)(cls)

    def __init__(self, *values: Any, **named: Any) -> None:
        fields = {field.name: field for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        given = dict(zip(fields, values)) | named
        if len(given) < len(values) + len(named) or not given.keys() <= fields.keys():
            raise TypeError(f"{type(self).__name__} got {values} and {named}, allowed: {', '.join(fields)}")
        for name, field in fields.items():
            missing = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            vars(self)[name] = given.get(name, missing)
        self.__post_init__()

    def __post_init__(self) -> None:
        """Refuse fields that do not go together; raises ValueError."""

    def __setattr__(self, name: str, value: Any) -> None:
        raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other) if type(self) is type(other) else NotImplemented

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


def public_name(field: dataclasses.Field[Any]) -> str:
    """The name a user writes."""
    return field.metadata.get("alias") or field.name


def defaults(cls: type) -> dict[str, Any]:
    """Return the default of every option of an options class by its public name."""
    found = {}
    for field in dataclasses.fields(cls):
        factory = field.default_factory
        found[public_name(field)] = field.default if factory is dataclasses.MISSING else factory()
    return found


def but_name(named: Mapping[str, Any]) -> dict[str, Any]:
    """What a named component has but its name: its options."""
    return {key: value for key, value in named.items() if key != "name"}


def suggestion(key: str, allowed: Collection[str]) -> str:
    """Return ``; did you mean 'x'?`` with the allowed name that is most similar to `key`; ``.`` if none is similar."""
    similar = difflib.get_close_matches(key, allowed, n=1)
    return f"; did you mean {similar[0]!r}?" if similar else "."


def instead(key: str, allowed: Collection[str]) -> str:
    """End of the error for an unknown name: the most similar name that exists, and all names that exist."""
    return f"{suggestion(key, allowed)} Allowed: {', '.join(sorted(allowed)) or 'no options'}"


def unknown_key(key: str, allowed: Collection[str], where: str) -> ConfigError:
    """The error for a key that does not exist."""
    return ConfigError(f"{where}: unknown option {key!r}{instead(key, allowed)}")


def parse(cls: type[T], values: Mapping[str, Any], where: str) -> T:
    """Build the options dataclass `cls` from `values`; `where` names the place in messages.

    Raises:
        ConfigError: a key is unknown, a value has the wrong type or lies outside what is allowed.
    """
    fields = {public_name(field): field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls)
    arguments = {}
    for key, value in values.items():
        if key not in fields:
            raise unknown_key(key, fields, where)
        field = fields[key]
        arguments[field.name] = _checked(value, hints[field.name], field.metadata, f"{where}.{key}")
    try:
        return cls(**arguments)
    except ValueError as error:  # a check between fields in __post_init__
        raise ConfigError(f"{where}: {error}") from None


def meant_number(value: Any) -> str:
    """What to write for a text that means a number, such as ``1e-3``, which YAML takes for text; else empty."""
    found = re.fullmatch(r"([-+]?\d+)(\.\d*)?(?:[eE]([-+]?)(\d+))?", value) if isinstance(value, str) else None
    if found is None:
        return ""
    whole, part, sign, exponent = found.groups()
    if abs(float(value)) < 1e15 and float(value).is_integer():
        number = str(int(float(value)))
    else:
        number = value if exponent is None else f"{whole}{part or '.0'}e{sign or '+'}{exponent}"
    return f"; in YAML this is text, write {number}"


def dump(options: Any) -> dict[str, Any]:
    """All options of an instance with their public names, defaults included: what identifies a component."""
    return {public_name(field): getattr(options, field.name) for field in dataclasses.fields(options)}


def _checked(value: Any, hint: Any, metadata: Mapping[str, Any], where: str) -> Any:
    if callable(metadata.get("component")):
        return metadata["component"](value, where)
    choices = metadata.get("choices", ())
    if str(value) in choices:
        value = str(value)  # for YAML the name 64 is a number
    converted = _converted(value, hint)
    valid = converted is not _INVALID
    if valid and converted is not None:
        within = (_BOUNDS[name][1](converted, bound) for name, bound in metadata.get("bounds", {}).items())
        valid = all(within) and (not choices or converted in choices)
    if not valid:
        numeric = {int, float} & {hint, *typing.get_args(hint)}
        raise refusal(where, repr(value), _describe(hint, metadata) + (meant_number(value) if numeric else ""))
    return converted


_INVALID = object()


def _converted(value: Any, hint: Any) -> Any:
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


def _describe(hint: Any, metadata: Mapping[str, Any]) -> str:
    if metadata.get("choices"):
        return "one of " + ", ".join(str(choice) for choice in metadata["choices"])
    names = {float: "number", int: "integer", str: "text", bool: "true or false", type(None): "null"}
    members = [m for m in typing.get_args(hint) if m is not Ellipsis] or [hint]
    text = " or ".join(names.get(member, str(member)) for member in members)
    if typing.get_origin(hint) in (tuple, list):
        text = f"list of {text}"
    bounds = [f"{_BOUNDS[name][0]} {bound:g}" for name, bound in metadata.get("bounds", {}).items()]
    return text + (" " + " and ".join(bounds) if bounds else "") + f" ({metadata['help']})"
