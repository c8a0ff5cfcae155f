"""Components that an experiment selects by name, such as a backbone, an optimizer or a metric, with their options.

The options of a component are a class that derives from `ComponentOptions`, in the module ``settings`` of the package
that has the component's code. The class declares name, code and options, and `Components.register` adds it to the
components of its kind:

    @AVERAGES.register
    class PowerOptions(AverageOptions):
        code: ClassVar[str] = "kairos.training.optim:power"

        name: str = "power"
        width: float = field(0.05, "relative width sigma_rel of the averaging profile", gt=0, lt=0.289)

Samplers, weightings, couplings and forward processes are components of the library, which has its own declarations;
`kairos.library_components.LibraryComponent` holds one that an experiment selects.

`component` annotates a field of a section that selects a component of either kind.
"""

import dataclasses
import importlib
from collections import UserDict
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, TypeVar, get_args

from pydantic import ConfigDict, TypeAdapter
from pydantic_core import CoreSchema, core_schema

from kairos.library_components import LibraryComponent
from kairos.section import Section, check
from kairos_timesteps import options
from kairos_timesteps.errors import ConfigError, ValueRejected
from kairos_timesteps.registry import Registry


class ComponentOptions(Section):
    """Base class of the options of a component; an instance holds the options that an experiment selects.

    Attributes:
        name: name of the component in an experiment file.
        code: ``module:attribute`` of the function or class that implements the component; it is called as
            ``code(options, ...)``.
    """

    model_config = ConfigDict(defer_build=True)

    name: str
    code: ClassVar[str]

    @classmethod
    def help(cls) -> str:
        """Return the first line of the class's docstring, without its full stop; empty without a docstring."""
        return (cls.__doc__ or "").strip().partition("\n")[0].removesuffix(".")

    @classmethod
    def module(cls) -> str:
        """Return the dotted name of the module that contains the component's code; nothing is imported."""
        return cls.code.partition(":")[0]

    @classmethod
    def load(cls) -> Any:
        """Import the module in `code` and return the function or class that implements the component."""
        module, _, attribute = cls.code.partition(":")
        return getattr(importlib.import_module(module), attribute)

    def build(self, *arguments: Any, **keywords: Any) -> Any:
        """Import the component's code and call it with these options and the arguments; return its result."""
        return self.load()(self, *arguments, **keywords)

    def plain(self) -> dict[str, Any]:
        """Return ``{"name": ..., option: ...}`` with values of JSON, defaults included."""
        return self.model_dump(mode="json")

    def plain_options(self) -> dict[str, Any]:
        """Return the options by name, without the component's name, as values of JSON; defaults are included."""
        return self.model_dump(mode="json", exclude={"name"})


C = TypeVar("C", bound=ComponentOptions)


class Components(UserDict[str, type[C]], Generic[C]):
    """The components of one kind by name.

    Args:
        kind: name of the kind for messages, such as ``optimizer``.
    """

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind

    def register(self, cls: type[C]) -> type[C]:
        """Add a component under the default of its field `name`, and return it unchanged, as a decorator.

        An earlier component with this name is replaced.
        """
        self.data[cls.model_fields["name"].default] = cls
        return cls

    def find(self, name: str) -> type[C]:
        """Return the class of the component with a name.

        Raises:
            ConfigError: the name is unknown; the message lists the existing names, and the most similar one if any.
        """
        if name not in self.data:
            alternatives = options.allowed_names_hint(str(name), self.data) if self.data else "; there is none"
            raise ConfigError(f"unknown {self.kind} {name!r}{alternatives}")
        return self.data[name]

    def select(self, values: Mapping[str, Any]) -> C:
        """Return an instance of a component with checked options, from ``{"name": ..., option: ...}``.

        Raises:
            ConfigError: the component or an option is unknown, or an option has a value that is not allowed.
            KeyError: the values have no name.
        """
        name = values["name"]
        return check(self.find(name), dict(values), f"{self.kind} {name}")


def component(components: Components[Any] | Registry, default: str | None = None) -> "Selection":
    """Return the annotation of a section's field that selects a component, as ``name`` or ``{name: ..., option: ...}``.

    The value of the field is then the checked options of the component. The annotated type is the base class of
    these options, or `LibraryComponent`:

        optimizer: Annotated[OptimizerOptions, component(OPTIMIZERS, "adam")] = field({}, "optimizer of the model")

    Args:
        components: the components to select from.
        default: name of the component if the value has options only; None: the name is required.
    """
    return Selection(components, default)


@dataclasses.dataclass(frozen=True)
class Selection:
    """Annotation by which pydantic validates and serialises a field that selects a component, see `component`.

    Sections serialise the value as ``{name: ..., option: ...}`` with all options, so that different spellings of one
    configuration are equal.

    Attributes:
        components: the components to select from.
        default: name of the component if the value has options only; None: the name is required.
    """

    components: Components[Any] | Registry
    default: str | None = None

    def class_of(self, value: Any) -> type[ComponentOptions] | None:
        """Return the class of the pipeline's component that an unchecked value of the field selects.

        None for components of the library, for an unknown name, and for a value that is neither name nor dictionary. A
        dictionary without a name selects the default; if there is no default, the result is None.
        """
        if isinstance(self.components, Registry):
            return None
        name = value.get("name", self.default) if isinstance(value, dict) else value
        return self.components.get(name) if isinstance(name, str) else None

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        """Return pydantic's schema, which validates with `_select` and serialises as ``{name: ..., option: ...}``."""
        serialization = core_schema.plain_serializer_function_ser_schema(lambda value: value.plain())
        return core_schema.no_info_plain_validator_function(self._select, serialization=serialization)

    def _select(self, value: Any) -> ComponentOptions | LibraryComponent:
        """Return the checked options of the selected component.

        Args:
            value: a name, or a dictionary of name and options; without a name it selects the default. Options are
                returned unchanged, and their kind is not checked.

        Raises:
            ValueRejected: the value has another form, it has neither name nor default, the component is unknown, or the
                library rejects an option.
            ValidationError: pydantic rejects an option of a pipeline's component.
        """
        if isinstance(value, ComponentOptions | LibraryComponent):
            return value
        if isinstance(value, str):
            value = {"name": value}
        if isinstance(value, dict) and self.default is not None:
            value = {"name": self.default, **value}
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            names = sorted(self.components)
            raise ValueRejected(f"got {value!r}, allowed: a name or {{name: ..., options}} of {names}")
        try:
            if isinstance(self.components, Registry):
                return LibraryComponent.select(self.components, value)
            # not `select`: its message would replace pydantic's, which contains the option's path in the experiment
            selected: ComponentOptions = self.components.find(value["name"]).model_validate(value)
            return selected
        except ConfigError as error:
            raise ValueRejected(str(error)) from None

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        """Return a JSON schema that accepts the name of each component, or its name with options.

        Options alone select the default component. Without any component, the schema accepts no value.
        """
        name_schemas, object_schemas = [], []
        for name in self.components:
            if isinstance(self.components, Registry):
                entry = self.components[name]
                description = entry.help or self.components.kind
                properties = _library_schema(entry.component)
            else:
                cls = self.components[name]
                description = cls.help()
                properties = _options_schema(cls)
            name_schema = {"const": name, "description": description}
            name_schemas.append(name_schema)
            object_schemas.append(
                {
                    "type": "object",
                    "description": description,
                    "properties": {"name": name_schema, **properties},
                    "required": [] if name == self.default else ["name"],
                    "additionalProperties": False,
                }
            )
        if not name_schemas:
            return {"not": {}}  # accepts no value
        return {"anyOf": [*name_schemas, *object_schemas]}


def _options_schema(cls: type[ComponentOptions]) -> dict[str, Any]:
    """Return the JSON schemas of the options of a component of the pipeline, by name and without titles."""
    properties: dict[str, Any] = cls.model_json_schema()["properties"]
    options_schema = {name: schema for name, schema in properties.items() if name != "name"}
    for schema in options_schema.values():
        del schema["title"]  # pydantic's repetition of the name
    return options_schema


# bounds of an option of the library, and their names in a JSON schema
_BOUNDS = {"gt": "exclusiveMinimum", "ge": "minimum", "lt": "exclusiveMaximum", "le": "maximum"}


def _library_schema(component: type[options.Component]) -> dict[str, Any]:
    """Return the JSON schemas of the options of a library's component, by the options' names in an experiment file.

    A schema has the type with bounds, or the allowed values, and the help and the default of the option.
    """
    schemas = {}
    for option in component.options.values():
        if option.choices:
            is_nullable = type(None) in get_args(option.type)
            schema: dict[str, Any] = {"enum": spellings(option.choices, nullable=is_nullable)}
        else:
            schema = TypeAdapter(option.type).json_schema()
        for bound, limit in option.bounds.items():
            schema[_BOUNDS[bound]] = limit
        schemas[option.public_name] = {**schema, "description": option.help, "default": option.default}
    return schemas


def spellings(choices: Any, nullable: bool = False) -> list[Any]:
    """Return the values in YAML that select one of the choices, which are texts; with `nullable`, None is the last one.

    YAML parses the name ``64`` as a number: for the choices "32" and "64" the values are "32", "64", 32 and 64, in this
    order.
    """
    integers = [int(choice) for choice in choices if str(choice).isdecimal()]
    values = [*choices, *integers]
    if nullable:
        values.append(None)
    return values
