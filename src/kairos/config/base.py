"""What all configuration models share: unknown keys are refused, values are frozen, components are named."""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict

from kairos import options
from kairos.registry import Registry


class Section(BaseModel):
    """A section of an experiment file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def component(registry: Registry) -> Any:
    """The type of a field that names a component: ``name`` or ``{name: ..., option: ...}``.

    The value is stored as a dictionary with every option of the component, defaults included, so that two ways to write
    the same thing are the same configuration.
    """

    def complete(value: Any) -> dict[str, Any]:
        from pydantic_core import PydanticCustomError

        from kairos.errors import ConfigError

        if isinstance(value, str):
            value = {"name": value}
        try:
            if not isinstance(value, dict) or "name" not in value:
                raise ConfigError(f"got {value!r}, allowed: a name or {{name: ..., options}} of {sorted(registry)}")
            rest = {key: item for key, item in value.items() if key != "name"}
            parsed = registry.parse(value["name"], rest, f"{registry.kind} {value['name']}")
        except ConfigError as error:
            raise PydanticCustomError("component", "{message}", {"message": str(error)}) from None
        return {"name": value["name"], **options.dump(parsed)}

    return Annotated[dict[str, Any], BeforeValidator(complete)]


def build(registry: Registry, named: dict[str, Any], *arguments: Any, **keywords: Any) -> Any:
    """Build the component that a `component` field names."""
    rest = {key: item for key, item in named.items() if key != "name"}
    return registry.build(named["name"], rest, *arguments, **keywords)
