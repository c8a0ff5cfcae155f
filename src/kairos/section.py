"""Sections of an experiment file: their base class, fields, components and error messages.

An experiment file consists of sections such as ``dataset`` or ``training``. Each is a pydantic model that derives from
`Section`, in the module ``settings`` of the package that uses it. A section rejects unknown keys, and its values cannot
be changed. Its fields are of two kinds:

* `field` declares a plain value, with its meaning and limits;
* `component` is the type of a value that selects a component of a registry, such as a sampler, with options.

`check` converts the values of a file to a section, and reports all problems at once, one line per field. `build`
builds the component that a field selects.
"""

import dataclasses
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from kairos_timesteps import options
from kairos_timesteps.errors import ConfigError, ValueRejected, rejection
from kairos_timesteps.registry import Registry, split

S = TypeVar("S", bound=BaseModel)


class Section(BaseModel):
    """Base class of a section of an experiment file.

    Subclasses check in `model_post_init` the conditions that involve several fields.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, validate_default=True)


def field(default: Any, help: str, **limits: Any) -> Any:
    """Declare a field of a section, as `options.option` declares an option of a component.

    Args:
        default: default value; ``...`` for a required field.
        help: meaning of the field.
        limits: limits of the value, arguments of pydantic's `Field` such as ``ge`` or ``max_length``.
    """
    return Field(default, description=help, **limits)


def component(registry: Registry, default: str | None = None) -> Any:
    """Return the type of a field that selects a component: ``name`` or ``{name: ..., option: ...}``.

    The value is stored as a dictionary with all options of the component, defaults included, so that different
    spellings of one configuration are equal.

    Args:
        registry: the components to select from.
        default: name of the component if the value has options only; None: the name is required.
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
        """Return a schema that accepts the name of each component, or its name with options."""
        name_schemas, object_schemas = [], []
        for name, entry in self.registry.items():
            description = entry.help or self.registry.kind
            name_schema = {"const": name, "description": description}
            name_schemas.append(name_schema)
            object_schemas.append(
                {
                    "type": "object",
                    "description": description,
                    "properties": {"name": name_schema, **_options_schema(entry.options)},
                    "required": [] if name == self.default else ["name"],
                    "additionalProperties": False,
                }
            )
        return {"anyOf": [*name_schemas, *object_schemas]} if name_schemas else {"not": {}}


# bounds of an option, and their names in a JSON schema
_BOUNDS = {"gt": "exclusiveMinimum", "ge": "minimum", "lt": "exclusiveMaximum", "le": "maximum"}


def _options_schema(cls: type) -> dict[str, Any]:
    """Return the JSON schemas of a component's options, by the names in an experiment file."""
    schemas = {}
    types = get_type_hints(cls)
    for option in dataclasses.fields(cls):
        option_type = types[option.name]
        choices = option.metadata["choices"]
        if choices:
            is_nullable = type(None) in get_args(option_type)
            schema: dict[str, Any] = {"enum": _spellings(choices, is_nullable)}
        else:
            schema = TypeAdapter(option_type).json_schema()
        schema |= {_BOUNDS[bound]: value for bound, value in option.metadata["bounds"].items()}
        default = option.default if option.default_factory is dataclasses.MISSING else option.default_factory()
        schemas[options.public_name(option)] = {**schema, "description": option.metadata["help"], "default": default}
    return schemas


def _spellings(choices: Any, nullable: bool) -> list[Any]:
    """Return the values in YAML that select one of the choices.

    YAML parses the name ``64`` as a number: for the choices "32" and "64" the values are "32", "64", 32 and 64.
    """
    values = [*choices, *(int(choice) for choice in choices if str(choice).isdecimal())]
    if nullable:
        values.append(None)
    return values


def build(registry: Registry, value: dict[str, Any], *arguments: Any, **keywords: Any) -> Any:
    """Build the component that the value of a `component` field selects, from further arguments."""
    return registry.build(*split(value), *arguments, **keywords)


def check(model: type[S], values: dict[str, Any], source: str) -> S:
    """Convert values to an instance of a section.

    Args:
        model: class of the section, or of the whole experiment.
        values: values by field, nested for sections within sections.
        source: name of the file in the error message.

    Raises:
        ConfigError: values are invalid; the message has a line per field, with its value and what is allowed.
    """
    try:
        return model.model_validate(values)
    except ConfigError as error:  # from checks outside pydantic, such as those of the models
        lines = [str(error)]
    except ValidationError as error:
        lines = [_error_line(item, model) for item in error.errors()]
    header = f"{source}: " if len(lines) == 1 else f"{source}: {len(lines)} fields cannot be used\n  "
    raise ConfigError(header + "\n  ".join(lines))


_TYPES = ("int", "float", "str")  # in locations, see `_field_name`


def _error_line(item: Any, model: type[BaseModel]) -> str:
    """Return one error of pydantic as a line with the field, its value and what is allowed.

    Args:
        item: element of pydantic's `ValidationError.errors`.
        model: class of the section.
    """
    where = _field_name(item["loc"])
    error_type, value = item["type"], item["input"]
    section, meaning = _find_field(model, item["loc"])
    if error_type == "extra_forbidden":
        hint = options.instead(str(item["loc"][-1]), section.model_fields if section else {})
        return f"{where}: unknown field (value {_short(value)}){hint}"
    if error_type == "missing":
        return f"{where}: is missing. It is: {meaning}"
    message = item["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    contains_field = message.startswith((f"{where}.", f"{where}: "))  # of checks in `model_post_init`
    if not where or contains_field:
        return message
    if isinstance(
        item.get("ctx", {}).get("error"), ValueRejected
    ):  # the message contains the value and what is allowed
        return f"{where}: {message}"
    allowed = message
    if meaning:
        allowed += f" ({meaning})"
    if error_type.startswith(("int_", "float_")):
        allowed += options.meant_number(value)
    return str(rejection(where, _short(value), allowed))


def _field_name(location: tuple[Any, ...]) -> str:
    """Return the name of a field from pydantic's location: ``training.batch_size``, ``sweep.values.0``.

    pydantic adds the type of a union, or the name of a checking function, to the location of an error, such as
    ``("dataset", "heldout", "float")``.
    """
    names = [str(part) for part in location]
    return ".".join(name for name in names if name not in _TYPES and not name.startswith("function-"))


def _short(value: Any) -> str:
    """Return the representation of a value, cut off after 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _find_field(model: type[BaseModel], location: tuple[Any, ...]) -> tuple[type[BaseModel] | None, str]:
    """Return the section at a location of pydantic, None for a plain value, and the meaning of the last field in it."""
    current: type[BaseModel] | None = model
    meaning = ""
    for part in location:
        if current is not None and part in current.model_fields:
            field = current.model_fields[part]
            meaning = field.description or ""
            # the type of the field, and the types in a union such as `TextEncoderConfig | None`
            types = (item for item in (field.annotation, *get_args(field.annotation)) if isinstance(item, type))
            current = next((item for item in types if issubclass(item, BaseModel)), None)
    return current, meaning
