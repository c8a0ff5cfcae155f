"""Sections of an experiment file: their base class, fields and error messages.

An experiment file consists of sections such as ``dataset`` or ``training``. Each is a pydantic model that derives from
`Section`, usually in module ``settings`` of the package that uses it. A section rejects unknown keys, and its values
cannot be changed. `field` declares a field with its meaning and limits; a field may select a component, see
`kairos.components`.

`check` converts the values of a file to a section, and reports all problems at once, one line per field.
"""

from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kairos_timesteps import options
from kairos_timesteps.errors import ConfigError, ValueRejected, rejection

S = TypeVar("S", bound=BaseModel)


class Section(BaseModel):
    """Base class of a section of an experiment file.

    A section cannot be changed. It rejects unknown fields, values of another type, infinities and NaN. Subclasses check
    in `model_post_init` the conditions that involve several fields.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, validate_default=True)


def field(default: Any, help: str, **limits: Any) -> Any:
    """Return pydantic's declaration of a field of a section, with its default, meaning and limits.

    Args:
        default: default value; ``...`` for a required field.
        help: meaning of the field.
        limits: limits of the value, arguments of pydantic's `Field` such as ``ge`` or ``max_length``.
    """
    return Field(default, description=help, **limits)


def check(model: type[S], values: dict[str, Any], source: str) -> S:
    """Return an instance of a section with checked values; the defaults of omitted fields are added.

    Args:
        model: class of the section, or of the whole experiment.
        values: values by field, nested for sections within sections.
        source: file or section with which the error message begins.

    Raises:
        ConfigError: values are invalid; the message has a line per field, with its value and what is allowed. With
            several problems, these lines follow a line with their number. If a check raises a ConfigError that is no
            ValueError, the message contains that error alone.
    """
    try:
        return model.model_validate(values)
    except ConfigError as error:  # not a ValueError, so pydantic does not collect it; such as an error of a backbone
        lines = [str(error)]
    except ValidationError as error:
        lines = [_error_line(item, model, values) for item in error.errors()]
    if len(lines) == 1:
        raise ConfigError(f"{source}: {lines[0]}")
    raise ConfigError("\n  ".join([f"{source}: {len(lines)} fields cannot be used", *lines]))


_TYPES = ("int", "float", "str")  # in locations, see `_field_name`


def _error_line(item: Any, model: type[BaseModel], values: Any) -> str:
    """Return one error of pydantic as a line with the field, its value and what is allowed.

    An unknown field has a hint on similar fields, and a missing field its meaning. The messages of kairos' own checks
    are kept, and begin with the field.

    Args:
        item: element of pydantic's `ValidationError.errors`.
        model: class of the outermost section, to which the locations of errors are relative.
        values: its values, as the user has written them.
    """
    where = _field_name(item["loc"])
    error_type, value = item["type"], item["input"]
    section, meaning = _find_field(model, item["loc"], values)

    # errors about the presence of a field
    if error_type == "extra_forbidden":
        names = [name for name in section.model_fields if name != "name"] if section else []
        hint = options.allowed_names_hint(str(item["loc"][-1]), names)
        return f"{where}: unknown field (value {_short(value)}){hint}"
    if error_type == "missing":
        return f"{where}: is missing. It is: {meaning}"

    # messages of kairos' own checks are complete, except that some begin with a name within the section
    message: str = item["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    contains_field = message.startswith((f"{where}.", f"{where}: "))  # a message of `model_post_init`
    if not where or contains_field:
        return message
    if isinstance(item.get("ctx", {}).get("error"), ValueRejected):  # the message has the value and what is allowed
        begins_with_field = section is not None and message.partition(":")[0] in section.model_fields
        return f"{where}.{message}" if begins_with_field else f"{where}: {message}"

    # messages of pydantic contain only what is allowed
    allowed = message
    if meaning:
        allowed += f" ({meaning})"
    if error_type.startswith(("int_", "float_")):
        allowed += options.yaml_number_hint(value)
    return str(rejection(where, _short(value), allowed))


def _field_name(location: tuple[Any, ...]) -> str:
    """Return the name of a field from pydantic's location: ``training.batch_size``, ``sweep.values.0``.

    pydantic adds the type of a union, or the name of a checking function, to the location of an error, such as
    ``("dataset", "heldout", "float")``. These parts are left out of the name.
    """
    names = [str(part) for part in location]
    return ".".join(name for name in names if name not in _TYPES and not name.startswith("function-"))


def _short(value: Any) -> str:
    """Return the representation of a value, or if it has more than 80 characters, its first 77 and ``...``."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _find_field(model: type[BaseModel], location: tuple[Any, ...], values: Any) -> tuple[type[BaseModel] | None, str]:
    """Return the class of the section that a location of pydantic leads to, and the help text of its last field.

    The class is None for a plain value, and if the values select no component of the pipeline. The text is empty if
    there is none.

    Args:
        model: class of the outermost section.
        location: names of fields and indices of lists.
        values: values of the outermost section, which decide the class of a selected component.
    """
    section: type[BaseModel] | None = model
    meaning = ""
    component: Any = None  # annotation of a field that selects a component, until the values decide the class
    for key in location:
        values = _value_at(values, key)
        if section is not None and key in section.model_fields:
            model_field = section.model_fields[key]
            meaning = model_field.description or ""
            section = _find_section_class(model_field.annotation)
            component = _find_component_annotation(model_field)
        values_are_of_one_component = not isinstance(values, list)  # in a list, the next key is the component's index
        if component is not None and values_are_of_one_component:
            section = component.class_of(values)
            component = None
    return section, meaning


def _find_section_class(annotation: Any) -> type[BaseModel] | None:
    """Return the section's class that a type annotation is, or contains as in ``Section | None``; None without one."""
    for member in (annotation, *get_args(annotation)):
        if isinstance(member, type) and issubclass(member, BaseModel):
            return member
    return None


def _value_at(values: Any, key: Any) -> Any:
    """Return the value of a key or index; None if there is none, or if `values` is not a container."""
    try:
        return values[key]
    except (KeyError, IndexError, TypeError):
        return None


def _find_component_annotation(model_field: Any) -> Any:
    """Return the annotation by `kairos.components.component` of a pydantic `FieldInfo` or of its list's elements.

    None if the field does not select a component.
    """
    annotations = [*model_field.metadata]
    # elements of a list have annotations of their own, in list[...] as well as in list[...] | None
    for outer_type in (model_field.annotation, *get_args(model_field.annotation)):
        for inner_type in (outer_type, *get_args(outer_type)):
            annotations += getattr(inner_type, "__metadata__", ())
    for annotation in annotations:
        if hasattr(annotation, "class_of"):  # not `isinstance`: `kairos.components` imports this module
            return annotation
    return None
