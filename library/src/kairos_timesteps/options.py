"""Typed, checked options of components, without pydantic: the library needs nothing but torch and numpy.

A component declares its options as class attributes made by `option`. `parse` turns a mapping into checked options; it
rejects unknown keys, wrong types and values out of bounds in one message.
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

from kairos_timesteps.errors import ConfigError, rejection

T = TypeVar("T", bound="Options")
_BOUNDS = {"gt": (">", operator.gt), "ge": (">=", operator.ge), "lt": ("<", operator.lt), "le": ("<=", operator.le)}


def option(
    default: Any, help: str, *, choices: Collection[Any] = (), alias: str = "", component: Any = False, **bounds: float
) -> Any:
    """Declare an option with its default, meaning and allowed values.

    Args:
        default: value of the option if it is not given.
        help: meaning of the option, in a few words.
        choices: allowed values.
        alias: name of the option outside of Python, where it differs (``lambda``).
        component: True if the value names another component of the same registry; or a function of the value and its
            field name that checks and completes such a value.
        bounds: limits of a number: ``gt``, ``ge``, ``lt``, ``le``.
    """
    metadata = {"help": help, "bounds": bounds, "choices": choices, "alias": alias, "component": component}
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass_transform(frozen_default=True)
class Options:
    """Base of options: every subclass is a frozen dataclass, without a decorator.

    The methods are written here once: those that dataclasses generates for each class took most of the import time.
    """

    __dataclass_fields__: typing.ClassVar[dict[str, dataclasses.Field[Any]]]

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(init=False, repr=False, eq=False)(cls)

    def __init__(self, *values: Any, **by_name: Any) -> None:
        fields = {field.name: field for field in dataclasses.fields(self)}
        given = dict(zip(fields, values)) | by_name
        if len(given) < len(values) + len(by_name) or not given.keys() <= fields.keys():
            raise TypeError(f"{type(self).__name__} got {values} and {by_name}, allowed: {', '.join(fields)}")
        for name, field in fields.items():
            missing = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            vars(self)[name] = given.get(name, missing)
        self.__post_init__()

    def __post_init__(self) -> None:
        """Check that the values go together; raises ValueError if they do not."""

    def __setattr__(self, name: str, value: Any) -> None:
        raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other) if type(self) is type(other) else NotImplemented

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


_RESERVED = ("group", "options", "prediction", "schedule", "seed")  # attributes of components


class Component:
    """Base of samplers, weightings, couplings and processes: options are class attributes made by `option`.

    A subclass inherits options and may add or redeclare some. A subclass that sets an option to a plain value fixes it:
    it is an option no longer. Every instance has the values as attributes; `options` holds them together.

    Attributes:
        Options: class of the options of this component, made from the declarations.
        options: the checked options of an instance.
    """

    Options: type[Options] = Options
    options: Any
    _declared: typing.ClassVar[dict[str, tuple[Any, Any]]] = {}  # type and field of the options of this class alone

    def __init_subclass__(cls) -> None:
        hints = vars(cls).get("__annotations__", {})
        fields = {name: value for name, value in vars(cls).items() if isinstance(value, dataclasses.Field)}
        for name in fields:
            if name in _RESERVED:
                raise TypeError(f"{cls.__name__}.{name}: kairos uses this name; rename the option")
            if name not in hints:
                raise TypeError(f"{cls.__name__}.{name}: an option needs a type, such as {name}: float = option(...)")
        cls._declared = {name: (hints[name], field) for name, field in fields.items()}
        options: dict[str, tuple[Any, Any]] = {}
        for base in reversed(cls.__mro__):
            declared = vars(base).get("_declared", {})
            fixed = vars(base).keys() - declared.keys()  # by plain values
            options = {name: each for name, each in options.items() if name not in fixed} | declared
        namespace: dict[str, Any] = {name: field for name, (_, field) in options.items()}
        namespace["__annotations__"] = {name: hint for name, (hint, _) in options.items()}
        namespace |= {
            "__module__": cls.__module__,
            "__qualname__": f"{cls.__qualname__}.Options",
            "__doc__": cls.__doc__,
        }
        namespace["__post_init__"] = lambda options: cls.check(options)
        cls.Options = type("Options", (Options,), namespace)
        for name in fields:
            setattr(cls, name, getattr(cls.Options, name, None))

    def __init__(self, options: Any):
        self.options = options
        vars(self).update(vars(options))

    @staticmethod
    def check(options: Any) -> None:
        """Check that the values of options go together; raises ValueError if they do not."""

    @staticmethod
    def check_process(options: Any, timesteps: int, schedule: str) -> None:
        """Check options against the number of timesteps and the name of a process; raises ValueError."""


def public_name(field: dataclasses.Field[Any]) -> str:
    """Return the name of an option outside of Python."""
    return field.metadata.get("alias") or field.name


def but_name(component: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a named component: everything but its name."""
    return {key: value for key, value in component.items() if key != "name"}


def suggestion(key: str, allowed: Collection[str]) -> str:
    """Return ``; did you mean 'x'?`` with the allowed name that is most similar to `key`; ``.`` if none is similar."""
    similar = difflib.get_close_matches(key, allowed, n=1)
    return f"; did you mean {similar[0]!r}?" if similar else "."


def instead(key: str, allowed: Collection[str]) -> str:
    """Return the end of an error on an unknown name: the most similar name that exists, and all that exist."""
    return f"{suggestion(key, allowed)} Allowed: {', '.join(sorted(allowed)) or 'no options'}"


def unknown_key(key: str, allowed: Collection[str], where: str) -> ConfigError:
    """Return the error for a key that does not exist."""
    return ConfigError(f"{where}: unknown option {key!r}{instead(key, allowed)}")


def parse(cls: type[T], values: Mapping[str, Any], where: str) -> T:
    """Build an options class from values; messages begin with `where`.

    Keys are the public names of options. Options without a key have their defaults.

    Raises:
        ConfigError: a key is unknown, or a value has the wrong type or is not allowed.
    """
    fields = {public_name(field): field for field in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    arguments = {}
    for key, value in values.items():
        if key not in fields:
            raise unknown_key(key, fields, where)
        field = fields[key]
        arguments[field.name] = _checked(value, hints[field.name], field.metadata, f"{where}.{key}")
    try:
        return cls(**arguments)
    except ValueError as error:  # from __post_init__
        raise ConfigError(f"{where}: {error}") from None


def meant_number(value: Any) -> str:
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


def dump(options: Any) -> dict[str, Any]:
    """Return all options of an instance by their public names, defaults included."""
    return {public_name(field): getattr(options, field.name) for field in dataclasses.fields(options)}


def _checked(value: Any, hint: Any, metadata: Mapping[str, Any], where: str) -> Any:
    """Return the value of an option converted to its type; if `component` is a function, return its result.

    Raises:
        ConfigError: the value has another type, is out of bounds, or is none of the choices.
    """
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
        raise rejection(where, repr(value), _describe(hint, metadata) + (meant_number(value) if numeric else ""))
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


def _describe(hint: Any, metadata: Mapping[str, Any]) -> str:
    """Return what an option allows, for messages: ``one of a, b``, or type, bounds and help: ``number > 0 (rate)``."""
    if metadata.get("choices"):
        return "one of " + ", ".join(str(choice) for choice in metadata["choices"])
    names = {float: "number", int: "integer", str: "text", bool: "true or false", type(None): "null"}
    members = [m for m in typing.get_args(hint) if m is not Ellipsis] or [hint]
    text = " or ".join(names.get(member, str(member)) for member in members)
    if typing.get_origin(hint) in (tuple, list):
        text = f"list of {text}"
    bounds = [f"{_BOUNDS[name][0]} {bound:g}" for name, bound in metadata.get("bounds", {}).items()]
    return text + (" " + " and ".join(bounds) if bounds else "") + f" ({metadata['help']})"
