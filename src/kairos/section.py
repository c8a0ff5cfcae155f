"""Sections of an experiment file: what all of them share, how components are named in them, and how a refusal reads.

Unknown keys are refused, values are frozen. A package that has a section of its own states it in its ``settings``.
"""

import dataclasses
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from kairos_timesteps import options
from kairos_timesteps.errors import ConfigError, ValueRejected, rejection
from kairos_timesteps.registry import Registry, split

S = TypeVar("S", bound=BaseModel)


class Section(BaseModel):
    """A section of an experiment file. What must hold between its fields it demands in `model_post_init`."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, validate_default=True)


def field(default: Any, help: str, **limits: Any) -> Any:
    """A field of a section with its meaning, as `options.option` is one of a component; `limits` are pydantic's."""
    return Field(default, description=help, **limits)


def component(registry: Registry, default: str | None = None) -> Any:
    """The type of a field that names a component: ``name`` or ``{name: ..., option: ...}``; `default` where none does.

    The value is stored as a dictionary with every option of the component, defaults included, so that two ways to write
    the same thing are the same configuration.
    """

    def complete(value: Any) -> dict[str, Any]:
        if isinstance(value, str):
            value = {"name": value}
        if isinstance(value, dict) and default is not None:
            value = {"name": default, **value}
        try:
            if not isinstance(value, dict) or "name" not in value:
                raise ConfigError(f"got {value!r}, allowed: a name or {{name: ..., options}} of {sorted(registry)}")
            parsed = registry.parse(*split(value), f"{registry.kind} {value['name']}")
        except ConfigError as error:
            raise ValueRejected(str(error)) from None
        return {"name": value["name"], **options.dump(parsed)}

    return Annotated[dict[str, Any], BeforeValidator(complete), _Schema(registry, default)]


@dataclasses.dataclass(frozen=True)
class _Schema:
    """JSON schema of a `component` field; `kairos schema` computes it on demand."""

    registry: Registry
    default: str | None

    def __get_pydantic_json_schema__(self, core_schema: Any, handler: Any) -> dict[str, Any]:
        named, told = [], []
        for name, entry in self.registry.items():
            named.append({"const": name, "description": entry.help or self.registry.kind})
            fields = {"name": named[-1], **_options_schema(entry.options)}
            form = {"type": "object", "description": named[-1]["description"], "properties": fields}
            told.append({**form, "required": ["name"] * (name != self.default), "additionalProperties": False})
        return {"anyOf": [*named, *told]} if named else {"not": {}}


_BOUNDS = {"gt": "exclusiveMinimum", "ge": "minimum", "lt": "exclusiveMaximum", "le": "maximum"}


def _options_schema(cls: type) -> dict[str, Any]:
    """JSON schema of what a component can be told, by the names a user writes."""
    found, hints = {}, get_type_hints(cls)
    for one in dataclasses.fields(cls):
        its, choices = TypeAdapter(hints[one.name]).json_schema(), one.metadata["choices"]
        if choices:  # for YAML the name 64 is a number; where there may be none, null is among those of the type
            spelt = [*choices, *(int(choice) for choice in choices if str(choice).isdecimal())]
            its = {"enum": spelt + [None] * (type(None) in get_args(hints[one.name]))}
        its |= {_BOUNDS[bound]: value for bound, value in one.metadata["bounds"].items()}
        default = one.default if one.default_factory is dataclasses.MISSING else one.default_factory()
        found[options.public_name(one)] = {**its, "description": one.metadata["help"], "default": default}
    return found


def build(registry: Registry, named: dict[str, Any], *arguments: Any, **keywords: Any) -> Any:
    """Build the component that a `component` field names."""
    return registry.build(*split(named), *arguments, **keywords)


def check(model: type[S], values: dict[str, Any], source: str) -> S:
    """Values as an instance of a section.

    Raises:
        ConfigError: everything that is wrong, a line per field: the field, the value and what is allowed.
    """
    try:
        return model.model_validate(values)
    except ConfigError as error:  # of what stands elsewhere, such as the models' own checks
        lines = [str(error)]
    except ValidationError as error:
        lines = [_line(item, model) for item in error.errors()]
    head = f"{source}: " if len(lines) == 1 else f"{source}: {len(lines)} fields cannot be used\n  "
    raise ConfigError(head + "\n  ".join(lines))


_TYPES = ("int", "float", "str")  # with which pydantic says at which type of several it was


def _line(item: Any, model: type[BaseModel]) -> str:
    parts = map(str, item["loc"])
    where = ".".join(part for part in parts if part not in _TYPES and not part.startswith("function-"))
    kind, value = item["type"], item["input"]
    holder, meaning = _walk(model, item["loc"])
    if kind == "extra_forbidden":
        hint = options.instead(str(item["loc"][-1]), holder.model_fields if holder else {})
        return f"{where}: unknown field (value {_short(value)}){hint}"
    if kind == "missing":
        return f"{where}: is missing. It is: {meaning}"
    message = item["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    if not where or message.startswith((f"{where}.", f"{where}: ")):
        return message
    if isinstance(item.get("ctx", {}).get("error"), ValueRejected):
        return f"{where}: {message}"
    hint = options.meant_number(value) if kind.startswith(("int_", "float_")) else ""
    return str(rejection(where, _short(value), message + (f" ({meaning})" if meaning else "") + hint))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _walk(model: type[BaseModel], loc: tuple[Any, ...]) -> tuple[type[BaseModel] | None, str]:
    """The model that a location leads to, and what the last field on the way means."""
    current: type[BaseModel] | None = model
    meaning = ""
    for part in loc:
        if current is not None and part in current.model_fields:
            field = current.model_fields[part]
            meaning = field.description or ""
            kinds = (kind for kind in (field.annotation, *get_args(field.annotation)) if isinstance(kind, type))
            current = next((kind for kind in kinds if issubclass(kind, BaseModel)), None)
    return current, meaning
